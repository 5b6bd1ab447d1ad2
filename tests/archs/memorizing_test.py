"""The memorizing layer against a loop over blocks, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.memorizing import HeadGate
from meliad_rec.archs.memorizing import MemorizingLayer
from meliad_rec.archs.memorizing import Ring
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import scaled
from meliad_rec.models.cell import reset
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import part

MEMORY, NEIGHBORS, ROOM = 2 * W, 5, 3 * W
T = 6 * W  # More than once round the ring.


def layer(memory=MEMORY, neighbors=NEIGHBORS, room=ROOM, **options):
  return MemorizingLayer(config(), memory, neighbors, room, **options)


def example(length=T):
  block = cells.example(length)
  block.mask[:] = np.random.default_rng(2).random((B, length)) < 0.9
  return block


@functools.cache
def parameters():
  return cells.parameters(layer())


def slow(cell, block, neighbors):
  """Computes outputs; each token searches everything before its block."""
  attention = cell.layer.attention
  n_BTD = cell.layer.pre_norm(block.x)
  own = cell.layer.kv(n_BTD, block.mask)
  past = cell.config.empty_past(B).append(own)
  near_BTHK = attention.attend_window(n_BTD, past).reshape(B, -1, H, K)
  q_BTHK = scaled(*attention.query(n_BTD))
  stored = jax.lax.stop_gradient(own)
  far = []
  for begin in range(0, block.mask.shape[1], W):
    older = slice(max(begin - MEMORY, 0), begin)
    k, v, mask = stored.k[:, older], stored.v[:, older], stored.mask[:, older]
    q_BWHK, seen = q_BTHK[:, begin : begin + W], mask[:, None, None]
    score = jnp.einsum('bthk,bshk->bhts', q_BWHK, k)
    score = jnp.where(seen, score, -jnp.inf)
    place = jnp.argsort(jnp.argsort(-score, -1), -1)
    p = jnp.where((place < neighbors) & seen, jnp.exp(score), 0)
    p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
    far.append(jnp.einsum('bhts,bshk->bthk', p, v))
  g = jax.nn.sigmoid(cell.output.variables['params']['gate'])[:, None]
  y_BTHK = g * jnp.concatenate(far, 1) + (1 - g) * near_BTHK
  return (), cell.layer.output(block.x, y_BTHK.reshape(B, -1, H * K))


@functools.cache
def expected(neighbors):
  method = functools.partial(slow, neighbors=neighbors)
  return outcome(layer(), method)


def outcome(cell, method=lambda c, b: ((), cells.forward(c, b)[1])):
  run = lambda p, block: cell.apply({'params': p}, block, method=method)
  return cells.outcome(run, parameters(), example())


@pytest.mark.parametrize(
  'neighbors, options',
  [
    (NEIGHBORS, {'tile': 3}),
    (1, {'tile': 4}),
    (None, {'room': W, 'remat': 'full'}),
  ],
)
def test_is_the_loop_in_values_and_gradients(neighbors, options):
  found = outcome(layer(neighbors=neighbors, **options))
  assert_close(found, expected(neighbors or MEMORY))


def test_what_an_approximate_search_misses_is_attended_to(monkeypatch):
  """A search that misses every second score attends to twice as many keys."""
  targets = []

  def lossy(score_BHQS, k, recall_target):
    targets.append(recall_target)
    top = jax.lax.top_k(score_BHQS, 2 * k)
    found = np.array([*range(1, 2 * k - 2, 2), 2 * k - 2])
    return [a[..., found] for a in top]

  monkeypatch.setattr(jax.lax, 'approx_max_k', lossy)
  found = outcome(layer(recall_target=0.75))
  assert_close(found, expected(2 * NEIGHBORS))
  assert set(targets) == {0.75}


def test_heads_that_share_keys_are_heads_whose_keys_are_alike():
  params = parameters()
  attention = params['layer']['attention']

  def read(cell, change):
    kernels = {
      name: {'kernel': change(attention[name]['kernel'][:, :K])}
      for name in ('key', 'value')
    }
    changed = {'attention': attention | kernels}
    changed = params | {'layer': params['layer'] | changed}
    return cells.apply(cell, changed, example())[1]

  alike = read(layer(), lambda kernel_DK: np.tile(kernel_DK, (1, H)))
  shared = layer().clone(config=config(num_kv_heads=1))
  assert_close(read(shared, lambda kernel_DK: kernel_DK), alike)


def test_segments_of_any_length_round_the_ring():
  """Includes single tokens after a block border."""
  cell, block, params = layer(), example(), {'params': parameters()}
  apply = jax.jit(functools.partial(cell.apply, params))
  state = cell.apply(params, B, method='initial_state')
  outputs, first = [], 0
  for end in (W, ROOM, *range(ROOM + 1, ROOM + W + 1), T):
    state, y = apply(state, part(block, first, end))
    outputs.append(y)
    first = end
  whole = cells.apply(cell, parameters(), block)
  assert_close((state, np.concatenate(outputs, 1)), whole)


def test_as_many_queries_are_compared_at_once_as_divide_the_window():
  apply = functools.partial(layer(tile=3).apply, method=cells.forward)
  text = str(jax.make_jaxpr(apply)({'params': parameters()}, example(ROOM)))
  assert W == 8 and 'length=12\n' in text
  with pytest.raises(ValueError, match='MemorizingLayer.tile'):
    cells.shapes(layer(tile=0))


def test_the_search_is_not_repeated_in_the_backward_pass():
  def searches(function):
    text = str(jax.make_jaxpr(function)({'params': parameters()}))
    return text.count('= top_k')

  apply = functools.partial(layer().apply, method=cells.forward)
  outputs = lambda p: apply(p, example(ROOM))[1].sum()
  assert searches(outputs) == searches(jax.grad(outputs)) == 1


def test_the_gate_is_even_at_first():
  near = np.zeros((B, T, H * K), np.float32)
  far = np.ones((B, T, H, K), np.float32)
  y, _ = HeadGate().init_with_output(jax.random.key(0), near, far)
  np.testing.assert_array_equal(y, 0.5)


def temporary_bytes(memory, tokens, train, rows=B):
  """Returns the memory of one call of the layer; its state is donated."""
  cell = layer(memory, room=max(tokens, W), tile=1)
  block = jax.tree.map(lambda a: a[:rows], example(tokens))
  params = {'params': parameters()}

  def loss(params, state):
    state, y_BTD = cell.apply(params, state, block)
    return jnp.sum(y_BTD), state

  call = jax.grad(loss, has_aux=True) if train else loss
  state = jax.eval_shape(
    lambda: cell.apply(params, rows, method='initial_state')
  )
  compiled = jax.jit(call, donate_argnums=1).lower(params, state).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_the_ring_is_never_copied():
  """It is copied neither per block of the backward pass nor per token.

  Nor is it copied once for the whole backward pass. A single row is a case of
  its own, because XLA drops its axis.
  """
  memory = 1000 * W
  ring = 2 * B * H * K * memory * 4
  few, many = (temporary_bytes(memory, n * W, train=True) for n in (2, 6))
  assert many - few < 0.1 * ring
  assert many < 0.4 * ring
  for rows in (1, B):
    step = temporary_bytes(memory, 1, train=False, rows=rows)
    assert step < 0.4 * ring * rows / B


def test_reset_hides_rows_and_leaves_the_arrays_alone():
  """Layers in one scan stack their arrays along axis 1; this hides rows too."""
  fresh = Ring.empty(B, 12, H, K, 'float32')
  k = np.ones((B, W, H, K), np.float32)
  ring = fresh.write(KV(k, 2 * k, example(W).mask), 4)
  new = reset(np.arange(B) == 1, (fresh,), (ring,))[0]
  assert new.keys is ring.keys and new.values is ring.values
  np.testing.assert_array_equal(new.next_B, ring.next_B)
  stacked = jax.tree.map(lambda a: jnp.stack([a, a], 1), ring)
  hidden = stacked.hide(np.arange(B) == 1)
  for before, after in (ring, new), (stacked, hidden):
    assert not after.mask[1].any() and before.mask[1].any()
    np.testing.assert_array_equal(after.mask[::2], before.mask[::2])
