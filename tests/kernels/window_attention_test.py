"""Which form of windowed attention runs where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import xla
from meliad_rec.kernels.window_attention import SAVED
from meliad_rec.kernels.window_attention import window_attention

B, T, W, H, K = 2, 128, 128, 2, 64


def arguments(T=T, W=W, K=K, past=W):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  S = past + T
  mask_BS = jnp.asarray(rng.random((B, S)) < 0.8)
  return (
    draw(B, T, H, K),
    draw(B, S, H, K),
    draw(B, S, H, K),
    mask_BS,
    draw(H, W),
  )


def gradients(function, arguments, **options):
  def loss(q, k, v, mask, bias, scale):
    y = function(q, k, v, mask, bias, scale_H=scale, **options)
    return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y)

  grad = jax.grad(loss, (0, 1, 2, 4, 5))
  return grad, (*arguments, jnp.array([1.0, 2.0]))


@pytest.mark.parametrize('dropout', [False, True])
def test_on_a_cpu_it_is_the_blocked_form_bit_for_bit(dropout):
  options = {}
  if dropout:
    options = {'dropout_rng': jax.random.key(0), 'dropout_rate': 0.5}
  grad, given = gradients(window_attention, arguments(), **options)
  expected, _ = gradients(xla.window_attention, arguments(), **options)
  for a, b in zip(
    jax.jit(grad)(*given), jax.jit(expected)(*given), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def lowered_for(platform, *given, **options):
  attend = lambda *a: window_attention(*a, **options)
  traced = jax.jit(attend).trace(*given)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_kernels_are_chosen_for_a_tpu_alone():
  assert 'tpu_custom_call' in lowered_for('tpu', *arguments())
  assert 'tpu_custom_call' not in lowered_for('cpu', *arguments())
  assert 'tpu_custom_call' not in lowered_for('tpu', *arguments(), form='xla')


@pytest.mark.parametrize(
  'sizes', [{'W': 96}, {'K': 32}, {'T': 1}, {'T': 40}, {'past': W + 1}]
)
def test_what_the_kernels_do_not_take_runs_in_the_blocked_form(sizes):
  given = arguments(**({'W': W, 'past': sizes.get('W', W)} | sizes))
  if 'past' not in sizes:
    assert 'tpu_custom_call' not in lowered_for('tpu', *given)
  with pytest.raises(ValueError, match='do not take this'):
    window_attention(*given, form='tpu')


def test_vectors_by_distance_run_in_the_blocked_form():
  keys_WK = jnp.ones((W, K))
  assert 'tpu_custom_call' not in lowered_for(
    'tpu', *arguments(), keys_WK=keys_WK
  )


def test_another_form_is_one_sentence():
  with pytest.raises(ValueError, match="form is 'fast'"):
    window_attention(*arguments(), form='fast')


def test_under_a_mesh_it_is_the_same():
  given = arguments()
  grad, given = gradients(window_attention, given)
  expected = jax.jit(grad)(*given)
  with jax.set_mesh(partition.make_mesh(2, 2, 2)):
    found = jax.jit(grad)(*given)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_the_backward_pass_reads_can_be_saved_by_name():
  def forwards(policy):
    def attend(*arguments, scale_H):
      call = lambda *a: window_attention(*a, scale_H=scale_H, form='tpu')
      return jax.checkpoint(call, policy=policy)(*arguments)

    grad, given = gradients(attend, arguments())
    text = str(jax.make_jaxpr(grad)(*given))
    return text.count('name=window_attention_forward')

  saved = jax.checkpoint_policies.save_only_these_names(*SAVED)
  # By bound and by maximum; once again in the backward pass, or not.
  assert forwards(saved) == 2
  assert forwards(jax.checkpoint_policies.nothing_saveable) == 4
