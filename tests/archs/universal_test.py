"""UT and GUT against the algorithms in plain arrays; all loops agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.universal import INFERENCE
from meliad_rec.archs.universal import LOOPS
from meliad_rec.archs.universal import Universal
from meliad_rec.distributed import partition
from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.layers.experts import Experts
from meliad_rec.metrics import figures
from meliad_rec.recurrence.halt import Halt
from meliad_rec.training.train_step import auxiliary
from tests import plain_core
from tests.architectures import core_config
from tests.architectures import D
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
COLLECTIONS = ['losses', 'figures', 'pictures']


def core(kind, memory=False, changes=None, **options):
  together, transition, gated, causal = KINDS[kind]
  config = core_config(causal=causal, **(changes or {}))
  layer = CoreLayer(config, memory, gated)
  options = {'halt': OFFICIAL, 'steps': STEPS} | options
  return Universal(
    layer, global_halt=together, transition=transition, **options
  )


def example():
  """Rows of unlike lengths, one of them of no token."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.array([T, 2, 0, 5])[:, None]


def slots():
  rng = np.random.default_rng(2)
  return rng.normal(size=(B, S, D)).astype(np.float32)


@functools.cache
def parameters(kind, memory=False, halts=True):
  """Those of a new model, gates with strong opinions."""
  made = core(kind, memory, **({} if halts else {'halt': None}))
  inputs = *example(), *((slots(),) if memory else ())
  params = jax.jit(made.init)(jax.random.key(0), *inputs)['params']
  rng = np.random.default_rng(1)
  move = lambda a: np.asarray(a) + rng.normal(size=a.shape) * 0.6
  moved = {'gate': jax.tree.map(move, params['gate'])} if halts else {}
  return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params | moved)


def trained(made, params, *inputs, key=0):
  """Output, penalty and what is sown, as in training."""
  rngs = {'dropout': jax.random.key(key)}
  y_BTD, sown = made.apply(
    {'params': params}, *inputs, rngs=rngs, mutable=COLLECTIONS
  )
  return y_BTD, auxiliary(sown.get('losses', {})), sown


def with_gradients(run, params, *inputs, compiled=True):
  """What run(params, *inputs) gives, and gradients of a loss of it."""
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
def outcome(kind, loop, halt=OFFICIAL, memory=False):
  inputs = *example(), *((slots(),) if memory else ())
  made = core(kind, memory, halt=halt, loop=loop)
  params = parameters(kind, memory, halt is not None)
  return with_gradients(functools.partial(trained, made), params, *inputs)


@every
@pytest.mark.parametrize(
  'halt', [OFFICIAL, pytest.param(PAPER, marks=slow)], ids=['official', 'paper']
)
def test_equals_the_algorithm(kind, halt):
  """Values, penalty, steps of each unit, and all gradients."""

  def plain(params, x_BTD, mask_BT):
    y_BTD, penalty_B, depth_BU = plain_core.universal(
      core(kind, halt=halt), params, x_BTD, mask_BT
    )
    return y_BTD, penalty_B.sum() / mask_BT.any(1).sum(), depth_BU

  expected, gradients = with_gradients(
    plain, parameters(kind), *example(), compiled=False
  )
  (*found, sown), grads = outcome(kind, 'while', halt)
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


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize(
  ('kind', 'halt', 'memory'),
  [
    ('ut', OFFICIAL, False),
    pytest.param('gut', OFFICIAL, True, marks=slow),
    pytest.param('gut causal', PAPER, False, marks=slow),
    pytest.param('gut', None, False, marks=slow),
  ],
)
def test_all_loops_agree(kind, halt, memory, loop):
  """In values and gradients."""
  (*found, _), gradients = outcome(kind, loop, halt, memory)
  (*expected, _), reference = outcome(kind, 'masked', halt, memory)
  close_to_reference((found, gradients), (expected, reference))


@functools.cache
def trained_alone(kind, halt=OFFICIAL, **options):
  """As outcome, without gradients."""
  made = core(kind, halt=halt, **options)
  run = functools.partial(trained, made, parameters(kind))
  return jax.jit(run)(*example())


@every
@pytest.mark.parametrize('name', INFERENCE)
def test_inference_is_training_without_dropout(kind, name):
  expected, _, _ = trained_alone(kind)
  mask_BT = example()[1]
  made = core(kind, inference=name)
  y_BTD = jax.jit(made.apply)({'params': parameters(kind)}, *example())
  assert_close(y_BTD[mask_BT], expected[mask_BT])


def seen_figures(made, params, *inputs, rngs=None):
  apply = jax.jit(functools.partial(made.apply, mutable=['figures']))
  _, sown = apply({'params': params}, *inputs, rngs=rngs)
  return figures.collect(sown['figures'])


def test_figures_are_those_of_the_algorithm():
  """And compacted, each row is computed little longer than it goes on."""
  params, (x_BTD, mask_BT) = parameters('gut'), example()
  *_, depth_BU = jax.jit(functools.partial(plain_core.universal, core('gut')))(
    params, x_BTD, mask_BT
  )
  ran = {}
  for name in ('masked', 'while', 'compacted'):
    seen = seen_figures(core('gut', inference=name), params, x_BTD, mask_BT)
    assert figures.over_steps([seen['halting_depth']]) == depth_BU.sum() / 3
    assert float(seen['halting_depth_max'].value) == depth_BU.max()
    # Of the three rows that hold any token.
    assert float(seen['halting_waste'].count) == depth_BU.sum()
    ran[name] = float(seen['halting_waste'].total)
    assert float(seen['halting_p_0'].count) == 3
    assert 0 < figures.over_steps([seen['halting_left']]) < 1
  deepest = depth_BU.max()
  assert ran['masked'] == 3 * STEPS
  # The step that is crossed in is computed too, but there are no more.
  assert ran['while'] == 3 * min(deepest + 1, STEPS)
  assert ran['compacted'] < ran['while']


def test_halting_is_asked_of_those_that_go_on():
  """UT: p of step l over the tokens that took all steps before it."""
  params, inputs = parameters('ut'), example()
  made = core('ut', inference='masked')
  run = jax.jit(functools.partial(plain_core.universal, made))
  *_, depth_BT = run(params, *inputs)
  seen = seen_figures(made, params, *inputs)
  for l in range(STEPS):
    asked = (depth_BT[inputs[1]] >= l).sum()
    assert float(seen[f'halting_p_{l}'].count) == asked
  p_0 = figures.over_steps([seen['halting_p_0']])
  assert 0 < p_0 < 1


@pytest.mark.parametrize(
  'kind', ['ut', 'gut', pytest.param('gut causal', marks=slow)]
)
def test_padding_is_seen_by_nothing(kind):
  """Not what stands there, nor how much of it there is."""
  x_BTD, mask_BT = example()
  made = core(kind, halt=dataclasses.replace(PAPER, threshold=1 - 1e-7))
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
  made = core('gut causal', halt=halt, steps=3, eval_steps=5)
  depth = lambda rngs: float(
    seen_figures(made, parameters('gut causal'), *example(), rngs=rngs)[
      'halting_depth_max'
    ].value
  )
  assert depth({'dropout': jax.random.key(0)}) == 3
  assert depth({}) == 5


@pytest.mark.parametrize(
  'kind, steps', [('gut', T + 1), ('ut', T + 1), ('gut causal', 30)]
)
def test_steps_are_at_most_the_tokens_and_one(kind, steps):
  """But where that would tell tokens how many follow."""
  made = core(kind, halt=Halt(threshold=1 - 1e-9), steps=30)
  x_BTD, mask_BT = example()
  params = parameters(kind)
  still = params | {'gate': jax.tree.map(jnp.zeros_like, params['gate'])}
  still['gate']['last']['bias'] -= 8.0
  seen = seen_figures(made, still, x_BTD, mask_BT)
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
def dropped(name, loop):
  made = core('gut', loop=loop, **DROPOUT[name])
  run = functools.partial(trained, made, key=3)
  return with_gradients(run, parameters('gut'), *example())


@pytest.mark.parametrize('loop', [l for l in LOOPS if l != 'masked'])
@pytest.mark.parametrize('name', DROPOUT)
def test_dropout_is_the_same_in_the_backward_pass(name, loop):
  """Or gradients would not be those of 'masked'."""
  (*found, _), gradients = dropped(name, loop)
  (*expected, _), reference = dropped(name, 'masked')
  close_to_reference((found, gradients), (expected, reference))
  assert np.abs(found[0] - trained_alone('gut')[0]).max() > 0.1


@pytest.mark.parametrize('name', ['alike', 'by row'])
@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_rows_drop_alike_or_not(kind, name):
  x_BTD = np.repeat(example()[0][:1], B, 0)
  made = core(kind, **DROPOUT[name])
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
  """Each step by itself, and in the backward pass those of the forward pass."""
  x_BTD, mask_BT = example()
  params = parameters(kind, halts=False)

  def outputs(seed=None, loop='while', steps=2):
    made = core(kind, layer_drop=0.5, halt=None, steps=steps, loop=loop)
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
    jax.tree.map(assert_close, outputs(seed), outputs(seed, 'masked'))
  with pytest.raises(ValueError, match='layer_drop is 1.0; .* Set LAYER_DROP'):
    core(kind, layer_drop=1.0).init(jax.random.key(0), x_BTD, mask_BT)


def test_bfloat16_activations_halt_in_float32():
  """As they would in float32, whose sums a bfloat16 threshold never meets."""
  x_BTD, mask_BT = example()
  made = core('gut', changes={'dtype': 'bfloat16'})
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
  with pytest.raises(ValueError, match='set DEPTH and EVAL_DEPTH to 1 or more'):
    core('gut', **steps).init(jax.random.key(0), *example())


@pytest.mark.parametrize('name', ['loop', 'inference'])
def test_loops_have_names(name):
  with pytest.raises(ValueError, match=f"{name} is 'for'; it must be one of "):
    core('gut', **{name: 'for'}).init(jax.random.key(0), *example())
  if name == 'loop':
    with pytest.raises(ValueError, match="loop is 'compacted'"):
      core('gut', loop='compacted').init(jax.random.key(0), *example())


def uneven():
  """16 rows, of which the last hold no token, and those before them one."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(16, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.repeat([T, 5, 1, 0], 4)[:, None]


def on_mesh(kind, shape, **options):
  """Results and gradients over a mesh, of parameters cut as a run cuts them."""
  mesh = partition.make_mesh(*shape)
  place = lambda path, a: jax.device_put(
    a,
    jax.sharding.NamedSharding(
      mesh, partition.param_spec(mesh, partition.path_string(path), a.shape)
    ),
  )
  params = jax.tree_util.tree_map_with_path(place, parameters(kind))
  inputs = jax.device_put(uneven(), partition.batch_sharding(mesh, 16))
  run = functools.partial(trained, core(kind, **options))
  with jax.set_mesh(mesh):
    (*found, sown), gradients = with_gradients(run, params, *inputs)
  seen = figures.collect(sown['figures'])
  return jax.device_get((found, gradients)), float(seen['halting_waste'].total)


@functools.cache
def unsharded(kind, drops=None):
  run = functools.partial(trained, core(kind, **DROPOUT.get(drops, {})))
  (*found, sown), gradients = with_gradients(run, parameters(kind), *uneven())
  seen = figures.collect(sown['figures'])
  return (found, gradients), float(seen['halting_waste'].total)


@slow
@pytest.mark.parametrize(
  'shape, loop, drops',
  [
    *((shape, 'while', None) for shape in ((8, 1, 1), (2, 2, 2), (1, 4, 2))),
    *(((2, 2, 2), loop, None) for loop in LOOPS if loop != 'while'),
    ((2, 2, 2), 'while', 'by row'),
  ],
)
@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_each_device_of_a_mesh_may_end_by_itself(kind, shape, loop, drops):
  """With the same results; without it, all end with the slowest."""
  expected, ran = unsharded(kind, drops)
  options = {'loop': loop} | DROPOUT.get(drops, {})
  together, ran_together = on_mesh(kind, shape, **options)
  found, ran_apart = on_mesh(kind, shape, exit_per_device=True, **options)
  jax.tree.map(assert_close, together, expected)
  jax.tree.map(assert_close, found, expected)
  if loop in ('while', 'cond'):
    assert ran_apart < ran_together == ran
  else:
    assert ran_apart == ran_together == 12 * STEPS  # Of rows with any token.


def test_only_halting_bears_the_warm_up():
  """Of what a halting layer of experts sows."""
  layer = CoreLayer(core_config(), experts=Experts(4, 2))
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
