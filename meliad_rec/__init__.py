"""Recurrent transformers on long documents, in JAX.

run = meliad_rec.load_run('runs/tiny')
run.generate('Once upon a time', tokens=200)[0]
"""

import importlib

__version__ = '0.1.0'


def __getattr__(name: str):
  """`load_run`, imported when it is first asked for, as jax is then too."""
  if name == 'load_run':
    return importlib.import_module('meliad_rec.runs.trained_run').load_run
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
