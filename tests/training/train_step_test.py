"""One training step against a slow and obvious form of it (law 8).

Then steps compiled over many devices.
"""

import dataclasses
import functools
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_rec.data.batch import Batch
from meliad_rec.data.lanes import Lanes
from meliad_rec.metrics import losses
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import eval_step
from meliad_rec.storage.checksums import digest
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.train_step import auxiliary
from meliad_rec.training.train_step import create_state
from meliad_rec.training.train_step import train_step
from tests import architectures as tiny
from tests import tiny_run
from tests.counting import Counting

B, T, V = tiny.B, tiny.T, tiny.V
RATE = 0.05


def language_model(dropout=0.0):
  cell = tiny.recurrent(1, (0,), changes={'dropout': dropout})
  return Model(V, cell, tiny.D)


def batch(number) -> Batch:
  """Returns a batch from a formula, equal with every version of NumPy."""
  ids_BT = (7 * np.arange(B)[:, None] + 3 * np.arange(T) + 5 * number) ** 2 % 30
  ids_BT = ids_BT.astype(np.int32) + 1
  mask_BT = np.arange(T) < T - 4 * np.arange(B)[:, None]
  return Batch(
    tokens_BT=np.roll(ids_BT, 1, 1),
    targets_BT=ids_BT,
    mask_BT=mask_BT,
    scored_BT=mask_BT,
    start_B=np.arange(B) == number,
    document_B=np.arange(B, dtype=np.int32),
    offset_B=np.zeros(B, np.int32),
  )


@functools.cache
def compiled(changes=False):
  """Returns the initial state and the step of Adafactor, constant rate.

  Args:
    changes: adds dropout, an average of the weights, and accumulation.
  """
  model = language_model(0.3 if changes else 0.0)
  chained = optimizer.chain(
    optimizer.adafactor, schedules.constant(RATE), every=1 + changes
  )
  make = functools.partial(create_state, model, chained, 3, B, T, ema=changes)
  step = functools.partial(
    train_step, model, chained, losses.objective, 0.5 if changes else None, 0
  )
  return jax.jit(make)(), jax.jit(step)


def nats_by_hand(logits_BTV, targets_BT):
  """Computes the cross-entropy by its definition, in float64."""
  exp_BTV = np.exp(np.asarray(logits_BTV, np.float64))
  p_BTV = exp_BTV / exp_BTV.sum(-1, keepdims=True)
  return -np.log(np.take_along_axis(p_BTV, targets_BT[..., None], -1)[..., 0])


@functools.cache
def by_hand():
  """Returns nats_BT of two steps and the parameters; updates in float64 NumPy.

  Adafactor without factoring (no axis has 128 places): Shazeer and Stern 2018,
  algorithm 4, and momentum.
  """
  model, nats = language_model(), []
  state, _ = compiled()
  carry = state.carry
  params, tree = jax.tree.flatten(state.params)
  moments, second = [0.0] * len(params), [0.0] * len(params)
  rms = lambda a: np.sqrt((a**2).mean())

  @jax.jit
  def gradients(params, carry, batch):
    def loss(params):
      read = batch.tokens_BT, batch.start_B, batch.mask_BT
      after, logits_BTV = model.apply({'params': params}, carry, *read)
      nats_BT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV, batch.targets_BT
      )
      mean = (nats_BT * batch.mask_BT).sum() / batch.mask_BT.sum()
      return mean, (after, logits_BTV)

    return jax.grad(loss, has_aux=True)(params)

  for step in (0, 1):
    read = batch(step)
    grads, (carry, logits_BTV) = gradients(
      jax.tree.unflatten(tree, params), carry, read
    )
    nats.append(nats_by_hand(logits_BTV, read.targets_BT))
    decay = 1 - (step + 1) ** -0.8
    for i, g in enumerate(jax.tree.leaves(grads)):
      p, g = np.asarray(params[i], np.float64), np.asarray(g, np.float64)
      second[i] = decay * second[i] + (1 - decay) * (g**2 + 1e-30)
      u = g / np.sqrt(second[i])
      move = RATE * max(rms(p), 1e-3) * u / max(1, rms(u))
      moments[i] = 0.9 * moments[i] + 0.1 * move
      params[i] = np.float32(p - moments[i])
  return nats, jax.tree.unflatten(tree, params)


def means(nats):
  """Returns the mean over the tokens of each step."""
  return [nats_BT[batch(i).mask_BT].mean() for i, nats_BT in enumerate(nats)]


def test_two_steps_equal_their_slow_form():
  """Law 8. The second step continues from the carry of the first."""
  state, step = compiled()
  nats, params = by_hand()
  for number, mean in enumerate(means(nats)):
    state, sums = step(state, batch(number))
    assert int(sums.tokens) == batch(number).mask_BT.sum()
    assert int(sums.padding) == (~batch(number).mask_BT).sum()
    assert float(sums.nats) / int(sums.tokens) == pytest.approx(mean, rel=1e-5)
  assert int(state.step) == 2
  # The sign of a gradient as small as its rounding error is random.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
    jax.device_get(state.params),
    params,
  )


def test_golden_step():
  """Values of `by_hand`, printed once; a change of the model shows here."""
  nats, params = by_hand()
  size = sum(float((np.float64(p) ** 2).sum()) for p in jax.tree.leaves(params))
  assert means(nats) == pytest.approx([4.115589, 3.973748], rel=1e-4)
  assert size == pytest.approx(1328.444, rel=1e-4)


def thirds(read):
  """Yields the batch with every third target scored, and with the others."""
  third_T = np.arange(T) % 3 == 0
  for scored_T in third_T, ~third_T:
    yield read.replace(scored_BT=read.mask_BT & scored_T)


class Toll(Cell):
  """State: nothing. Returns its input; its loss is toll * sum of w^2."""

  toll: float = 0.0
  called: str = 'toll'

  @nn.compact
  def __call__(self, state, block):
    w = self.param('w', nn.initializers.constant(3.0), (5,))
    if self.toll:
      self.sow('losses', self.called, self.toll * w**2)
    return state, block.x

  def initial_state(self, batch):
    return np.zeros((batch, 1), np.float32)


@functools.cache
def toll_step(toll, warmup, called):
  """Returns the initial state and the step of a model with one Toll.

  Its updates are the gradients, and its optimizer's state is their weight.
  """
  through = types.SimpleNamespace(
    init=lambda params: jnp.int32(0),
    update=lambda g, state, params, tokens: (g, tokens),
  )
  model = Model(V, Toll(toll, called), tiny.D)
  step = functools.partial(
    train_step, model, through, losses.objective, None, warmup
  )
  make = functools.partial(create_state, model, through, 3, B, T, ema=False)
  return jax.jit(make)(), jax.jit(step)


def gradients(read, toll=0.0, warmup=0, at=0, called='toll'):
  """Returns the gradients and the sums of step `at` of a model with a Toll."""
  state, step = toll_step(toll, warmup, called)
  after, sums = step(state.replace(step=state.step + at), read)
  moved = jax.tree.map(lambda a, b: a - b, after.params, state.params)
  assert after.opt_state == sums.scored
  return jax.device_get(moved), sums


def test_the_gradient_is_of_the_mean_over_scored_tokens():
  """Others are read, but not counted."""
  (a, sums_a), (b, sums_b) = (gradients(each) for each in thirds(batch(0)))
  both, sums = gradients(batch(0))
  for name in 'nats', 'correct', 'scored':
    added = float(getattr(sums_a, name)) + float(getattr(sums_b, name))
    assert added == pytest.approx(float(getattr(sums, name)), rel=1e-6), name
  assert 0 < sums_a.scored < sums_a.tokens == sums.tokens == sums.scored
  close = functools.partial(np.testing.assert_allclose, atol=1e-4)
  jax.tree.map(
    lambda a, b, both: close(
      a * sums_a.scored + b * sums_b.scored, both * sums.scored
    ),
    *(a, b, both),
  )
  some = next(thirds(batch(0)))
  junk = some.replace(targets_BT=np.where(some.scored_BT, some.targets_BT, 0))
  exact = functools.partial(np.testing.assert_allclose, atol=1e-6)
  jax.tree.map(exact, gradients(junk)[0], a)
  assert np.abs(a['embed']['embedding']).max() > 0.1 / sums_a.scored


def test_spans_are_clipped_after_each_step():
  state, _ = toll_step(0.0, 0, 'toll')
  spans = lambda *z: {'span': {'ratio': jnp.array(z)}}
  through = types.SimpleNamespace(update=lambda g, state, *_: (g, state))
  state = state.replace(params=spans(0.5, 0.5, 0.25))
  after = state.updated(spans(2.0, -2.0, 0.5), through, 1, state.carry, None)
  np.testing.assert_array_equal(after.params['span']['ratio'], [1, 0, 0.75])


def test_a_step_without_scored_tokens_has_no_gradient():
  read = batch(0).replace(scored_BT=np.zeros((B, T), bool))
  moved, sums = gradients(read)
  assert (sums.nats, sums.scored, sums.gradient_norm) == (0, 0, 0)
  assert not any(leaf.any() for leaf in jax.tree.leaves(moved))


def assert_taxed(taxed, plain, weight=1):
  """The gradient of a toll of 0.25 reaches the cell's parameter alone."""
  expected = np.full(5, weight * 0.25 * 2 * 3)
  np.testing.assert_allclose(taxed['cell']['w'], expected, rtol=1e-5)
  tables = (each['embed']['embedding'] for each in (taxed, plain))
  np.testing.assert_array_equal(*tables)


def test_sown_losses_are_minimized_but_not_reported():
  plain, sums = gradients(batch(0))
  taxed, same = gradients(batch(0), toll=0.25)
  assert float(sums.nats) == float(same.nats)
  assert not plain['cell']['w'].any()
  assert_taxed(taxed, plain)


def test_the_halting_loss_alone_has_a_warm_up():
  plain, _ = gradients(batch(0))
  for at, weight in {0: 0.2, 3: 0.8, 4: 1, 9: 1}.items():
    taxed, _ = gradients(batch(0), 0.25, warmup=5, at=at, called='halting')
    assert_taxed(taxed, plain, weight)
  sown = {'a': {'halting': (5.0,), 'balance': (2.0,)}, 'halting': {'x': 7.0}}
  assert auxiliary(sown, 0.2) == 1 + 2 + 7
  with pytest.raises(ValueError, match='HALT_WARMUP is 5'):
    gradients(batch(0), warmup=5)


def test_means_of_rows_are_over_the_whole_scan():
  """A plain loss is summed. One of the two chunks has an empty row."""

  def total(w):
    # Means 15 / 5, (1 + 1) / (1 + 1), and an empty row.
    total_B = w * jnp.array([[0.0, 1.0, 0.0], [15.0, 1.0, 0.0]])
    count_B = jnp.array([[0.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    sown = {
      'a': {'mean': (losses.RowMeans(total_B / 4, count_B / 4),)},
      'b': {'parts': (w * jnp.array([1.0, 2.0]), w)},
    }
    return auxiliary(sown)

  assert jax.value_and_grad(total)(2.0) == (2 * 2 + 3 * 2 + 2, 2 + 3 + 1)
  zero = losses.RowMeans(jnp.zeros(2), jnp.zeros(2))
  nothing, gradient = jax.value_and_grad(lambda r: auxiliary({'x': (r,)}))(zero)
  assert nothing == 0 and np.isfinite(gradient.total_B).all()
  assert auxiliary({}) == 0


def test_gradients_are_accumulated_and_averages_follow():
  """In two steps the parameters change once, and their average twice."""
  start, step = compiled(changes=True)
  first, _ = step(start, batch(0))
  second, _ = step(first, batch(1))
  params = [jax.device_get(s.params) for s in (start, first, second)]
  equal = lambda a, b, **by: jax.tree.map(
    functools.partial(np.testing.assert_allclose, **by), a, b
  )
  equal(params[0], params[1], rtol=0)
  tables = [p['embed']['embedding'] for p in params]
  assert np.abs(tables[2] - tables[1]).max() > 1e-4
  # Step 1 keeps (1 + 1) / (10 + 1) = 2 / 11 of the average.
  average = jax.tree.map(
    lambda a, b: 2 / 11 * a + 9 / 11 * b, params[1], params[2]
  )
  equal(jax.device_get(second.ema), average, atol=1e-6)


def test_dropout_depends_on_the_seed_and_the_step():
  state, step = compiled(changes=True)
  loss = lambda state: float(step(state, batch(0))[1].nats)
  assert loss(state) == loss(state)
  assert loss(state) != loss(state.replace(step=state.step + 1))
  assert loss(state) != loss(state.replace(rng=state.rng + 1))


def test_evaluation_gives_each_token_and_has_no_dropout():
  state, _ = compiled(changes=True)
  step = functools.partial(eval_step, language_model(dropout=0.3))
  carry, sums, scores = jax.jit(step)(state.params, state.carry, batch(0))
  found = np.asarray(scores.nats_BT)[batch(0).mask_BT]
  expected = by_hand()[0][0][batch(0).mask_BT]
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  assert float(sums.nats) == pytest.approx(expected.sum(), rel=1e-5)
  assert jax.tree.structure(carry) == jax.tree.structure(state.carry)


def lanes(program, data):
  documents = data.documents('train')
  return Lanes(documents, program.rows, program.segment, seed=0)


def test_the_state_is_donated_and_keeps_shapes_and_shardings(data):
  program = tiny_run.program()
  state = program.create(1)
  facts = lambda a: (a.shape, a.dtype, a.sharding)
  wanted = jax.tree.map(facts, program.shapes)
  assert jax.tree.map(facts, state) == wanted
  batch, _ = next(lanes(program, data))
  after, _ = program.train_step(state, program.put(batch, program.rows))
  for part in state.carry, state.params:
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(part))
  assert jax.tree.map(facts, after) == wanted


def test_a_seed_gives_the_same_state():
  program = tiny_run.program()
  assert digest(program.create(1)) == digest(program.create(1))
  assert digest(program.create(1).params) != digest(program.create(2).params)
  assert digest(program.create(2**32 - 1)) != digest(program.create(2**31 - 1))


def test_rows_must_divide_over_the_devices():
  program = tiny_run.program(8, rows=12)
  with pytest.raises(ValueError, match='12'):
    _ = program.shapes


class Blocks(Counting):
  """Reads blocks, in a scan over them."""

  @property
  def block_length(self):
    return tiny.W


@pytest.mark.parametrize(
  'remat, shape', [('none', (8, 2, 2)), ('full', (1, 1, 1))]
)
def test_sown_metrics_count_all_rows_on_every_device(data, remat, shape):
  """In a scan over blocks, in training and in evaluation."""
  program = tiny_run.program(*shape, rows=8)
  model = program.model.clone(cell=Blocks(remat=remat))
  program = dataclasses.replace(program, model=model)
  batch, _ = next(lanes(program, data))
  depth_BT = batch.mask_BT * (1 + np.arange(program.segment) % tiny.W)
  put = program.put(batch, 8)
  state = program.create(1)
  _, evaluated, _ = program.eval_step(
    state.params, program.empty_carry(state.params, 8), put
  )
  _, trained = program.train_step(state, put)
  for sums in evaluated, trained:
    assert all(a.is_fully_replicated for a in jax.tree.leaves(sums.sown))
    mean, peak = sums.sown['halting_depth'], sums.sown['halting_depth_max']
    assert (mean.total, mean.count) == (depth_BT.sum(), batch.mask_BT.sum())
    assert peak.value == depth_BT.max()


@pytest.mark.slow
def test_a_sharded_run_equals_one_on_one_device(data):
  """Two steps, including optimizer and average."""
  carries, nats = [], []
  for program in tiny_run.program(rows=8), tiny_run.program(8, 2, 2):
    state, batches = program.create(1), lanes(program, data)
    for _ in range(2):
      batch = program.put(next(batches)[0], 8)
      state, sums = program.train_step(state, batch)
      nats.append(float(sums.nats))
    carries.append(jax.device_get(state.carry))
  np.testing.assert_allclose(nats[2:], nats[:2], rtol=1e-5)
  # Adam's initial updates are signs of gradients, even of those near 0.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *carries
  )
