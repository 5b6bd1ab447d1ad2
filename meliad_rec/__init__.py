"""Recurrent transformers on long documents, in JAX.

run = meliad_rec.load_run('runs/tiny')
run.generate('Once upon a time', tokens=200)[0]

The names in `dir(meliad_rec)` are the public API. Each is imported, and jax
with it, when it is first used.
"""

import importlib

__version__ = '0.1.0'

# Public name -> where it is: a module, or a module's attribute after a colon.
_PUBLIC = {
  # Use a trained run.
  'load_run': 'runs.trained_run:load_run',
  'TrainedRun': 'runs.trained_run:TrainedRun',
  'Sampler': 'generation.sampling:Sampler',
  # Define an architecture.
  'Cell': 'models.cell:Cell',
  'Block': 'models.cell:Block',
  'Model': 'models.model:Model',
  'FeedForward': 'layers.layer:FeedForward',
  'gates': 'layers.gates',
  'positions': 'layers.positions',
  'stack': 'archs.stack',
  # Train it.
  'Experiment': 'training.experiment:Experiment',
  'losses': 'metrics.losses',
  'optimizer': 'training.optimizer',
  'schedules': 'training.schedules',
}
__all__ = [*_PUBLIC]


def __getattr__(name: str):
  """Imports a public name when it is first used (PEP 562)."""
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module, _, attribute = _PUBLIC[name].partition(':')
  value = importlib.import_module(f'{__name__}.{module}')
  if attribute:
    value = getattr(value, attribute)
  globals()[name] = value
  return value


def __dir__():
  return sorted({*globals(), *_PUBLIC})
