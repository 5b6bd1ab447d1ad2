"""A text, and checks of results, for the tests of meliad_rec.explore."""

import functools

import numpy as np
import pandas as pd

from tests import observed

TEXT = 'import argparse\n\nparser = argparse.Argument()\nparser.add(argparse)\n'
OTHER = 'the dog and the cat sat on the mat, and the dog ate the cat\n' * 2
W = 8
close = functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-4)
block_recurrent = functools.partial(observed.run, 'recurrent_fixed_skip')


def check(shown, path):
  """The figure is drawn, and the table has every number."""
  shown.save(path / 'figure.png')
  assert (path / 'figure.png').stat().st_size > 5000
  assert shown._repr_png_().startswith(b'\x89PNG')
  shown.to_csv(path / 'table.csv')
  table = pd.read_csv(path / 'table.csv')
  for name, a in shown.data.data_vars.items():
    if a.dtype.kind == 'f' and a.size == len(table):
      close(np.sort(table[name]), np.sort(a.values.ravel()))
