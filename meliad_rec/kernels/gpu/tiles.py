"""Tiles of windowed attention, shared by the kernels for GPU.

A program of the grid works on tiles of S queries by S keys. The queries of a
block of S see W + S keys, for a window of W keys. Tile j of the block begins
S j keys after the first of these keys. Bias and band (see kernels/blocks.py)
depend on distance only, so in every block and row, tile j uses columns S j to
S (j + 1) of one array [S, W + S] for each head. Only in names such as k_BSHK
and seen_BS, S is the number W + T of keys in a row.
"""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import AB_T
from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.blocks import LOG2E


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of the tiles, and block specs for a grid (blocks, B, H).

  Attributes:
    num_heads: number of query heads.
    head_dim: width K of a head.
    sharing: number of query heads that share one key head.
    normalize: whether queries are L2-normalized and scaled.
    size: number S of queries in a tile, which is also its number of keys.
  """

  num_heads: int
  head_dim: int
  sharing: int
  normalize: bool
  size: int

  def block(self):
    """Returns the spec of [B, T, H, K] for a block of S tokens of one head."""
    shape = None, self.size, None, self.head_dim
    return pl.BlockSpec(shape, lambda i, b, h: (b, i, h, 0))

  def kv_block(self):
    """Returns the spec of keys or values [B, W + T, H, K] for a block of S.

    It selects the key head that the program's query head reads.
    """
    shape = None, self.size, None, self.head_dim
    share = self.sharing
    return pl.BlockSpec(shape, lambda i, b, h: (b, i, jax.lax.div(h, share), 0))

  def row(self, a_BTHK):
    """Returns the spec of [B, T, H, K] for all tokens of a row, of one head."""
    shape = None, a_BTHK.shape[1], None, self.head_dim
    return pl.BlockSpec(shape, lambda i, b, h: (b, 0, h, 0))

  def kv_row(self, a_BSHK):
    """Returns the spec of keys or values [B, W + T, H, K] for a whole row.

    It selects the key head that the program's query head reads.
    """
    shape = None, a_BSHK.shape[1], None, self.head_dim
    share = self.sharing
    return pl.BlockSpec(shape, lambda i, b, h: (b, 0, jax.lax.div(h, share), 0))

  def block_sums(self):
    """Returns the spec of [B, H, T] for a block of S tokens of one head."""
    return pl.BlockSpec((None, None, self.size), lambda i, b, h: (b, h, i))

  def row_sums(self, a_BHT):
    """Returns the spec of [B, H, T] for all tokens of a row, of one head."""
    return pl.BlockSpec((None, None, a_BHT.shape[2]), lambda i, b, h: (b, h, 0))

  def mask_row(self, a_BS):
    """Returns the spec of a mask [B, W + T] for all keys of a row."""
    return pl.BlockSpec((None, a_BS.shape[1]), lambda i, b, h: (b, 0))

  def head(self, a):
    """Returns the spec of [H, ...] for one head."""
    rest = a.shape[1:]
    return pl.BlockSpec((None, *rest), lambda i, b, h: (h, *(0 for _ in rest)))

  def query(self, q, scale):
    """Prepares queries for products with keys.

    Returns:
      The queries to multiply with keys; the unit queries; and the factors that
      scaled queries to unit length. The last two are None if queries are not
      normalized.
    """
    if not self.normalize:
      return q, None, None
    unit = q.astype(jnp.float32)
    square = jnp.sum(unit * unit, 1, keepdims=True) + 1e-6
    factor = jax.lax.rsqrt(square)
    unit = unit * factor
    return (unit * (scale * LOG2E)).astype(q.dtype), unit, factor

  def logits(self, q, k, tile, seen):
    """Returns the logits of one tile, multiplied by log2(e): [queries, keys].

    Args:
      q, k: queries and keys of the tile.
      tile: position bias [queries, keys], MASKED outside the window.
      seen: [keys], MASKED at keys that no query may see, and 0 elsewhere.
    """
    s = dot(q, k, AB_T)
    if not self.normalize:
      s = s * LOG2E
    return s + tile + seen[None, :]

  def logit_gradients(self, q, k, v, do, lse, delta, seen, tile, keep):
    """Returns a tile's probabilities after dropout, and gradients of logits.

    Both arrays are [queries, keys]. The gradients are with respect to the
    logits before these are multiplied by log2(e).

    Args:
      q, k, v: queries, keys and values of the tile.
      do: gradients of the outputs.
      lse: logarithms, to base 2, of each query's sum of exponentials.
      delta: product of each query's output and its gradient.
      tile, seen: see `logits`.
      keep: dropout factors [queries, keys].
    """
    p = jnp.exp2(self.logits(q, k, tile, seen) - lse[:, None])
    dp = dot(do, v, AB_T)
    if keep is None:
      return p, p * (dp - delta[:, None])
    kept = p * keep
    return kept, kept * dp - p * delta[:, None]


def tile_size(q_BTHK) -> int:
  """Returns the size S of tiles, for which tiles and sums fit in registers."""
  return 64 if q_BTHK.dtype.itemsize == 2 and q_BTHK.shape[3] <= 128 else 32


def compiler_params(q_BTHK) -> plgpu.CompilerParams:
  """Returns compiler options, chosen by the bytes of one head of a query.

  They are the number of warps, whose registers hold the sums, and the number of
  pipeline stages, which overlap loads with computation.
  """
  row_bytes = q_BTHK.shape[3] * q_BTHK.dtype.itemsize
  return plgpu.CompilerParams(
    num_warps=4 if row_bytes <= 128 else 8,
    num_stages=1 if row_bytes > 256 else 2,
  )
