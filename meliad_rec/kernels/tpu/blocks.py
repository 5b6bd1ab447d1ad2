"""Blocks of the TPU kernels: how arrays are divided, and the VMEM they need.

A grid step reads one block of Q queries of several heads. The W keys before the
block are still in VMEM from earlier steps, so every key is read once. The block
is cut into sub-blocks of S queries, each of which sees one contiguous slice of
X = W + S keys. Bias and band depend on distance only: one tile [S, X] per head
serves all sub-blocks, blocks and rows. Q is W, or a divisor of W if there are
fewer than W queries. Other letters of this folder: G query heads of a grid
step, F columns of merged heads (H K). Only in names such as k_BSF and seen_B1S,
S is the number of all keys of a row. LANES is 128, the number of columns of a
vector register.

The compiler rejects a kernel that needs more VMEM than a core has. The
estimates here add up all arrays that a kernel holds, and count each block twice
(one is copied while another is worked on), except past keys. They were compared
with the compiler's messages about rejected kernels, for v4, v5p and v5e.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import heads_of_device

LANES = 128  # Columns of a vector register.
DEFAULT_VMEM = 16 * 2**20  # Bytes that a kernel gets without a request.


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Sizes of a kernel's blocks.

  Attributes:
    block: number of queries Q of a grid step.
    head_dim: width K of a head.
    num_heads: number of query heads of a grid step.
    sharing: number of query heads that share one key head.
    sub_block: number of queries S of a sub-block.
  """

  block: int
  head_dim: int
  num_heads: int
  sharing: int = 1
  sub_block: int = LANES

  @property
  def num_kv_heads(self) -> int:
    """Number of key heads of a grid step."""
    return max(1, self.num_heads // self.sharing)

  @property
  def width(self) -> int:
    """Number of columns of a block of queries."""
    return self.num_heads * self.head_dim

  @property
  def kv_width(self) -> int:
    """Number of columns of a block of keys."""
    return self.num_kv_heads * self.head_dim

  def queries(self, j):
    """Returns the slice of a block of queries that is sub-block j."""
    return pl.ds(_aligned(j * self.sub_block), self.sub_block)

  def columns(self, head: int) -> slice:
    """Returns the columns of a query head in a block of queries."""
    return slice(head * self.head_dim, (head + 1) * self.head_dim)

  def kv_columns(self, head: int) -> slice:
    """Returns the columns of the key head that a query head reads."""
    return self.columns(head // self.sharing)

  def is_first_reader(self, head: int) -> bool:
    """Returns whether a query head is the step's first to read its key head."""
    return head % min(self.sharing, self.num_heads) == 0

  def read(self, keys, j, head: int):
    """Returns the keys or values that a query head of sub-block j sees.

    Args:
      keys: keys or values of all key heads of the grid step.
      j: index of the sub-block.
      head: index of the query head in the grid step.
    """
    return keys[self.seen(j), self.kv_columns(head)]

  def kv_group(self, group):
    """Returns the index of the block of key heads that a grid step reads.

    Args:
      group: index of the grid step's group of query heads.
    """
    if self.num_heads >= self.sharing:
      return group
    return jax.lax.div(group, self.sharing // self.num_heads)

  def for_sub_blocks(self, first: Callable, second: Callable) -> None:
    """Calls second(j, head, first(j, head)) for each sub-block j and head.

    `first` of a pair (j, head) is issued before `second` of the preceding pair,
    so that matrix products overlap with exponentials. More than 4 sub-blocks
    run in a loop, because their unrolled code would not fit.
    """
    count = self.block // self.sub_block
    if count <= 4:
      pairs = [
        (j, head) for j in range(count) for head in range(self.num_heads)
      ]
      _pipelined(pairs, first, second)
    else:
      jax.lax.fori_loop(
        0,
        count,
        lambda j, _: _pipelined(
          [(j, head) for head in range(self.num_heads)], first, second
        ),
        None,
      )


@dataclasses.dataclass(frozen=True)
class WindowBlocks(Blocks):
  """Blocks of windowed attention: a query sees at most `window` keys."""

  window: int = 0

  def seen(self, j):
    """Returns the slice of the keys that sub-block j sees.

    Index 0 is the first of the `window` keys before the block.
    """
    return pl.ds(_aligned(j * self.sub_block), self.window + self.sub_block)

  def own(self, j):
    """Returns the slice of the keys that belong to the tokens of sub-block j.

    It is the end of the slice that `seen` returns.
    """
    return pl.ds(_aligned(j * self.sub_block + self.window), self.sub_block)


@dataclasses.dataclass(frozen=True)
class MemoryBlocks(Blocks):
  """Blocks of attention to memory, in which every query sees all slots."""

  slots: int = 0

  def seen(self, j):
    return pl.ds(0, self.slots)


def _pipelined(pairs: Sequence, first: Callable, second: Callable) -> None:
  ahead = first(*pairs[0])
  for pair, following in zip(pairs, [*pairs[1:], None], strict=True):
    now, ahead = ahead, first(*following) if following else None
    second(*pair, now)


def _aligned(start):
  return start if isinstance(start, int) else pl.multiple_of(start, LANES)


def l2_normalize_rows(x):
  """Returns the rows scaled to unit length in float32, and the factors."""
  x = x.astype(jnp.float32)
  square = jnp.sum(x * x, 1, keepdims=True) + 1e-6
  # Two instructions of the chip; rsqrt would take a dozen more to refine.
  factor = jnp.exp2(-0.5 * jnp.log2(square))
  return x * factor, factor


def reciprocal(x, dtype):
  """Returns 1 / x, as exact as products with arrays of this dtype require."""
  if dtype == jnp.float32:
    return 1 / x
  estimate = pl.reciprocal(x, approx=True)
  return estimate * (2 - x * estimate)  # A step of Newton's method.


def to_row(column):
  """Transposes [S, 1] to [1, S]."""
  return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def to_columns(row):
  """Transposes [1, S] to [S, 1], and repeats the column: [S, LANES]."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widen(columns, width: int):
  """Widens [X, LANES] to [X, width]; all columns must be equal."""
  return jnp.concatenate([columns] * (width // LANES), 1)


def heads_per_step(
  num_heads: int,
  head_dim: int,
  sharing: int,
  window: int,
  preferred: int = 4,
  backward: bool = False,
) -> int:
  """Returns the number of query heads in a grid step.

  A number is allowed if it divides `num_heads`, and if it divides `sharing` or
  is a multiple of it. The columns of the query heads must also be a multiple of
  LANES, or all columns; the same holds for the columns of their key heads. The
  result is the largest allowed number that is at most `preferred` and at most
  half of `num_heads`. If the window is longer than 512, the limit is 1. If no
  allowed number is within the limit, the result is the smallest allowed number.

  Args:
    num_heads: number of all query heads.
    head_dim: width of a head.
    sharing: number of query heads that share one key head.
    window: number of keys that a query sees.
    preferred: preferred number of heads.
    backward: whether the kernel computes gradients. Steps that share a key head
      then write separate gradients of it.
  """
  # A chip may have two cores, and each needs its own heads. With a long window,
  # code and tiles of several heads would not fit.
  preferred = min(preferred, num_heads // 2) if window <= 512 else 1
  fills_lanes = lambda n, total: n * head_dim % LANES == 0 or n == total

  def fits(n):
    # Each backward step that shares a key head computes its own gradient of it.
    parts = max(num_heads // sharing, num_heads // n if backward else 1)
    keys = fills_lanes(max(1, n // sharing), parts)
    return (
      fills_lanes(n, num_heads)
      and keys
      and (n % sharing == 0 or sharing % n == 0)
    )

  candidates = [
    n for n in range(1, num_heads + 1) if num_heads % n == 0 and fits(n)
  ]
  return max((n for n in candidates if n <= preferred), default=candidates[0])


def backward_heads(H: int, K: int, sharing: int, W: int, Q: int, size: int):
  """Returns the number of query heads in a grid step of windowed gradients.

  Four heads are preferred if their arrays fit in VMEM, because they take a
  tenth less time than two. Otherwise two heads are preferred.

  Args:
    H, K, sharing: number of query heads, their width, and how many of them
      share a key head.
    W, Q: number of keys in the window, and of queries in a block.
    size: bytes of an element of queries and keys.
  """
  four = heads_per_step(H, K, sharing, W, 4, backward=True)
  if _window_step_bytes(four, K, sharing, W, Q, size, True) <= vmem_capacity():
    return four
  return heads_per_step(H, K, sharing, W, 2, backward=True)


_MIB = 2**20
_LARGEST = 128 * _MIB
# VMEM of a core, by JAX's device_kind; other chips have _LARGEST.
_CAPACITIES = {
  'TPU v2': 16 * _MIB,
  'TPU v3': 16 * _MIB,
  'TPU v4': 16 * _MIB,
  'TPU v4 lite': 16 * _MIB,
  'TPU v5': 64 * _MIB,
  'TPU v5p': 64 * _MIB,
  'TPU7x': 64 * _MIB,
}
_MARGIN = 1.05  # The compiler itself needs some VMEM.


def vmem_capacity() -> int:
  """Returns the bytes of VMEM of one core of a chip.

  The chip is one of the current mesh or, without a mesh, this machine's TPU.
  Without a TPU, the result is the largest VMEM of any chip.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None and jax.default_backend() == 'tpu':
    device = jax.devices()[0]
  return _CAPACITIES.get(device and device.device_kind, _LARGEST)


def vmem_shortage(needed: int) -> str | None:
  """Returns why a core's VMEM cannot hold this many bytes, or None if it can.

  The text is the end of a sentence. The caller begins the sentence with the
  names of what needs the bytes.
  """
  if needed <= vmem_capacity():
    return None
  return (
    f'need {needed / _MIB:.1f} MiB of VMEM, but a core has '
    f'{vmem_capacity() / _MIB:.0f} MiB'
  )


def vmem_limit(blocks: Sequence, scratch: Sequence, tiles: int) -> int:
  """Returns the bytes of VMEM to request for a kernel.

  Args:
    blocks: (shape, dtype) of each block of inputs and outputs. VMEM holds each
      twice, so that one is copied while the other is worked on.
    scratch: (shape, dtype) of each array of scratch memory.
    tiles: bytes of intermediate values.
  """
  size = lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize
  total = 2 * sum(size(*each) for each in blocks)
  return max(DEFAULT_VMEM, total + sum(size(*each) for each in scratch) + tiles)


def window_bytes(q_BTHK, k_BSHK, W: int, Q: int) -> int:
  """Returns the bytes of VMEM that windowed attention needs.

  These are the bytes of the forward or the backward kernel, whichever needs
  more. Dropout is always counted.

  Args:
    q_BTHK, k_BSHK: queries and keys.
    W: number of keys in the window.
    Q: number of queries in a block.
  """
  H, K, sharing, size = _sizes(q_BTHK, k_BSHK)
  forward = heads_per_step(H, K, sharing, W, 4)
  backward = backward_heads(H, K, sharing, W, Q, size)
  return max(
    _window_step_bytes(forward, K, sharing, W, Q, size, False),
    _window_step_bytes(backward, K, sharing, W, Q, size, True),
  )


def _window_step_bytes(G, K, sharing, W, Q, size, backward: bool) -> int:
  """Returns the bytes of VMEM that a kernel of windowed attention needs.

  Args:
    G: number of query heads in a grid step.
    K, sharing, W, Q, size: see backward_heads.
    backward: whether the kernel is the backward kernel.
  """
  width = max(1, G // sharing) * K
  tile = G * LANES * (W + LANES)
  # The number of arrays like a block of queries, of arrays like a block of
  # keys, and of tiles; and the bytes of scratch for each element of the keys.
  queries, keys, tiles, kept = (
    (4, 7, 2, 2 * size + 8) if backward else (2, 2, 1, 2 * size)
  )
  moved = (queries * Q * G * K + keys * Q * width) * size
  moved += tile * 4 * (tiles + 1)
  scratch = (W + Q) * (width * kept + 4 * LANES * (tiles - 1))
  scratch += 2 * W * width * size  # Past keys and values.
  return int(_MARGIN * (2 * moved + scratch))


def memory_bytes(q_BTHK, k_BSHK, Q: int, has_dropout: bool) -> int:
  """Returns the bytes of VMEM that attention to memory slots needs.

  These are the bytes of the forward or the backward kernel, whichever needs
  more.

  Args:
    q_BTHK, k_BSHK: queries, and keys of slots.
    Q: number of queries in a block.
    has_dropout: whether probabilities are dropped.
  """
  H, K, sharing, size = _sizes(q_BTHK, k_BSHK)
  S = k_BSHK.shape[1] + -k_BSHK.shape[1] % LANES
  # In the backward kernel, logits of more than 512 slots spill from registers.
  arrays = 0 if S <= 512 else 22 if S > 1024 and K > 128 else 12
  spilled = arrays * LANES * S * 4
  needed = []
  for preferred, queries, keys in (4, 2, 2), (2, 4, 4):
    is_backward = preferred == 2
    G = heads_per_step(
      H, K, sharing, min(S, 512), preferred, backward=is_backward
    )
    width = max(1, G // sharing) * K
    moved = (queries * Q * G * K + keys * S * width) * size
    moved += has_dropout * G * Q * S * 4
    scratch = S * (8 * width + 4 * LANES) + spilled if is_backward else 0
    needed.append(2 * moved + scratch)
  return int(_MARGIN * max(needed))


def _sizes(q_BTHK, k_BSHK):
  """Returns four sizes of attention on one device.

  They are the number of query heads, the width of a head, the number of query
  heads that share a key head, and the bytes of an element.
  """
  H, num_kv_heads = heads_of_device(q_BTHK.shape[2], k_BSHK.shape[2])
  return H, q_BTHK.shape[3], H // num_kv_heads, q_BTHK.dtype.itemsize
