"""The Block-Recurrent layer against a loop over blocks of plain equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.block_recurrent import StateVectors
from meliad_rec.layers import gates
from meliad_rec.layers import positions
from meliad_rec.layers.attention import KV
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W
from tests.cells import example
from tests.cells import forward

GATES = {'fixed': gates.FixedGate, 'lstm': gates.LSTMGate}
CONFIGS = ('dual', 'single', 'skip')


@functools.cache
def parameters(gate, gate_config):
  cell = BlockRecurrentLayer(config(), S, GATES[gate], gate_config)
  return cells.parameters(cell, example())


def norm(p, x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p['scale']


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def project(p, x):
  return (x @ p['kernel']).reshape(*x.shape[:2], H, K)


def unit(y):
  return y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)


def query(p, x):
  return unit(project(p['heads'], x)) * np.abs(p['scale'])[:, None]


def attention(q, k, v, seen_BTS, bias_HTS=0.0):
  logits = np.einsum('bthk,bshk->bhts', q, k) + bias_HTS
  p = np.exp(logits) * seen_BTS[:, None]
  p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
  y = np.einsum('bhts,bshk->bthk', p, v)
  return y.reshape(*y.shape[:2], -1)


def linear(p, h):
  kernel = p['kernel'].reshape(-1, p['kernel'].shape[-1])
  return h @ kernel + p.get('bias', 0)


def through_gate(p, kind, tanh, x, h):
  z = linear(p['z'], h)  # eq. 1 or 4
  z = np.tanh(z) if tanh else z
  if kind == 'fixed':
    g = sigmoid(p['gate'])  # eq. 2
    return x * g + z * (1 - g)  # eq. 3
  i = sigmoid(linear(p['i'], h) - 1)  # eq. 5
  f = sigmoid(linear(p['f'], h) + 1)  # eq. 6
  return x * f + z * i  # eq. 7


def slow(p, gate, gate_config, block, compat=False):
  """Computes section 3 of the paper, block by block, in float64."""
  x_BTD, mask_BT = block.x.astype(np.float64), block.mask
  t, s = p['tokens'], p['states']
  tanh = gate_config == 'single' if compat else gate == 'lstm'
  k_past = v_past = np.zeros((B, W, H, K))
  seen_past = np.full((B, W), compat)
  state = np.repeat(s['first'][None], B, 0)
  back_WX = np.arange(W)[:, None] + W - np.arange(2 * W)[None]
  near_WX = (back_WX >= 1) & (back_WX <= W)
  bucket_WX = positions.t5_bucket(np.clip(back_WX, 1, W), 32, 128)
  bias_HWX = t['attention']['position']['table'][:, bucket_WX]
  if compat:
    bias_HWX = (
      bias_HWX * np.abs(t['attention']['query']['scale'])[:, None, None]
    )
  outputs = []
  for i in range(0, T, W):
    x, mask = x_BTD[:, i : i + W], mask_BT[:, i : i + W]
    a = t['attention']
    n = norm(a['norm'], x)
    k = np.concatenate([k_past, unit(project(a['key'], n))], 1)
    v = np.concatenate([v_past, project(a['value'], n)], 1)
    seen = np.concatenate([seen_past, mask], 1)
    # Vertical: tokens to their window, and to the states the block began with.
    m = s['attention']
    c = norm(m['norm'], state) + s['ids']
    k_state, v_state = unit(project(m['key'], c)), project(m['value'], c)
    own = attention(
      query(a['query'], n), k, v, near_WX & seen[:, None], bias_HWX
    )
    read = attention(
      query(a['memory_query'], n), k_state, v_state, np.ones((B, W, S))
    )
    h = np.concatenate([own, read], -1)
    y = x + linear(a['output']['linear'], h)
    hidden = np.maximum(
      norm(t['mlp_norm'], y) @ t['mlp']['hidden']['kernel'], 0
    )
    outputs.append(y + linear(t['mlp']['output']['linear'], hidden))
    # Horizontal: states to themselves, and to the tokens of both blocks.
    own = attention(query(m['query'], c), k_state, v_state, np.ones((B, S, S)))
    read = attention(
      query(m['memory_query'], c), k, v, np.repeat(seen[:, None], S, 1)
    )
    h = np.concatenate([own, read], -1)
    pass_gate = functools.partial(through_gate, kind=gate, tanh=tanh)
    if gate_config == 'single':
      hidden = np.maximum(linear(s['mlp']['hidden'], h), 0)
      state = pass_gate(s['mlp']['output'], x=state, h=hidden)
    else:
      state = pass_gate(m['output'], x=state, h=h)
    if gate_config == 'dual':
      hidden = norm(s['mlp_norm'], state) @ s['mlp']['hidden']['kernel']
      state = pass_gate(s['mlp']['output'], x=state, h=np.maximum(hidden, 0))
    k_past, v_past, seen_past = k[:, W:], v[:, W:], seen[:, W:]
  return state, np.concatenate(outputs, 1)


def compiled(cell, params, block, **options):
  params = jax.tree.map(lambda a: a.astype(np.float32), params)
  apply = lambda p: cell.apply({'params': p}, block, method=forward, **options)
  return jax.jit(apply)(params)


@pytest.mark.parametrize('gate_config', CONFIGS)
@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize(
  'compat', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_is_the_papers_equations(gate, gate_config, compat):
  params = parameters(gate, gate_config)
  cell = BlockRecurrentLayer(
    config(compat_meliad=compat), S, GATES[gate], gate_config
  )
  (_, state), y = compiled(cell, params, example())
  expected_state, expected = slow(params, gate, gate_config, example(), compat)
  real = example().mask
  np.testing.assert_allclose(y[real], expected[real], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(state, expected_state, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  'remat', [pytest.param('none', marks=pytest.mark.slow), 'full']
)
def test_hoist_changes_nothing(remat):
  params = parameters('fixed', 'skip')
  params = jax.tree.map(lambda a: a.astype(np.float32), params)

  def outcome(hoist):
    cell = BlockRecurrentLayer(config(), S, hoist=hoist, remat=remat)

    def loss(p):
      state, y = cell.apply({'params': p}, example(), method=forward)
      return jnp.sum(jnp.sin(y)), (state, y)

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    outcome(True),
    outcome(False),
  )


def test_states_at_the_start_are_learned_and_alike_in_all_rows():
  cell = BlockRecurrentLayer(config(), S)
  params = parameters('fixed', 'skip')
  past, state = cell.apply({'params': params}, B, method='initial_state')
  np.testing.assert_array_equal(state[0], state[2])
  np.testing.assert_allclose(state[0], params['states']['first'], rtol=1e-6)
  assert not past.mask.any()


def test_the_summary_is_the_state_vectors():
  cell = BlockRecurrentLayer(config(), S)
  state = cell.apply(
    {'params': parameters('fixed', 'skip')}, B, method='initial_state'
  )
  assert cell.memory_slots(state) is state[1] and state[1].shape == (B, S, D)
  assert cell.causal and cell.is_recurrent and not cell.needs_whole_document


def test_dropout_is_off_in_the_horizontal_direction():
  params = parameters('lstm', 'dual')
  options = config(), S, gates.LSTMGate, 'dual'
  plain = BlockRecurrentLayer(*options).apply
  wet = BlockRecurrentLayer(config(dropout=0.5), *options[1:]).apply
  state = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)
  past = config().empty_past(B)

  def update(cell):
    n_BSD, memory = cell.seen((past, state))
    return cell.states.update(state, n_BSD, memory, past.append(past))

  rngs = {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(
    wet({'params': params}, method=update, rngs=rngs),
    plain({'params': params}, method=update),
  )


def test_one_block_is_computed_again_too():
  params = parameters('fixed', 'skip')
  block = jax.tree.map(lambda a: a[:, :W], example())

  def products(remat):
    cell = BlockRecurrentLayer(config(), S, remat=remat)

    def loss(p):
      return cell.apply({'params': p}, block, method=forward)[1].sum()

    return str(jax.make_jaxpr(jax.grad(loss))(params)).count('= dot_general')

  assert products('full') > products('none')


def test_slots_are_needed():
  cell = BlockRecurrentLayer(config(), 0)
  with pytest.raises(ValueError, match='SLOTS'):
    cell.init(jax.random.key(0), example(), method=forward)


def update(cell, tokens):
  s_BSD = cell.initial_states(B)
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
  with pytest.raises(ValueError, match="gate_config .*'both'"):
    shapes(gates.FixedGate, 'both')


def test_states_differ_by_their_identities_alone():
  """Without identities, states that begin equal would stay equal."""
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
