"""Gin files read into checked bindings, and written as one gin text.

Names in gin files: what an import brings, and what a dotted name means.

One binding, the place it was written in, and the check of its value.
"""

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
import sys
import types
from typing import Any

from meliad_rec.config import files as gin_files
from meliad_rec.config.files import nearest
from meliad_rec.config.values import annotation
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import BlockDeclaration
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import describe
from meliad_rec.config.values import DYNAMIC
from meliad_rec.config.values import fits
from meliad_rec.config.values import ImportStatement
from meliad_rec.config.values import IncludeStatement
from meliad_rec.config.values import Macro
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import parameters
from meliad_rec.config.values import Reference
from meliad_rec.config.values import statements
from meliad_rec.config.values import takes


def load(name: str, where: str) -> types.ModuleType:
  """The module of that dotted name, imported.

  Raises:
    ConfigError: there is none, with the nearest, or it fails while imported.
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
          f'{where}: {module} cannot be imported,'
          f' {type(error).__name__}: {first}'
        ) from error
      known = pkgutil.iter_modules(getattr(parent, '__path__', None))
      raise ConfigError(
        f'{where}: there is no module {module}'
        f'{nearest(part, [one.name for one in known])}.'
      ) from error
  return module


def look_up(
  dotted: str, modules: dict[str, types.ModuleType], where: str
) -> tuple[types.ModuleType, str, object]:
  """The function or class that a dotted name means.

  Args:
    dotted: for instance 'window.WindowLayer'.
    modules: what the first part may be.
    where: the place that names it, for messages.

  Returns:
    The module that holds it, its dotted name inside the module, itself.

  Raises:
    ConfigError: some part of the name leads nowhere, with the nearest.
  """
  first, *rest = dotted.split('.')
  if first not in modules:
    raise ConfigError(
      f'{where}: nothing imported is called {first!r} in {dotted}'
      f'{nearest(first, modules)}; import it, or in a --gin_param write its'
      ' full name.'
    )
  module = thing = modules[first]
  inner = []
  for part in rest:
    if not hasattr(thing, part) and _is_submodule(thing, part):
      load(f'{thing.__name__}.{part}', where)
    if not hasattr(thing, part):
      known = [name for name in dir(thing) if not name.startswith('_')]
      owner = getattr(thing, '__name__', type(thing).__name__)
      raise ConfigError(
        f'{where}: {owner} has no {part!r}{nearest(part, known)}.'
      )
    thing = getattr(thing, part)
    if isinstance(thing, types.ModuleType):
      module, inner = thing, []
    else:
      inner.append(part)
  if not (inner and callable(thing) and hasattr(thing, '__name__')):
    raise ConfigError(
      f'{where}: {dotted} is {describe(type(thing))}, and needed is a function'
      ' or class.'
    )
  return module, '.'.join(inner), thing


def _is_submodule(thing, part):
  return hasattr(thing, '__path__') and bool(
    importlib.util.find_spec(f'{thing.__name__}.{part}')
  )


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/name.parameter = value`, or `scope/name = value`, a macro.

  where: the place, as messages call it.
  optional: whether nothing need read it.
  """

  scope: str
  name: str
  parameter: str
  target: Any
  value: Any
  where: str
  optional: bool

  @property
  def path(self):
    scope = f'{self.scope}/' if self.scope else ''
    return scope + (
      f'{self.name}.{self.parameter}' if self.target else self.name
    )

  @property
  def key(self):
    return self.scope, self.target or self.name, self.parameter

  def is_read_as(self, other):
    """Whether `other`, of the operative configuration, may have read this.

    Gin records the scope of the call, which the binding's scope begins.
    """
    return self.key[1:] == other.key[1:] and (
      other.scope == self.scope
      or not self.scope
      or other.scope.startswith(f'{self.scope}/')
    )


def check_type(binding: Binding, value) -> None:
  """The value fits the annotation of its parameter, or is its default.

  Args:
    binding: of a function or class.
    value: what it binds, with macros replaced.

  Raises:
    ConfigError: it does not fit.
  """
  known = parameters(binding.target) or {}
  if binding.parameter not in known:
    return
  default = known[binding.parameter].default
  if type(default) is type(value) and default == value:
    return
  needed = annotation(binding.target, binding.parameter)
  if fits(value, needed):
    return
  given = repr(value)
  if repr(binding.value) != given:
    given = f'{binding.value!r}, that is {given}'
  if isinstance(value, Reference):
    other = dataclasses.replace(value, called=not value.called)
    hint = f'; write {other!r}' if fits(other, needed) else ''
  else:
    hint = f', not {describe(type(value))}'
  raise ConfigError(
    f'{binding.where}: {binding.path} = {given}, and needed is'
    f' {describe(needed)}{hint}.'
  )


class Reader:
  """What was read so far.

  bindings: by key; the last one of a key.
  chains: each file read, after the files that include it, outermost first.
  modules: what the files import, by name; None if they mean several by it.
  aliases: names that the flat text gives to modules.
  """

  def __init__(self):
    self.bindings = {}
    self.chains = []
    self.modules = {'meliad_rec': sys.modules['meliad_rec']}
    self.aliases = {}

  def file(self, name, where, outer=()):
    """Reads a file and those it includes; `outer` are the including ones."""
    path = gin_files.find(name, where)
    if path in outer:
      raise ConfigError(f'{where} includes {name}, which includes it again.')
    self.chains.append((*outer, path))
    label = gin_files.label(path)
    shipped = gin_files.is_shipped(path)
    try:
      text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
      raise ConfigError(f'{where}: {label} is not UTF-8 text.') from error
    self.text(
      text,
      lambda line: f'{label}:{line}',
      optional=shipped and gin_files.is_optional(path),
      chain=(*outer, path),
    )

  def param(self, text):
    """Reads one binding; it may name every module that the files import."""
    where = f'--gin_param {text!r}'
    if not re.match(r'[^=#]+=', text):
      raise ConfigError(f'{where} has no "="; write NAME = value.')
    clear = {name: one for name, one in self.modules.items() if one}
    self.text(text, lambda _: where, modules=clear)

  def text(self, text, place, optional=False, chain=(), modules=None):
    """Reads the text of one file.

    Args:
      text: statements.
      place: from the number of a line to how messages call it.
      optional: whether what is set here may go unread.
      chain: this file, after those that include it.
      modules: modules by name; None if the text imports what it names.
    """
    here = modules or {}
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
          self._import(statement, where, here)
        case BlockDeclaration():
          self._resolve(statement.selector, where, here)
        case BindingStatement():
          binding = self._binding(statement, where, here, optional)
          if binding.key in set_here:
            raise ConfigError(
              f'{where} sets {binding.path} again, after'
              f' {set_here[binding.key]}; keep one of the two.'
            )
          set_here[binding.key] = where
          self.bindings[binding.key] = binding

  def check(self):
    """Every macro is set, and every value fits its parameter.

    Raises:
      ConfigError: one is not or does not.
    """
    for binding in self.bindings.values():
      value = self._expand(binding.value, binding)
      if binding.target:
        check_type(binding, value)

  def flat(self) -> str:
    """All bindings as one gin text, without includes, each name unique."""
    lines = [DYNAMIC]
    for module, alias in self.aliases.items():
      parent, _, last = module.rpartition('.')
      line = f'from {parent} import {last}' if parent else f'import {last}'
      lines.append(line if alias == last else f'{line} as {alias}')
    for binding in self.bindings.values():
      lines.append(f'{binding.path} = {binding.value!r}')
    return '\n'.join(lines) + '\n'

  def _import(self, statement, where, here):
    module = load(statement.module, where)
    name = statement.bound_name()
    if not (statement.is_from or statement.alias):
      module = sys.modules[name]
    here[name] = module
    if self.modules.setdefault(name, module) is not module:
      self.modules[name] = None

  def _binding(self, statement, where, here, optional):
    scope, selector, parameter, value, _ = statement
    value = map_leaves(lambda leaf: self._target(leaf, where, here), value)
    if not parameter:
      return Binding(scope, selector, '', None, value, where, optional)
    name, target = self._resolve(selector, where, here)
    known = parameters(target)
    if not takes(known, parameter):
      raise ConfigError(
        f'{where}: {selector} has no parameter {parameter!r}'
        f'{nearest(parameter, known)}.'
      )
    return Binding(scope, name, parameter, target, value, where, optional)

  def _target(self, leaf, where, here):
    if not isinstance(leaf, Reference):
      return leaf
    name, target = self._resolve(leaf.name, where, here)
    return dataclasses.replace(leaf, name=name, target=target)

  def _resolve(self, dotted, where, here):
    """The name that the flat text has for it, and the function or class."""
    module, inner, target = look_up(dotted, here, where)
    if module.__name__ not in self.aliases:
      alias = module.__name__.rpartition('.')[2]
      while alias in (*self.aliases.values(), 'gin'):
        alias += '_'
      self.aliases[module.__name__] = alias
    return f'{self.aliases[module.__name__]}.{inner}', target

  def _expand(self, value, binding, outer=()):
    """The value with macros replaced by what they are bound to."""

    def expand(leaf):
      if not isinstance(leaf, Macro):
        return leaf
      scope, _, name = leaf.name.rpartition('/')
      macro = self.bindings.get((scope, name, ''))
      if macro is None and leaf.name == 'gin.REQUIRED':
        raise ConfigError(
          f'{binding.where}: {binding.path} must be set by another file or by'
          f" --gin_param='{binding.path} = ...'."
        )
      if macro is None:
        names = [one.path for one in self.bindings.values() if not one.target]
        raise ConfigError(
          f'{binding.where}: {binding.path} = {binding.value!r}, but nothing'
          f' sets {leaf.name}{nearest(leaf.name, names)}.'
        )
      if macro.key in outer:
        raise ConfigError(f'{macro.where}: {macro.path} is set to itself.')
      return self._expand(macro.value, macro, (*outer, macro.key))

    return map_leaves(expand, value)
