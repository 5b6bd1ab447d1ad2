"""The laws that every architecture passes, over one list of tiny models."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from meliad_rec.models.model import Model
from tests import architectures as tiny
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import build
from tests.architectures import NONE
from tests.architectures import real

B, T, W = tiny.B, tiny.T, tiny.W
every = pytest.mark.parametrize('name', tiny.each())
with_state = pytest.mark.parametrize('name', tiny.each(lambda a: a.has_state))
streaming = pytest.mark.parametrize(
  'name', tiny.each(lambda a: a.cell().can_step)
)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


def whole(m, start_B=ALL, tokens_BT=None):
  tokens_BT = m.tokens_BT if tokens_BT is None else tokens_BT
  return m.apply(m.carry, tokens_BT, start_B, real(tokens_BT))


def trees_close(a, b):
  jax.tree.map(close, a, b)


def differ(a, b, by=1e-4):
  return np.abs(np.asarray(a) - np.asarray(b)).max() > by


@every
def test_split(name):
  """Law 1: two segments equal one, in outputs and in the final state."""
  m = build(name)
  state, logits = whole(m)
  first, rest = m.tokens_BT[:, :W], m.tokens_BT[:, W:]
  middle, a = m.apply(m.carry, first, ALL, real(first))
  end, b = m.apply(middle, rest, NONE, real(rest))
  close(logits, jnp.concatenate([a, b], 1))
  trees_close(state, end)


@streaming
def test_token_by_token(name):
  """Laws 1 and 5: steps give the teacher-forced logits and the same state."""
  m = build(name)
  state, logits = whole(m)
  variables = {'params': m.params}
  method = lambda f: jax.jit(
    functools.partial(m.model.apply, variables, method=f)
  )
  step = method('decode_step')
  opened = method('to_decode_state')(
    m.model.apply(variables, B, method='initial_state')
  )
  for t in range(T):
    opened, logits_BV = step(opened, m.tokens_BT[:, t])
    close(logits_BV, logits[:, t])
  trees_close(state, method('to_segment_state')(opened))


@every
def test_causal(name):
  """Law 2: a token changes its own output and later ones, none before it."""
  m = build(name)
  _, logits = whole(m)
  for t in (0, 3, W - 1, W, T - 1):
    other = m.tokens_BT.at[:, t].add(1) % tiny.V
    _, changed = whole(m, tokens_BT=other)
    close(logits[:, :t], changed[:, :t], atol=1e-6)
    assert differ(logits[:, t], changed[:, t])


@with_state
def test_reset(name):
  """Law 3: with start the old state has no effect; without it, it has one."""
  m = build(name)
  state, fresh = whole(m)
  _, again = m.apply(state, m.tokens_BT, ALL, real(m.tokens_BT))
  np.testing.assert_array_equal(fresh, again)
  _, goes_on = m.apply(state, m.tokens_BT, NONE, real(m.tokens_BT))
  assert differ(fresh, goes_on)
  only_0 = jnp.arange(B) == 0
  _, mixed = m.apply(state, m.tokens_BT, only_0, real(m.tokens_BT))
  close(mixed[0], fresh[0])
  close(mixed[1:], goes_on[1:])


@every
def test_gradients(name):
  """Law 4: every parameter gets a finite, non-zero gradient."""
  m = build(name)

  def loss(params):
    _, logits = m.model.apply(
      {'params': params}, m.carry, m.tokens_BT, ALL, real(m.tokens_BT)
    )
    return cross_entropy(logits, jnp.roll(m.tokens_BT, -1, 1)).mean()

  for path, g in jax.tree_util.tree_leaves_with_path(
    jax.jit(jax.grad(loss))(m.params)
  ):
    assert np.isfinite(g).all(), path
    assert np.abs(g).max() > 0, path


@every
def test_rows_and_padding(name):
  """Law 6: rows do not influence each other; padding influences nothing."""
  m = build(name)
  _, logits = whole(m)
  other = m.tokens_BT.at[1].add(1) % tiny.V
  _, changed = whole(m, tokens_BT=other)
  close(logits[0], changed[0])
  close(logits[2], changed[2])
  at = W + 3
  mask = real(m.tokens_BT).at[0, at:].set(False)
  junk = m.tokens_BT.at[0, at:].add(1) % tiny.V
  state_a, a = m.apply(m.carry, m.tokens_BT, ALL, mask)
  state_b, b = m.apply(m.carry, junk, ALL, mask)
  close(a[0, :at], logits[0, :at])
  close(b[0, :at], logits[0, :at])
  next_a, _ = m.apply(state_a, m.tokens_BT, NONE, real(m.tokens_BT))
  next_b, _ = m.apply(state_b, m.tokens_BT, NONE, real(m.tokens_BT))
  trees_close(next_a, next_b)


@pytest.mark.parametrize(
  'name',
  [
    *('recurrent_fixed_skip', 'recurrent_lstm_dual', 'recurrent_in_scan'),
    *('block_feedback', 'latent_bottleneck', 'recurrent_memory'),
  ],
)
def test_blocks_of_padding_keep_memory(name):
  """Law 6: a block without a real token leaves the memory slots as they are."""
  m = build(name)
  slots = lambda state: m.model.apply(
    {'params': m.params},
    state,
    method=lambda self, s: self.cell.memory_slots(s),
  )
  first = m.tokens_BT[:, :W]
  short, _ = m.apply(m.carry, first, ALL, real(first))
  mask = real(m.tokens_BT).at[0, W:].set(False)
  padded, _ = m.apply(m.carry, m.tokens_BT, ALL, mask)
  close(slots(padded)[0], slots(short)[0])
  assert differ(slots(padded)[1], slots(short)[1])


@every
def test_scan_is_loop(name):
  """Law 11: one scan over blocks equals a Python loop over them."""
  m = build(name)
  cell = m.model.cell
  x_BTD = jax.random.normal(jax.random.key(3), (B, T, tiny.D))
  block = Block(x_BTD, real(m.tokens_BT))
  variables = {'params': m.params['cell']}

  def scanned(c):
    return run(c, c.initial_state(B), block)

  def looped(c):
    state, outputs = c.initial_state(B), []
    for i in range(0, T, W):
      part = jax.tree.map(lambda a: a[:, i : i + W], block)
      state, y = c(state, part)
      outputs.append(y)
    return state, jnp.concatenate(outputs, 1)

  both = [
    jax.jit(lambda f=f: cell.apply(variables, method=f))()
    for f in (scanned, looped)
  ]
  trees_close(*both)


@with_state
def test_state_is_used(name):
  """Law 12: zeroing or permuting the carried state changes the outputs."""
  m = build(name)
  state, _ = whole(m)
  after = lambda s: m.apply(s, m.tokens_BT, NONE, real(m.tokens_BT))[1]
  kept = after(state)
  assert differ(kept, after(jax.tree.map(jnp.zeros_like, state)))
  assert differ(kept, after(jax.tree.map(lambda a: a[::-1], state)))


@pytest.mark.parametrize('name', tiny.each(lambda a: a.recurrent))
def test_clear_forgets_the_recurrent_state_alone(name):
  m = build(name)
  state, _ = whole(m)
  ablated = Model(tiny.V, m.model.cell, tiny.D, clear_state=True)
  _, logits = ablated.apply(
    {'params': m.params}, state, m.tokens_BT, NONE, real(m.tokens_BT)
  )
  _, kept = m.apply(state, m.tokens_BT, NONE, real(m.tokens_BT))
  _, fresh = whole(m)
  assert differ(logits, kept)
  assert differ(logits, fresh) != ARCHITECTURES[name].forgets_all


@every
def test_bfloat16_stays_close(name):
  """Law 10, with the float32 model's own parameters."""
  m = build(name)
  _, logits = whole(m)
  half = to_bfloat16(m.model)
  carry = jax.eval_shape(
    lambda: half.apply({'params': m.params}, B, method='initial_state')
  )
  carry = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), carry)
  state, low = jax.jit(functools.partial(half.apply, {'params': m.params}))(
    carry, m.tokens_BT, ALL, real(m.tokens_BT)
  )
  assert low.dtype == jnp.float32
  assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(
    lambda a: a.dtype, carry
  )
  error = np.abs(low - logits)
  assert 1e-6 < error.mean() < 0.02 * np.std(logits)


def to_bfloat16(model):
  """The same model with bfloat16 activations, every layer's included."""

  def change(module):
    if hasattr(module, 'config'):
      lower = dataclasses.replace(module.config, dtype='bfloat16')
      module = module.clone(config=lower)
    elif hasattr(module, 'dtype'):
      module = module.clone(dtype='bfloat16')
    if hasattr(module, 'cells'):
      return module.clone(cells=tuple(change(c) for c in module.cells))
    if isinstance(module, EncoderLayers):
      return module.clone(layer=lambda: change(module.layer()))
    for part in ('cell', 'encoder', 'layer'):
      if hasattr(module, part):
        module = module.clone(**{part: change(getattr(module, part))})
    return module

  return model.clone(cell=change(model.cell), dtype='bfloat16')


def test_every_shipped_architecture_is_listed():
  root = pathlib.Path(__file__).parent.parent
  shipped = {p.stem for p in (root / 'gin' / 'arch').glob('*.gin')}
  assert shipped == {a.gin for a in ARCHITECTURES.values()}
