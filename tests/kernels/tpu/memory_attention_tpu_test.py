"""The kernels for TPU of attention to memory, interpreted; and compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.memory_attention import memory_attention
from meliad_rec.kernels.reference import unit
from meliad_rec.kernels.reference import wide
from meliad_rec.kernels.tpu import memory_attention as memory_attention_tpu
from meliad_rec.planning import topology
from tests.attention_example import assert_close
from tests.libtpu import needs_libtpu
from tests.tpu_interpreted import without_races


def example(T, S, H=2, num_kv_heads=2, K=64, dtype='float32', scale=3.0):
  """Operands, of which all have gradients, and the mask."""
  rng = np.random.default_rng(T + S)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B = 2
  mask_BS = rng.random((B, S)) < 0.8
  mask_BS[1] = False
  q, k, v = (
    draw(B, T, H, K),
    draw(B, S, num_kv_heads, K),
    draw(B, S, num_kv_heads, K),
  )
  scale_H = jnp.asarray(rng.uniform(1, scale, H), jnp.float32)
  return (q, unit(k), v, scale_H), jnp.asarray(mask_BS)


def both(function, operands, mask_BS, **options):
  """The output, and the gradients of all operands."""

  def loss(operands):
    q, k, v, scale = operands
    y = function(q, k, v, mask_BS, scale_H=scale, **options)
    weights = jnp.sin(jnp.arange(y.size)).reshape(y.shape)
    return jnp.sum(weights * y.astype(wide(y))), y

  (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
  return [y, *jax.tree.leaves(grads)]


def exactly(operands, mask_BS, keep_HTS=None):
  """The definition in float64: as both."""
  with jax.enable_x64(True):
    exact = jax.tree.map(
      lambda a: np.asarray(a, np.float64), (operands, keep_HTS)
    )
    operands, keep_HTS = exact
    return both(ref.memory_attention, operands, mask_BS, keep_HTS=keep_HTS)


CASES = {
  'blocks and slots that are not full': ({'T': 100, 'S': 70}, False),
  'two blocks, two heads for one of keys': (
    {'T': 600, 'S': 128, 'H': 2, 'num_kv_heads': 1},
    True,
  ),
  'so large a scale that no bound holds': (
    {'T': 64, 'S': 64, 'scale': 90.0},
    False,
  ),
}


def keep_of(sizes):
  """Factors of the probabilities, as of dropout."""
  shape = sizes['H'], sizes['T'], sizes['S']
  return jax.random.bernoulli(jax.random.key(0), 0.7, shape) / 0.7


@pytest.mark.parametrize('S', [1500, 4096])
def test_many_slots(S):
  operands, mask = example(T=64, S=S, H=1, num_kv_heads=1)
  found = both(memory_attention, operands, mask, form='tpu_interpreted')
  assert_close(found, exactly(operands, mask), 3e-5)


@pytest.mark.parametrize('case', CASES)
def test_is_the_definition(case):
  sizes, drops = CASES[case]
  operands, mask = example(**sizes)
  keep = keep_of(sizes) if drops else None
  found = both(
    memory_attention, operands, mask, keep_HTS=keep, form='tpu_interpreted'
  )
  expected = exactly(operands, mask, keep)
  assert_close(found, expected, 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('case', CASES)
def test_as_a_tpu_would_run_it_without_races(case, seed):
  sizes, drops = CASES[case]
  (q, k, v, scale), mask = example(**sizes)
  keep = keep_of(sizes) if drops else None
  given = q, k, v, mask, scale, keep
  found = without_races(memory_attention_tpu, given, seed)
  expected = exactly((q, k, v, scale), mask, keep)
  assert_close(found, expected, 3e-5)


def test_queries_that_are_scaled_already():
  (q, k, v, _), mask = example(T=128, S=128)
  operands = q, k, v, None
  found = both(memory_attention, operands, mask, form='tpu_interpreted')
  expected = exactly(operands, mask)
  assert_close(found, expected, 3e-5)


# More than 1,024 slots, or those of heads 256 wide, are more than the 16 MiB of
# VMEM that a v4 has.
CHIPS = 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'v7x:2x2x1', 'v4:2x2x1'


@needs_libtpu
@pytest.mark.parametrize(
  'name, S, K, dtype',
  [
    ('v5e:2x2', 640, 256, 'float32'),
    *(
      pytest.param(name, S, K, dtype, marks=pytest.mark.slow)
      for name in CHIPS
      for S, K, dtype in (
        (512, 64, 'bfloat16'),
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
  operands, mask = example(512, S, 4, 4, K, dtype)
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    (operands, mask),
  )
  compiled = jax.jit(
    lambda operands, mask: both(memory_attention, operands, mask)
  ).lower(*shapes)
  text = compiled.compile().as_text()
  assert 'memory_attention_forward' in text
  assert 'memory_attention_backward' in text
