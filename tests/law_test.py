"""The laws that every architecture passes, over one list of tiny models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.models.laws import same_state
from meliad_rec.models.model import empty_carry
from tests import architectures as tiny
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import build
from tests.architectures import QUICK
from tests.architectures import real

B, T, W = tiny.B, tiny.T, tiny.W
WITH_SLOTS = 'block_recurrent', 'block_feedback', 'latent_bottleneck'
WITH_SLOTS += 'gated_latent_bottleneck', 'recurrent_memory'


def of(fits=lambda a: True, quick=QUICK):
  """One architecture after another, so that each is compiled once."""
  return pytest.mark.parametrize('name', tiny.each(fits, quick), scope='module')


every = of()
with_state = of(lambda a: a.has_state)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


def trees_close(a, b):
  jax.tree.map(close, a, b)


def differ(a, b, by=1e-4):
  return np.abs(np.asarray(a) - np.asarray(b)).max() > by


@every
def test_split_and_scan(name):
  """Laws 1 and 11: two segments, each one scan, equal a loop over blocks."""
  build(name).split()


@of(lambda a: a.cell().can_step)
def test_token_by_token(name):
  """Laws 1 and 5: steps give the teacher-forced logits and the same state."""
  build(name).steps()


@every
def test_the_state_keeps_its_shapes_and_dtypes(name):
  """Law 13."""
  same_state(ARCHITECTURES[name].cell(), tiny.D)


@every
def test_causal(name):
  """Law 2."""
  build(name).causal()


@with_state
def test_reset_and_use_of_the_state(name):
  """Laws 3 and 12."""
  build(name).use_of_state()


@of(lambda a: a.recurrent)
def test_clear_forgets_the_recurrent_state_alone(name):
  m = build(name)
  state, fresh = m.whole
  _, logits = m.read(m.compiled('clear')(state), m.tokens_BT)
  assert differ(logits, m.read(state, m.tokens_BT)[1])
  assert differ(logits, fresh) != ARCHITECTURES[name].forgets_all


@of(lambda a: a.recurrent)
def test_recurrent_states_are_replaced_row_by_row(name):
  """With the state of another row, a row goes on as that row if it forgets all.

  Where attention caches are kept, it goes on in a third way.
  """
  m = build(name)
  state, _ = m.whole
  parts, put = m.compiled('parts'), m.compiled('with_parts')
  replace = lambda state, other: put(state, parts(other))
  after = lambda state: m.read(state, m.tokens_BT[:1].repeat(B, 0))[1]
  goes_on, other = after(state), jax.tree.map(lambda a: a[::-1], state)
  close(after(replace(state, state)), goes_on)
  assert all(len(a) == B for a in jax.tree.leaves(parts(state)))
  replaced = after(replace(state, other))
  assert differ(replaced, goes_on)
  assert differ(replaced, after(other)) != ARCHITECTURES[name].forgets_all


# Of the others, a gradient takes long to compile.
@of(quick=QUICK - {'staircase', 'latent_bottleneck', 'block_feedback'})
def test_gradients(name):
  """Laws 4 and 1: finite, not zero, and they do not depend on the cuts."""
  build(name).gradients()


@pytest.mark.slow
def test_gradients_of_spans_do_not_depend_on_the_cut():
  """Their layers are not in QUICK."""
  for name in 'window_span', 'feedback_own_and_below':
    build(name).same_gradients()


@every
def test_rows_and_padding(name):
  """Law 6."""
  build(name).rows()
  build(name).padding()


@of(lambda a: a.gin in WITH_SLOTS)
def test_blocks_of_padding_keep_memory(name):
  """Law 6: a block without a real token leaves the memory slots as they are."""
  m = build(name)
  slots = m.compiled(lambda model, state: model.cell.memory_slots(state))
  short, _ = m.read(m.carry, m.tokens_BT[:, :W], ALL)
  mask = np.ones((B, T), bool)
  mask[0, W:] = False
  padded, _ = m.apply(m.carry, m.tokens_BT, ALL, mask)
  close(slots(padded)[0], slots(short)[0])
  assert differ(slots(padded)[1], slots(short)[1])


@every
def test_bfloat16_stays_close(name):
  """Law 10, with the float32 model's own parameters."""
  m = build(name)
  _, logits = m.whole
  half = to_bfloat16(m.model)
  carry = empty_carry(half, m.params, B)
  state, low = jax.jit(functools.partial(half.apply, {'params': m.params}))(
    carry, m.tokens_BT, ALL, real(m.tokens_BT)
  )
  assert low.dtype == jnp.float32
  types = lambda tree: jax.tree.map(lambda a: a.dtype, tree)
  assert types(state) == types(carry)
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
