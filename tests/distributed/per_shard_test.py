"""A function of whole arrays, on each device's own rows and heads."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.distributed.per_shard import cut_alike
from meliad_rec.distributed.per_shard import per_row
from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.window_attention import window_attention
from meliad_rec.planning import topology
from tests.attention_example import assert_close
from tests.attention_example import both
from tests.attention_example import example
from tests.libtpu import needs_libtpu

KINDS = 'tokens', 'rows', 'sums', 'heads', 'heads'
RESULTS = 'tokens', 'heads'


def gradient_like(x_BTHK, mask_BS, sums_BHT, scale_H, nothing):
  """What belongs to rows, and what is added up over them."""
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


def shapes_seen(mesh, given):
  """The result under a mesh, and what each device saw of the tokens."""
  seen = []

  def watched(*arguments):
    seen.append(arguments[0].shape)
    return gradient_like(*arguments)

  @jax.jit
  def run(*arguments):
    return per_shard(watched, KINDS, arguments, RESULTS)(*arguments)

  with jax.set_mesh(mesh):
    return run(*given), seen


@pytest.mark.parametrize(
  'shape, here',
  [
    ((8, 1, 1), (4, 3, 2, 5)),  # Four rows do not divide over eight devices.
    ((1, 8, 1), (4, 3, 2, 5)),
    ((2, 2, 2), (1, 3, 1, 5)),
    ((4, 1, 2), (1, 3, 1, 5)),
    ((1, 1, 8), (4, 3, 2, 5)),  # Nor two heads.
  ],
)
def test_is_the_whole(shape, here):
  given = arguments()
  expected = gradient_like(*given)
  found, seen = shapes_seen(partition.make_mesh(*shape), given)
  assert set(seen) == {here}
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_without_a_mesh_it_is_the_function_itself():
  assert per_shard(gradient_like, KINDS, arguments(), RESULTS) is gradient_like


@needs_libtpu
@pytest.mark.parametrize(
  'shape',
  [(8, 1, 1), (2, 2, 2)]
  + [
    pytest.param(shape, marks=pytest.mark.slow)
    for shape in ((1, 8, 1), (1, 1, 8), (4, 1, 2))
  ],
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
  mask_BS = operand(B, W + T, dtype=jnp.bool)
  bias_HW = operand(H, W, dtype=jnp.float32, place=whole)
  scale_H = operand(H, dtype=jnp.float32, place=whole)

  def loss(q, k, v, bias, scale, mask):
    y = window_attention(q, k, v, mask, bias, scale_H=scale)
    return jnp.sum(y.astype(jnp.float32))

  grad = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
  with jax.set_mesh(mesh):
    lowered = grad.lower(
      operand(B, T, H, K), keys, keys, bias_HW, scale_H, mask_BS
    )
  text = lowered.compile().as_text()
  assert 'window_attention_backward' in text
  # Rows stay where they are.
  assert 'all-to-all' not in text


@pytest.mark.parametrize(
  'shape, here',
  [((8, 1, 1), 4), ((4, 1, 2), 1), ((2, 2, 2), 1), ((1, 1, 8), 4)],
)
def test_rows_of_a_device_are_sorted_by_themselves(shape, here):
  x_BTHK, _, _, scale_H, _ = arguments()
  seen = []

  def sort(of_rows, shared):
    seen.append(len(of_rows['x']))
    return jnp.sort(of_rows['x'] * shared[:, None], 1)

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


def test_heads_of_keys_divide_as_those_of_queries_do():
  k_BSHK = jnp.arange(6.0).reshape(1, 1, 2, 3)
  assert cut_alike(k_BSHK, 8) is k_BSHK
  with jax.set_mesh(partition.make_mesh(2, 1, 4)):
    found = cut_alike(k_BSHK, 8)
    assert cut_alike(k_BSHK, 6) is k_BSHK  # Nor do the queries.
    assert cut_alike(found, 8) is found
  np.testing.assert_array_equal(found, np.repeat(k_BSHK, 2, 2))


def test_kernels_of_shared_keys_on_many_devices():
  """Each has its heads of queries alone; gradients of keys are added up."""
  arguments = example(T=128, P=128, W=128, H=4, num_kv_heads=1)
  expected = both(ref.window_attention, *arguments)
  interpreted = functools.partial(window_attention, form='tpu_interpreted')
  with jax.set_mesh(partition.make_mesh(1, 2, 4)):
    found = both(interpreted, *arguments)
  assert_close(found, expected, 3e-5)
