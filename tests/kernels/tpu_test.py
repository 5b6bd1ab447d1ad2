"""Windowed attention on TPU: interpreted against the definition; compiled."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.tpu import window_attention as window_attention_tpu
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.planning import topology
from tests import attention_example as examples
from tests.libtpu import needs_libtpu

interpreted = functools.partial(
  window_attention, implementation='tpu_interpreted'
)

CASES = {
  'two blocks': {'T': 256, 'P': 128, 'W': 128},
  'no past, a last block that is not full': {'T': 200, 'P': 0, 'W': 128},
  'several sub-blocks': {'T': 256, 'P': 256, 'W': 256},
  'fewer queries than a window': {'T': 128, 'P': 256, 'W': 256},
  'four heads share keys': {'T': 128, 'P': 128, 'W': 128, 'H': 4}
  | {'num_kv_heads': 1},
  'a scale too large for a bound': {'T': 128, 'P': 128, 'W': 128}
  | {'scale': 45.0},
}
SLOW = {
  'wide heads, pairs share keys': {'T': 128, 'P': 128, 'W': 128, 'H': 4}
  | {'K': 128},
  'a loop over sub-blocks': {'T': 640, 'P': 300, 'W': 640, 'K': 128},
  'fewer queries than a window, in two blocks': {'T': 256, 'P': 300, 'W': 384},
  'fewer queries, and no past': {'T': 300, 'P': 0, 'W': 384},
  'three heads': {'T': 384, 'P': 384, 'W': 384, 'H': 3, 'num_kv_heads': 3},
}
SCALED_OR_BIASED = {
  'a large bias where the last block is not full': {'T': 200, 'P': 128}
  | {'W': 128, 'bias': 100},
  'queries that are already scaled': {'T': 128, 'P': 128, 'W': 128}
  | {'scale': None, 'include_self': True},
}
ALL = CASES | SLOW


def cases(quick, slow):
  return pytest.mark.parametrize(
    'case',
    [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)],
  )


@cases(CASES | SCALED_OR_BIASED, SLOW)
@pytest.mark.parametrize(
  'include_self', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_is_the_definition(case, include_self):
  sizes = {'include_self': include_self} | (ALL | SCALED_OR_BIASED)[case]
  examples.assert_exact(interpreted, examples.example(**sizes), 3e-5)


NORMALIZED = [
  'no past, a last block that is not full',
  'four heads share keys',
]


@cases(NORMALIZED, [name for name in ALL if name not in NORMALIZED])
def test_own_keys_to_normalize(case):
  examples.assert_exact(
    interpreted, examples.with_raw_own(examples.example(**ALL[case])), 3e-5
  )


@pytest.mark.parametrize(
  ('T', 'W', 'block'),
  [
    *((128, 256, 128), (256, 512, 256), (300, 512, 128)),
    *((512, 512, 512), (5000, 512, 512), (700, 768, 768)),
  ],
)
def test_blocks_need_little_padding(T, W, block):
  assert window_attention_tpu.block_size(T, W) == block


@pytest.mark.parametrize(
  'normalize_own', [True, pytest.param(False, marks=pytest.mark.slow)]
)
@cases(
  ['several sub-blocks'], [name for name in ALL if name != 'several sub-blocks']
)
def test_bfloat16_is_near_the_definition(case, normalize_own):
  inputs = examples.example(**ALL[case], dtype='bfloat16')
  inputs = examples.with_raw_own(inputs) if normalize_own else inputs
  examples.assert_near_in_bfloat16(interpreted, inputs)


def test_dropout_is_that_of_xla():
  inputs = examples.example(T=256, P=128, W=128)
  dropout = Dropout(jax.random.key(1), 0.3)
  found = examples.both(interpreted, inputs, dropout)
  expected = examples.both(examples.window_by_xla, inputs, dropout, tile=LANES)
  examples.assert_close(found, expected, 3e-5)
  without = examples.both(interpreted, inputs)
  assert np.abs(np.asarray(found[0]) - np.asarray(without[0])).max() > 0.1


def test_bound_and_range_of_the_logits_hold():
  inputs = examples.example(T=128, P=128, W=128)
  bias_HW, scale_H = inputs.bias_HW, inputs.scale_H
  top_H, range_H = window_attention_tpu.bound(bias_HW, scale_H)
  q_BTHK = ref.normalize_and_scale(inputs.q_BTHK, scale_H)
  dots_HX = jnp.einsum('bthk,bshk->hbts', q_BTHK, inputs.k_BSHK)
  visible = [bias_HW[0, :64], bias_HW[1]]
  for head, bias in enumerate(visible):
    logits = dots_HX[head].reshape(-1, 1) + bias
    assert logits.max() <= top_H[head]
    assert top_H[head] - logits.min() <= range_H[head]
  _, nothing_H = window_attention_tpu.bound(
    jnp.full((2, 4), ref.MASKED), jnp.ones(2)
  )
  assert (nothing_H < 3).all()


RACES = {
  'pairs share keys': {'T': 384, 'H': 4},
  'queries that see themselves': {'T': 384, 'H': 4, 'include_self': True},
  'a scale too large for a bound': {'T': 384, 'scale': 45.0},
  'a loop over sub-blocks': {'T': 640, 'W': 640, 'P': 300, 'K': 128},
  'fewer queries than a window': {'T': 256, 'W': 384, 'P': 300},
  'no past, a last block that is not full': {'T': 200, 'P': 0},
}


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('case', RACES)
def test_as_a_tpu_would_run_it_without_races(case, seed):
  inputs = examples.example(**{'P': 128, 'W': 128} | RACES[case])
  if not inputs.include_self:
    inputs = examples.with_raw_own(inputs)
  found = examples.without_races(window_attention_tpu, inputs, None, seed)
  examples.assert_close(found, examples.exactly(inputs), 3e-5)


CHIPS = 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1', 'v4:2x2x1'
# W, H, key heads, K, dtype.
SMALLEST = 128, 4, 2, 64, 'bfloat16'
PAPER = 512, 8, 8, 128, 'bfloat16'
SHARED = 1024, 2, 1, 128, 'bfloat16'
# One head of keys, and less than 128 columns of it.
NARROW = 128, 4, 1, 64, 'bfloat16'
ODD = 128, 4, 1, 192, 'bfloat16'
# More than the 16 MiB of VMEM that a v4 has.
LARGE = (512, 2, 2, 256, 'float32'), (4096, 2, 2, 128, 'bfloat16')


@needs_libtpu
@pytest.mark.parametrize(
  ('name', 'sizes'),
  [(CHIPS[0], NARROW)]
  + [
    pytest.param(name, sizes, marks=pytest.mark.slow)
    for sizes in (SMALLEST, PAPER, SHARED, NARROW, ODD, *LARGE)
    for name in CHIPS
    if not (sizes in LARGE and name.startswith('v4'))
  ],
)
def test_compiles_for(name, sizes):
  W, H, num_kv_heads, K, dtype = sizes
  mesh = partition.make_mesh(devices=topology.devices(name)[:1])
  place = NamedSharding(mesh, PartitionSpec())
  T = 16 * W
  inputs = examples.example(
    T, W, W, H, num_kv_heads, K, dtype, normalize_own=True
  )
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), inputs
  )
  dropout = Dropout(jax.random.key(0), 0.1)

  def gradients(inputs):
    return examples.both(window_attention, inputs, dropout)[1:]

  with jax.set_mesh(mesh):
    compiled = jax.jit(gradients).lower(shapes).compile()
  text = compiled.as_text()
  assert 'window_attention_forward' in text
  assert 'window_attention_backward' in text
  # Less than the logits of all queries, [B, H, T, 2 W], and their gradients.
  logits = 2 * H * T * 2 * W * 4
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * logits
