"""UT and GUT against the algorithms in plain arrays, and without early exit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.universal import INFERENCE_LOOPS
from meliad_rec.archs.universal import Universal
from meliad_rec.benchmarks.halting import MaskedUniversal
from meliad_rec.distributed import partition
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import Experts
from meliad_rec.metrics import metrics
from meliad_rec.metrics import totals
from meliad_rec.recurrence.halt import Halt
from meliad_rec.training.train_step import auxiliary
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.cells import assert_close

B, T, S, STEPS = 4, 6, 3, 5

# Whether tokens halt together, whether states behind the layer are asked too,
# whether the layer has a gate, and whether it is causal.
KINDS = {
  'ut': (False, False, False, False),
  'ut causal': (False, False, False, True),
  'gut': (True, True, True, False),
  'gut causal': (True, True, True, True),
  'gut, each token': (False, True, True, False),
  'gut, no gate': (True, True, False, False),
  'gut, state before': (True, False, True, False),
}
slow = pytest.mark.slow
every = pytest.mark.parametrize(
  'kind',
  [pytest.param(k, marks=[] if k in ('ut', 'gut') else slow) for k in KINDS],
)
OFFICIAL = Halt(threshold=0.9, bias_init=-1.0)
PAPER = dataclasses.replace(OFFICIAL, keep_crossing=True, leftover=False)
COLLECTIONS = ['losses', 'metrics', 'pictures']


def encoder(kind, memory=False, changes=None, make=Universal, **options):
  together, transition, gated, causal = KINDS[kind]
  config = encoder_config(causal=causal, **(changes or {}))
  layer = EncoderLayer(config, memory, gated)
  options = {'halt': OFFICIAL, 'steps': STEPS} | options
  return make(layer, global_halt=together, transition=transition, **options)


def example():
  """Rows of different lengths, one of them empty."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.array([T, 2, 0, 5])[:, None]


def slots():
  rng = np.random.default_rng(2)
  return rng.normal(size=(B, S, D)).astype(np.float32)


@functools.cache
def parameters(kind, memory=False, halts=True):
  """Returns initial parameters with larger weights in the gates."""
  made = encoder(kind, memory, **({} if halts else {'halt': None}))
  inputs = *example(), *((slots(),) if memory else ())
  params = jax.jit(made.init)(jax.random.key(0), *inputs)['params']
  rng = np.random.default_rng(1)
  move = lambda a: np.asarray(a) + rng.normal(size=a.shape) * 0.6
  moved = {'gate': jax.tree.map(move, params['gate'])} if halts else {}
  return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params | moved)


def trained(made, params, *inputs, key=0):
  """Returns output, ponder cost and sown values, as in training."""
  rngs = {'dropout': jax.random.key(key)}
  y_BTD, sown = made.apply(
    {'params': params}, *inputs, rngs=rngs, mutable=COLLECTIONS
  )
  return y_BTD, auxiliary(sown.get('losses', {})), sown


def with_gradients(run, params, *inputs, compiled=True):
  """Returns results of run(params, *inputs), and gradients of a loss."""
  mask_BT = inputs[1]

  def loss(params, x_BTD, *memory):
    y_BTD, cost, more = run(params, x_BTD, mask_BT, *memory)
    y_BTD = jnp.where(mask_BT[..., None], y_BTD, 0)
    return jnp.sum(jnp.sin(y_BTD)) + cost, (y_BTD, cost, more)

  floats = params, inputs[0], *inputs[2:]
  grad = jax.grad(loss, argnums=tuple(range(len(floats))), has_aux=True)
  gradients, results = (jax.jit(grad) if compiled else grad)(*floats)
  return results, gradients


@functools.cache
def outcome(kind, make=Universal, halt=OFFICIAL, memory=False):
  inputs = *example(), *((slots(),) if memory else ())
  made = encoder(kind, memory, make=make, halt=halt)
  params = parameters(kind, memory, halt is not None)
  return with_gradients(functools.partial(trained, made), params, *inputs)


@every
@pytest.mark.parametrize(
  'halt', [OFFICIAL, pytest.param(PAPER, marks=slow)], ids=['official', 'paper']
)
def test_equals_the_algorithm(kind, halt):
  """Compares values, ponder cost, steps of each unit and all gradients."""

  def plain(params, x_BTD, mask_BT):
    y_BTD, penalty_B, depth_BU = plain_encoder.universal(
      encoder(kind, halt=halt), params, x_BTD, mask_BT
    )
    return y_BTD, penalty_B.sum() / mask_BT.any(1).sum(), depth_BU

  expected, gradients = with_gradients(
    plain, parameters(kind), *example(), compiled=False
  )
  (*found, sown), grads = outcome(kind, halt=halt)
  jax.tree.map(assert_close, (found, grads), (list(expected[:2]), gradients))
  (depth_BU,) = sown['pictures']['depth']
  np.testing.assert_array_equal(depth_BU, expected[2])
  # Units halt at different steps, and before the last, or nothing was shown.
  real = example()[1][:, : depth_BU.shape[1]]
  assert len(set(depth_BU[real].tolist())) > 1


def close_to_reference(found, reference):
  """Values and gradients, to 1e-6 of the length of each.

  Each array to 4e-6 of its own largest number, or of 1: sums that cancel are
  less exact where programs are compiled as quickly as those of tests.
  """
  for these, those in zip(found, reference, strict=True):
    pairs = [*zip(*map(jax.tree.leaves, (these, those)), strict=True)]
    squares = lambda arrays: sum(np.sum(np.float64(a) ** 2) for a in arrays)
    error = squares(a - b for a, b in pairs)
    assert error <= 1e-6**2 * squares(b for _, b in pairs)
    for a, b in pairs:
      assert np.abs(a - b).max() <= 4e-6 * max(np.abs(b).max(), 1)


@pytest.mark.parametrize(
  ('kind', 'halt', 'memory'),
  [
    ('ut', OFFICIAL, False),
    pytest.param('gut', OFFICIAL, True, marks=slow),
    pytest.param('gut causal', PAPER, False, marks=slow),
    pytest.param('gut', None, False, marks=slow),
  ],
)
def test_early_exit_changes_nothing(kind, halt, memory):
  """Compares values and gradients."""
  (*found, _), gradients = outcome(kind, Universal, halt, memory)
  (*expected, _), reference = outcome(kind, MaskedUniversal, halt, memory)
  close_to_reference((found, gradients), (expected, reference))


@functools.cache
def trained_alone(kind, halt=OFFICIAL, **options):
  """Returns results without gradients."""
  made = encoder(kind, halt=halt, **options)
  run = functools.partial(trained, made, parameters(kind))
  return jax.jit(run)(*example())


@every
@pytest.mark.parametrize('name', INFERENCE_LOOPS)
def test_inference_is_training_without_dropout(kind, name):
  expected, _, _ = trained_alone(kind)
  mask_BT = example()[1]
  made = encoder(kind, inference=name)
  y_BTD = jax.jit(made.apply)({'params': parameters(kind)}, *example())
  assert_close(y_BTD[mask_BT], expected[mask_BT])


def seen_metrics(made, params, *inputs, rngs=None):
  apply = jax.jit(functools.partial(made.apply, mutable=['metrics']))
  _, sown = apply({'params': params}, *inputs, rngs=rngs)
  return metrics.collect(sown['metrics'])


def test_metrics_are_those_of_the_algorithm():
  """And compacted, each row is computed little longer than it goes on."""
  params, (x_BTD, mask_BT) = parameters('gut'), example()
  *_, depth_BU = jax.jit(
    functools.partial(plain_encoder.universal, encoder('gut'))
  )(params, x_BTD, mask_BT)
  ran = {}
  for name, made in {
    'masked': encoder('gut', make=MaskedUniversal),
    'while': encoder('gut'),
    'compacted': encoder('gut', inference='compacted'),
  }.items():
    seen = seen_metrics(made, params, x_BTD, mask_BT)
    assert totals.over_steps([seen['halting_depth']]) == depth_BU.sum() / 3
    assert float(seen['halting_depth_max'].value) == depth_BU.max()
    # Of the three rows that hold any token.
    assert float(seen['halting_waste'].count) == depth_BU.sum()
    ran[name] = float(seen['halting_waste'].total)
    assert float(seen['halting_p_0'].count) == 3
    assert 0 < totals.over_steps([seen['halting_left']]) < 1
  deepest = depth_BU.max()
  assert ran['masked'] == 3 * STEPS
  # The step that is crossed in is computed too, but there are no more.
  assert ran['while'] == 3 * min(deepest + 1, STEPS)
  assert ran['compacted'] < ran['while']


def test_halting_is_asked_of_those_that_go_on():
  """UT: p of step l counts the tokens that took all earlier steps."""
  params, inputs = parameters('ut'), example()
  made = encoder('ut', make=MaskedUniversal)
  run = jax.jit(functools.partial(plain_encoder.universal, made))
  *_, depth_BT = run(params, *inputs)
  seen = seen_metrics(made, params, *inputs)
  for l in range(STEPS):
    asked = (depth_BT[inputs[1]] >= l).sum()
    assert float(seen[f'halting_p_{l}'].count) == asked
  p_0 = totals.over_steps([seen['halting_p_0']])
  assert 0 < p_0 < 1


@pytest.mark.parametrize(
  'kind', ['ut', 'gut', pytest.param('gut causal', marks=slow)]
)
def test_padding_is_seen_by_nothing(kind):
  """Neither its values nor its amount matter."""
  x_BTD, mask_BT = example()
  made = encoder(kind, halt=dataclasses.replace(PAPER, threshold=1 - 1e-7))
  apply = jax.jit(functools.partial(trained, made, parameters(kind)))
  y_BTD, cost, _ = apply(x_BTD, mask_BT)
  junk_BTD = x_BTD + 3 * ~mask_BT[..., None]
  other_BTD, other, _ = apply(junk_BTD, mask_BT)
  np.testing.assert_array_equal(y_BTD[mask_BT], other_BTD[mask_BT])
  np.testing.assert_array_equal(cost, other)
  # Row 1 by itself, without its padding.
  alone_BTD, _, _ = apply(x_BTD[1:2, :2], mask_BT[1:2, :2])
  assert_close(alone_BTD[0], y_BTD[1, :2])


def test_evaluation_may_go_deeper():
  halt = Halt(threshold=1 - 1e-9)
  made = encoder('gut causal', halt=halt, steps=3, eval_steps=5)
  depth = lambda rngs: float(
    seen_metrics(made, parameters('gut causal'), *example(), rngs=rngs)[
      'halting_depth_max'
    ].value
  )
  assert depth({'dropout': jax.random.key(0)}) == 3
  assert depth({}) == 5


@pytest.mark.parametrize(
  'kind, steps', [('gut', T + 1), ('ut', T + 1), ('gut causal', 30)]
)
def test_steps_are_at_most_the_tokens_and_one(kind, steps):
  """Except where that would reveal how many tokens follow."""
  made = encoder(kind, halt=Halt(threshold=1 - 1e-9), steps=30)
  x_BTD, mask_BT = example()
  params = parameters(kind)
  still = params | {'gate': jax.tree.map(jnp.zeros_like, params['gate'])}
  still['gate']['last']['bias'] -= 8.0
  seen = seen_metrics(made, still, x_BTD, mask_BT)
  assert float(seen['halting_depth_max'].value) == steps
  # Nor are more than those reckoned with.
  assert f'halting_p_{steps - 1}' in seen and f'halting_p_{steps}' not in seen


DROPOUT = {
  'alike': {'changes': {'dropout': 0.3, 'attention_dropout': 0.3}},
  'by row': {
    'changes': {
      'dropout': 0.3,
      'attention_dropout': 0.3,
      'dropout_by_row': True,
    }
  },
  'of layers': {'layer_drop': 0.5},
}


@functools.cache
def dropped(name, make):
  made = encoder('gut', make=make, **DROPOUT[name])
  run = functools.partial(trained, made, key=3)
  return with_gradients(run, parameters('gut'), *example())


@pytest.mark.parametrize('name', DROPOUT)
def test_dropout_is_the_same_in_the_backward_pass(name):
  (*found, _), gradients = dropped(name, Universal)
  (*expected, _), reference = dropped(name, MaskedUniversal)
  close_to_reference((found, gradients), (expected, reference))
  assert np.abs(found[0] - trained_alone('gut')[0]).max() > 0.1


@pytest.mark.parametrize('name', ['alike', 'by row'])
@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_rows_drop_alike_or_not(kind, name):
  x_BTD = np.repeat(example()[0][:1], B, 0)
  made = encoder(kind, **DROPOUT[name])
  apply = jax.jit(functools.partial(trained, made, parameters(kind)))
  y_BTD, _, _ = apply(x_BTD, np.ones((B, T), bool))
  for row in range(1, B):
    change = np.abs(y_BTD[row] - y_BTD[0]).max()
    assert (change > 0.1) == (name == 'by row')
    assert change < 1e-5 or name == 'by row'


@pytest.mark.parametrize(
  'kind', ['ut', pytest.param('gut', marks=pytest.mark.slow)]
)
def test_layers_are_left_out_in_training_alone(kind):
  """Each step draws by itself; the backward pass repeats the draws."""
  x_BTD, mask_BT = example()
  params = parameters(kind, halts=False)

  def outputs(seed=None, make=Universal, steps=2):
    made = encoder(kind, layer_drop=0.5, halt=None, steps=steps, make=make)
    rngs = {} if seed is None else {'dropout': jax.random.key(seed)}
    apply = lambda x: made.apply({'params': params}, x, mask_BT, rngs=rngs)
    y_BTD, pull = jax.vjp(apply, x_BTD)
    return y_BTD, pull(jnp.cos(y_BTD))[0]

  whole, _ = outputs()
  once, _ = outputs(steps=1)
  found = [outputs(seed)[0] for seed in range(16)]
  kinds = [whole, once, x_BTD]
  near = [[np.abs(y - a).max() < 1e-5 for a in kinds] for y in found]
  assert np.sum(near, 1).tolist() == [1] * 16
  assert np.any(near, 0).all()
  for seed in range(4):
    jax.tree.map(assert_close, outputs(seed), outputs(seed, MaskedUniversal))
  with pytest.raises(ValueError, match='LAYER_DROP'):
    encoder(kind, layer_drop=1.0).init(jax.random.key(0), x_BTD, mask_BT)


def test_bfloat16_activations_halt_in_float32():
  """Sums in bfloat16 would never reach the threshold."""
  x_BTD, mask_BT = example()
  made = encoder('gut', changes={'dtype': 'bfloat16'})
  apply = jax.jit(functools.partial(trained, made))
  y_BTD, _, sown = apply(parameters('gut'), x_BTD.astype('bfloat16'), mask_BT)
  expected, _, wide = trained_alone('gut')
  assert y_BTD.dtype == jnp.bfloat16
  assert {a.dtype for a in jax.tree.leaves(sown)} == {jnp.dtype('float32')}
  (depth_BU,), (wide_BU,) = sown['pictures']['depth'], wide['pictures']['depth']
  np.testing.assert_array_equal(depth_BU, wide_BU)
  error = np.abs(y_BTD.astype(np.float32) - expected)[mask_BT]
  assert 0 < error.mean() < 0.02


@pytest.mark.parametrize('steps', [{'steps': 0}, {'eval_steps': 0}])
def test_steps_are_needed(steps):
  with pytest.raises(ValueError, match='Set DEPTH and EVAL_DEPTH'):
    encoder('gut', **steps).init(jax.random.key(0), *example())


def test_inference_loops_have_names():
  with pytest.raises(ValueError, match='Universal.inference'):
    encoder('gut', inference='for').init(jax.random.key(0), *example())


def uneven():
  """16 rows with 6, 5, 1 and 0 tokens."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(16, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.repeat([T, 5, 1, 0], 4)[:, None]


def on_mesh(kind, shape, **options):
  """Returns results and gradients on a mesh, with sharded parameters."""
  mesh = partition.make_mesh(*shape)
  place = lambda path, a: jax.device_put(
    a,
    jax.sharding.NamedSharding(
      mesh, partition.param_spec(mesh, partition.path_string(path), a.shape)
    ),
  )
  params = jax.tree_util.tree_map_with_path(place, parameters(kind))
  inputs = jax.device_put(uneven(), partition.batch_sharding(mesh, 16))
  run = functools.partial(trained, encoder(kind, **options))
  with jax.set_mesh(mesh):
    (*found, sown), gradients = with_gradients(run, params, *inputs)
  seen = metrics.collect(sown['metrics'])
  return jax.device_get((found, gradients)), float(seen['halting_waste'].total)


@functools.cache
def unsharded(kind, drops=None):
  run = functools.partial(trained, encoder(kind, **DROPOUT.get(drops, {})))
  (*found, sown), gradients = with_gradients(run, parameters(kind), *uneven())
  seen = metrics.collect(sown['metrics'])
  return (found, gradients), float(seen['halting_waste'].total)


@slow
@pytest.mark.parametrize(
  'shape, drops',
  [((8, 1, 1), None), ((1, 4, 2), None), ((2, 2, 2), 'by row')],
)
@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_a_mesh_changes_nothing(kind, shape, drops):
  expected, ran = unsharded(kind, drops)
  found, ran_sharded = on_mesh(kind, shape, **DROPOUT.get(drops, {}))
  jax.tree.map(assert_close, found, expected)
  assert ran_sharded == ran


def test_only_halting_bears_the_warm_up():
  """Other losses are not scaled by it."""
  layer = EncoderLayer(encoder_config(), experts=Experts(4, 2))
  made = Universal(layer, 2, global_halt=False, transition=False, halt=OFFICIAL)
  params = made.init(jax.random.key(0), *example())['params']
  _, whole, sown = trained(made, params, *example())
  halting, balance = (
    auxiliary({name: sown['losses'][name]}) for name in ('halting', 'balance')
  )
  assert set(sown['losses']) == {'halting', 'balance'}
  assert abs(float(halting)) > 1e-3 and abs(float(balance)) > 1e-5
  assert_close(auxiliary(sown['losses'], 0.25), 0.25 * halting + balance)
  assert_close(whole, halting + balance)
