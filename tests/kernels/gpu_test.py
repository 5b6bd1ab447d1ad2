"""Windowed attention by the kernels for GPU, against the definition.

The kernels are interpreted. On a machine with a GPU, this command runs them:

  JAX_PLATFORMS=cuda JAX_DEFAULT_MATMUL_PRECISION=highest \
    python -m pytest tests/kernels/gpu_test.py -m 'slow or not slow'
"""

import functools
import types

import jax
from jax.sharding import AbstractDevice
from jax.sharding import AbstractMesh
import numpy as np
import pytest

from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import window_attention
from tests import attention_example as examples

IMPLEMENTATION = 'gpu' if jax.default_backend() == 'gpu' else 'gpu_interpreted'
# A GPU approximates exponentials. Logits of about 100, as with a large bias,
# are rounded to 8e-6, which exponentials turn into that share of a weight.
RATE = 4e-5 if IMPLEMENTATION == 'gpu' else 1e-5
attend = functools.partial(window_attention, implementation=IMPLEMENTATION)

CASES = {
  'no past, a last block that is not full': {'T': 50, 'P': 0, 'W': 64, 'K': 16},
  'pairs share keys': {'T': 64, 'P': 64, 'W': 64, 'H': 4},
}
SLOW = {
  'several blocks': {'T': 192, 'P': 128, 'W': 128, 'K': 32},
  'a large scale': {'T': 64, 'P': 64, 'W': 64, 'scale': 45.0},
  'heads 24 wide': {'T': 64, 'P': 64, 'W': 64, 'K': 24},
  'wide heads': {'T': 64, 'P': 40, 'W': 64, 'H': 1, 'num_kv_heads': 1}
  | {'K': 256},
}
SCALED_OR_BIASED = {
  'a large bias where the last block is not full': {'T': 50, 'P': 64, 'W': 64}
  | {'K': 16, 'bias': 100},
  'queries that are already scaled': {'T': 64, 'P': 64, 'W': 64, 'K': 16}
  | {'scale': None},
}
ALL = CASES | SLOW
NOT_FULL, SHARED = CASES
BIASED, SCALED = SCALED_OR_BIASED


@pytest.mark.parametrize(
  ('case', 'include_self'),
  [
    *((NOT_FULL, False), (SHARED, True), (BIASED, False), (SCALED, True)),
    *(
      pytest.param(name, include_self, marks=pytest.mark.slow)
      for name in ALL
      for include_self in (False, True)
    ),
  ],
)
def test_is_the_definition(case, include_self):
  sizes = (ALL | SCALED_OR_BIASED)[case]
  examples.assert_exact(
    attend, examples.example(**sizes, include_self=include_self), RATE
  )


@pytest.mark.parametrize(
  'case', [NOT_FULL, pytest.param('several blocks', marks=pytest.mark.slow)]
)
def test_own_keys_to_normalize(case):
  examples.assert_exact(
    attend, examples.with_raw_own(examples.example(**ALL[case])), RATE
  )


@pytest.mark.parametrize(
  ('case', 'normalize_own'),
  [
    *((SHARED, True), (NOT_FULL, False)),
    *(
      pytest.param(name, normalize_own, marks=pytest.mark.slow)
      for name in ALL
      for normalize_own in (False, True)
    ),
  ],
)
def test_bfloat16_is_near_the_definition(case, normalize_own):
  inputs = examples.example(**ALL[case], dtype='bfloat16')
  inputs = examples.with_raw_own(inputs) if normalize_own else inputs
  examples.assert_near_in_bfloat16(attend, inputs)


def test_dropout_is_that_of_xla():
  inputs = examples.example(T=128, P=64, W=64, K=16)
  dropout = Dropout(jax.random.key(1), 0.3)
  found = examples.both(attend, inputs, dropout)
  expected = examples.both(examples.window_by_xla, inputs, dropout, tile=32)
  examples.assert_close(found, expected, RATE)
  without = examples.both(attend, inputs)
  assert np.abs(np.asarray(found[0]) - np.asarray(without[0])).max() > 0.1


@pytest.mark.parametrize('capability', ['7.5', '8.0', '10.0', None])
def test_gpus_before_ampere_are_an_error(capability, monkeypatch):
  device = types.SimpleNamespace()
  if capability:
    device.compute_capability = capability
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  inputs = examples.example(T=64, P=64, W=64, K=16)
  for implementation in 'gpu', 'gpu_interpreted', 'auto':
    run = functools.partial(window_attention, implementation=implementation)
    if capability == '7.5' and implementation == 'gpu':
      with pytest.raises(ValueError, match='7.5.*LayerConfig.attention'):
        jax.eval_shape(run, inputs)
    else:
      text = str(jax.make_jaxpr(run)(inputs))
      runs = implementation != 'auto' or capability != '7.5'
      assert ('window_attention_gpu' in text) == runs


@pytest.mark.parametrize(
  ('K', 'dtype', 'implementation'),
  [
    *((64, 'bfloat16', 'gpu'), (192, 'bfloat16', 'gpu')),
    *((256, 'float32', 'gpu'), (64, 'bfloat16', 'auto')),
  ],
)
def test_it_is_lowered_for_a_gpu_without_one(K, dtype, implementation):
  """Forward, and the gradients of queries, keys and the bias."""
  inputs = examples.example(T=256, P=128, W=128, K=K, dtype=dtype)
  run = lambda inputs: examples.both(
    window_attention, inputs, implementation=implementation
  )
  device = AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  mesh = AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = jax.jit(run).trace(inputs).lower(lowering_platforms=('cuda',))
  text = lowered.as_text()
  for name in 'forward', 'query', 'key', 'bias':
    assert f'window_attention_gpu_{name}' in text
