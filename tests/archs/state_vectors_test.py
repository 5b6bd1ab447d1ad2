"""State vectors: identities, gate configurations, and what they leave out.

Their equations are tested with the layer, in block_recurrent_test.py.
"""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.block_recurrent import StateVectors
from meliad_rec.layers import gates
from meliad_rec.layers.attention import KV
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.architectures import S
from tests.architectures import W


def update(cell, tokens):
  s_BSD = cell.first(B)
  n_BSD = cell.pre_norm(s_BSD)
  return cell.update(s_BSD, n_BSD, cell.kv(n_BSD), tokens)


def tokens(seen=True):
  draw = np.random.default_rng(0).normal(size=(B, 2 * W, H, K))
  draw = draw.astype(np.float32)
  return KV(draw, draw + 1, np.full((B, 2 * W), seen))


@functools.cache
def shapes(gate, gate_config):
  cell = StateVectors(config(), S, gate, gate_config)
  init = functools.partial(cell.init, method=update)
  params = jax.eval_shape(init, jax.random.key(0), tokens())['params']
  return jax.tree.map(lambda a: a.shape, params)


def test_skip_has_no_mlp():
  assert set(shapes(gates.FixedGate, 'skip')) == {'attention', 'ids', 'first'}


def test_single_joins_behind_the_mlp_alone():
  found = shapes(gates.FixedGate, 'single')
  assert 'output' not in found['attention']
  assert 'mlp_norm' not in found
  assert found['mlp']['hidden']['kernel'] == (2 * H * K, F)


def test_dual_has_a_gate_behind_each():
  found = shapes(gates.LSTMGate, 'dual')
  assert found['attention']['output']['i']['kernel'] == (2, H * K, D)
  assert found['mlp']['output']['f']['kernel'] == (F, D)
  assert found['mlp_norm']['scale'] == (D,)


def test_keys_are_shared_and_there_is_no_position():
  attention = shapes(gates.FixedGate, 'skip')['attention']
  assert set(attention) == {
    'norm',
    'query',
    'memory_query',
    'key',
    'value',
    'output',
  }


def test_unknown_configuration_is_an_error():
  with pytest.raises(
    ValueError, match="gate_config is 'both'; it must be dual"
  ):
    shapes(gates.FixedGate, 'both')


def test_states_differ_by_their_identities_alone():
  """Without identities, states that begin alike would stay alike."""
  cell = StateVectors(config(), S)
  init = jax.jit(functools.partial(cell.init, method=update))
  params = init(jax.random.key(0), tokens())['params']
  alike = {**params, 'first': np.zeros((S, D), np.float32) + 0.3}
  run = jax.jit(functools.partial(cell.apply, method=update))
  spread = lambda p: np.std(run({'params': p}, tokens()), 1).max()
  assert spread(alike) > 1e-3
  nameless = {**alike, 'ids': np.zeros((S, D), np.float32)}
  assert spread(nameless) < 1e-6
  np.testing.assert_allclose(np.std(params['ids']), 1, atol=0.2)
  np.testing.assert_allclose(np.std(params['first']), 0.1, atol=0.02)


def test_masked_tokens_have_no_influence():
  cell = StateVectors(config(), S)
  params = jax.jit(functools.partial(cell.init, method=update))(
    jax.random.key(0), tokens()
  )
  run = jax.jit(functools.partial(cell.apply, method=update))
  hidden = tokens(seen=False)
  other = hidden.replace(v=hidden.v + 5)
  np.testing.assert_array_equal(run(params, hidden), run(params, other))
  assert np.abs(run(params, hidden) - run(params, tokens())).max() > 1e-3
