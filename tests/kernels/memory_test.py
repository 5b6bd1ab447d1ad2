"""Attention to memory on TPU: interpreted against the definition; compiled."""

import functools

import jax
from jax.sharding import SingleDeviceSharding
import pytest

from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import memory_attention
from meliad_rec.kernels.tpu import memory_attention as memory_attention_tpu
from meliad_rec.planning import topology
from tests import attention_example as examples
from tests.libtpu import needs_libtpu

interpreted = functools.partial(
  memory_attention, implementation='tpu_interpreted'
)
DROPOUT = Dropout(jax.random.key(0), 0.3)

# Sizes, and whether probabilities are dropped.
CASES = {
  'blocks and slots that are not full': ({'T': 100, 'S': 70}, False),
  'two blocks, two heads share keys': (
    {'T': 600, 'S': 128, 'H': 2, 'num_kv_heads': 1},
    True,
  ),
  'a scale too large for a bound': ({'T': 64, 'S': 64, 'scale': 45.0}, False),
}
MANY = {
  f'{S} slots': ({'T': 64, 'S': S, 'H': 1, 'num_kv_heads': 1}, False)
  for S in (1500, 4096)
}
SCALED = {'scaled queries': ({'T': 128, 'S': 128, 'scale': None}, False)}


def keep_of(inputs):
  (T, H), S = inputs.q_BTHK.shape[1:3], inputs.k_BSHK.shape[1]
  return DROPOUT.keep_mask((H, T, S))


@pytest.mark.parametrize('case', CASES | MANY | SCALED)
def test_is_the_definition(case):
  sizes, drops = (CASES | MANY | SCALED)[case]
  inputs = examples.memory_example(**sizes)
  found = examples.both(interpreted, inputs, DROPOUT if drops else None)
  expected = examples.exactly(inputs, keep_of(inputs) if drops else None)
  examples.assert_close(found, expected, 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('case', CASES)
def test_as_a_tpu_would_run_it_without_races(case, seed):
  sizes, drops = CASES[case]
  inputs = examples.memory_example(**sizes)
  keep = keep_of(inputs) if drops else None
  found = examples.without_races(memory_attention_tpu, inputs, keep, seed)
  examples.assert_close(found, examples.exactly(inputs, keep), 3e-5)


# More than 1,024 slots, or those of heads 256 wide, need more than the 16 MiB
# of VMEM that a v4 has.
CHIPS = 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1', 'v4:2x2x1'


@needs_libtpu
@pytest.mark.parametrize(
  ('name', 'S', 'K', 'dtype'),
  [
    ('v5e:2x2', 256, 64, 'bfloat16'),
    *(
      pytest.param(name, S, K, dtype, marks=pytest.mark.slow)
      for name in CHIPS
      for S, K, dtype in (
        (512, 64, 'bfloat16'),
        (640, 256, 'float32'),
        (1024, 128, 'bfloat16'),
        (1024, 256, 'bfloat16'),
        (1024, 256, 'float32'),
        (2048, 256, 'bfloat16'),
        (4096, 128, 'bfloat16'),
      )
      if name != 'v4:2x2x1' or (K < 256 and S <= 1024)
    ),
  ],
)
def test_compiles_for(name, S, K, dtype):
  place = SingleDeviceSharding(topology.devices(name)[0])
  inputs = examples.memory_example(512, S, 4, 4, K, dtype)
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), inputs
  )
  run = jax.jit(lambda inputs: examples.both(memory_attention, inputs))
  text = run.lower(shapes).compile().as_text()
  assert 'memory_attention_forward' in text
  assert 'memory_attention_backward' in text
