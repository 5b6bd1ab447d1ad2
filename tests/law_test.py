"""The laws that every architecture passes, over one list of tiny models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models.model import empty_carry
from tests import architectures as tiny
from tests import cells
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import build
from tests.architectures import NONE
from tests.architectures import real

B, T, W = tiny.B, tiny.T, tiny.W
WITH_SLOTS = 'block_recurrent', 'block_feedback', 'latent_bottleneck'
WITH_SLOTS += 'gated_latent_bottleneck', 'recurrent_memory'


def of(fits=lambda a: True):
  """One architecture after another, so that each is compiled once."""
  return pytest.mark.parametrize('name', tiny.each(fits), scope='module')


every = of()
with_state = of(lambda a: a.has_state)
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


def read(m, state, tokens_BT, start_B=NONE):
  """Returns the state after a segment without padding, and its logits."""
  return m.apply(state, tokens_BT, start_B, np.ones(tokens_BT.shape, bool))


def compiled(m, method):
  variables = {'params': m.params}
  return jax.jit(functools.partial(m.model.apply, variables, method=method))


@functools.cache
def whole(name):
  """The state after the tokens of a document, and their logits."""
  m = build(name)
  return read(m, m.carry, m.tokens_BT, ALL)


def others(tokens_BT, *place):
  """Returns tokens that differ at these places, and nowhere else."""
  changed = np.array(tokens_BT)
  changed[place] = (changed[place] + 1) % tiny.V
  return changed


def trees_close(a, b):
  jax.tree.map(close, a, b)


def differ(a, b, by=1e-4):
  return np.abs(np.asarray(a) - np.asarray(b)).max() > by


@every
def test_split_and_scan(name):
  """Laws 1 and 11: two segments, each one scan, equal a loop over blocks."""
  m = build(name)
  state, logits = whole(name)
  more_BT = others(m.tokens_BT)[:, ::-1]
  scanned, more = read(m, state, more_BT)
  looped, start_B, found = m.carry, ALL, []
  for block_BW in np.split(np.hstack([m.tokens_BT, more_BT]), 2 * T // W, 1):
    looped, part = read(m, looped, block_BW, start_B)
    start_B = NONE
    found.append(part)
  close(np.hstack([logits, more]), np.hstack(found))
  trees_close(scanned, looped)


@of(lambda a: a.cell().can_step)
def test_token_by_token(name):
  """Laws 1 and 5: steps give the teacher-forced logits and the same state."""
  m = build(name)
  state, logits = whole(name)
  step = compiled(m, 'decode_step')
  opened = compiled(
    m, lambda model: model.to_decode_state(model.initial_state(B))
  )()
  for t in range(T):
    opened, logits_BV = step(opened, m.tokens_BT[:, t])
    close(logits_BV, logits[:, t])
  trees_close(state, compiled(m, 'to_segment_state')(opened))


@every
def test_causal(name):
  """Law 2: a token changes its own output and later ones, none before it."""
  m = build(name)
  _, logits = whole(name)
  for t in (0, 3, W - 1, W, T - 1):
    other = others(m.tokens_BT, slice(None), t)
    _, changed = read(m, m.carry, other, ALL)
    close(logits[:, :t], changed[:, :t], atol=1e-6)
    assert differ(logits[:, t], changed[:, t])


@with_state
def test_reset_and_use_of_the_state(name):
  """Laws 3 and 12.

  With start the old state has no effect; without it, it has one, which is
  another if the state is cleared or permuted.
  """
  m = build(name)
  state, fresh = whole(name)
  after = lambda state, start_B: read(m, state, m.tokens_BT, start_B)[1]
  np.testing.assert_array_equal(fresh, after(state, ALL))
  goes_on = after(state, NONE)
  assert differ(fresh, goes_on)
  mixed = after(state, np.arange(B) == 0)
  close(mixed[0], fresh[0])
  close(mixed[1:], goes_on[1:])
  state = jax.tree.map(np.asarray, state)
  assert differ(goes_on, after(jax.tree.map(np.zeros_like, state), NONE))
  assert differ(goes_on, after(jax.tree.map(lambda a: a[::-1], state), NONE))


@of(lambda a: a.recurrent)
def test_clear_forgets_the_recurrent_state_alone(name):
  m = build(name)
  state, fresh = whole(name)
  _, logits = read(m, compiled(m, 'clear')(state), m.tokens_BT)
  assert differ(logits, read(m, state, m.tokens_BT)[1])
  assert differ(logits, fresh) != ARCHITECTURES[name].forgets_all


@of(lambda a: a.recurrent)
def test_recurrent_states_are_replaced_row_by_row(name):
  """With the state of another row, a row goes on as that row if it forgets all.

  Where attention caches are kept, it goes on in a third way.
  """
  m = build(name)
  state, _ = whole(name)
  parts, put = compiled(m, 'parts'), compiled(m, 'with_parts')
  replace = lambda state, other: put(state, parts(other))
  after = lambda state: read(m, state, m.tokens_BT[:1].repeat(B, 0))[1]
  goes_on, other = after(state), jax.tree.map(lambda a: a[::-1], state)
  close(after(replace(state, state)), goes_on)
  assert all(len(a) == B for a in jax.tree.leaves(parts(state)))
  replaced = after(replace(state, other))
  assert differ(replaced, goes_on)
  assert differ(replaced, after(other)) != ARCHITECTURES[name].forgets_all


@functools.cache
def gradients(name, *cuts):
  """Gradients of the loss of a document, read in segments."""
  m = build(name)

  def loss(params):
    state, start_B, found = m.carry, ALL, []
    for part_BT in jnp.split(m.tokens_BT, cuts, 1):
      arguments = state, part_BT, start_B, real(part_BT)
      state, logits = m.model.apply({'params': params}, *arguments)
      start_B = NONE
      found.append(logits)
    targets_BT = jnp.roll(m.tokens_BT, -1, 1)
    return cross_entropy(jnp.concatenate(found, 1), targets_BT).mean()

  # Spans outside of [0, 1], which is where their gradients are special.
  outside = lambda path, a: (
    jnp.linspace(-0.1, 1.1, len(a)) if path[-1].key == 'ratio' else a
  )
  params = jax.tree_util.tree_map_with_path(outside, m.params)
  return jax.jit(jax.grad(loss))(params)


@every
def test_gradients(name):
  """Law 4: every parameter gets a finite, non-zero gradient."""
  for path, g in jax.tree_util.tree_leaves_with_path(gradients(name)):
    assert np.isfinite(g).all(), path
    assert np.abs(g).max() > 0, path


@with_state
def test_gradients_do_not_depend_on_the_cut(name):
  """Law 1, for gradients, which pass from segment to segment."""
  cells.assert_close(gradients(name, W), gradients(name))


def test_gradients_of_spans_do_not_depend_on_the_cut():
  """Their layers are not in QUICK."""
  for name in 'window_span', 'feedback_own_and_below':
    cells.assert_close(gradients(name, W), gradients(name))


@every
def test_rows_and_padding(name):
  """Law 6: rows do not influence each other; padding influences nothing."""
  m = build(name)
  _, logits = whole(name)
  _, changed = read(m, m.carry, others(m.tokens_BT, 1), ALL)
  close(logits[0], changed[0])
  close(logits[2], changed[2])
  at = W + 3
  mask = np.ones((B, T), bool)
  mask[0, at:] = False
  junk = others(m.tokens_BT, 0, slice(at, None))
  nexts = []
  for tokens_BT in m.tokens_BT, junk:
    state, padded = m.apply(m.carry, tokens_BT, ALL, mask)
    close(padded[0, :at], logits[0, :at])
    nexts.append(read(m, state, m.tokens_BT)[0])
  trees_close(*nexts)


@of(lambda a: a.gin in WITH_SLOTS)
def test_blocks_of_padding_keep_memory(name):
  """Law 6: a block without a real token leaves the memory slots as they are."""
  m = build(name)
  slots = compiled(m, lambda model, state: model.cell.memory_slots(state))
  short, _ = read(m, m.carry, m.tokens_BT[:, :W], ALL)
  mask = np.ones((B, T), bool)
  mask[0, W:] = False
  padded, _ = m.apply(m.carry, m.tokens_BT, ALL, mask)
  close(slots(padded)[0], slots(short)[0])
  assert differ(slots(padded)[1], slots(short)[1])


@every
def test_bfloat16_stays_close(name):
  """Law 10, with the float32 model's own parameters."""
  m = build(name)
  _, logits = whole(name)
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
