"""The kernels for GPU, interpreted, against the definition; and lowered."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import xla
from meliad_rec.kernels.gpu import window_attention as window_attention_gpu
from meliad_rec.kernels.window_attention import window_attention
from tests.attention_example import assert_close
from tests.attention_example import assert_near_in_bfloat16
from tests.attention_example import both
from tests.attention_example import exactly
from tests.attention_example import example
from tests.attention_example import with_raw_own

interpreted = functools.partial(window_attention, form='gpu_interpreted')

CASES = {
  'no past, a last block that is not full': {'T': 50, 'P': 0, 'W': 64, 'K': 16},
  'two share keys': {'T': 64, 'P': 64, 'W': 64, 'H': 4},
}
SLOW = {
  'several blocks': {'T': 192, 'P': 128, 'W': 128, 'K': 32},
  'so large a scale that no bound holds': {'T': 64, 'P': 64, 'W': 64}
  | {'scale': 90.0},
  'heads 24 wide': {'T': 64, 'P': 64, 'W': 64, 'K': 24},
  'wide heads': {
    'T': 64,
    'P': 40,
    'W': 64,
    'H': 1,
    'num_kv_heads': 1,
    'K': 256,
  },
}


@pytest.mark.parametrize(
  'case, include_self',
  [
    (list(CASES)[0], False),
    (list(CASES)[1], True),
    *(
      pytest.param(name, include_self, marks=pytest.mark.slow)
      for name in CASES | SLOW
      for include_self in (False, True)
    ),
  ],
)
def test_is_the_definition(case, include_self):
  arguments = example(**(CASES | SLOW)[case])
  found = both(interpreted, *arguments, include_self=include_self)
  expected = exactly(*arguments, include_self=include_self)
  assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
  'case',
  [
    'no past, a last block that is not full',
    pytest.param('several blocks', marks=pytest.mark.slow),
  ],
)
def test_own_keys_that_are_raw(case):
  operands, mask = example(**(CASES | SLOW)[case])
  arguments = with_raw_own(operands, (CASES | SLOW)[case]['T']), mask
  found = both(interpreted, *arguments, normalize_own=True)
  expected = exactly(*arguments, normalize_own=True)
  assert_close(found, expected, 1e-5)
  unlike = exactly(*arguments)
  assert np.abs(np.asarray(found[0]) - np.asarray(unlike[0])).max() > 0.1


def test_a_large_bias_where_the_last_block_is_not_full():
  (q, k, v, bias, scale), mask = example(T=50, P=64, W=64, K=16)
  arguments = (q, k, v, bias + 100, scale), mask
  found = both(interpreted, *arguments, include_self=False)
  expected = exactly(*arguments, include_self=False)
  assert_close(found, expected, 1e-5)


def test_queries_that_are_scaled_already():
  (q, k, v, bias, _), mask = example(T=64, P=64, W=64, K=16)
  arguments = (q, k, v, bias, None), mask
  found = both(interpreted, *arguments, include_self=True)
  expected = exactly(*arguments, include_self=True)
  assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
  ('known', 'old'),
  [('7.5', True), ('8.0', False), ('10.0', False), (None, False)],
)
def test_gpus_of_before_ampere_have_the_blocked_form(known, old, monkeypatch):
  device = types.SimpleNamespace()
  if known:
    device.compute_capability = known
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  told = window_attention_gpu.refusal()
  assert (told is not None) == old
  (q, k, v, bias, scale), mask = example(T=64, P=64, W=64, K=16)
  if old:
    with pytest.raises(ValueError, match='before Ampere'):
      window_attention(q, k, v, mask, bias, scale_H=scale, form='gpu')
    interpreted(q, k, v, mask, bias, scale_H=scale)


@pytest.mark.parametrize('normalize_own', [False, True])
@pytest.mark.parametrize(
  'case',
  [
    pytest.param(
      name,
      marks=() if name == 'two share keys' else pytest.mark.slow,
    )
    for name in CASES | SLOW
  ],
)
def test_bfloat16_is_near_the_definition(case, normalize_own):
  assert_near_in_bfloat16(interpreted, (CASES | SLOW)[case], normalize_own)


def test_dropout_is_that_of_the_blocked_form():
  arguments = example(T=128, P=64, W=64, K=16)
  options = {'dropout_rng': jax.random.key(1), 'dropout_rate': 0.3}
  found = both(interpreted, *arguments, **options)
  expected = both(xla.window_attention, *arguments, tile=32, **options)
  assert_close(found, expected, 1e-5)
  without = both(interpreted, *arguments)
  assert np.abs(np.asarray(found[0]) - np.asarray(without[0])).max() > 0.1


@pytest.mark.parametrize(
  'K, dtype', [(64, 'bfloat16'), (192, 'bfloat16'), (256, 'float32')]
)
def test_it_is_lowered_for_a_gpu_without_one(K, dtype):
  operands, mask = example(T=256, P=128, W=128, K=K, dtype=dtype)

  def gradients(operands, mask_BS):
    def loss(operands):
      q, k, v, bias, scale = operands
      y = window_attention(q, k, v, mask_BS, bias, scale_H=scale)
      return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss)(operands)

  traced = jax.jit(gradients).trace(operands, mask)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  for kernel in ('forward', 'of_queries', 'of_keys', 'of_bias'):
    assert f'window_attention_gpu_{kernel}' in text
