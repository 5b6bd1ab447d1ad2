"""What the two TPU kernels of windowed attention have in common.

A grid step reads one block of Q queries of several heads; the W keys before it
are still in VMEM from the steps before, so every key is read once. The block is
cut into sub-blocks of S queries, each of which sees one contiguous slice of
X = W + S keys. Bias and band depend on distance alone: one tile [S, X] per head
serves all sub-blocks, blocks and rows. Q is W, or a part of it where there are
fewer queries.

Bytes of VMEM: what the kernels for TPU take at most, and what a core has.

Compilers refuse a kernel that takes more. These sums are of what the kernels
hold, blocks twice, as tpu_blocks.bytes_needed has them; they were compared with
what the compiler said of kernels that it refused, for v4, v5p and v5e.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import heads_of_device

LANES = 128  # Of a vector register; its columns.
VMEM = 16 * 2**20  # Bytes that need not be asked for.


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How a kernel cuts its arrays.

  Attributes:
    block: Q, queries of a grid step.
    head_dim: K.
    heads: query heads of a grid step.
    sharing: query heads that share one key head.
    sub_block: S.
  """

  block: int
  head_dim: int
  num_heads: int
  sharing: int = 1
  sub_block: int = LANES

  @property
  def num_kv_heads(self) -> int:
    """Key heads of a grid step."""
    return max(1, self.num_heads // self.sharing)

  @property
  def width(self) -> int:
    """Columns of a block of queries."""
    return self.num_heads * self.head_dim

  @property
  def key_width(self) -> int:
    """Columns of a block of keys."""
    return self.num_kv_heads * self.head_dim

  def queries(self, j):
    """The rows of sub-block j in a block of queries."""
    return pl.ds(_aligned(j * self.sub_block), self.sub_block)

  def columns(self, head: int) -> slice:
    """The columns of a query head."""
    return slice(head * self.head_dim, (head + 1) * self.head_dim)

  def key_columns(self, head: int) -> slice:
    """The columns of the key head that a query head reads."""
    return self.columns(head // self.sharing)

  def first_of_key(self, head: int) -> bool:
    """Whether no head of a grid step before this one reads its key head."""
    return head % min(self.sharing, self.num_heads) == 0

  def read(self, keys, j, head: int):
    """The keys or values that a sub-block sees."""
    return keys[self.seen(j), self.key_columns(head)]

  def key_group(self, group):
    """The block of key heads that a block of query heads reads."""
    if self.num_heads >= self.sharing:
      return group
    return jax.lax.div(group, self.sharing // self.num_heads)

  def sub_blocks(self, first: Callable, second: Callable) -> None:
    """Calls second(j, head, first(j, head)) for each sub-block and head.

    The first half of the next is issued before the second half of each, so
    that products fill the time of exponentials. Blocks of many sub-blocks loop
    over them: written out, their code would not fit.
    """
    count = self.block // self.sub_block
    if count <= 4:
      pairs = [
        (j, head) for j in range(count) for head in range(self.num_heads)
      ]
      _staged(pairs, first, second)
    else:
      jax.lax.fori_loop(
        0,
        count,
        lambda j, _: _staged(
          [(j, head) for head in range(self.num_heads)], first, second
        ),
        None,
      )


@dataclasses.dataclass(frozen=True)
class WindowBlocks(Blocks):
  """Blocks whose queries see the last `window` keys."""

  window: int = 0

  def seen(self, j):
    """The rows that sub-block j sees, of keys before the block and in it."""
    return pl.ds(_aligned(j * self.sub_block), self.window + self.sub_block)

  def own(self, j):
    """The last of those rows: keys of the sub-block's own tokens."""
    return pl.ds(_aligned(j * self.sub_block + self.window), self.sub_block)


@dataclasses.dataclass(frozen=True)
class MemoryBlocks(Blocks):
  """Blocks whose queries all see the same slots."""

  slots: int = 0

  def seen(self, j):
    return pl.ds(0, self.slots)


def _staged(pairs: Sequence, first: Callable, second: Callable) -> None:
  ahead = first(*pairs[0])
  for pair, following in zip(pairs, [*pairs[1:], None], strict=True):
    now, ahead = ahead, first(*following) if following else None
    second(*pair, now)


def _aligned(start):
  return start if isinstance(start, int) else pl.multiple_of(start, LANES)


def heads_of_step(
  heads: int,
  head_dim: int,
  sharing: int,
  window: int,
  wanted: int = 4,
  backward: bool = False,
) -> int:
  """Query heads of a grid step: as many as wanted, or what lanes allow."""
  # Both cores of a chip shall have some, and code and tiles their place.
  wanted = min(wanted, heads // 2) if window <= 512 else 1
  whole = lambda n, of: n * head_dim % LANES == 0 or n == of

  def fits(n):
    # Gradients of keys that several steps share are apart, one of each.
    parts = max(heads // sharing, heads // n if backward else 1)
    keys = whole(max(1, n // sharing), parts)
    return whole(n, heads) and keys and (n % sharing == 0 or sharing % n == 0)

  found = [n for n in range(1, heads + 1) if heads % n == 0 and fits(n)]
  return max((n for n in found if n <= wanted), default=found[0])


def unit(x):
  """Rows of unit length, and what each was multiplied with; float32."""
  x = x.astype(jnp.float32)
  square = jnp.sum(x * x, 1, keepdims=True) + 1e-6
  # Two of the chip's own functions; rsqrt is refined by a dozen others.
  factor = jnp.exp2(-0.5 * jnp.log2(square))
  return x * factor, factor


def reciprocal(x, dtype):
  """1 / x, as exactly as products with it in that dtype need."""
  if dtype == jnp.float32:
    return 1 / x
  about = pl.reciprocal(x, approx=True)
  return about * (2 - x * about)  # A step of Newton's method.


def as_row(column):
  """[S, 1] -> [1, S]."""
  return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def as_column(row):
  """[1, S] -> [S, LANES], every column the same."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def across(column, width: int):
  """[X, LANES], every column the same -> [X, width]."""
  return jnp.concatenate([column] * (width // LANES), 1)


def bytes_needed(blocks: Sequence, scratch: Sequence, tiles: int) -> int:
  """VMEM to ask for.

  Args:
    blocks: (shape, dtype) of what is read and written; each is there twice,
      so that it travels while another is worked on.
    scratch: (shape, dtype) of what stays.
    tiles: bytes of values between them.
  """
  size = lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize
  total = 2 * sum(size(*each) for each in blocks)
  return max(VMEM, total + sum(size(*each) for each in scratch) + tiles)


_MIB = 2**20
_MOST = 128 * _MIB
# By jax's name of a chip; those that are not here have _MOST.
_CORES = {
  'TPU v2': 16 * _MIB,
  'TPU v3': 16 * _MIB,
  'TPU v4': 16 * _MIB,
  'TPU v4 lite': 16 * _MIB,
  'TPU v5': 64 * _MIB,
  'TPU v5p': 64 * _MIB,
  'TPU7x': 64 * _MIB,
}
_MARGIN = 1.05  # What the compiler keeps for itself.


def capacity() -> int:
  """Of a core of the mesh that is traced within, or else of this machine's.

  Where no TPU is known, what the largest has.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None and jax.default_backend() == 'tpu':
    device = jax.devices()[0]
  return _CORES.get(device and device.device_kind, _MOST)


def lacking(needed: int) -> str | None:
  """What to say where a core has fewer bytes; None: it has as many."""
  if needed <= capacity():
    return None
  return (
    f'which need {needed / _MIB:.1f} MiB of VMEM where a core has '
    f'{capacity() / _MIB:.0f}'
  )


def of_window(q_BTHK, k_BSHK, W: int, Q: int) -> int:
  """Of windowed attention, with dropout, forward or backward.

  Args:
    q_BTHK, k_BSHK: queries and keys.
    W: the window.
    Q: queries of a block.
  """
  H, K, sharing, size = _sizes(q_BTHK, k_BSHK)
  forward = heads_of_step(H, K, sharing, W, 4)
  backward = backward_heads(H, K, sharing, W, Q, size)
  return max(
    _of_step(forward, K, sharing, W, Q, size, False),
    _of_step(backward, K, sharing, W, Q, size, True),
  )


def backward_heads(H: int, K: int, sharing: int, W: int, Q: int, size: int):
  """Query heads of a grid step of windowed attention's backward pass.

  Four cost a tenth less than two, where a core has room for them.

  Args:
    H, K, sharing: query heads, their width, and how many share one of keys.
    W, Q: the window, and queries of a block.
    size: bytes of a number.
  """
  four = heads_of_step(H, K, sharing, W, 4, backward=True)
  if _of_step(four, K, sharing, W, Q, size, True) <= capacity():
    return four
  return heads_of_step(H, K, sharing, W, 2, backward=True)


def _of_step(G, K, sharing, W, Q, size, backward: bool) -> int:
  """Bytes that G query heads of windowed attention take."""
  width = max(1, G // sharing) * K
  tile = G * LANES * (W + LANES)
  # Arrays of a block, of queries and of keys; tiles; bytes a number of scratch.
  queries, keys, tiles, kept = (
    (4, 5, 2, 2 * size + 8) if backward else (2, 2, 1, 2 * size)
  )
  moved = (queries * Q * G * K + keys * Q * width + 2 * W * width) * size
  moved += tile * 4 * (tiles + 1)
  scratch = (W + Q) * (width * kept + 4 * LANES * (tiles - 1))
  return int(_MARGIN * (2 * moved + scratch))


def of_memory(q_BTHK, k_BSHK, Q: int, drops: bool) -> int:
  """Of attention to slots, forward or backward.

  Args:
    q_BTHK, k_BSHK: queries, and keys of slots.
    Q: queries of a block.
    drops: whether probabilities are dropped.
  """
  H, K, sharing, size = _sizes(q_BTHK, k_BSHK)
  S = k_BSHK.shape[1] + -k_BSHK.shape[1] % LANES
  # Backward, logits of more slots do not stay in registers.
  arrays = 0 if S <= 512 else 22 if S > 1024 and K > 128 else 12
  spilt = arrays * LANES * S * 4
  needed = []
  for wanted, queries, keys in (4, 2, 2), (2, 4, 4):
    G = heads_of_step(H, K, sharing, min(S, 512), wanted, backward=wanted == 2)
    width = max(1, G // sharing) * K
    moved = (queries * Q * G * K + keys * S * width) * size
    moved += drops * G * Q * S * 4
    scratch = S * (8 * width + 4 * LANES) + spilt if wanted == 2 else 0
    needed.append(2 * moved + scratch)
  return int(_MARGIN * max(needed))


def _sizes(q_BTHK, k_BSHK):
  """Heads of a device, their width, how many share one of keys, and bytes of a
  number."""
  H, num_kv_heads = heads_of_device(q_BTHK.shape[2], k_BSHK.shape[2])
  return H, q_BTHK.shape[3], H // num_kv_heads, q_BTHK.dtype.itemsize
