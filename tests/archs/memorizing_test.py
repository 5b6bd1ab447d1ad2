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
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import reset
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W

MEMORY, NEIGHBORS, ROOM = 2 * W, 5, 3 * W
T = 6 * W  # More than once round the ring.
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def layer(
  memory=MEMORY, neighbors=NEIGHBORS, room=ROOM, changes=None, **options
):
  settings = config(**(changes or {}))
  return MemorizingLayer(settings, memory, neighbors, room, **options)


def example(seed=0, length=T):
  rng = np.random.default_rng(seed)
  x_BTD = rng.normal(size=(B, length, D)).astype(np.float32)
  return Block(x_BTD, rng.random((B, length)) < 0.9)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@functools.cache
def parameters():
  init = jax.jit(functools.partial(layer().init, method=forward))
  rng = np.random.default_rng(1)
  # Scales and gates away from their first values.
  moved = lambda a: a + rng.normal(size=a.shape).astype(np.float32) * 0.3
  return {
    'params': jax.tree.map(moved, init(jax.random.key(0), example())['params'])
  }


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
  return cell.layer.output(block.x, y_BTHK.reshape(B, -1, H * K))


def outcome(cell, method):
  """Returns outputs and gradients at tokens that are not padding."""
  block = example()

  def loss(params, x_BTD):
    y_BTD = cell.apply(params, block.replace(x=x_BTD), method=method)
    return jnp.sum(jnp.sin(y_BTD) * block.mask[..., None]), y_BTD

  grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
    parameters(), block.x
  )
  return y[block.mask], grads


@functools.cache
def expected(neighbors):
  return outcome(layer(), functools.partial(slow, neighbors=neighbors))


@pytest.mark.parametrize(
  'neighbors, options',
  [
    (NEIGHBORS, {'tile': 3}),
    (NEIGHBORS, {'recall_target': 0.9}),  # Off a TPU it finds all.
    (1, {'tile': 4}),
    (None, {'room': W, 'remat': 'full'}),
    (MEMORY, {}),
  ],
)
def test_is_the_loop_in_values_and_gradients(neighbors, options):
  cell = layer(neighbors=neighbors, **options)
  found = outcome(cell, lambda c, b: forward(c, b)[1])
  jax.tree.map(close, found, expected(neighbors or MEMORY))


def test_heads_that_share_keys_are_heads_whose_keys_are_alike():
  params = parameters()['params']
  attention = params['layer']['attention']

  def read(num_kv_heads, change):
    kernels = {
      name: {'kernel': change(attention[name]['kernel'][:, :K])}
      for name in ('key', 'value')
    }
    changed = params | {
      'layer': params['layer'] | {'attention': attention | kernels}
    }
    cell = layer(changes={'num_kv_heads': num_kv_heads})
    return cell.apply({'params': changed}, example(), method=forward)[1]

  alike = read(None, lambda kernel_DK: jnp.tile(kernel_DK, (1, H)))
  close(read(1, lambda kernel_DK: kernel_DK), alike)


@pytest.mark.parametrize('ends', [[24, 48], [8, 48], [40, *range(41, 49)]])
def test_segments_of_any_length_round_the_ring(ends):
  """Includes single tokens after a block border."""
  cell, block = layer(), example()
  apply = jax.jit(cell.apply)
  state = cell.apply(parameters(), B, method='initial_state')
  outputs, first = [], 0
  for end in ends:
    part = jax.tree.map(lambda a, f=first, e=end: a[:, f:e], block)
    state, y = apply(parameters(), state, part)
    outputs.append(y)
    first = end
  whole_state, whole = jax.jit(functools.partial(cell.apply, method=forward))(
    parameters(), block
  )
  close(np.concatenate(outputs, 1), whole)
  jax.tree.map(close, state, whole_state)


def test_a_new_document_recalls_nothing_of_the_old():
  cell = layer()
  apply = jax.jit(cell.apply)
  fresh = cell.apply(parameters(), B, method='initial_state')
  state, _ = apply(parameters(), fresh, example(2, 5 * W))
  start = np.arange(B) == 1
  mixed = reset(start, fresh, state)
  _, y = apply(parameters(), mixed, example())
  _, new = apply(parameters(), fresh, example())
  _, goes_on = apply(parameters(), state, example())
  close(y[1], new[1], atol=1e-5)
  close(y[::2], goes_on[::2], atol=1e-5)
  assert np.abs(new - goes_on).max() > 0.1


def test_approximate_search_is_asked_for_its_target():
  apply = functools.partial(layer(recall_target=0.75).apply, method=forward)
  text = str(jax.make_jaxpr(apply)(parameters(), example()))
  assert 'approx_top_k' in text and 'recall_target=0.75' in text


def test_what_an_approximate_search_misses_is_attended_to(monkeypatch):
  """A search that misses every second score attends to twice as many keys."""

  def lossy(score_BHQS, k, recall_target):
    top = jax.lax.top_k(score_BHQS, 2 * k)
    found = np.array([*range(1, 2 * k - 2, 2), 2 * k - 2])
    return [a[..., found] for a in top]

  monkeypatch.setattr(jax.lax, 'approx_max_k', lossy)
  found = outcome(layer(recall_target=0.5), lambda c, b: forward(c, b)[1])
  jax.tree.map(close, found, expected(2 * NEIGHBORS))


def test_the_search_is_not_repeated_in_the_backward_pass():
  def searches(function):
    text = str(jax.make_jaxpr(function)(parameters()))
    return text.count('= top_k')

  block = example(length=ROOM)
  outputs = lambda p: layer().apply(p, block, method=forward)[1].sum()
  assert searches(outputs) == searches(jax.grad(outputs)) == 1


def test_the_ring_has_the_dtype_of_activations():
  cell = layer(changes={'dtype': 'bfloat16'})
  _, ring = cell.apply(parameters(), B, method='initial_state')
  assert ring.keys.dtype == ring.values.dtype == jnp.bfloat16


def test_the_gate_is_even_at_first_and_one_of_each_head():
  near, far = np.zeros((B, T, H * K), np.float32), np.ones((B, T, H, K))
  gate = HeadGate()
  params = gate.init(jax.random.key(0), near, far)
  np.testing.assert_array_equal(gate.apply(params, near, far), 0.5)
  y = gate.apply({'params': {'gate': jnp.array([0, 50.0])}}, near, far)
  y_BTHK = y.reshape(B, T, H, K)
  np.testing.assert_allclose(y_BTHK[:, :, 0], 0.5)
  np.testing.assert_allclose(y_BTHK[:, :, 1], 1)


def temporary_bytes(memory, tokens, train, rows=B):
  """Returns the memory of one call of the layer; its state is donated."""
  cell = layer(memory, room=max(tokens, W), tile=1)
  block = jax.tree.map(lambda a: a[:rows], example(length=tokens))

  def loss(params, state):
    state, y_BTD = cell.apply(params, state, block)
    return jnp.sum(y_BTD), state

  call = jax.grad(loss, has_aux=True) if train else loss
  state = cell.apply(parameters(), rows, method='initial_state')
  lowered = jax.jit(call, donate_argnums=1).lower(parameters(), state)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_the_ring_is_never_copied():
  """Neither for the backward pass, be it once or per block, nor per token.

  One row is a case of its own: XLA drops its axis.
  """
  memory = 1000 * W
  ring = 2 * B * H * K * memory * 4
  few, many = (temporary_bytes(memory, n * W, train=True) for n in (2, 6))
  assert many - few < 0.1 * ring
  assert many < 0.4 * ring
  for rows in (1, B):
    step = temporary_bytes(memory, 1, train=False, rows=rows)
    assert step < 0.4 * ring * rows / B


RING_H, RING_K, RING_W, S = 2, 5, 4, 12


def stream(length):
  """Returns keys and values, some of them padding."""
  rng = np.random.default_rng(0)
  k = rng.normal(size=(B, length, RING_H, RING_K)).astype(np.float32)
  return KV(k, 2 * k, rng.random((B, length)) < 0.8)


def written(kv, ends):
  """Returns the ring after segments with these ends."""
  ring, first = Ring.empty(B, S, RING_H, RING_K, 'float32'), 0
  for end in ends:
    part = jax.tree.map(lambda a, f=first, e=end: a[:, f:e], kv)
    ring = ring.write(part, RING_W)
    first = end
  return ring


@pytest.mark.parametrize(
  'ends', [[8], [8, 20], [4, 8, 9, 10, 11, 12, 20], [32]]
)
def test_holds_the_last_tokens_and_knows_their_age(ends):
  kv = stream(ends[-1])
  ring = written(kv, ends)
  age_S = np.asarray(ring.age_S())
  assert sorted(age_S) == list(range(S))
  for s in range(S):
    token = ends[-1] - 1 - age_S[s]
    if token < 0:
      assert not ring.mask[:, 0, s].any()
    else:
      np.testing.assert_array_equal(ring.keys[:, :, s], kv.k[:, token])
      np.testing.assert_array_equal(ring.values[:, :, s], kv.v[:, token])
      np.testing.assert_array_equal(ring.mask[:, 0, s, 0], kv.mask[:, token])


def test_reset_hides_rows_and_leaves_the_arrays_alone():
  ring = written(stream(8), [8])
  fresh = Ring.empty(B, S, RING_H, RING_K, 'float32')
  new = reset(np.arange(B) == 1, (fresh,), (ring,))[0]
  assert new.keys is ring.keys and new.values is ring.values
  assert not new.mask[1].any() and ring.mask[1].any()
  np.testing.assert_array_equal(new.mask[::2], ring.mask[::2])
  np.testing.assert_array_equal(new.next_B, ring.next_B)


def test_stacked_rings_are_hidden_too():
  """The layout of layers in one scan: stacked along axis 1."""
  ring = written(stream(8), [8])
  stacked = jax.tree.map(lambda a: jnp.stack([a, a], 1), ring)
  new = stacked.hide(jnp.arange(B) == 1)
  assert not new.mask[1].any()
  np.testing.assert_array_equal(new.mask[::2], stacked.mask[::2])


@pytest.mark.parametrize('length', [1, RING_W, 2 * RING_W])
def test_is_written_in_place(length):
  write = jax.jit(lambda ring, kv: ring.write(kv, RING_W), donate_argnums=0)
  ring = Ring.empty(B, 1000 * RING_W, RING_H, RING_K, 'float32')
  memory = write.lower(ring, stream(length)).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.1 * ring.keys.nbytes


@pytest.mark.parametrize(
  'options, setting',
  [
    ({'memory': 20}, 'MEMORY'),
    ({'room': 20}, 'SEGMENT'),
    ({'neighbors': 0}, 'NEIGHBORS'),
    ({'neighbors': MEMORY + 1}, 'NEIGHBORS'),
    ({'recall_target': 1.5}, 'recall_target'),
    ({'neighbors': None, 'recall_target': 0.9}, 'recall_target'),
  ],
)
def test_impossible_settings(options, setting):
  with pytest.raises(ValueError, match=setting):
    layer(**options).init(jax.random.key(0), example(), method=forward)
