"""The ring: what it holds, how old it is, and what a reset leaves of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.memorizing import Ring
from meliad_rec.layers.attention import KV
from meliad_rec.models.cell import reset

B, H, K, W, S = 3, 2, 5, 4, 12


def stream(length):
  """Keys and values, some of them padding."""
  rng = np.random.default_rng(0)
  k = rng.normal(size=(B, length, H, K)).astype(np.float32)
  return KV(k, 2 * k, rng.random((B, length)) < 0.8)


def written(kv, ends):
  """The ring behind segments with these ends."""
  ring, first = Ring.empty(B, S, H, K, 'float32'), 0
  for end in ends:
    part = jax.tree.map(lambda a, f=first, e=end: a[:, f:e], kv)
    ring = ring.write(part, W)
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
  fresh = Ring.empty(B, S, H, K, 'float32')
  new = reset(np.arange(B) == 1, (fresh,), (ring,))[0]
  assert new.keys is ring.keys and new.values is ring.values
  assert not new.mask[1].any() and ring.mask[1].any()
  np.testing.assert_array_equal(new.mask[::2], ring.mask[::2])
  np.testing.assert_array_equal(new.next_B, ring.next_B)


def test_stacked_rings_are_hidden_too():
  """As layers in one scan hold them, along axis 1."""
  ring = written(stream(8), [8])
  stacked = jax.tree.map(lambda a: jnp.stack([a, a], 1), ring)
  new = stacked.hide(jnp.arange(B) == 1)
  assert not new.mask[1].any()
  np.testing.assert_array_equal(new.mask[::2], stacked.mask[::2])


@pytest.mark.parametrize('length', [1, W, 2 * W])
def test_is_written_in_place(length):
  write = jax.jit(lambda ring, kv: ring.write(kv, W), donate_argnums=0)
  ring = Ring.empty(B, 1000 * W, H, K, 'float32')
  memory = write.lower(ring, stream(length)).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.1 * ring.keys.nbytes
