"""The kernels for TPU, interpreted, against the definition; and compiled."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla
from meliad_rec.kernels.tpu import window_attention as window_attention_tpu
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.window_attention import window_attention
from meliad_rec.planning import topology
from tests.attention_example import assert_close
from tests.attention_example import assert_near_in_bfloat16
from tests.attention_example import both
from tests.attention_example import exactly
from tests.attention_example import example
from tests.attention_example import with_raw_own
from tests.libtpu import needs_libtpu
from tests.tpu_interpreted import without_races

interpreted = functools.partial(window_attention, form='tpu_interpreted')

CASES = {
  'two blocks': {'T': 256, 'P': 128, 'W': 128},
  'no past, a last block that is not full': {'T': 200, 'P': 0, 'W': 128},
  'several sub-blocks': {'T': 256, 'P': 256, 'W': 256},
  'fewer queries than a window': {'T': 128, 'P': 256, 'W': 256},
  'four heads for one of keys': {'T': 128, 'P': 128, 'W': 128, 'H': 4}
  | {'num_kv_heads': 1},
  'so large a scale that no bound holds': {'T': 128, 'P': 128, 'W': 128}
  | {'scale': 90.0},
}
SLOW = {
  'wide heads, two for one of keys': {'T': 128, 'P': 128, 'W': 128, 'H': 4}
  | {'K': 128},
  'a loop over sub-blocks': {'T': 640, 'P': 300, 'W': 640, 'K': 128},
  'fewer queries than a window, in two blocks': {'T': 256, 'P': 300, 'W': 384},
  'fewer queries, and no past': {'T': 300, 'P': 0, 'W': 384},
  'three heads': {'T': 384, 'P': 384, 'W': 384, 'H': 3, 'num_kv_heads': 3},
}


@pytest.mark.parametrize(
  'case',
  [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
@pytest.mark.parametrize(
  'include_self', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_is_the_definition(case, include_self):
  arguments = example(**(CASES | SLOW)[case])
  found = both(interpreted, *arguments, include_self=include_self)
  expected = exactly(*arguments, include_self=include_self)
  assert_close(found, expected, 3e-5)


@pytest.mark.parametrize(
  'case',
  [
    'no past, a last block that is not full',
    'four heads for one of keys',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in (
        'two blocks',
        'several sub-blocks',
        'fewer queries than a window',
        'fewer queries than a window, in two blocks',
        'wide heads, two for one of keys',
        'a loop over sub-blocks',
        'so large a scale that no bound holds',
      )
    ),
  ],
)
def test_own_keys_that_are_raw(case):
  operands, mask = example(**(CASES | SLOW)[case])
  arguments = with_raw_own(operands, (CASES | SLOW)[case]['T']), mask
  found = both(interpreted, *arguments, normalize_own=True)
  expected = exactly(*arguments, normalize_own=True)
  assert_close(found, expected, 3e-5)
  unlike = exactly(*arguments)
  assert np.abs(np.asarray(found[0]) - np.asarray(unlike[0])).max() > 0.1


@pytest.mark.parametrize(
  'T, W, block',
  [
    *((128, 256, 128), (256, 512, 256), (300, 512, 128)),
    *((512, 512, 512), (5000, 512, 512), (700, 768, 768)),
  ],
)
def test_blocks_leave_little_empty(T, W, block):
  assert window_attention_tpu.queries_of_block(T, W) == block


def test_a_large_bias_where_the_last_block_is_not_full():
  (q, k, v, bias, scale), mask = example(T=200, P=128, W=128, K=64)
  arguments = (q, k, v, bias + 100, scale), mask
  found = both(interpreted, *arguments, include_self=False)
  expected = exactly(*arguments, include_self=False)
  assert_close(found, expected, 3e-5)


def test_queries_that_are_scaled_already():
  (q, k, v, bias, _), mask = example(T=128, P=128, W=128)
  arguments = (q, k, v, bias, None), mask
  found = both(interpreted, *arguments, include_self=True)
  expected = exactly(*arguments, include_self=True)
  assert_close(found, expected, 3e-5)


@pytest.mark.parametrize('normalize_own', [False, True])
@pytest.mark.parametrize(
  'case',
  [
    pytest.param(
      name, marks=() if name == 'several sub-blocks' else pytest.mark.slow
    )
    for name in CASES | SLOW
  ],
)
def test_bfloat16_is_near_the_definition(case, normalize_own):
  assert_near_in_bfloat16(interpreted, (CASES | SLOW)[case], normalize_own)


def test_dropout_is_that_of_the_blocked_form():
  arguments = example(T=256, P=128, W=128)
  options = {'dropout_rng': jax.random.key(1), 'dropout_rate': 0.3}
  found = both(interpreted, *arguments, **options)
  expected = both(xla.window_attention, *arguments, tile=LANES, **options)
  assert_close(found, expected, 3e-5)
  without = both(interpreted, *arguments)
  assert np.abs(np.asarray(found[0]) - np.asarray(without[0])).max() > 0.1


def test_the_bound_holds_and_the_range_is_not_wider_than_said():
  (q, k, _, bias_HW, scale_H), _ = example(T=128, P=128, W=128)
  top_H, range_H = window_attention_tpu.bound(bias_HW, scale_H)
  q_BTHK = ref.scaled_unit(q, scale_H)
  dots_HX = jnp.einsum('bthk,bshk->hbts', q_BTHK, k).reshape(2, -1)
  visible = [bias_HW[0, :64], bias_HW[1]]
  for head, bias in enumerate(visible):
    logits = dots_HX[head][:, None] + bias
    assert logits.max() <= top_H[head]
    assert top_H[head] - logits.min() <= range_H[head]
  _, nothing_H = window_attention_tpu.bound(
    jnp.full((2, 4), ref.NEVER), jnp.ones(2)
  )
  assert (nothing_H < 3).all()


RACES = {
  'two heads for one of keys': ({'T': 384, 'H': 4}, False, True),
  'queries that see themselves': ({'T': 384, 'H': 4}, True, False),
  'so large a scale that no bound holds': (
    {'T': 384, 'scale': 90.0},
    False,
    True,
  ),
  'a loop over sub-blocks': (
    {'T': 640, 'W': 640, 'P': 300, 'K': 128},
    False,
    True,
  ),
  'fewer queries than a window': (
    {'T': 256, 'W': 384, 'P': 300},
    False,
    True,
  ),
  'no past, a last block that is not full': (
    {'T': 200, 'P': 0},
    False,
    True,
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize('case', RACES)
def test_as_a_tpu_would_run_it_without_races(case, seed):
  sizes, include_self, raw = RACES[case]
  sizes = {'P': 128, 'W': 128, 'num_kv_heads': 2} | sizes
  options = {'include_self': include_self, 'normalize_own': raw}
  operands, mask = example(**sizes)
  if raw:
    operands = with_raw_own(operands, sizes['T'])
  q, k, v, bias, scale = operands
  given = q, k, v, mask, bias, scale, None
  found = without_races(window_attention_tpu, given, seed, **options)
  expected = exactly(operands, mask, **options)
  assert_close(found, expected, 3e-5)


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
  'name, sizes',
  [(name, NARROW) for name in CHIPS[:2]]
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
  operands, mask = example(T, W, W, H, num_kv_heads, K, dtype)
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    (operands, mask),
  )

  def gradients(operands, mask_BS):
    def loss(operands):
      q, k, v, bias, scale = operands
      y = window_attention(
        q,
        k,
        v,
        mask_BS,
        bias,
        scale_H=scale,
        normalize_own=True,
        dropout_rng=jax.random.key(0),
        dropout_rate=0.1,
      )
      return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss)(operands)

  with jax.set_mesh(mesh):
    compiled = jax.jit(gradients).lower(*shapes).compile()
  text = compiled.as_text()
  assert 'window_attention_forward' in text
  assert 'window_attention_backward' in text
  # Less than the logits of all queries, [B, H, T, 2 W], and their gradients.
  logits = 2 * H * T * 2 * W * 4
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * logits
