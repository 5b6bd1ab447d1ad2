"""Bytes of VMEM: what the kernels for TPU take at most, and what a core has.

Compilers refuse a kernel that takes more. These sums are of what the kernels
hold, blocks twice, as tpu_blocks.bytes_needed has them; they were compared with
what the compiler said of kernels that it refused, for v4, v5p and v5e.
"""

import jax

from meliad_rec.kernels.per_shard import heads_of_device
from meliad_rec.kernels.tpu_blocks import heads_of_step
from meliad_rec.kernels.tpu_blocks import LANES

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
  H, key_heads = heads_of_device(q_BTHK.shape[2], k_BSHK.shape[2])
  return H, q_BTHK.shape[3], H // key_heads, q_BTHK.dtype.itemsize
