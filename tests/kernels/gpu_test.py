"""Windowed attention on GPU: interpreted against the definition; lowered."""

import functools
import types

import jax
import numpy as np
import pytest

from meliad_rec.kernels import xla
from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import window_attention
from tests.attention_example import assert_close
from tests.attention_example import assert_near_in_bfloat16
from tests.attention_example import both
from tests.attention_example import exactly
from tests.attention_example import example
from tests.attention_example import with_raw_own

interpreted = functools.partial(window_attention, form='gpu_interpreted')

CASES = {
  'no past, a last block that is not full': {'T': 50, 'P': 0, 'W': 64, 'K': 16},
  'pairs share keys': {'T': 64, 'P': 64, 'W': 64, 'H': 4},
}
SLOW = {
  'several blocks': {'T': 192, 'P': 128, 'W': 128, 'K': 32},
  'a large scale': {'T': 64, 'P': 64, 'W': 64, 'scale': 90.0},
  'heads 24 wide': {'T': 64, 'P': 64, 'W': 64, 'K': 24},
  'wide heads': {'T': 64, 'P': 40, 'W': 64, 'H': 1, 'num_kv_heads': 1}
  | {'K': 256},
}
ALL = CASES | SLOW
NOT_FULL, SHARED = CASES


@pytest.mark.parametrize(
  'case, include_self',
  [
    (NOT_FULL, False),
    (SHARED, True),
    *(
      pytest.param(name, include_self, marks=pytest.mark.slow)
      for name in ALL
      for include_self in (False, True)
    ),
  ],
)
def test_is_the_definition(case, include_self):
  inputs = example(**ALL[case], include_self=include_self)
  assert_close(both(interpreted, inputs), exactly(inputs), 1e-5)


@pytest.mark.parametrize(
  'case', [NOT_FULL, pytest.param('several blocks', marks=pytest.mark.slow)]
)
def test_own_keys_to_normalize(case):
  inputs = with_raw_own(example(**ALL[case]))
  found = both(interpreted, inputs)
  assert_close(found, exactly(inputs), 1e-5)
  unlike = exactly(inputs.replace(normalize_own=False))
  assert np.abs(np.asarray(found[0]) - np.asarray(unlike[0])).max() > 0.1


def test_a_large_bias_where_the_last_block_is_not_full():
  inputs = example(T=50, P=64, W=64, K=16)
  inputs = inputs.replace(bias_HW=inputs.bias_HW + 100)
  assert_close(both(interpreted, inputs), exactly(inputs), 1e-5)


def test_queries_that_are_already_scaled():
  inputs = example(T=64, P=64, W=64, K=16, scale=None, include_self=True)
  assert_close(both(interpreted, inputs), exactly(inputs), 1e-5)


@pytest.mark.parametrize('normalize_own', [False, True])
@pytest.mark.parametrize(
  'case',
  [
    pytest.param(name, marks=() if name == SHARED else pytest.mark.slow)
    for name in ALL
  ],
)
def test_bfloat16_is_near_the_definition(case, normalize_own):
  inputs = example(**ALL[case], dtype='bfloat16')
  inputs = with_raw_own(inputs) if normalize_own else inputs
  assert_near_in_bfloat16(interpreted, inputs)


def test_dropout_is_that_of_xla():
  inputs = example(T=128, P=64, W=64, K=16)
  dropout = Dropout(jax.random.key(1), 0.3)
  found = both(interpreted, inputs, dropout)
  expected = both(xla.window_attention, inputs, dropout, tile=32)
  assert_close(found, expected, 1e-5)
  without = both(interpreted, inputs)
  assert np.abs(np.asarray(found[0]) - np.asarray(without[0])).max() > 0.1


@pytest.mark.parametrize(
  ('capability', 'is_old'),
  [('7.5', True), ('8.0', False), ('10.0', False), (None, False)],
)
def test_gpus_before_ampere_are_an_error(capability, is_old, monkeypatch):
  device = types.SimpleNamespace()
  if capability:
    device.compute_capability = capability
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  inputs = example(T=64, P=64, W=64, K=16)
  attend = lambda form: jax.eval_shape(
    lambda inputs: window_attention(inputs, form=form), inputs
  )
  if is_old:
    with pytest.raises(ValueError, match='7.5.*LayerConfig.attention'):
      attend('gpu')
  else:
    attend('gpu')
  attend('gpu_interpreted')
  attend('auto')


@pytest.mark.parametrize(
  'K, dtype', [(64, 'bfloat16'), (192, 'bfloat16'), (256, 'float32')]
)
def test_it_is_lowered_for_a_gpu_without_one(K, dtype):
  """Forward, and the gradients of queries, keys and the bias."""
  inputs = example(T=256, P=128, W=128, K=K, dtype=dtype)

  def kernels(form):
    run = lambda inputs: both(window_attention, inputs, form=form)
    lowered = jax.jit(run).trace(inputs).lower(lowering_platforms=('cuda',))
    return {
      name
      for name in ('forward', 'query', 'key', 'bias')
      if f'window_attention_gpu_{name}' in lowered.as_text()
    }

  assert kernels('gpu') == {'forward', 'query', 'key', 'bias'}
  assert kernels('auto') == set()
