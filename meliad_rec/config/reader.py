"""Reads gin files and single bindings.

Every name is imported and looked up when it is read, so that a mistake is
reported with its file and line before anything is built.
"""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import importlib
import importlib.util
from pathlib import Path
import pkgutil
import re
import sys
import types

from meliad_rec.config import files as gin_files
from meliad_rec.config.files import nearest
from meliad_rec.config.values import Binding
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import BlockDeclaration
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import cut
from meliad_rec.config.values import describe
from meliad_rec.config.values import DYNAMIC
from meliad_rec.config.values import ImportStatement
from meliad_rec.config.values import IncludeStatement
from meliad_rec.config.values import Macro
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import Name
from meliad_rec.config.values import Reference
from meliad_rec.config.values import statements

# Modules whose names need no import statement.
_KNOWN = 'meliad_rec', 'jax', 'optax'


class Reader:
  """Reads gin statements; for each parameter, the last binding counts.

  Attributes:
    bindings: {Binding.key: binding}.
    chains: a tuple for each file read: the files that include it, outermost
      first, then the file itself.
    modules: {alias: imported module, or None if files use the alias for
      different modules}.
    targets: {Name: function or class}.
  """

  def __init__(self):
    self.bindings = {}
    self.chains = []
    self.modules = {}
    self.targets = {}
    self._names = {}
    self._all = []  # Bindings in the order of reading.

  def file(self, name: str, where: str, outer: tuple[Path, ...] = ()) -> None:
    """Reads a file and the files that it includes.

    defaults.gin is read only once, so that a task that replaces the task of an
    experiment leaves the training recipe as it is. Settings that were read
    before a file of scale/ may stay unused. The same holds for the settings of
    a shipped experiment or a saved configuration if another file follows, which
    may replace its parts. If an experiment comes first, a later file of arch/,
    size/ or task/ takes the place of the experiment's own file of that kind,
    none of whose settings remain.

    Args:
      name: name or path of the file; see files.find.
      where: the flag, or the file and line, that names it; for messages.
      outer: files that include this one, outermost first.

    Raises:
      ConfigError: the file does not exist or has a mistake.
    """
    path = gin_files.find(name, where)
    if path in outer:
      raise ConfigError(
        f'{where} includes {name}, which includes it again. '
        'Remove one of the two include statements.'
      )
    is_defaults = gin_files.kind(path) == gin_files.DEFAULTS
    if is_defaults and path in {read for *_, read in self.chains}:
      return
    kind, begun = gin_files.kind(path), self.chains and self.chains[-1][0]
    replaces = kind == 'scale' or (
      begun and kind != 'experiments' and gin_files.has_replaceable_parts(begun)
    )
    if self.chains and kind in gin_files.KINDS and not outer:
      self._replace(kind)
    if replaces and not outer:
      self._make_optional(self.bindings)
    chain = (*outer, path)
    self.chains.append(chain)
    label = gin_files.label(path)
    try:
      text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
      raise ConfigError(
        f'{where}: {label} is not UTF-8 text. Convert it to UTF-8.'
      ) from error
    optional = gin_files.is_optional(chain)
    self.text(text, lambda line: f'{label}:{line}', {}, optional, chain)

  def params(self, texts: Iterable[str]) -> None:
    """Reads single bindings, such as 'NAME = value'.

    They may use all modules that the files read so far import. If one of them
    replaces a part of a shipped experiment or a saved configuration, or a macro
    in it, settings of the files may stay unused.

    Raises:
      ConfigError: a text is not a binding, or has a mistake.
    """
    of_files = self.bindings.copy()
    for text in texts:
      self._param(text)
    kept = {k: one for k, one in of_files.items() if self.bindings[k] is one}
    replaced = [one for key, one in of_files.items() if key not in kept]
    whole = self.chains and gin_files.has_replaceable_parts(self.chains[-1][0])
    if whole and any(_uses_others(one.value) for one in replaced):
      self._make_optional(kept)

  def _replace(self, kind):
    """Removes what an experiment, read first, has from files of a kind."""
    if gin_files.kind(self.chains[0][0]) != 'experiments':
      return

    def is_kept(binding):
      kinds = [*map(gin_files.kind, binding.files)]
      return kind not in kinds or kinds[-1] == gin_files.DEFAULTS

    self._all = [*filter(is_kept, self._all)]
    optional = {key for key, one in self.bindings.items() if one.optional}
    self.bindings = {one.key: one for one in self._all}
    rest = self.bindings.items()
    self._make_optional({key: one for key, one in rest if key in optional})

  def _make_optional(self, bindings):
    for key, binding in bindings.items():
      self.bindings[key] = dataclasses.replace(binding, optional=True)

  def _param(self, text):
    where = f'--gin_param {cut(text)!r}'
    if not re.match(r'[^=#]+=', text):
      raise ConfigError(f'{where} has no "=". Write NAME = value.')
    self.text(text, lambda _: where, self.modules.copy())

  def name(self, function: Callable) -> Name:
    """Returns the Name that bindings use for a function or class."""
    own = Name(function.__module__, function.__qualname__)
    return self._names.get(function, own)

  def called(self, function: Callable, parameter: str) -> Callable | None:
    """Returns the function or class that the value of a parameter calls.

    Args:
      function: function or class that has the parameter.
      parameter: name of the parameter.

    Returns:
      What `name` means, if the parameter is bound to `@name()`. None if
      the parameter is not bound, or is bound to anything else.
    """
    binding = self.bindings.get(('', self.name(function), parameter))
    match binding and binding.value:
      case Reference(scope='', called=True, target=target):
        return target

  def text(self, text, place, here, optional=False, chain=()):
    """Reads a gin text: the content of a file, or a single binding.

    Args:
      text: statements.
      place: maps a line number to its description in messages.
      here: {alias: module}; import statements add to it.
      optional: whether the bindings of this text may stay unread.
      chain: the files that include this file, outermost first, then this file;
        () for a single binding.

    Raises:
      ConfigError: the text has a mistake.
    """
    set_here = {}
    dynamic = False
    for statement in statements(text, place):
      where = place(statement.location.line_num)
      match statement:
        case IncludeStatement():
          self.file(statement.filename, where, chain)
        case ImportStatement() if statement.format() == DYNAMIC:
          dynamic = True
        case ImportStatement() if not dynamic:
          raise ConfigError(
            f'{where}: write "{DYNAMIC}" before "{statement.format()}".'
          )
        case ImportStatement():
          self.import_module(statement, where, here)
        case BlockDeclaration():
          self.look_up(statement.selector, where, here)
        case BindingStatement():
          binding = self._binding(statement, where, here, optional, chain)
          if binding.key in set_here:
            raise ConfigError(
              f'{where} sets {binding.path} again, after'
              f' {set_here[binding.key]}. Keep one of the two.'
            )
          set_here[binding.key] = where
          self.bindings[binding.key] = binding
          self._all.append(binding)

  def import_module(self, statement, where, here):
    module = load(statement.module, where)
    alias = statement.bound_name()
    if not (statement.is_from or statement.alias):
      module = sys.modules[alias]
    here[alias] = module
    if self.modules.setdefault(alias, module) is not module:
      self.modules[alias] = None

  def _binding(self, statement, where, here, optional, chain):
    scope, selector, parameter, value, _ = statement

    def resolved(leaf):
      if not isinstance(leaf, Reference):
        return leaf
      name, target = self.look_up(leaf.name, where, here)
      return dataclasses.replace(leaf, name=name, target=target)

    value = map_leaves(resolved, value)
    if not parameter:
      return Binding(scope, selector, '', value, where, optional, chain)
    name, _ = self.look_up(selector, where, here)
    return Binding(scope, name, parameter, value, where, optional, chain)

  def look_up(self, dotted, where, here):
    """Looks up a function or class.

    Args:
      dotted: a name such as 'window.WindowLayer'.
      where: the flag, or the file and line, that names it; for messages.
      here: {alias: module, or None if the alias means several modules};
        meliad_rec, jax and optax are added when needed.

    Returns:
      (Name, function or class).

    Raises:
      ConfigError: a part of the name does not exist or cannot be imported, or
        the name is not the name of a function or class.
    """
    first, *rest = dotted.split('.')
    if first in _KNOWN:
      here.setdefault(first, load(first, where))
    if first not in here:
      raise ConfigError(
        f'{where}: {first!r} in {dotted} is not an imported module'
        f'{nearest(first, here)}. Import it, or in a --gin_param write its full'
        ' name.'
      )
    if here[first] is None:
      raise ConfigError(
        f'{where}: {first!r} in {dotted} means several modules that the files'
        ' import. Write the full name of the module.'
      )
    module = thing = here[first]
    inner = []
    for part in rest:
      if not hasattr(thing, part) and _is_submodule(thing, part):
        load(f'{thing.__name__}.{part}', where)
      if not hasattr(thing, part):
        known = [name for name in dir(thing) if not name.startswith('_')]
        owner = getattr(thing, '__name__', type(thing).__name__)
        raise ConfigError(
          f'{where}: {owner} has no {part!r}{nearest(part, known)}. Correct the'
          ' name.'
        )
      thing = getattr(thing, part)
      if isinstance(thing, types.ModuleType):
        module, inner = thing, []
      else:
        inner.append(part)
    if not (inner and callable(thing) and hasattr(thing, '__name__')):
      raise ConfigError(
        f'{where}: {dotted} is {describe(type(thing))}, but a function or class'
        ' is needed. Correct the name.'
      )
    name = self._names.setdefault(thing, _name(thing, module, inner))
    self.targets[name] = thing
    return name, thing


def load(name: str, where: str) -> types.ModuleType:
  """Imports and returns a module.

  Args:
    name: dotted name of the module.
    where: the flag, or the file and line, that names it; for messages.

  Raises:
    ConfigError: the module does not exist, or its import fails.
  """
  module = None
  for part in name.split('.'):
    parent, module = module, f'{module.__name__}.{part}' if module else part
    try:
      module = importlib.import_module(module)
    except Exception as error:
      if not isinstance(error, ModuleNotFoundError) or error.name != module:
        first, *_ = str(error).splitlines() or ['']
        raise ConfigError(
          f'{where}: {module} cannot be imported'
          f' ({type(error).__name__}: {first}). Correct that module, or install'
          ' what it imports.'
        ) from error
      known = pkgutil.iter_modules(getattr(parent, '__path__', None))
      advice = 'Correct the name'
      if not parent:
        advice += (
          ', start the command in the folder of that module, or add the folder'
          ' to PYTHONPATH'
        )
      raise ConfigError(
        f'{where}: there is no module {module}'
        f'{nearest(part, [one.name for one in known])}. {advice}.'
      ) from error
  return module


def _name(thing, module, inner):
  """Returns the Name of a function or class.

  Args:
    thing: the function or class.
    module: the module in which it was found. A public name of meliad_rec, such
      as meliad_rec.Model, counts as found where it is defined, because a saved
      configuration is opened by that name.
    inner: parts of its name in this module.
  """
  is_public = module.__name__ == 'meliad_rec' and len(inner) == 1
  home = thing.__module__ if is_public else module.__name__
  return Name(home, '.'.join(inner))


def _uses_others(value):
  """Returns whether a value has a reference, or a macro that files set."""
  leaves = []
  map_leaves(leaves.append, value)
  return any(
    isinstance(leaf, Reference | Macro) and leaf != Macro('gin.REQUIRED')
    for leaf in leaves
  )


def _is_submodule(thing, part):
  return hasattr(thing, '__path__') and bool(
    importlib.util.find_spec(f'{thing.__name__}.{part}')
  )
