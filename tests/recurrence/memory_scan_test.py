"""The memory scan against a plain scan: results, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import memory_scan as tokens_memory_scan
from meliad_rec.recurrence.memory_scan import memory_scan
from tests.cells import assert_close
from tests.remembering import B
from tests.remembering import D
from tests.remembering import given
from tests.remembering import K
from tests.remembering import model
from tests.remembering import plain_scan
from tests.remembering import T


@pytest.mark.parametrize(
  'C, A, near, span, parallel',
  [
    (1, 5, 1, 8, True),
    (1, 1, 3, 1, True),
    (1, 1, 3, 100, False),
    (3, 7, 3, 8, False),
    (3, 7, 3, 100, True),
    (4, 30, 8, 1, False),
    (4, 30, 8, 8, True),
  ],
)
def test_results_and_gradients_are_those_of_the_plain_scan(
  C, A, near, span, parallel
):
  m = model(C, A, near, span, parallel)
  *arguments, inputs = given(A, near)

  def outcome(scan):
    weights = np.random.default_rng(1)

    def loss(params, memory, x):
      results = scan(m, params, memory, x, inputs)
      weigh = lambda a: jnp.sum(jnp.sin(a) * weights.normal(size=a.shape))
      return sum(map(weigh, jax.tree.leaves(results))), results

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arguments)

  assert_close(outcome(memory_scan), outcome(plain_scan), 1e-5, least=0)


@pytest.mark.parametrize('parallel', [False, True])
def test_nothing_grows_by_a_window_a_token(parallel):
  A = 200
  m = model(1, A, 1, 4, parallel)
  *arguments, inputs = given(A, 1)

  def temporary(scan):
    def loss(params, memory, x):
      return jnp.sum(scan(m, params, memory, x, inputs)[1])

    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  window = B * A * (K + D) * 4
  assert temporary(plain_scan) > T * window
  assert temporary(memory_scan) < 12 * window


@pytest.mark.parametrize(
  'T, C, most, found',
  [(24, 1, 8, 8), (24, 1, 10, 8), (24, 3, 10, 6), (24, 4, 3, 4), (7, 1, 5, 1)],
)
def test_a_divisor_is_whole_chunks(T, C, most, found):
  assert tokens_memory_scan.divisor(T, C, most) == found
