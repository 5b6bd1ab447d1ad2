"""All synthetic tasks as seqio tasks."""

import dataclasses
import importlib
import pkgutil

from meliad_rec.data import seqio_tasks
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.data.synthetic.arithmetic import Arithmetic
from meliad_rec.data.synthetic.associative_recall import AssociativeRecall
from meliad_rec.data.synthetic.copying import Copying
from meliad_rec.data.synthetic.counting import Counting
from meliad_rec.data.synthetic.needle import Needle
from meliad_rec.data.synthetic.pathfinder import Pathfinder
from meliad_rec.data.synthetic.word_problem import WordProblem

# Further settings of some tasks, as in papers and in `meliad-rec bench tasks`.
VARIANTS = {
  'Algorithm5': Algorithm(variables=5),
  'AlgorithmEquality': Algorithm(equality=True),
  'Brackets': Arithmetic(brackets=True),
  'Rewrites': AssociativeRecall(rewrites=0.5),
  'Reverse': Copying(backward=True),
  'Counting1000': Counting(max_size=1000, test_sizes=(50, 1000, 2000)),
  'VariableTracking': Needle(chains=4, hops=2),
  'Pathfinder6': Pathfinder(contour_length=6),
  'Pathfinder9': Pathfinder(contour_length=9),
  'Parity': WordProblem(group='Z2', max_size=40, test_sizes=(64, (40, 256))),
  'A5': WordProblem(group='A5'),
  'S5': WordProblem(group='S5'),
}


def register_all() -> list[str]:
  """Registers all synthetic tasks with seqio.

  Each class is a task with its default settings, and there are VARIANTS.

  Returns:
    The names of the tasks, such as 'meliad_rec.FlipFlop', after their classes,
    and 'meliad_rec.Reverse', after their keys in VARIANTS.

  Raises:
    ValueError: they are registered already.
  """
  package = importlib.import_module(__name__.rpartition('.')[0])
  found = {}
  for module in pkgutil.iter_modules(package.__path__):
    of_module = importlib.import_module(f'{package.__name__}.{module.name}')
    for kind in vars(of_module).values():
      if dataclasses.is_dataclass(kind) and hasattr(kind, 'documents'):
        found[kind.__name__] = kind
  tasks = {n: kind() for n, kind in found.items() if not kind.__subclasses__()}
  names = {f'meliad_rec.{n}': task for n, task in (tasks | VARIANTS).items()}
  for name, task in names.items():
    seqio_tasks.register(name, task)
  return [*names]
