"""All forms compute the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.kernels import reference as ref

SETTING = forms.AttentionSizes(2, 24, 3, 5, 8, 'float32')


def arguments(setting):
  rng = np.random.default_rng(0)
  q, k, v, mask, bias, scale = (
    jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in setting.shapes()
  )
  heads = k.reshape(*k.shape[:2], setting.num_heads, -1)
  past, own = jnp.split(heads, [setting.window], 1)
  heads = jnp.concatenate([ref.l2_normalize(past), 3 * own], 1)
  mask = jnp.asarray(rng.random(mask.shape) < 0.8)
  return q, heads.reshape(k.shape), v, mask, bias, scale


@pytest.mark.parametrize('form', forms.FORMS)
def test_is_the_definition(form):
  given = arguments(SETTING)
  if form == 'jax, no bias':
    given = *given[:4], jnp.zeros_like(given[4]), given[5]
  found = forms.programs(form, SETTING)['forward'](*given)
  heads = lambda a: a.reshape(*a.shape[:2], SETTING.num_heads, -1)
  inputs = ref.AttentionInputs(
    *map(heads, given[:3]),
    *given[3:],
    # jax's window has the query's own key.
    include_self=form == 'jax, no bias',
    normalize_own=True,
  )
  expected = ref.window_attention(inputs)
  np.testing.assert_allclose(heads(found), expected, rtol=1e-4, atol=1e-5)


def test_backward_gives_a_gradient_of_each_operand():
  given = arguments(SETTING)
  run = forms.programs(forms.BASELINE, SETTING)['forward+backward']
  y, grads = jax.jit(run)(*given)
  assert y.shape == given[0].shape
  operands = *given[:3], *given[4:]
  assert [g.shape for g in grads] == [a.shape for a in operands]
  assert all(jnp.abs(g).max() > 0 for g in grads)


@pytest.mark.parametrize('setting', forms.SETTINGS.values())
def test_settings_are_whole_blocks(setting):
  assert setting.tokens % setting.window == 0
  assert dataclasses.replace(setting, rows=3).shapes()[0].shape[0] == 3
