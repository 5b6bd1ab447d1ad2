"""Names in gin files: what an import brings, and what a dotted name means."""

import importlib
import importlib.util
import pkgutil
import types

from meliad_rec.config.files import nearest
from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import describe


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
