"""Attention of a core against plain equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import positions
from meliad_rec.layers.core_attention import Attention
from meliad_rec.layers.core_attention import kept
from meliad_rec.layers.core_config import CoreConfig
from tests import plain_core
from tests.architectures import core_config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import S
from tests.cells import assert_close

B, T = 3, 6
LOGITS = {
  positions.NoPosition: plain_core.plain_logits,
  positions.XPos: plain_core.xpos_logits,
  positions.SymmetricXPos: functools.partial(
    plain_core.xpos_logits, two_sided=True
  ),
}
both = pytest.mark.parametrize('causal', [False, True])


def example():
  """A stream, another, and what is seen: row 1 holds a gap, row 2 nothing."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  other_BSD = rng.normal(size=(B, S, D)).astype(np.float32)
  mask_BT = np.array([[1] * 6, [1, 0, 1, 1, 0, 0], [0] * 6], bool)
  return x_BTD, other_BSD, mask_BT


@functools.cache
def parameters(own=True, position=positions.XPos):
  x_BTD, other_BSD, mask_BT = example()
  source = (x_BTD, mask_BT) if own else (other_BSD, mask_BT[:, :S])
  made = Attention(core_config(position=position), own)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, *source)['params']
  rng = np.random.default_rng(1)
  # Strong opinions, and norms that differ.
  move = lambda a: np.float32(a * 2 + rng.normal(size=a.shape) * 0.3)
  return jax.tree.map(move, params)


@both
@pytest.mark.parametrize('position', LOGITS, ids=lambda p: p.__name__)
def test_own_tokens(causal, position):
  config = core_config(causal, position=position)
  x_BTD, _, mask_BT = example()
  params = parameters(position=position)
  source_BTD = x_BTD[:, ::-1]  # Of the same tokens, but not the stream.
  y_BTD = Attention(config).apply(
    {'params': params}, x_BTD, source_BTD, mask_BT
  )
  order_TS = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
  expected = plain_core.attention(
    *(params, config, x_BTD, source_BTD),
    *(mask_BT[:, None] & order_TS, LOGITS[position]),
  )
  assert_close(y_BTD, expected)


@both
def test_slots_have_no_order(causal):
  """And a norm of their own; a query sees all of them, causal or not."""
  x_BTD, other_BSD, mask_BT = example()
  mask_BS, params = mask_BT[:, :S], parameters(own=False)
  made = Attention(core_config(causal), own=False)
  apply = functools.partial(made.apply, {'params': params})
  y_BTD = apply(x_BTD, other_BSD, mask_BS)
  seen_BTS = np.repeat(mask_BS[:, None], T, 1)
  expected = plain_core.attention(
    params, made.config, x_BTD, other_BSD, seen_BTS
  )
  assert_close(y_BTD, expected)
  assert_close(y_BTD, apply(x_BTD, other_BSD[:, ::-1], mask_BS[:, ::-1]))
  # As many slots as tokens are no reason to be causal.
  longer = np.concatenate([other_BSD, other_BSD[:, :1]], 1)
  seen_BT = np.ones((B, T), bool)
  moved = np.concatenate([longer[:, :-1], -longer[:, -1:]], 1)
  change = apply(x_BTD, longer, seen_BT) - apply(x_BTD, moved, seen_BT)
  assert (np.abs(change).max(-1) > 1e-4).all()


@pytest.mark.parametrize('own', [False, True])
def test_a_query_that_sees_nothing_adds_nothing(own):
  """And gives no gradient, where others would be 0 / 0."""
  x_BTD, other_BSD, mask_BT = example()
  source, mask_BS = (x_BTD, mask_BT) if own else (other_BSD, mask_BT[:, :S])
  made = Attention(core_config(False), own)

  def loss(params, x_BTD, source):
    y_BTD = made.apply({'params': params}, x_BTD, source, mask_BS)
    return jnp.sum(jnp.sin(y_BTD)), y_BTD

  grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  gradients, y_BTD = grad(parameters(own), x_BTD, source)
  np.testing.assert_array_equal(y_BTD[2], x_BTD[2])
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  np.testing.assert_array_equal(gradients[2][2], np.zeros_like(source[2]))
  assert np.abs(gradients[2][1][mask_BS[1]]).max() > 0
  assert np.abs(gradients[2][1][~mask_BS[1]]).max() == 0


@pytest.mark.parametrize('by_row', [False, True])
def test_dropout_of_probabilities(by_row):
  """Heads and queries have their own; so have rows, or they share it."""
  wide = core_config(attention_dropout=0.3, dropout_by_row=by_row)
  streams = np.zeros((B, 40, D)), np.zeros((B, 50, D))
  draw = lambda module: kept(module, wide, H, *streams)
  apply = functools.partial(Attention(wide).apply, {}, method=draw)
  found = np.asarray(apply(rngs={'dropout': jax.random.key(0)}))
  assert found.shape == ((B,) if by_row else ()) + (H, 40, 50)
  assert abs(found.mean() - 0.7) < 0.02
  for axis in range(found.ndim):
    a, b = np.moveaxis(found, axis, 0)[:2]
    assert abs((a == b).mean() - 0.58) < 0.15
  assert apply() is None


@pytest.mark.parametrize('by_row', [False, True])
def test_dropout_of_attention_changes_the_output(by_row):
  x_BTD, _, mask_BT = example()
  apply = lambda rate, rng: Attention(
    core_config(False, attention_dropout=rate, dropout_by_row=by_row)
  ).apply({'params': parameters()}, x_BTD, x_BTD, mask_BT, rngs=rng)
  dry = apply(0.0, {'dropout': jax.random.key(0)})
  wet = apply(0.5, {'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(apply(0.5, {}), dry)
  assert np.abs(wet - dry).max() > 0.01


def test_first_weights():
  """Xavier's, keys, queries and values by the root of 2 smaller."""
  x_BTD, _, mask_BT = example()
  config = CoreConfig(64, 4, 24, 8, True)
  wide_BTD = np.repeat(x_BTD, 4, -1)[..., :64]
  init = jax.jit(Attention(config).init)
  params = init(jax.random.key(0), wide_BTD, wide_BTD, mask_BT)['params']
  most = (6 / (64 + 4 * 24)) ** 0.5
  for name, bound in (('query', 0.5), ('key', 0.5), ('value', 0.5), (0, 1)):
    kernel = params[name] if name else params['output']['linear']
    largest = np.abs(kernel['kernel']).max()
    assert 0.98 < largest / (most * bound**0.5) <= 1
    assert set(kernel) == {'kernel'}  # No bias.
