"""One training step against a slow and obvious form of it (law 8)."""

import functools
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_rec.data.batch import Batch
from meliad_rec.metrics import losses
from meliad_rec.metrics import metrics
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import eval_step
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.train_step import auxiliary
from meliad_rec.training.train_step import create_state
from meliad_rec.training.train_step import train_step
from tests import architectures as tiny

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
def compiled(ema_decay=None, every=1, dropout=0.0):
  """Returns the initial state and the step of Adafactor, constant rate."""
  model = language_model(dropout)
  chained = optimizer.chain(
    optimizer.adafactor, schedules.constant(RATE), every=every
  )
  make = functools.partial(
    create_state, model, chained, 3, B, T, ema=ema_decay is not None
  )
  step = functools.partial(
    train_step, model, chained, losses.objective, ema_decay, 0
  )
  return jax.jit(make)(), jax.jit(step)


def nats_by_hand(logits_BTV, targets_BT):
  """Computes the cross-entropy by its definition, in float64."""
  exp_BTV = np.exp(np.asarray(logits_BTV, np.float64))
  p_BTV = exp_BTV / exp_BTV.sum(-1, keepdims=True)
  return -np.log(np.take_along_axis(p_BTV, targets_BT[..., None], -1)[..., 0])


@functools.cache
def by_hand():
  """Returns losses and parameters of two steps; updates in float64 NumPy.

  Adafactor without factoring (no axis has 128 places): Shazeer and Stern 2018,
  algorithm 4, and momentum.
  """
  model = language_model()
  state, _ = compiled()
  params, carry = state.params, state.carry
  moments = jax.tree.map(lambda p: np.zeros(p.shape), params)
  second, nats = moments, []

  @jax.jit
  def gradients(params, carry, batch):
    def loss(params):
      after, logits_BTV = model.apply(
        {'params': params},
        carry,
        batch.tokens_BT,
        batch.start_B,
        batch.mask_BT,
      )
      nats_BT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV, batch.targets_BT
      )
      return (nats_BT * batch.mask_BT).sum() / batch.mask_BT.sum(), (
        after,
        logits_BTV,
      )

    return jax.grad(loss, has_aux=True)(params)

  for step in (0, 1):
    read = batch(step)
    grads, (carry, logits_BTV) = gradients(params, carry, read)
    nats_BT = nats_by_hand(logits_BTV, read.targets_BT)
    nats.append(nats_BT[read.mask_BT].mean())
    decay = 1 - (step + 1) ** -0.8
    rms = lambda x: np.sqrt((np.asarray(x, np.float64) ** 2).mean())
    second = jax.tree.map(
      lambda v, g: (
        decay * v + (1 - decay) * (np.asarray(g, np.float64) ** 2 + 1e-30)
      ),
      second,
      grads,
    )
    scaled = jax.tree.map(lambda g, v: g / np.sqrt(v), grads, second)
    moments = jax.tree.map(
      lambda m, u, p: (
        0.9 * m + 0.1 * RATE * max(rms(p), 1e-3) * u / max(1, rms(u))
      ),
      moments,
      scaled,
      params,
    )
    params = jax.tree.map(
      lambda p, m: np.float32(np.asarray(p, np.float64) - m), params, moments
    )
  return nats, params


def test_two_steps_equal_their_slow_form():
  """Law 8. The second step continues from the carry of the first."""
  state, step = compiled()
  nats, params = by_hand()
  for number in (0, 1):
    state, sums = step(state, batch(number))
    assert int(sums.tokens) == batch(number).mask_BT.sum()
    assert float(sums.nats) / int(sums.tokens) == pytest.approx(
      nats[number], rel=1e-5
    )
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
  assert nats == pytest.approx(GOLDEN_NATS, rel=1e-4)
  assert size == pytest.approx(GOLDEN_SIZE, rel=1e-4)


GOLDEN_NATS = [4.113974, 3.961329]
GOLDEN_SIZE = 1082.956


def test_padding_has_no_weight():
  """The gradient is that of the mean over real tokens."""
  state, step = compiled()
  read = batch(0)
  junk = read.replace(
    targets_BT=np.where(read.mask_BT, read.targets_BT, 9),
    tokens_BT=np.where(read.mask_BT, read.tokens_BT, 8),
  )
  a, sums = step(state, read)
  b, same = step(state, junk)
  assert float(sums.nats) == pytest.approx(float(same.nats), rel=1e-6)
  assert float(sums.gradient_norm) == pytest.approx(
    float(same.gradient_norm), rel=1e-5
  )
  assert int(sums.padding) == (~read.mask_BT).sum()


def thirds(read):
  """Yields the batch with every third target scored, and with the others."""
  third_T = np.arange(T) % 3 == 0
  for scored_T in third_T, ~third_T:
    yield read.replace(scored_BT=read.mask_BT & scored_T)


def test_unscored_tokens_are_read_but_not_counted():
  state, step = compiled()
  (_, whole), *parts = (
    step(state, each) for each in (batch(0), *thirds(batch(0)))
  )
  for name in ('nats', 'correct', 'scored'):
    added = sum(float(getattr(sums, name)) for _, sums in parts)
    assert added == pytest.approx(float(getattr(whole, name)), rel=1e-6), name
  assert int(whole.scored) == int(whole.tokens)
  for _, sums in parts:
    assert 0 < int(sums.scored) < int(sums.tokens) == int(whole.tokens)


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

  Its updates are the gradients.
  """
  through = types.SimpleNamespace(
    init=lambda params: (), update=lambda g, state, params, tokens: (g, state)
  )
  model = Model(V, Toll(toll, called), tiny.D)
  step = functools.partial(
    train_step, model, through, losses.objective, None, warmup
  )
  return create_state(model, through, 3, B, T, ema=False), jax.jit(step)


def gradients(read, toll=0.0, warmup=0, at=0, called='toll'):
  """Returns the gradients and the sums of step `at` of a model with a Toll."""
  state, step = toll_step(toll, warmup, called)
  after, sums = step(state.replace(step=state.step + at), read)
  moved = jax.tree.map(lambda a, b: a - b, after.params, state.params)
  return jax.device_get(moved), sums


def test_the_gradient_is_of_the_mean_over_scored_tokens():
  sums_of = lambda read: jax.tree.map(
    lambda g: g * read.scored_BT.sum(), gradients(read)[0]
  )
  a, b = map(sums_of, thirds(batch(0)))
  close = functools.partial(np.testing.assert_allclose, atol=1e-4)
  jax.tree.map(lambda *g: close(g[0] + g[1], g[2]), a, b, sums_of(batch(0)))
  some = next(thirds(batch(0)))
  junk = some.replace(targets_BT=np.where(some.scored_BT, some.targets_BT, 0))
  jax.tree.map(close, sums_of(junk), a)
  assert np.abs(a['embed']['embedding']).max() > 0.1


def test_a_step_without_scored_tokens_has_no_gradient():
  read = batch(0).replace(scored_BT=np.zeros((B, T), bool))
  moved, sums = gradients(read)
  assert (sums.nats, sums.scored, sums.gradient_norm) == (0, 0, 0)
  assert not any(leaf.any() for leaf in jax.tree.leaves(moved))


def test_sown_losses_are_minimized_but_not_reported():
  plain, sums = gradients(batch(0))
  taxed, same = gradients(batch(0), toll=0.25)
  assert float(sums.nats) == float(same.nats)
  assert not plain['cell']['w'].any()
  np.testing.assert_allclose(
    taxed['cell']['w'], np.full(5, 0.25 * 2 * 3), rtol=1e-5
  )
  np.testing.assert_array_equal(
    taxed['embed']['embedding'], plain['embed']['embedding']
  )


def test_the_halting_loss_alone_has_a_warm_up():
  plain, _ = gradients(batch(0))
  for at, weight in {0: 0.2, 1: 0.4, 3: 0.8, 4: 1, 9: 1}.items():
    taxed, _ = gradients(batch(0), 0.25, warmup=5, at=at, called='halting')
    np.testing.assert_allclose(
      taxed['cell']['w'], np.full(5, weight * 0.25 * 2 * 3), rtol=1e-5
    )
    np.testing.assert_array_equal(
      taxed['embed']['embedding'], plain['embed']['embedding']
    )
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


class Counter(Cell):
  """State: nothing. Doubles its input, and sows metrics if it `counts`."""

  counts: bool = True

  @property
  def block_length(self):
    return tiny.W

  @nn.compact
  def __call__(self, state, block):
    w = self.param('w', nn.initializers.constant(2.0), (tiny.D,))
    if self.counts:
      real_BT = block.mask * jnp.ones_like(w[0])
      metrics.sow(self, 'doubled', metrics.MeanMetric(real_BT * w[0], real_BT))
      metrics.sow(self, 'doubled', metrics.MeanMetric(real_BT * 0, real_BT))
      metrics.sow(self, 'most', metrics.MaxMetric(real_BT.sum(1)))
    return state, w * block.x

  def initial_state(self, batch):
    return np.zeros((batch, 1), np.float32)


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_sown_metrics_count_the_whole_step_and_change_nothing(remat):
  """In a scan over blocks, in training and in evaluation."""
  chained = optimizer.chain(optimizer.adamw, schedules.constant(RATE))
  read, found = batch(0), {}
  for counts in True, False:
    model = Model(V, Counter(counts, remat=remat), tiny.D)
    state = create_state(model, chained, 3, B, T, ema=False)
    step = functools.partial(
      train_step, model, chained, losses.objective, None, 0
    )
    carry, seen, nats_BT = jax.jit(functools.partial(eval_step, model))(
      state.params, state.carry, read
    )
    after, sums = jax.jit(step)(state, read)
    found[counts] = (after, sums.replace(sown={}), nats_BT), (sums, seen)
  same = np.testing.assert_array_equal
  jax.tree.map(same, found[True][0], found[False][0])
  for sums in found[True][1]:
    assert set(sums.sown) == {'doubled', 'most'}
    real = int(read.mask_BT.sum())
    assert (sums.sown['doubled'].total, sums.sown['doubled'].count) == (
      *(2 * real, 2 * real),
    )
    assert sums.sown['most'].value == tiny.W
  assert [sums.sown for sums in found[False][1]] == [{}, {}]


def test_gradients_are_accumulated_and_averages_follow():
  """In two steps the parameters change once, and their average twice."""
  start, step = compiled(ema_decay=0.5, every=2)
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
  state, step = compiled(dropout=0.3)
  loss = lambda state: float(step(state, batch(0))[1].nats)
  assert loss(state) == loss(state)
  assert loss(state) != loss(state.replace(step=state.step + 1))
  assert loss(state) != loss(state.replace(rng=state.rng + 1))


def test_evaluation_gives_each_token_and_has_no_dropout():
  model = language_model(dropout=0.3)
  state, _ = compiled(dropout=0.3)
  step = jax.jit(functools.partial(eval_step, model))
  carry, sums, nats_BT = step(state.params, state.carry, batch(0))
  plain, _ = compiled()
  _, logits_BTV = language_model().apply(
    {'params': plain.params},
    plain.carry,
    *(batch(0).tokens_BT, batch(0).start_B, batch(0).mask_BT),
  )
  expected = nats_by_hand(logits_BTV, batch(0).targets_BT)
  mask_BT = batch(0).mask_BT
  np.testing.assert_allclose(
    np.asarray(nats_BT)[mask_BT], expected[mask_BT], rtol=1e-4
  )
  assert float(sums.nats) == pytest.approx(expected[mask_BT].sum(), rel=1e-5)
  assert jax.tree.structure(carry) == jax.tree.structure(state.carry)
