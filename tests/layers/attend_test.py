"""Attention by blocks of queries; positions against their papers."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.layers import attention
from meliad_rec.layers import positions
from tests import plain_encoder
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close

B, T = 3, 6
LONG = 2 * attention.QUERY_BLOCK + 50


def long_example():
  """Returns queries, keys, values and a mask with a gap and an empty row."""
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, B, LONG, H, K)).astype(np.float32)
  mask_BS = np.arange(LONG) < np.array([[LONG], [130], [0]])
  mask_BS[0, 5] = False
  return q, k, v, mask_BS


@pytest.mark.parametrize('dropped', [None, (H,), (B, H)])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(
  'position', [positions.XPos, positions.SymmetricXPos, None]
)
def test_blocks_are_all_at_once(position, causal, dropped, monkeypatch):
  """Compares values and gradients; position None: memory slots."""
  *qkv, mask_BS = long_example()
  rng = np.random.default_rng(1)
  kept = dropped and rng.random((*dropped, LONG, LONG)) < 0.7
  relative = position and position(H)

  def value_and_gradients():
    def loss(q, k, v):
      y = attention.attend(
        *(relative, q, k, v, mask_BS),
        causal=causal,
        keep=kept,
        dropout_rate=0.3,
      )
      return jnp.sum(jnp.sin(y) * np.arange(K)), y

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*qkv)

  found = value_and_gradients()
  monkeypatch.setattr(attention, 'QUERY_BLOCK', LONG)
  expected = value_and_gradients()
  jax.tree.map(assert_close, found, expected)
  assert np.abs(expected[1][0]).max() > 0.1
  np.testing.assert_array_equal(found[1][2], 0)


@pytest.mark.parametrize('by_row', [False, True])
def test_what_is_kept_counts_so_much_more(by_row):
  """Compares a single block with the definition."""
  q, k, v, mask_BS = (a[:, :T] for a in long_example())
  rng = np.random.default_rng(1)
  kept = rng.random((B, H, T, T) if by_row else (H, T, T)) < 0.7
  found = attention.attend(
    None, q, k, v, mask_BS, causal=True, keep=kept, dropout_rate=0.3
  )
  e_BHTS = np.exp(plain_encoder.plain_logits(q, k)) * mask_BS[:, None, None]
  total_BHT1 = e_BHTS.sum(-1, keepdims=True)
  p_BHTS = e_BHTS / np.where(total_BHT1 > 0, total_BHT1, 1) * kept / 0.7
  assert_close(found, np.einsum('bhts,bshk->bthk', p_BHTS, v))


@pytest.mark.parametrize('dropped', [False, True])
@pytest.mark.parametrize('axes', [(8, 1, 1), (2, 2, 2)])
def test_rows_and_heads_stay_on_their_devices(axes, dropped):
  """Nothing is gathered, even where rows run one after another."""
  mesh = partition.make_mesh(*axes)
  rows = 8
  spec = NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), None, 'model'))
  rng = np.random.default_rng(0)
  qkv = rng.normal(size=(3, rows, LONG, H, K)).astype(np.float32)
  mask_BS = np.ones((rows, LONG), bool)
  kept = rng.random((rows, H, LONG, LONG)) < 0.7 if dropped else None

  def loss(q, k, v, kept):
    y = attention.attend(
      None, q, k, v, mask_BS, causal=True, keep=kept, dropout_rate=0.3
    )
    return jnp.sum(jnp.sin(y))

  gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
  expected = gradients(*qkv, kept)
  cut = [jax.device_put(a, spec) for a in qkv]
  if dropped:
    heads = NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), 'model'))
    kept = jax.device_put(kept, heads)
  with jax.set_mesh(mesh):
    text = gradients.lower(*cut, kept).compile().as_text()
    jax.tree.map(assert_close, gradients(*cut, kept), expected)
  assert not {'all-gather', 'all-to-all', 'collective-permute'} & set(
    re.findall(r'[a-z-]+(?=\()', text)
  )


def test_no_array_of_all_queries_by_all_keys():
  """A gradient takes less memory than half of such an array."""
  queries = jax.ShapeDtypeStruct((8, 1024, 4, 16), 'float32')
  mask_BS = np.ones(queries.shape[:2], bool)
  read = functools.partial(attention.attend, None, causal=True)
  loss = lambda q, k, v: jnp.sum(read(q, k, v, mask_BS) ** 2)
  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*[queries] * 3).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < 8 * 4 * 1024**2 * 4 / 2


def logits_of(position, causal=False, dtype='float32'):
  """Returns random queries, keys and their function of logits."""
  rng = np.random.default_rng(0)
  pair = rng.normal(size=(2, B, T, H, K)).astype(np.float32)

  def logits(q_BTHK, k_BTHK):
    pairs = attention.rotated_pairs(position(H), q_BTHK, k_BTHK, causal)
    heads_first = jax.tree.map(lambda a: a.swapaxes(1, 2), pairs)
    return attention.attention_logits(
      heads_first, ~np.tri(q_BTHK.shape[1], dtype=bool)
    )

  return *pair.astype(dtype), logits


def test_xpos_is_its_definition():
  """Sun et al. 2022: pairs turned by n theta, times and by zeta^(n / 512)."""
  q_BTHK, k_BTHK, logits = logits_of(positions.XPos)
  found = logits(q_BTHK, k_BTHK)
  i = np.arange(K // 2)
  theta_I, zeta_I = 10_000.0 ** (-i / (K / 2)), (2 * i + 0.4 * K) / (1.4 * K)
  pairs = lambda a: a[..., : K // 2] + 1j * a[..., K // 2 :]
  for n, m in np.ndindex(T, T):
    q = pairs(q_BTHK[:, n]) * np.exp(1j * n * theta_I) * zeta_I ** (n / 512)
    k = pairs(k_BTHK[:, m]) * np.exp(1j * m * theta_I) / zeta_I ** (m / 512)
    expected = (q * np.conj(k)).real.sum(-1)
    np.testing.assert_allclose(found[:, :, n, m], expected, atol=1e-5)


def flipped(a_BTHK):
  """Mirrors pairs, so that they rotate the other way."""
  return a_BTHK * np.where(np.arange(K) < K // 2, 1, -1).astype(np.float32)


def test_symmetric_xpos_has_no_direction():
  """A mirrored sequence has mirrored logits, except with XPos."""

  def mirrored(position):
    q_BTHK, k_BTHK, logits = logits_of(position)
    # Far enough for the decay to show.
    far = lambda a: np.repeat(a, 40, 1)
    q_BTHK, k_BTHK = far(q_BTHK), far(k_BTHK)
    there = logits(q_BTHK, k_BTHK)
    back = logits(flipped(q_BTHK)[:, ::-1], flipped(k_BTHK)[:, ::-1])
    return np.abs(there - back[..., ::-1, ::-1]).max()

  assert mirrored(positions.SymmetricXPos) < 1e-4
  assert mirrored(positions.RoPE) < 1e-4
  assert mirrored(positions.XPos) > 0.1


def test_both_kinds_of_xpos_agree_on_the_past():
  *inputs, logits = logits_of(positions.XPos)
  *_, symmetric = logits_of(positions.SymmetricXPos)
  *_, causal = logits_of(positions.SymmetricXPos, causal=True)
  past = np.tri(T, dtype=bool)
  a, b = logits(*inputs), symmetric(*inputs)
  np.testing.assert_array_equal(a[..., past], b[..., past])
  assert (a != b)[..., ~past].any()
  np.testing.assert_array_equal(causal(*inputs), a)


def test_no_position_and_rope():
  q_BTHK, k_BTHK, logits = logits_of(positions.NoPosition)
  expected = plain_encoder.plain_logits(q_BTHK, k_BTHK)
  assert_close(logits(q_BTHK, k_BTHK), expected)
  *_, logits = logits_of(positions.RoPE)
  turn = lambda a: positions.RoPE(H).apply({}, a, 0, method='rotate')
  expected = plain_encoder.plain_logits(turn(q_BTHK), turn(k_BTHK))
  assert_close(logits(q_BTHK, k_BTHK), expected)


def test_logits_of_bfloat16_are_float32():
  q_BTHK, k_BTHK, logits = logits_of(positions.XPos, dtype='bfloat16')
  found = logits(q_BTHK, k_BTHK)
  assert found.dtype == jnp.float32
  expected = plain_encoder.xpos_logits(
    q_BTHK.astype(np.float32), k_BTHK.astype(np.float32)
  )
  assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
