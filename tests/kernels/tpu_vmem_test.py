"""VMEM that kernels need, against what the compiler accepted and rejected."""

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MemoryInputs
from meliad_rec.kernels.tpu import blocks
from meliad_rec.kernels.tpu import memory_attention
from meliad_rec.kernels.tpu import window_attention
from meliad_rec.planning import topology
from tests.libtpu import needs_libtpu

# MiB of a core, window, heads, head_dim, dtype; whether it compiled.
WINDOWS = [
  (16, 512, 8, 128, 'bfloat16', True),
  (16, 512, 8, 128, 'float32', False),
  (16, 1024, 8, 128, 'bfloat16', True),
  (16, 2048, 8, 128, 'bfloat16', False),
  (64, 512, 8, 256, 'float32', True),
  (64, 4096, 2, 128, 'bfloat16', True),
  (64, 4096, 8, 128, 'float32', False),
  (128, 8192, 2, 128, 'bfloat16', True),
]
# MiB of a core, slots, head_dim of 8 heads, dtype, dropout; as above.
SLOTS = [
  (16, 512, 128, 'bfloat16', True, True),
  (16, 512, 128, 'float32', False, True),
  (16, 512, 128, 'float32', True, False),
  (16, 1024, 128, 'bfloat16', False, True),
  (16, 1024, 128, 'bfloat16', True, False),
  (64, 1536, 256, 'float32', False, True),
  (64, 1536, 256, 'float32', True, False),
  (64, 2048, 256, 'float32', False, False),
  (64, 4096, 128, 'bfloat16', False, True),
  (64, 4096, 128, 'bfloat16', True, False),
  (128, 4096, 128, 'float32', True, True),
  (128, 4096, 256, 'bfloat16', False, True),
  (128, 4096, 256, 'bfloat16', True, False),
]


def shape(*sizes, dtype='float32'):
  return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def check(reason, core, fits):
  assert (reason is None) == fits
  assert fits or f'a core has {core} MiB' in reason


@pytest.mark.parametrize(('core', 'W', 'H', 'K', 'dtype', 'fits'), WINDOWS)
def test_windows(core, W, H, K, dtype, fits, monkeypatch):
  monkeypatch.setattr(blocks, 'vmem_capacity', lambda: core * 2**20)
  q, k = (shape(1, n * W, H, K, dtype=dtype) for n in (4, 5))
  inputs = AttentionInputs(q, k, k, None, shape(H, W))
  check(window_attention.unsupported_reason(inputs), core, fits)


@pytest.mark.parametrize(('core', 'S', 'K', 'dtype', 'drops', 'fits'), SLOTS)
def test_slots(core, S, K, dtype, drops, fits, monkeypatch):
  monkeypatch.setattr(blocks, 'vmem_capacity', lambda: core * 2**20)
  q, k = (shape(1, n, 8, K, dtype=dtype) for n in (512, S))
  keep = shape(8, 512, S) if drops else None
  inputs = MemoryInputs(q, k, k, None)
  check(memory_attention.unsupported_reason(inputs, keep), core, fits)


@needs_libtpu
@pytest.mark.parametrize(
  ('name', 'core'), [('v4:2x2x1', 16), ('v5p:2x2x1', 64), ('v5e:2x2', 128)]
)
def test_capacity_is_that_of_the_mesh(name, core):
  with jax.set_mesh(partition.make_mesh(devices=topology.devices(name))):
    assert blocks.vmem_capacity() == core * 2**20


@pytest.mark.parametrize(
  ('heads', 'alone'), [((12, 12), (3, 3)), ((8, 2), (2, 1)), ((6, 6), (6, 6))]
)
def test_heads_are_those_of_one_device(heads, alone):
  """With 12 heads on 4 devices, a step has all 3 heads of a device."""

  def needed(heads):
    shapes = (shape(1, 2048, n, 64) for n in heads)
    return blocks.window_bytes(*shapes, 1024, 1024)

  with jax.set_mesh(partition.make_mesh(1, 2, 4)):
    cut = needed(heads)
  assert cut == needed(alone)


def test_capacity_without_a_tpu_is_that_of_the_largest_chip():
  assert blocks.vmem_capacity() == 128 * 2**20
