"""The memory scan against a plain scan: results, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import memory_scan as tokens_memory_scan
from meliad_rec.recurrence.memory_scan import memory_scan
from tests.remembering import B
from tests.remembering import D
from tests.remembering import given
from tests.remembering import K
from tests.remembering import model
from tests.remembering import plain_scan
from tests.remembering import T


def gradients(scan, m, inputs, *arguments):
  weights = np.random.default_rng(1)

  def loss(params, memory, x):
    memory, y = scan(m, params, memory, x, inputs)
    leaves = [*jax.tree.leaves(memory), y]
    return sum(
      jnp.sum(jnp.sin(a) * weights.normal(size=a.shape)) for a in leaves
    )

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arguments)


@pytest.mark.parametrize('parallel', [False, True])
@pytest.mark.parametrize(
  'C, A, near', [(1, 5, 1), (1, 1, 3), (3, 7, 3), (4, 30, 8)]
)
@pytest.mark.parametrize('span', [1, 8, 100])
def test_they_are_those_of_the_plain_scan(C, A, near, span, parallel):
  m = model(C, A, near, span, parallel)
  *arguments, inputs = given(A, near)

  def close(a, b):
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()

  jax.tree.map(
    close,
    *(gradients(s, m, inputs, *arguments) for s in (memory_scan, plain_scan)),
  )


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


@pytest.mark.parametrize(
  'T, C, most, found',
  [(24, 1, 8, 8), (24, 1, 10, 8), (24, 3, 10, 6), (24, 4, 3, 4), (7, 1, 5, 1)],
)
def test_a_divisor_is_whole_chunks(T, C, most, found):
  assert tokens_memory_scan.divisor(T, C, most) == found
