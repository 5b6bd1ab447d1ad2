"""The lean scan against its definition: what it writes, and what it gives."""

import jax
import numpy as np
import pytest

from meliad_rec.recurrence.memory_scan import memory_scan
from tests.remembering import given
from tests.remembering import model
from tests.remembering import plain_scan


@pytest.mark.parametrize(
  'C, A, near', [(1, 5, 1), (1, 1, 3), (3, 7, 3), (4, 30, 8)]
)
@pytest.mark.parametrize('span', [1, 8, 100])
def test_it_is_the_plain_scan(C, A, near, span):
  m = model(C, A, near, span)
  *arguments, inputs = given(A, near)
  lean = memory_scan(m, *arguments, inputs)
  plain = plain_scan(m, *arguments, inputs)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), lean, plain
  )
