"""UT and GUT against the algorithms in plain arrays, and without early exit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import universal
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.universal import Universal
from meliad_rec.distributed import partition
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import Experts
from meliad_rec.metrics import metrics
from meliad_rec.metrics import totals
from meliad_rec.recurrence.halt import Halt
from meliad_rec.training.train_step import auxiliary
from tests import cells
from tests import plain_encoder
from tests.architectures import encoder_config
from tests.cells import assert_close
from tests.stepping import masked_loop

LENGTHS, T, STEPS = [6, 2, 0, 5], 6, 5

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
OFFICIAL = Halt(threshold=0.9, bias_init=-1.0)
PAPER = dataclasses.replace(
  OFFICIAL, keep_crossing=True, leftover=False, length_bound=False
)
ENDLESS = Halt(threshold=1 - 1e-9)
TRAINING = {'dropout': jax.random.key(3)}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


class MaskedUniversal(Universal):
  """Runs all steps, and stores the activations of each."""

  def loop(self, training):
    return masked_loop


def encoder(kind, make=Universal, changes=None, **options):
  together, transition, gated, causal = KINDS[kind]
  layer = EncoderLayer(encoder_config(causal, **(changes or {})), gated=gated)
  options = {'halt': OFFICIAL, 'steps': STEPS} | options
  halting = {'global_halt': together, 'transition': transition}
  return Encoder(make(layer, **halting, **options))


def example():
  """Rows of different lengths, one of them empty."""
  return cells.example(T, LENGTHS)


@functools.cache
def parameters(kind, halts=True):
  """Returns parameters with larger halting gates, so that units halt late."""
  made = encoder(kind, halt=OFFICIAL if halts else None)
  params = cells.parameters(made, example())
  if halts:
    gate = jax.tree.map(lambda a: 2 * a, params['encoder']['gate'])
    gate['last']['bias'] -= 1
    params['encoder']['gate'] = gate
  return params


def trained(made):
  """Returns a function that runs the cell as in training.

  It returns ponder cost, steps of each unit, and outputs.
  """

  def run(params, block):
    (_, y_BTD), sown = made.apply(
      {'params': params},
      block,
      method=cells.forward,
      rngs=TRAINING,
      mutable=['losses', 'depths'],
    )
    depths = jax.tree.leaves(sown.get('depths', {}))
    return (auxiliary(sown.get('losses', {})), depths), y_BTD

  return run


@functools.cache
def outcome(kind, make=Universal, halt=OFFICIAL, variant=None):
  options = {'halt': halt} | VARIANTS.get(variant, {})
  params = parameters(kind, options['halt'] is not None)
  run = trained(encoder(kind, make, **options))
  return cells.outcome(run, params, example())


@functools.cache
def algorithm(kind, halt=OFFICIAL):
  made = encoder(kind, halt=halt).encoder

  def plain(params, block):
    y_BTD, penalty_B, depth_BU = plain_encoder.universal(
      made, params['encoder'], block.x, block.mask
    )
    return (penalty_B.sum() / block.mask.any(1).sum(), [depth_BU]), y_BTD

  return cells.outcome(plain, parameters(kind), example(), compiled=False)


@pytest.mark.parametrize(
  'kind, halt',
  [
    ('ut', OFFICIAL),
    ('gut', OFFICIAL),
    slow('ut causal', OFFICIAL),
    # With a higher threshold, all rows would take all steps.
    slow('gut', dataclasses.replace(PAPER, threshold=0.4)),
    slow('gut causal', PAPER),
    slow('gut, each token', PAPER),
    slow('gut, no gate', OFFICIAL),
    slow('gut, state before', OFFICIAL),
  ],
)
def test_equals_the_algorithm(kind, halt):
  """Compares values, ponder cost, steps of each unit and all gradients."""
  assert_close(outcome(kind, halt=halt), algorithm(kind, halt))
  ((_, (depth_BU,)), _), _ = outcome(kind, halt=halt)
  # Units halt at different steps, and before the last, or nothing was shown.
  real = example().mask[:, : depth_BU.shape[1]]
  assert len(set(depth_BU[real].tolist())) > 1


BY_ROW = {'dropout': 0.3, 'attention_dropout': 0.3, 'dropout_by_row': True}
VARIANTS = {
  'dropout by row': {'changes': BY_ROW},
  'dropout of layers': {'layer_drop': 0.5},
  'no halting': {'halt': None},
}


@pytest.mark.parametrize(
  'variant',
  ['dropout by row', slow('dropout of layers'), slow('no halting')],
)
def test_early_exit_changes_nothing(variant):
  """Compares values and gradients, as vectors, to 1e-6 of their norm.

  Each array is also compared to 4e-6 of its largest number or of 1: sums that
  cancel are less exact in programs that are compiled as quickly as in tests.
  """
  found = outcome('gut', Universal, variant=variant)
  reference = outcome('gut', MaskedUniversal, variant=variant)
  for these, those in zip(found, reference, strict=True):
    assert_close(these, those, 4e-6)
    pairs = [*zip(*map(jax.tree.leaves, (these, those)), strict=True)]
    squares = lambda arrays: sum(np.sum(np.float64(a) ** 2) for a in arrays)
    error = squares(a - b for a, b in pairs)
    assert error <= 1e-6**2 * squares(b for _, b in pairs)
  assert np.abs(found[0][1] - outcome('gut')[0][1]).max() > 0.1


def test_steps_after_all_have_halted_change_nothing(monkeypatch):
  monkeypatch.setitem(VARIANTS, 'all steps', {'early_exit': False})
  assert_close(outcome('gut', variant='all steps'), outcome('gut'))


def evaluated(made, params, block=None, **options):
  """Returns outputs and metrics."""
  (_, y_BTD), sown = cells.apply(
    made, params, block or example(), mutable='metrics', **options
  )
  return y_BTD, metrics.collect(sown['metrics'])


@pytest.mark.parametrize('kind', [slow('ut'), 'gut', slow('gut causal')])
def test_inference_is_training_without_dropout(kind):
  """In 'compacted', few steps of a row are computed after it has halted."""
  ((_, (depth_BU,)), expected), _ = algorithm(kind)
  block, params = example(), parameters(kind)
  mask_BT, ran = block.mask, {}
  unit_BU, end, steps = plain_encoder.halted(
    encoder(kind).encoder, params['encoder'], block.x, mask_BT
  )
  means = {'halting_remainder': end[2][unit_BU].mean()}
  for l, (p_BU, active_BU) in enumerate(steps):
    if active_BU.any():
      means[f'halting_p_{l}'] = p_BU[active_BU].mean()
  assert len(means) > 3
  depths = np.asarray(depth_BU)[mask_BT[:, : depth_BU.shape[1]]]
  for name, made in {
    'masked': encoder(kind, MaskedUniversal),
    'while': encoder(kind),
    'compacted': encoder(kind, inference='compacted'),
    'all': encoder(kind, early_exit=False),
  }.items():
    y_BTD, seen = evaluated(made, params)
    assert_close(y_BTD[mask_BT], expected[mask_BT])
    mean = totals.over_steps([seen['halting_depth']])
    assert mean == pytest.approx(depths.mean())
    assert float(seen['halting_depth_max'].value) == depths.max()
    # Asked in step l are those that took all earlier steps.
    for l in range(STEPS):
      asked = float(seen[f'halting_p_{l}'].count)
      assert asked == (depths >= l).sum()
    found = {key: totals.over_steps([seen[key]]) for key in means}
    assert_close(found, means)
    # Of the three rows that hold any token.
    ran[name] = float(seen['halting_waste'].total)
    if kind == 'gut':
      assert float(seen['halting_waste'].count) == depths.sum()
  assert ran['masked'] == ran['all'] == 3 * STEPS
  # The step that is crossed in is computed too, if that is not known before.
  crossed = depths.max() + (kind != 'ut')
  assert ran['while'] == 3 * min(crossed, STEPS)
  # Of each row of a causal one, some token goes on to the last step.
  assert ran['compacted'] < ran['while'] or kind == 'gut causal'


@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_padding_is_seen_by_nothing(kind):
  """Neither its values nor its amount matter."""
  block, params = example(), parameters(kind)
  halt = dataclasses.replace(PAPER, threshold=1 - 1e-7)
  run = jax.jit(trained(encoder(kind, halt=halt)))
  (cost, _), y_BTD = run(params, block)
  junk = block.replace(x=block.x + 3 * ~block.mask[..., None])
  (other, _), other_BTD = run(params, junk)
  real = block.mask
  np.testing.assert_array_equal(y_BTD[real], other_BTD[real])
  np.testing.assert_array_equal(cost, other)
  # Row 1 by itself, without its padding.
  _, alone_BTD = run(params, jax.tree.map(lambda a: a[1:2, :2], block))
  assert_close(alone_BTD[0], y_BTD[1, :2])


def test_evaluation_may_go_deeper():
  made = encoder('gut causal', halt=ENDLESS, steps=3, eval_steps=5)
  for depth, rngs in (3, TRAINING), (5, {}):
    _, seen = evaluated(made, parameters('gut causal'), rngs=rngs)
    assert float(seen['halting_depth_max'].value) == depth


@pytest.mark.parametrize(
  'kind, bound, steps',
  [
    *(('gut', True, T + 1), ('gut', False, 30), ('ut', True, T + 1)),
    ('gut causal', True, 30),
  ],
)
def test_steps_are_at_most_the_tokens_and_one(kind, bound, steps):
  """Except where that would reveal how many tokens follow."""
  params = parameters(kind)['encoder']
  still = jax.tree.map(np.zeros_like, params['gate'])
  still['last']['bias'] -= 8.0
  halt = dataclasses.replace(ENDLESS, length_bound=bound)
  made = encoder(kind, halt=halt, steps=30)
  _, seen = evaluated(made, {'encoder': params | {'gate': still}})
  assert float(seen['halting_depth_max'].value) == steps
  # Nor are more than those reckoned with.
  assert f'halting_p_{steps - 1}' in seen and f'halting_p_{steps}' not in seen


@pytest.mark.parametrize('by_row', [False, True])
def test_rows_drop_alike_or_not(by_row):
  block = cells.example(T, [T] * 3)
  block.x[:] = block.x[:1]
  made = encoder('gut', changes=BY_ROW | {'dropout_by_row': by_row})
  _, y_BTD = jax.jit(trained(made))(parameters('gut'), block)
  for row in (1, 2):
    change = np.abs(y_BTD[row] - y_BTD[0]).max()
    assert change > 0.1 if by_row else change < 1e-5


def test_layers_are_left_out_in_training_alone():
  """Each step draws by itself; the backward pass repeats the draws."""
  block, params = example(), parameters('ut', halts=False)

  def outputs(make=Universal, steps=2):
    made = encoder('ut', make, layer_drop=0.5, halt=None, steps=steps)

    @jax.jit
    def call(rngs):
      apply = lambda x: made.apply(
        *({'params': params}, block.replace(x=x)),
        rngs=rngs,
        method=cells.forward,
      )[1]
      y_BTD, pull = jax.vjp(apply, block.x)
      return y_BTD, pull(jnp.cos(y_BTD))[0]

    return call

  draws = [{'dropout': jax.random.key(seed)} for seed in range(16)]
  either = outputs()
  found = [either(rngs)[0] for rngs in draws]
  kinds = [either({})[0], outputs(steps=1)({})[0], block.x]
  near = [[np.abs(y - a).max() < 1e-5 for a in kinds] for y in found]
  assert np.sum(near, 1).tolist() == [1] * 16
  assert np.any(near, 0).all()
  masked = outputs(MaskedUniversal)
  for rngs in draws[:4]:
    assert_close(either(rngs), masked(rngs))


@pytest.mark.parametrize('kind', ['ut', 'gut'])
def test_bfloat16_activations_halt_in_float32(kind, monkeypatch):
  """Sums in bfloat16 would never reach the threshold."""
  kept, loop = [], universal.while_loop

  def recorded(*arguments):
    state, added, ran_B = loop(*arguments)
    kept.extend(jax.tree.leaves((state.replace(h_BTD=None), added)))
    return state, added, ran_B

  monkeypatch.setattr(universal, 'while_loop', recorded)
  block = example()
  made = encoder(kind, changes={'dtype': 'bfloat16'})
  low = block.replace(x=jnp.asarray(block.x, 'bfloat16'))
  (cost, depths), y_BTD = jax.jit(trained(made))(parameters(kind), low)
  assert y_BTD.dtype == jnp.bfloat16
  assert {a.dtype.name for a in [cost, *depths, *kept]} == {'float32'}
  ((_, expected_depths), expected), _ = outcome(kind)
  np.testing.assert_array_equal(depths, expected_depths)
  error = np.abs(y_BTD.astype(np.float32) - expected)[block.mask]
  assert 0 < error.mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, shape, changes',
  [('ut', (1, 4, 2), {}), ('gut', (2, 2, 2), BY_ROW)],
)
def test_a_mesh_changes_nothing(kind, shape, changes):
  """With 16 rows, that end at different steps."""
  block = cells.example(T, np.repeat([T, 5, 1, 0], 4))
  run, params = trained(encoder(kind, changes=changes)), parameters(kind)
  expected = cells.outcome(run, params, block)
  mesh = partition.make_mesh(*shape)

  def place(path, a):
    path = partition.path_string(path).removeprefix('encoder/')
    spec = partition.param_spec(mesh, path, a.shape)
    return jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))

  params = jax.tree_util.tree_map_with_path(place, params)
  block = jax.device_put(block, partition.batch_sharding(mesh, 16))
  with jax.set_mesh(mesh):
    found = jax.device_get(cells.outcome(run, params, block))
  assert_close(found, jax.device_get(expected))


def test_only_halting_bears_the_warm_up():
  """Other losses are not scaled by it."""
  layer = EncoderLayer(encoder_config(), experts=Experts(4, 2))
  made = Encoder(Universal(layer, 2, False, False, OFFICIAL))
  params = cells.parameters(made, example())
  _, sown = cells.apply(
    made, params, example(), rngs=TRAINING, mutable='losses'
  )
  (losses,) = sown['losses'].values()
  assert set(losses) == {'halting', 'balance'}
  halting, balance = (
    auxiliary({name: losses[name]}) for name in ('halting', 'balance')
  )
  assert abs(float(halting)) > 1e-3 and abs(float(balance)) > 1e-5
  assert_close(auxiliary(losses, 0.25), 0.25 * halting + balance)
  assert_close(auxiliary(losses), halting + balance)


def test_experts_pay_for_being_used_unequally():
  """By the mean over routers, over the real tokens of all steps."""
  config = encoder_config(causal=False)
  layer = EncoderLayer(config, experts=Experts(4, 2, balance=0.03))
  made = Universal(layer, 2, True, False, None)
  h_BTD, mask_BT = example().x, example().mask
  params = cells.parameters(Encoder(made), example())['encoder']
  call = lambda module, params, *sown: jax.jit(
    functools.partial(module.apply, mutable=sown)
  )({'params': params}, h_BTD, mask_BT)
  _, found = call(made, params, 'losses', 'metrics')
  steps = []
  for _ in range(2):
    h_BTD, sown = call(layer, params['layer'], 'routes')
    steps.append(jax.tree.leaves(sown['routes']))
  values = []
  for routers in zip(*steps, strict=True):
    p_NE = np.concatenate([p_BTE[mask_BT] for p_BTE in routers])
    mean_E = p_NE.mean(0)
    entropy = -(p_NE * np.log(p_NE)).sum(1).mean()
    values.append(entropy + (mean_E * np.log(mean_E)).sum())
  assert len(values) == 2 and np.mean(values) < -1e-3
  loss = auxiliary(found['losses'])
  assert loss == pytest.approx(0.03 * np.mean(values), rel=1e-4)
  metric = metrics.collect(found['metrics'])['expert_imbalance']
  assert totals.over_steps([metric]) == pytest.approx(np.mean(values), rel=1e-4)
