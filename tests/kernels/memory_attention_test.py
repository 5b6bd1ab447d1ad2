"""Which form of attention to memory runs where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.memory_attention import memory_attention

B, T, S, H, K = 2, 64, 128, 2, 64


def arguments(T=T, S=S, K=K):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  mask_BS = jnp.asarray(rng.random((B, S)) < 0.8)
  return draw(B, T, H, K), draw(B, S, H, K), draw(B, S, H, K), mask_BS


def gradients(function, given):
  def loss(q, k, v, mask, scale):
    y = function(q, k, v, mask, scale_H=scale)
    return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y)

  grad = jax.jit(jax.grad(loss, (0, 1, 2, 4)))
  return grad(*given, jnp.array([1.0, 2.0]))


def test_on_a_cpu_it_is_the_definition_bit_for_bit():
  found = gradients(memory_attention, arguments())
  expected = gradients(ref.memory_attention, arguments())
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_under_a_mesh_it_is_the_same():
  expected = gradients(memory_attention, arguments())
  with jax.set_mesh(partition.make_mesh(2, 2, 2)):
    found = gradients(memory_attention, arguments())
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, found, expected)


def lowered_for(platform, *given, **options):
  attend = lambda *a: memory_attention(*a, **options)
  traced = jax.jit(attend).trace(*given)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_kernels_are_chosen_for_a_tpu_alone():
  assert 'tpu_custom_call' in lowered_for('tpu', *arguments())
  assert 'tpu_custom_call' not in lowered_for('cuda', *arguments())
  assert 'tpu_custom_call' not in lowered_for('tpu', *arguments(), form='xla')


@pytest.mark.parametrize('sizes', [{'K': 32}, {'T': 1}, {'S': 40}, {'S': 4100}])
def test_what_the_kernels_do_not_take_runs_in_xla(sizes):
  given = arguments(**sizes)
  assert 'tpu_custom_call' not in lowered_for('tpu', *given)
  with pytest.raises(ValueError, match='do not take this'):
    memory_attention(*given, form='tpu')


def test_there_are_none_for_a_gpu_yet():
  with pytest.raises(ValueError, match='gpu do not take this: there are none'):
    memory_attention(*arguments(), form='gpu')
