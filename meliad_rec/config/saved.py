"""Parts of a run built from its saved config.gin, which may be anybody's.

Only what is asked for is looked up, and a name outside of the stated modules is
neither imported nor called, so that a run folder from elsewhere cannot run code
of its own. gin's state is not touched: a notebook may train one run and read
others, each with its own configuration.
"""

from collections.abc import Callable
import contextlib
import functools
import importlib

from meliad_rec.config.files import nearest
from meliad_rec.config.values import BindingStatement
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import ImportStatement
from meliad_rec.config.values import IncludeStatement
from meliad_rec.config.values import Macro
from meliad_rec.config.values import map_leaves
from meliad_rec.config.values import parameters
from meliad_rec.config.values import Reference
from meliad_rec.config.values import statements
from meliad_rec.config.values import takes

# What the configuration of a run may call, whoever wrote it: a model is built
# of MODEL, a dataset of DATA, and neither runs code that it is given.
MODEL = (
  'meliad_rec.archs',
  'meliad_rec.kernels',
  'meliad_rec.layers',
  'meliad_rec.models',
  'meliad_rec.recurrence',
)
DATA = (
  'meliad_rec.data.synthetic',
  'meliad_rec.data.store.Store',
  'meliad_rec.data.text.Text',
  'meliad_rec.data.sources.Code',
  'meliad_rec.data.sources.Folder',
  'meliad_rec.data.sources.Jsonl',
  'meliad_rec.data.sources.Pg19',
  'meliad_rec.data.vocabulary',
)


class SavedConfig:
  """The operative configuration of a run.

  Args:
    text: as config.operative wrote it.
    where: the file it was read from, for messages.
    trusted: whether every module may be imported and every name called.

  Raises:
    ConfigError: it is no gin, or includes files.
  """

  def __init__(self, text: str, where: str, trusted: bool = False):
    self.where = where
    self.trusted = trusted
    self._modules = {}  # Alias -> dotted name.
    self._bindings = {}  # (scope, full name) -> {parameter: value}.
    for statement in statements(text, lambda line: f'{where}:{line}'):
      match statement:
        case IncludeStatement():
          raise ConfigError(
            f'{where} includes {statement.filename}, and the configuration of '
            'a run is complete by itself; restore the one that was saved.'
          )
        case ImportStatement() if statement.module != '__gin__':
          alias = statement.bound_name()
          whole = statement.is_from or statement.alias
          self._modules[alias] = statement.module if whole else alias
        case BindingStatement():
          scope, name, parameter, value, _ = statement
          key = scope, self._full(name) if parameter else name
          self._bindings.setdefault(key, {})[parameter] = value

  def build(self, function: Callable, given: dict, parts: tuple[str, ...]):
    """Calls a function with the arguments that the configuration gives it.

    Args:
      function: of this package.
      given: further arguments by name; they win.
      parts: full names, or beginnings of them, that may be called.

    Raises:
      ConfigError: the configuration needs a name outside of `parts`, or one
        that does not exist, or sets one to itself.
    """
    with self._finite():
      arguments = self._arguments(_name(function), function, '', parts)
    return function(**arguments | given)

  def argument(self, function: Callable, name: str, parts: tuple[str, ...]):
    """One argument that the configuration gives a function; as in `build`."""
    bound = self._bindings.get(('', _name(function)), {})
    if name not in bound:
      raise ConfigError(
        f'{self.where} does not set {name} of {_name(function)}; restore the '
        'one that was saved.'
      )
    with self._finite():
      return self._value(bound[name], '', parts)

  @contextlib.contextmanager
  def _finite(self):
    try:
      yield
    except RecursionError:
      raise ConfigError(
        f'{self.where} sets a name to itself, directly or by others; restore '
        'the file that was saved.'
      ) from None

  def _arguments(self, full, function, scope, parts) -> dict:
    """Those bound for all scopes, then for each that is entered."""
    bound, entered = dict(self._bindings.get(('', full), {})), ''
    for one in scope.split('/'):
      entered = f'{entered}/{one}'.strip('/')
      bound |= self._bindings.get((entered, full), {})
    known = parameters(function)
    for name in bound:
      if not takes(known, name):
        raise ConfigError(
          f'{self.where}: {full} has no parameter {name!r}'
          f'{nearest(name, known)}; use the version of meliad_rec that trained '
          'the run.'
        )
    return {k: self._value(v, scope, parts) for k, v in bound.items()}

  def _value(self, value, scope, parts):
    """The value with macros and references replaced by what they mean."""

    def replace(leaf):
      match leaf:
        case Macro():
          outer, _, name = leaf.name.rpartition('/')
          found = self._bindings.get((outer, name))
          if found is None:
            raise ConfigError(
              f'{self.where}: nothing sets %{leaf.name}; restore the file that '
              'was saved.'
            )
          return self._value(found[''], scope, parts)
        case Reference():
          return self._reference(leaf, scope, parts)
        case _:
          return leaf

    return map_leaves(replace, value)

  def _reference(self, leaf, scope, parts):
    full = self._full(leaf.name)
    function = self._load(full, parts)
    inner = f'{scope}/{leaf.scope}'.strip('/')
    arguments = self._arguments(full, function, inner, parts)
    if leaf.called:
      return function(**arguments)
    return functools.partial(function, **arguments) if arguments else function

  def _load(self, full, parts):
    """The function or class of that name, if it may be called."""
    module, _, name = full.rpartition('.')
    inside = any(f'{full}.'.startswith(f'{part}.') for part in parts)
    if not (inside or self.trusted):
      raise ConfigError(
        f'{self.where} calls {full}, which is no part of meliad_rec that a '
        'saved run may call; if you trust the folder, say so with --trusted.'
      )
    try:
      found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
      raise ConfigError(
        f'{self.where} names {full}, which is not there; use the version of '
        'meliad_rec that trained the run.'
      ) from None
    # What a module of ours imports from elsewhere is not ours.
    own = getattr(found, '__module__', '').startswith('meliad_rec.')
    if not (callable(found) and (own or self.trusted)):
      raise ConfigError(
        f'{self.where} calls {full}, which is no part of meliad_rec; restore '
        'the file that was saved.'
      )
    return found

  def _full(self, dotted: str) -> str:
    """'window.WindowLayer' with the module's full name."""
    alias, _, rest = dotted.partition('.')
    return f'{self._modules.get(alias, alias)}.{rest}'


def _name(function: Callable) -> str:
  return f'{function.__module__}.{function.__qualname__}'
