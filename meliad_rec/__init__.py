"""Recurrent transformers on long documents, in JAX.

run = meliad_rec.load_run('runs/tiny')
run.generate('Once upon a time', tokens=200)[0]

The names in `meliad_rec.__all__` are the public API. Each is imported, and jax
with it, when it is first used.
"""

import importlib
from typing import Any
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The same names for type checkers and editors.
  from meliad_rec import explore as explore
  from meliad_rec.archs import stack as stack
  from meliad_rec.generation.sampling import Sampler as Sampler
  from meliad_rec.layers import gates as gates
  from meliad_rec.layers import positions as positions
  from meliad_rec.layers.layer import FeedForward as FeedForward
  from meliad_rec.metrics import losses as losses
  from meliad_rec.models.cell import Block as Block
  from meliad_rec.models.cell import Cell as Cell
  from meliad_rec.models.laws import check_laws as check_laws
  from meliad_rec.models.model import Model as Model
  from meliad_rec.runs.agent_run import load_agent as load_agent
  from meliad_rec.runs.trained_run import load_run as load_run
  from meliad_rec.runs.trained_run import TrainedRun as TrainedRun
  from meliad_rec.runs.training import train as train
  from meliad_rec.training import optimizer as optimizer
  from meliad_rec.training import schedules as schedules
  from meliad_rec.training.experiment import Experiment as Experiment

__version__ = '0.2.0.dev0'

# Public name -> where it is: a module, or a module's attribute after a colon.
_PUBLIC = {
  # Train a run, and use it.
  'train': 'runs.training:train',
  'load_run': 'runs.trained_run:load_run',
  'load_agent': 'runs.agent_run:load_agent',
  'TrainedRun': 'runs.trained_run:TrainedRun',
  'Sampler': 'generation.sampling:Sampler',
  'explore': 'explore',
  # Define an architecture.
  'Cell': 'models.cell:Cell',
  'Block': 'models.cell:Block',
  'Model': 'models.model:Model',
  'FeedForward': 'layers.layer:FeedForward',
  'gates': 'layers.gates',
  'positions': 'layers.positions',
  'stack': 'archs.stack',
  'check_laws': 'models.laws:check_laws',
  # Configure its training.
  'Experiment': 'training.experiment:Experiment',
  'losses': 'metrics.losses',
  'optimizer': 'training.optimizer',
  'schedules': 'training.schedules',
}
__all__ = [*_PUBLIC]


if not TYPE_CHECKING:  # A type checker would accept any name.

  def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _PUBLIC:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, _, attribute = _PUBLIC[name].partition(':')
    value = importlib.import_module(f'{__name__}.{module}')
    # Whatever it is, the first use of jax may follow.
    importlib.import_module(f'{__name__}.planning.environment').silence_libtpu()
    if attribute:
      value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_PUBLIC})
