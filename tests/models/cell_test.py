"""Running a cell over blocks: order, remat, unroll, dropout; resets."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import reset
from meliad_rec.models.cell import Resettable
from meliad_rec.models.cell import run

B, T, W, D = 3, 12, 4, 5


class Mixer(Cell):
  """State: h_BD, a sum over earlier blocks."""

  rate: float = 0.0

  @property
  def block_length(self):
    return W

  def initial_state(self, batch):
    return jnp.zeros((batch, D))

  @nn.compact
  def __call__(self, state, block):
    x_BWD = TiledDropout(self.rate)(block.x)
    y_BWD = jnp.tanh(nn.Dense(D)(x_BWD + state[:, None]))
    return state + jnp.sum(y_BWD * block.mask[..., None], 1), y_BWD


def example(length=T):
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, length, D)).astype(np.float32)
  return Block(x_BTD, rng.random((B, length)) < 0.8)


PARAMS = {
  'params': {
    'Dense_0': {
      'kernel': np.random.default_rng(1).normal(size=(D, D)) * 0.3,
      'bias': np.full(D, 0.1),
    }
  }
}
PARAMS = jax.tree.map(lambda a: a.astype(np.float32), PARAMS)


def outcome(cell, block=None, **options):
  """Returns state, outputs and the gradient of the parameters."""
  block = block or example()

  def loss(params):
    state, y_BTD = cell.apply(
      params,
      np.ones((B, D), np.float32),
      block,
      method=lambda c, s, b: run(c, s, b),
      **options,
    )
    return jnp.sum(jnp.sin(y_BTD)) + jnp.sum(state), (state, y_BTD)

  return jax.jit(jax.grad(loss, has_aux=True))(PARAMS)


def close(a, b):
  compare = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
  jax.tree.map(compare, a, b)


def test_blocks_run_in_order():
  block, dense = example(), PARAMS['params']['Dense_0']
  state, expected = np.ones((B, D)), []
  for i in range(0, T, W):
    x = block.x[:, i : i + W] + state[:, None]
    expected.append(np.tanh(x @ dense['kernel'] + dense['bias']))
    state = state + (expected[-1] * block.mask[:, i : i + W, None]).sum(1)
  _, found = outcome(Mixer())
  close(found, (state, np.concatenate(expected, 1)))


@pytest.mark.parametrize(
  ('policy', 'unroll'), [('none', 2), ('sublayers', 1), ('full', 2)]
)
def test_remat_and_unroll_change_nothing(policy, unroll):
  close(outcome(Mixer(unroll=unroll, remat=policy)), outcome(Mixer()))


def test_segment_must_be_whole_blocks():
  with pytest.raises(ValueError, match='SEGMENT to a multiple of WINDOW'):
    outcome(Mixer(), example(10))


def test_blocks_share_their_dropout():
  block = Block(np.ones((B, T, D), np.float32), np.zeros((B, T), bool))
  rngs = {'dropout': jax.random.key(0)}
  _, (_, dropped) = outcome(Mixer(rate=0.5), block, rngs=rngs)
  close(dropped[:, :W], dropped[:, W : 2 * W])
  _, (_, plain) = outcome(Mixer(), block)
  assert np.abs(dropped - plain).max() > 0.1


class Marked(Resettable):
  """Marks its rows, and leaves the array unchanged."""

  large: jax.Array
  seen: jax.Array

  def reset(self, start_B, fresh):
    return self.replace(seen=np.where(start_B, fresh.seen, self.seen))


def test_reset_takes_fresh_rows_where_a_document_starts():
  """A part that can reset itself is left to itself."""
  state = {
    'wide': jnp.zeros((B, 2), 'bfloat16'),
    'bool': jnp.zeros(B, bool),
    'part': Marked(jnp.zeros((B, 2)), jnp.zeros(B)),
  }
  fresh = jax.tree.map(lambda a: np.ones(a.shape, np.float32), state)
  start = np.array([False, True, False])
  found = reset(start, fresh, state)
  assert found['wide'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(found['wide'][:, 1], start)
  np.testing.assert_array_equal(found['bool'], start)
  assert found['part'].large is state['part'].large
  np.testing.assert_array_equal(found['part'].seen, start)
