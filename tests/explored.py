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
  numbers = shown.data.to_dataframe().reset_index().select_dtypes('number')
  assert {*shown.data.data_vars} & {*numbers}
  found = table[[*numbers]]
  pd.testing.assert_frame_equal(found, numbers, check_dtype=False)
