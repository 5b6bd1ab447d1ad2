"""Metrics sown by modules, counted in a step and computed from totals."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.metrics import metrics
from meliad_rec.metrics import totals
from meliad_rec.metrics.metrics import MaxMetric
from meliad_rec.metrics.metrics import MeanMetric
from tests.cells import draw

B, T, N = 3, 5, 4


class Counter(nn.Module):
  """Sows a mean and a maximum of its input, and returns half of the input."""

  @nn.compact
  def __call__(self, x_BT):
    w = self.param('w', nn.initializers.constant(0.5), ())
    mean = MeanMetric(x_BT * w * 2, jnp.ones_like(x_BT))
    metrics.sow(self, 'mean_1', mean)
    metrics.sow(self, 'max', MaxMetric(x_BT))
    return x_BT * w


class Counters(nn.Module):
  """A counter twice, another in a scan, and a third within jax.checkpoint."""

  def setup(self):
    self.a, self.b, self.c = Counter(), Counter(), Counter()

  def __call__(self, x_BT):
    x_BT = self.a(self.a(x_BT))
    scan = nn.scan(
      lambda c, x, _: (c(x), None),
      variable_broadcast='params',
      variable_axes={metrics.COLLECTION: 0},
      split_rngs={'params': False},
      length=N,
    )
    x_BT, _ = scan(self.b, x_BT, None)
    return nn.remat(lambda c, x: c(x))(self.c, x_BT)


X = draw(B, T)
PARAMS = {name: {'w': jnp.asarray(0.5)} for name in 'abc'}


@jax.jit
def collected(x_BT):
  _, sown = Counters().apply({'params': PARAMS}, x_BT, mutable=['metrics'])
  return metrics.collect(sown['metrics'])


def test_all_that_is_sown_under_one_name_is_one_metric():
  read = np.stack([np.asarray(X, np.float64) / 2**i for i in range(N + 3)])
  found = collected(X)
  assert set(found) == {'mean_1', 'max'}
  assert float(found['mean_1'].total) == pytest.approx(read.sum(), rel=1e-5)
  assert float(found['mean_1'].count) == read.size
  assert float(found['max'].value) == pytest.approx(read.max())
  assert {leaf.shape for leaf in jax.tree.leaves(found)} == {()}
  found = collected(-2 - np.abs(X))
  assert float(found['max'].value) < 0


@pytest.mark.parametrize('dtype', ['bool', 'bfloat16'])
def test_sums_are_float32_for_any_dtype(dtype):
  """bfloat16 has 8 bits: a sum of ones in it stops at 256."""

  class Ones(nn.Module):
    @nn.compact
    def __call__(self):
      metrics.sow(self, 'ones', MeanMetric(jnp.ones(1001, dtype), 7))
      metrics.sow(self, 'max', MaxMetric(jnp.ones(3, dtype)))

  _, sown = Ones().apply({}, mutable=['metrics'])
  found = metrics.collect(sown['metrics'])
  assert (found['ones'].total, found['ones'].count) == (1001, 7)
  assert found['max'].value == 1
  assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.float32.dtype}


def test_over_steps():
  pairs = [(1e16, 3.0), (1.0, 0.0), (-1e16, 1.0), (3.0, 4.0)]
  means = [MeanMetric(np.float64(t), np.float64(c)) for t, c in pairs]
  assert totals.over_steps(means) == totals.over_steps(means[::-1]) == 0.5
  assert totals.over_steps(means[1:2]) is None
  maxima = [MaxMetric(np.float32(v)) for v in (-2.0, -1.5, -3.0)]
  nan = MaxMetric(np.float32('nan'))
  assert totals.over_steps(maxima) == -1.5
  assert math.isnan(totals.over_steps([*maxima, nan]))
  assert math.isnan(totals.over_steps([nan, *maxima]))


def some(gradient_norm=0.0, scored=range(7), sown=None):
  """Seven real tokens of 1, 2, ..., 7 nats; correct at even places."""
  places = np.arange(12).reshape(B, 4)
  mask_BT = places < 7
  return metrics.Sums.of_step(
    jnp.where(mask_BT, places + 1.0, jnp.nan),
    jnp.asarray(places % 2 == 0),
    jnp.asarray(mask_BT),
    np.isin(places, scored),
    gradient_norm,
    sown,
  )


def total(*sums):
  made = totals.Totals()
  for each in sums:
    made.add(each)
  return made


def test_quality_and_speed_by_hand():
  both = total(some(), some())
  plain = {
    'loss_nats_per_token': 4.0,
    'bits_per_token': 5.7707802,  # 4 / ln 2
    'perplexity': 54.59815,  # e ** 4
    'accuracy': 4 / 7,
    'padding_share': 5 / 12,
    'tokens': 14,
  }
  assert totals.quality(both) == pytest.approx(plain)
  # A text of nothing but special tokens has neither bytes nor words.
  assert totals.quality(both, bytes_=0.0, words=0) == pytest.approx(plain)
  assert totals.quality(both, bytes_=28, words=7) == pytest.approx(
    plain
    | {
      'bits_per_byte': 2.8853901,  # 56 / ln 2 / 28
      'word_perplexity': 2980.958,  # e^8
    }
  )
  overflow = totals.quality(total(*[some()] * 30), words=1)
  assert overflow['word_perplexity'] == math.inf
  plain = {'tokens_per_second': 3.5, 'step_seconds': 2.0}
  assert totals.speed(both, 4.0, flops_per_place=5e11) == plain
  found = totals.speed(both, 4.0, flops_per_place=5e11, peak_flops=12e12)
  assert found == plain | {'mfu': 0.25}


def test_label_quality_counts_scored_tokens_only():
  both = total(some(scored=[1, 2, 6]), some(scored=[0]))
  found = totals.label_quality(both)
  expected = {'loss_nats_per_token': 13 / 4, 'accuracy': 3 / 4, 'tokens': 14}
  expected |= {'error': 1 / 4, 'scored_tokens': 4}
  assert found | expected == pytest.approx(found)
  assert found.keys() == totals.quality(both).keys() | expected.keys()


def test_totals_are_exact_in_any_order():
  many, ones = totals.Totals(), jax.device_get(some())
  for _ in range(1000):
    many.add(ones.replace(nats=np.float32(0.1), tokens=np.int32(2**31 - 1)))
  many.add(ones.replace(nats=np.float32(1e8)))
  assert many.nats == 1e8 + 1000 * float(np.float32(0.1))
  assert many.tokens == 1000 * (2**31 - 1) + 7
  values = [1e16, 1.0, -1e16, 3.0]
  sums = [ones.replace(nats=np.float64(v)) for v in values]
  assert total(*sums).nats == total(*reversed(sums)).nats == 4
  assert total(some(1.0), some(2.0), some(6.0)).gradient_norm == 3.0


def test_sown_metrics_are_added_up_by_kind():
  sow = lambda mean, most: some(
    sown={
      'mean_2': MeanMetric(*jnp.float32(mean)),
      'mean': MeanMetric(*jnp.float32(mean)),
      'mean_10': MaxMetric(most),
    }
  )
  steps = sow((6, 3), 4.0), sow((1, 1), 1.0), sow((0, 0), 0.0)
  found = total(*steps).sown
  assert found == {'mean': 7 / 4, 'mean_2': 7 / 4, 'mean_10': 4.0}
  assert list(found) == ['mean', 'mean_2', 'mean_10']
  assert total(steps[-1]).sown == {'mean_10': 0.0}
  assert total(some()).sown == totals.Totals().sown == {}


def test_errors():
  one = jnp.ones(())
  both = {'a': {'x': (MeanMetric(one, one),)}, 'b': {'x': (MaxMetric(one),)}}
  with pytest.raises(ValueError, match='metric x '):
    metrics.collect(both)
  with pytest.raises(ValueError, match='metric accuracy'):
    some(sown={'accuracy': MeanMetric(one, one)})
  with pytest.raises(ValueError, match='0 steps'):
    totals.quality(totals.Totals())
  with pytest.raises(ValueError, match='1 steps'):
    totals.label_quality(total(some(scored=[])))


def test_units():
  found = totals.label_quality(total(some()))
  found |= totals.quality(total(some()), 1, 1)
  found |= totals.speed(total(some()), 1.0, 1.0, 1.0)
  assert all(map(metrics.unit, found))
  assert metrics.unit('halting_p_12') == 'probability'
  assert metrics.unit('halting_q_1') == metrics.unit('42') == ''
  labels = [metrics.label(name) for name in metrics.SOWN_UNITS | metrics.UNITS]
  assert 'state change (RMS difference of blocks per RMS)' in labels
  assert not any('  ' in label for label in labels)


def test_which_metrics_are_best_if_high():
  highest = {name for name, best in metrics.BEST.items() if best == 'highest'}
  labels = {'accuracy', 'sequence_accuracy'}
  assert highest == labels | {'mean_return', 'success'}
