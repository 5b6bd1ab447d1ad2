"""The Block-Recurrent layer against a loop over blocks of plain equations."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.layers import gates
from meliad_rec.layers import positions
from meliad_rec.metrics import metrics
from tests import cells
from tests import plain_layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import H
from tests.architectures import K
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import example
from tests.plain_layer import attention
from tests.plain_layer import heads
from tests.plain_layer import linear
from tests.plain_layer import norm
from tests.plain_layer import unit

GATES = {'fixed': gates.FixedGate, 'lstm': gates.LSTMGate}


def layer(gate='fixed', gate_config='skip', **options):
  return BlockRecurrentLayer(config(), S, GATES[gate], gate_config, **options)


@functools.cache
def parameters(gate='fixed', gate_config='skip'):
  return cells.parameters(layer(gate, gate_config))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def query(p, x):
  return unit(heads(p['heads'], x)) * np.abs(p['scale'])[:, None]


def through_gate(p, kind, x, h):
  z = linear(p['z'], h)  # eq. 1 or 4
  if kind == 'fixed':
    g = sigmoid(p['gate'])  # eq. 2
    return x * g + z * (1 - g)  # eq. 3
  i = sigmoid(linear(p['i'], h) - 1)  # eq. 5
  f = sigmoid(linear(p['f'], h) + 1)  # eq. 6
  return x * f + np.tanh(z) * i  # eq. 7


def slow(p, gate, gate_config, block, sequential=False):
  """Computes section 3 of the paper, block by block, in float64."""
  x_BTD, mask_BT = block.x.astype(np.float64), block.mask
  t, s = p['tokens'], p['states']
  k_past = v_past = np.zeros((B, W, H, K))
  seen_past = np.zeros((B, W), bool)
  state = np.repeat(s['first'][None], B, 0)
  back_WX = np.arange(W)[:, None] + W - np.arange(2 * W)[None]
  near_WX = (back_WX >= 1) & (back_WX <= W)
  bucket_WX = positions.t5_bucket(np.clip(back_WX, 1, W), 32, 128)
  bias_HWX = t['attention']['position']['table'][:, bucket_WX]
  outputs = []
  for i in range(0, T, W):
    x, mask = x_BTD[:, i : i + W], mask_BT[:, i : i + W]
    a = t['attention']
    n = norm(a['norm'], x)
    k = np.concatenate([k_past, unit(heads(a['key'], n))], 1)
    v = np.concatenate([v_past, heads(a['value'], n)], 1)
    seen = np.concatenate([seen_past, mask], 1)
    # Vertical: tokens to their window, and to the states the block began with.
    m = s['attention']
    c = norm(m['norm'], state) + s['ids']
    k_state, v_state = unit(heads(m['key'], c)), heads(m['value'], c)
    near = near_WX & seen[:, None]
    own = attention(query(a['query'], n), k, v, near, bias_HWX)
    all_BWS = np.ones((B, W, S))
    if sequential:
      x = x + linear(a['output']['linear'], own)
      a = t['memory_attention']
      n = norm(a['norm'], x)
    read = attention(query(a['memory_query'], n), k_state, v_state, all_BWS)
    y = read if sequential else np.concatenate([own, read], -1)
    outputs.append(plain_layer.output(t | {'attention': a}, x, y))
    # Horizontal: states to themselves, and to the tokens of both blocks.
    all_BSS = np.ones((B, S, S))
    own = attention(query(m['query'], c), k_state, v_state, all_BSS)
    if sequential:
      state = through_gate(m['output'], gate, state, own)
      m = s['memory_attention']
      c = norm(m['norm'], state) + s['ids']
    seen_BSX = np.repeat(seen[:, None], S, 1)
    read = attention(query(m['memory_query'], c), k, v, seen_BSX)
    h = read if sequential else np.concatenate([own, read], -1)
    if gate_config == 'single':
      hidden = np.maximum(linear(s['mlp']['hidden'], h), 0)
      state = through_gate(s['mlp']['output'], gate, state, hidden)
    else:
      state = through_gate(m['output'], gate, state, h)
    if gate_config == 'dual':
      hidden = linear(s['mlp']['hidden'], norm(s['mlp_norm'], state))
      hidden = np.maximum(hidden, 0)
      state = through_gate(s['mlp']['output'], gate, state, hidden)
    k_past, v_past, seen_past = k[:, W:], v[:, W:], seen[:, W:]
  return state, np.concatenate(outputs, 1)


@pytest.mark.parametrize(
  'gate, gate_config',
  [('fixed', 'skip'), ('fixed', 'single'), ('lstm', 'dual')],
)
def test_is_the_papers_equations(gate, gate_config):
  """commands/import_meliad_test.py compares other pairs with meliad."""
  params, block = parameters(gate, gate_config), example()
  (_, state), y = cells.apply(layer(gate, gate_config), params, block)
  expected_state, expected = slow(params, gate, gate_config, block)
  assert_close(y[block.mask], expected[block.mask])
  assert_close(state, expected_state)


def test_attention_may_be_sequential_with_a_third_gate():
  cell, block = layer('lstm', 'dual', sequential=True), example()
  params = cells.parameters(cell)
  (_, state), y = cells.apply(cell, params, block)
  expected_state, expected = slow(params, 'lstm', 'dual', block, True)
  assert_close(y[block.mask], expected[block.mask])
  assert_close(state, expected_state)
  states = params['states']
  assert all(
    'f' in states[part]['output']
    for part in ('attention', 'memory_attention', 'mlp')
  )
  # The new modules have only what they use.
  assert set(states['memory_attention']) == {'memory_query', 'norm', 'output'}


def test_neither_hoist_nor_remat_change_anything():
  outcomes = [
    cells.outcome(layer(hoist=hoist, remat=remat), parameters(), example())
    for hoist, remat in ((True, 'full'), (False, 'none'))
  ]
  assert_close(*outcomes)


@functools.cache
def slots_by_hand():
  """Returns the state vectors before each block and after the last one."""

  @jax.jit
  def after(state, block):
    return layer().apply(
      {'params': parameters()}, state, block, method=cells.run
    )[0]

  state = layer().apply({'params': parameters()}, B, method='initial_state')
  slots = [state[1]]
  for begin in range(0, T, W):
    state = after(state, cells.part(example(), begin, begin + W))
    slots.append(state[1])
  return np.stack(slots, 1)


@pytest.mark.parametrize('hoist', [True, False])
def test_slots_are_measured_once_after_each_block(hoist):
  for tokens in W, T:
    block = cells.part(example(), 0, tokens)
    _, sown = layer(hoist=hoist, remat='full').apply(
      {'params': parameters()}, block, method=cells.forward, mutable='metrics'
    )
    found = metrics.collect(sown['metrics'])
    real_BN = block.mask.reshape(B, -1, W).any(2)
    s_BNSD = slots_by_hand()[:, : real_BN.shape[1] + 1]
    rms = lambda a, axes: np.sqrt((a**2).mean(axes))
    after, before = s_BNSD[:, 1:], s_BNSD[:, :-1]
    unit = after / rms(after, 3)[..., None]
    for name, value_BN in (
      ('state_change', (rms(after - before, 3) / rms(after, 3)).mean(2)),
      ('slot_difference', rms(unit - unit.mean(2, keepdims=True), (2, 3))),
    ):
      assert found[name].count == real_BN.sum()
      assert_close(found[name].total, value_BN[real_BN].sum())
    reading_BT = block.mask[:, -W:] if hoist else block.mask
    assert found['slot_entropy'].count == reading_BT.sum() * H


def test_gates_of_rows_of_padding_do_not_count():
  block, rows = cells.example(W, [W, 0, W - 1]), np.array([0, 2])

  def gate(block):
    _, sown = layer('lstm').apply(
      {'params': parameters('lstm')},
      block,
      method=cells.forward,
      mutable='metrics',
    )
    mean = metrics.collect(sown['metrics'])['gate']
    return mean.total / mean.count

  assert_close(gate(block), gate(jax.tree.map(lambda a: a[rows], block)))


def test_one_block_is_computed_again_too():
  block = cells.part(example(), 0, W)

  def products(remat):
    apply = functools.partial(layer(remat=remat).apply, method=cells.forward)
    gradient = jax.grad(lambda p: apply({'params': p}, block)[1].sum())
    return str(jax.make_jaxpr(gradient)(parameters())).count('= dot_general')

  assert products('full') > products('none')


def test_dropout_is_off_in_the_horizontal_direction():
  params = {'params': parameters('lstm', 'dual')}
  plain, past = layer('lstm', 'dual'), config().empty_past(B)
  wet = plain.clone(config=config(dropout=0.5))

  def update(cell):
    state = cell.initial_state(B)
    n_BSD, memory = cell.seen(state)
    return cell.states.update(state[1], n_BSD, memory, past.append(past))

  rngs = {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(
    jax.jit(lambda: wet.apply(params, method=update, rngs=rngs))(),
    jax.jit(lambda: plain.apply(params, method=update))(),
  )


@pytest.mark.parametrize('name', ['ids_stddev', 'states_stddev'])
def test_a_negative_deviation_is_refused(name):
  with pytest.raises(ValueError, match=f'{name} .* got -1'):
    cells.parameters(layer(**{name: -1.0}))


def test_states_begin_unlike_and_their_identities_more_so():
  states = cells.initial(layer().clone(slots=90))['states']
  np.testing.assert_allclose(np.std(states['ids'], 0), 1, atol=0.3)
  np.testing.assert_allclose(np.std(states['first'], 0), 0.1, atol=0.03)
