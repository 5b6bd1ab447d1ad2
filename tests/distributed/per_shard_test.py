"""Functions of whole arrays, run on each device's own rows and heads."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.distributed.per_shard import per_row
from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.distributed.per_shard import split_kv_heads
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.planning import topology
from tests.attention_example import assert_close
from tests.attention_example import both
from tests.attention_example import example
from tests.libtpu import needs_libtpu

KINDS = 'BTHK', 'BS', 'BH', 'H', 'H'
RESULTS = 'BTHK', 'H'


def gradient_like(x_BTHK, mask_BS, sums_BHT, scale_H, nothing):
  """Returns an array with rows, and one that is summed over them."""
  assert nothing is None
  y = x_BTHK * mask_BS[:, :, None, None] * scale_H[:, None]
  y = y + sums_BHT.swapaxes(1, 2)[..., None]
  return y, {'scale': jnp.einsum('bthk->h', y)}


def arguments(B=4, H=2):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  T, K = 3, 5
  mask = jnp.asarray(rng.random((B, T)) < 0.5)
  return draw(B, T, H, K), mask, draw(B, H, T), draw(H), None


@pytest.mark.parametrize(
  'shape, here',
  [
    ((1, 8, 1), (4, 3, 2, 5)),  # Four rows do not divide over eight devices.
    ((2, 2, 2), (1, 3, 1, 5)),
    ((1, 1, 8), (4, 3, 2, 5)),  # Nor two heads.
  ],
)
def test_results_are_those_of_whole_arrays(shape, here):
  given, seen = arguments(), []

  def watched(*arguments):
    seen.append(arguments[0].shape)
    return gradient_like(*arguments)

  @jax.jit
  def run(*arguments):
    return per_shard(watched, KINDS, arguments, RESULTS)(*arguments)

  with jax.set_mesh(partition.make_mesh(*shape)):
    found = run(*given)
  expected = jax.jit(gradient_like)(*given)
  assert set(seen) == {here}
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_without_a_mesh_it_is_the_function_itself():
  assert per_shard(gradient_like, KINDS, arguments(), RESULTS) is gradient_like


@needs_libtpu
@pytest.mark.parametrize(
  'shape', [(2, 2, 2), pytest.param((4, 1, 2), marks=pytest.mark.slow)]
)
def test_the_kernels_compile_for_a_slice(shape):
  """Gradients of windowed attention, on eight chips."""
  mesh = partition.make_mesh(*shape, devices=topology.devices('v5e:2x4'))
  B, T, W, H, K = 8, 128, 128, 8, 64
  rows = partition.batch_sharding(mesh, B)
  whole = NamedSharding(mesh, PartitionSpec())
  operand = lambda *axes, dtype=jnp.bfloat16, place=rows: jax.ShapeDtypeStruct(
    axes, dtype, sharding=place
  )
  keys = operand(B, W + T, H, K)
  inputs = AttentionInputs(
    operand(B, T, H, K),
    keys,
    keys,
    operand(B, W + T, dtype=jnp.bool),
    operand(H, W, dtype=jnp.float32, place=whole),
    operand(H, dtype=jnp.float32, place=whole),
  )
  run = jax.jit(lambda inputs: both(window_attention, inputs))
  with jax.set_mesh(mesh):
    lowered = run.lower(inputs)
  text = lowered.compile().as_text()
  assert 'window_attention_backward' in text
  # Rows are not moved.
  assert 'all-to-all' not in text


@pytest.mark.parametrize('shape, here', [((8, 1, 1), 4), ((2, 2, 2), 1)])
def test_each_device_sorts_its_own_rows(shape, here):
  x_BTHK, _, _, scale_H, _ = arguments()
  seen = []

  def sort(batch, shared):
    seen.append(len(batch['x']))
    return jnp.sort(batch['x'] * shared[:, None], 1)

  def loss(x_BTHK, scale_H):
    y_BTHK = per_row(sort, {'x': x_BTHK}, scale_H)
    return jnp.sum(jnp.sin(y_BTHK)), y_BTHK

  gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  expected = gradients(x_BTHK, scale_H)
  with jax.set_mesh(partition.make_mesh(*shape)):
    found = gradients(x_BTHK, scale_H)
  assert seen[-1] == here
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected
  )


def test_key_heads_divide_as_query_heads_do():
  k_BSHK = jnp.arange(6.0).reshape(1, 1, 2, 3)
  assert split_kv_heads(k_BSHK, 8) is k_BSHK
  with jax.set_mesh(partition.make_mesh(2, 1, 4)):
    found = split_kv_heads(k_BSHK, 8)
    assert split_kv_heads(k_BSHK, 6) is k_BSHK  # Nor do the query heads.
    assert split_kv_heads(found, 8) is found
  np.testing.assert_array_equal(found, np.repeat(k_BSHK, 2, 2))


def test_kernels_of_shared_keys_on_many_devices():
  """Each device has its own query heads; gradients of keys are summed."""
  inputs = example(T=128, P=128, W=128, H=4, num_kv_heads=1)
  expected = both(ref.window_attention, inputs)
  with jax.set_mesh(partition.make_mesh(1, 2, 4)):
    found = both(window_attention, inputs, implementation='tpu_interpreted')
  assert_close(found, expected, 3e-5)
