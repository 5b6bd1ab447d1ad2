"""Window layers: what a token sees, across blocks and at a document's start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.window import VanillaLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import T
from tests.architectures import W

REAL = np.ones((B, T), bool)


def example():
  return np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


@functools.cache
def layer(kind, **changes):
  """Returns a compiled function x_BTD -> y_BTD of a document."""
  cell = kind(config(**changes))

  def forward(c, x_BTD):
    return run(c, c.initial_state(B), Block(x_BTD, REAL))[1]

  params = jax.jit(lambda r: cell.init(r, example(), method=forward))(
    jax.random.key(0)
  )
  return jax.jit(functools.partial(cell.apply, params, method=forward))


def seen(kind, at, **changes):
  """Returns the places whose inputs change the output at `at`."""
  y = layer(kind, **changes)
  found = []
  for t in set(range(T)) - {at}:
    x = example()
    x[:, t] += 1
    if np.abs(y(x)[:, at] - y(example())[:, at]).max() > 1e-5:
      found.append(t)
  return sorted(found)


@pytest.mark.parametrize('at', [2, W, 2 * W + 3])
def test_a_token_sees_the_window_before_it(at):
  assert seen(WindowLayer, at) == list(range(max(at - W, 0), at))


def test_or_one_less_and_itself():
  at = W + 3
  expected = list(range(at - W + 1, at))
  assert seen(WindowLayer, at, include_self=True) == expected


def test_vanilla_sees_its_own_block_alone():
  at = W + 3
  assert seen(VanillaLayer, at) == list(range(W, at))


def test_state_is_the_last_window_of_keys_and_mask():
  cell = WindowLayer(config())
  mask = np.arange(T)[None] < np.array([[T], [T - 2], [3]])

  def forward(c):
    state, _ = c(c.initial_state(B), Block(example(), mask))
    n = c.layer.pre_norm(example())
    return state, c.layer.kv(n, mask)

  both = jax.jit(lambda r: cell.init_with_output(r, method=forward)[0])
  state, kv = both(jax.random.key(0))
  np.testing.assert_allclose(state.k, kv.k[:, -W:], rtol=1e-5)
  np.testing.assert_array_equal(state.mask, mask[:, -W:])


def test_empty_cache_is_masked_but_in_compat_meliad():
  """Visible zeros take part in the softmax of the first tokens."""

  def attended(compat_meliad):
    cell = WindowLayer(config(compat_meliad=compat_meliad))

    def heads(c):
      n = c.layer.pre_norm(example())
      past = c.initial_state(B).append(c.layer.kv(n, REAL))
      values = jax.tree.map(jnp.ones_like, past.v)
      values = values.at[:, :W].set(0)  # Of the cache, zeros as they are.
      return c.layer.attention.attend_window(n, past.replace(v=values))

    run_heads = lambda r: cell.init_with_output(r, method=heads)[0]
    return jax.jit(run_heads)(jax.random.key(0))

  masked, compat = attended(False), attended(True)
  np.testing.assert_allclose(masked[:, 0], 0, atol=1e-6)
  np.testing.assert_allclose(masked[:, 1:], 1, rtol=1e-5)
  np.testing.assert_allclose(compat[:, 0], 0, atol=1e-6)
  assert (np.diff(compat[:, : W + 1, 0], axis=1) > 0).all()
  assert compat[:, W - 1].max() < 0.99
  np.testing.assert_allclose(compat[:, W:], 1, rtol=1e-5)
