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
from tests.cells import draw

B, T = 3, 6
LONG = 2 * attention.QUERY_BLOCK + 50


def long_example():
  """Returns queries, keys, values and a mask with a gap and an empty row."""
  mask_BS = np.arange(LONG) < np.array([[LONG], [130], [0]])
  mask_BS[0, 5] = False
  return *draw(3, B, LONG, H, K), mask_BS


@pytest.mark.parametrize(
  ('position', 'causal', 'dropped'),
  [
    (positions.XPos, True, None),
    (positions.SymmetricXPos, False, (B, H)),
    (positions.SymmetricXPos, True, (H,)),
    (None, True, None),
    (None, False, (H,)),
  ],
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


@pytest.mark.parametrize('rows', [(), (B,)])
def test_what_is_kept_counts_so_much_more(rows):
  """Compares a single block with the definition."""
  q, k, v, mask_BS = (a[:, :T] for a in long_example())
  kept = np.random.default_rng(1).random((*rows, H, T, T)) < 0.7
  attend = jax.jit(
    functools.partial(
      attention.attend, None, causal=True, keep=kept, dropout_rate=0.3
    )
  )
  e_BHTS = np.exp(plain_encoder.plain_logits(q, k)) * mask_BS[:, None, None]
  total_BHT1 = e_BHTS.sum(-1, keepdims=True)
  p_BHTS = e_BHTS / np.where(total_BHT1 > 0, total_BHT1, 1) * kept / 0.7
  expected = np.einsum('bhts,bshk->bthk', p_BHTS, v)
  assert_close(attend(q, k, v, mask_BS), expected)


@pytest.mark.parametrize(
  ('axes', 'dropped'), [((8, 1, 1), False), ((2, 2, 2), True)]
)
def test_rows_and_heads_stay_on_their_devices(axes, dropped):
  """Nothing is gathered, even where rows run one after another."""
  mesh = partition.make_mesh(*axes)
  rows = 8
  spec = NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), None, 'model'))
  rng = np.random.default_rng(0)
  qkv = draw(3, rows, LONG, H, K)
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
    compiled = gradients.lower(*cut, kept).compile()
    jax.tree.map(assert_close, compiled(*cut, kept), expected)
  assert not {'all-gather', 'all-to-all', 'collective-permute'} & set(
    re.findall(r'[a-z-]+(?=\()', compiled.as_text())
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


def rope_logits(q_BTHK, k_BTHK):
  turn = lambda a: positions.RoPE(H).apply({}, a, 0, method='rotate')
  return plain_encoder.plain_logits(turn(q_BTHK), turn(k_BTHK))


@pytest.mark.parametrize(
  ('position', 'causal', 'definition'),
  [
    (positions.NoPosition, False, plain_encoder.plain_logits),
    (positions.RoPE, False, rope_logits),
    (positions.XPos, False, plain_encoder.xpos_logits),
    (positions.SymmetricXPos, True, plain_encoder.xpos_logits),
    (
      positions.SymmetricXPos,
      False,
      functools.partial(plain_encoder.xpos_logits, two_sided=True),
    ),
  ],
)
def test_logits_are_those_of_the_papers(position, causal, definition):
  """They are float32, even those of bfloat16."""

  @jax.jit
  def logits(q_BTHK, k_BTHK):
    pairs = attention.rotated_pairs(position(H), q_BTHK, k_BTHK, causal)
    heads_first = jax.tree.map(lambda a: a.swapaxes(1, 2), pairs)
    return attention.attention_logits(heads_first, ~np.tri(T, dtype=bool))

  pair = draw(2, B, T, H, K)
  expected = np.asarray(definition(*pair))
  np.testing.assert_allclose(logits(*pair), expected, atol=1e-5)
  low = logits(*pair.astype('bfloat16'))
  assert low.dtype == jnp.float32
  assert np.abs(low - expected).max() < 0.05 * np.abs(expected).max()
