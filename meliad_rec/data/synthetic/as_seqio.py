"""All synthetic tasks as seqio tasks."""

import dataclasses
import importlib
import pkgutil

from meliad_rec.data import seqio_tasks


def register_all() -> list[str]:
  """Registers all synthetic tasks with seqio, with their default sizes.

  Returns:
    The names of the tasks, such as 'meliad_rec.FlipFlop', after their classes.

  Raises:
    ValueError: they are registered already.
  """
  package = importlib.import_module(__name__.rpartition('.')[0])
  found = {}
  for module in pkgutil.iter_modules(package.__path__):
    of_module = importlib.import_module(f'{package.__name__}.{module.name}')
    for kind in vars(of_module).values():
      if dataclasses.is_dataclass(kind) and hasattr(kind, 'documents'):
        found[f'meliad_rec.{kind.__name__}'] = kind
  names = [name for name, kind in found.items() if not kind.__subclasses__()]
  for name in names:
    seqio_tasks.register(name, found[name]())
  return names
