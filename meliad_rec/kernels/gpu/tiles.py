"""What the GPU kernels of windowed attention have in common.

A program works on tiles of S queries by S keys. Tile j of a block of queries
lies S j keys behind the first one that they see, so that bias and band, which
depend on distance alone, are columns S j to S (j + 1) of one [S, W + S] per
head, for all blocks and rows.
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
  """How programs of a grid (blocks, B, H) see their arrays.

  Attributes:
    heads: query heads H.
    head_dim: K.
    sharing: query heads that share one key head.
    normalize: whether queries are brought to unit length.
    size: S.
  """

  num_heads: int
  head_dim: int
  sharing: int
  normalize: bool
  size: int

  def block(self):
    """Of [B, T, H, K]: this program's S tokens and head."""
    shape = None, self.size, None, self.head_dim
    return pl.BlockSpec(shape, lambda i, b, h: (b, i, h, 0))

  def tokens(self, a_BTHK, of_keys: bool = False):
    """Of [B, T, H, K]: all tokens of a row and head."""
    share = self.sharing if of_keys else 1
    shape = None, a_BTHK.shape[1], None, self.head_dim
    return pl.BlockSpec(shape, lambda i, b, h: (b, 0, jax.lax.div(h, share), 0))

  def block_sums(self):
    """Of [B, H, T]: this program's S tokens and head."""
    return pl.BlockSpec((None, None, self.size), lambda i, b, h: (b, h, i))

  def sums(self, a_BHT):
    """Of [B, H, T]: all tokens of a row and head."""
    return pl.BlockSpec((None, None, a_BHT.shape[2]), lambda i, b, h: (b, h, 0))

  def rows(self, a_BS):
    """Of [B, S]: all keys of a row."""
    return pl.BlockSpec((None, a_BS.shape[1]), lambda i, b, h: (b, 0))

  def of_head(self, a):
    """Of [H, ...]: this program's head."""
    rest = a.shape[1:]
    return pl.BlockSpec((None, *rest), lambda i, b, h: (h, *(0 for _ in rest)))

  def query(self, q, scale):
    """Queries as they meet keys: what products take, unit ones, factors.

    The last two are None where queries are as they shall be.
    """
    if not self.normalize:
      return q, None, None
    along = q.astype(jnp.float32)
    square = jnp.sum(along * along, 1, keepdims=True) + 1e-6
    factor = jax.lax.rsqrt(square)
    along = along * factor
    return (along * (scale * LOG2E)).astype(q.dtype), along, factor

  def logits(self, q, k, tile, seen):
    """[S queries, S keys], to base 2."""
    s = dot(q, k, AB_T)
    if not self.normalize:
      s = s * LOG2E
    return s + tile + seen[None, :]


def gradients(tiles, q, k, v, do, lse, mean, seen, tile, keep):
  """Probabilities that were kept, and gradients of logits; [S, S] each."""
  p = jnp.exp2(tiles.logits(q, k, tile, seen) - lse[:, None])
  dp = dot(do, v, AB_T)
  if keep is None:
    return p, p * (dp - mean[:, None])
  kept = p * keep
  return kept, kept * dp - p * mean[:, None]


def size(q_BTHK) -> int:
  """S: as many rows as registers hold, of a handful of tiles and sums."""
  return 64 if q_BTHK.dtype.itemsize == 2 and q_BTHK.shape[3] <= 128 else 32


def compiler_params(q_BTHK) -> plgpu.CompilerParams:
  """Threads enough to hold the sums, and loads that are under way."""
  row_bytes = q_BTHK.shape[3] * q_BTHK.dtype.itemsize
  return plgpu.CompilerParams(
    num_warps=4 if row_bytes <= 128 else 8,
    num_stages=1 if row_bytes > 256 else 2,
  )
