"""Figures by hand, and exact sums."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.metrics import metrics
from meliad_rec.metrics import metrics as units
from meliad_rec.metrics.figures import Peak
from meliad_rec.metrics.figures import Ratio

B, T = 3, 4


def some(gradient_norm=0.0, scored=range(7), sown=None):
  """Seven real tokens of 1, 2, ..., 7 nats; those at even places correct."""
  mask_BT = jnp.arange(B * T).reshape(B, T) < 7
  nats_BT = jnp.where(
    mask_BT, jnp.arange(1.0, B * T + 1).reshape(B, T), jnp.nan
  )
  correct_BT = jnp.arange(B * T).reshape(B, T) % 2 == 0
  scored_BT = np.isin(np.arange(B * T), scored).reshape(B, T)
  return metrics.Sums.of_step(
    nats_BT, correct_BT, mask_BT, scored_BT, gradient_norm, sown
  )


def totals(*sums):
  total = metrics.Totals()
  for each in sums:
    total.add(each)
  return total


def test_a_step_by_hand():
  sums = some(gradient_norm=2.5)
  assert sums.nats == 28
  assert sums.correct == 4
  assert sums.tokens == sums.scored == 7
  assert sums.padding == 5
  assert sums.gradient_norm == 2.5
  assert sums.steps == 1


def test_quality_by_hand():
  figures = metrics.quality(totals(some(), some()), bytes_=28, words=7)
  assert figures == pytest.approx(
    {
      'loss_nats_per_token': 4.0,
      'bits_per_token': 5.7707802,  # 4 / ln 2
      'bits_per_byte': 2.8853901,  # 56 / ln 2 / 28
      'word_perplexity': 2980.958,  # e^8
      'accuracy': 4 / 7,
      'padding_share': 5 / 12,
      'tokens': 14,
    }
  )


def test_what_is_not_scored_is_read_and_counts_for_nothing():
  sums = some(scored=[1, 2, 6])
  assert (sums.nats, sums.correct) == (2 + 3 + 7, 2)
  assert (sums.tokens, sums.scored, sums.padding) == (7, 3, 5)
  both = totals(sums, some(scored=[0]))
  assert metrics.label_quality(both) == pytest.approx(
    {
      'loss_nats_per_token': 13 / 4,
      'bits_per_token': 4.6887589,  # 13 / 4 / ln 2
      'accuracy': 3 / 4,
      'padding_share': 5 / 12,
      'tokens': 14,
      'error': 1 / 4,
      'scored_tokens': 4,
    }
  )
  assert metrics.speed(both, 4.0)['tokens_per_second'] == 3.5


def test_figures_that_need_more_are_left_out():
  assert 'bits_per_byte' not in metrics.quality(totals(some()))
  assert 'word_perplexity' not in metrics.quality(totals(some()))
  # A text of nothing but special tokens has neither bytes nor words.
  none = metrics.quality(totals(some()), bytes_=0.0, words=0)
  assert none == metrics.quality(totals(some()))
  assert 'mfu' not in metrics.speed(totals(some()), 1.0, flops_per_place=3.0)


def test_a_word_perplexity_beyond_floats_is_infinite():
  figures = metrics.quality(totals(*[some()] * 30), words=1)
  assert figures['word_perplexity'] == math.inf


def test_speed_by_hand():
  figures = metrics.speed(
    totals(some(), some()), 4.0, flops_per_place=5e11, peak_flops=12e12
  )
  assert figures == {
    'tokens_per_second': 3.5,
    'step_seconds': 2.0,
    'mfu': 0.25,
  }


def test_gradient_norm_is_the_mean_over_steps():
  assert totals(some(1.0), some(2.0), some(6.0)).gradient_norm == 3.0


def test_long_sums_are_exact():
  many = metrics.Totals()
  ones = jax.device_get(some())
  for _ in range(1000):
    many.add(ones.replace(nats=np.float32(0.1), tokens=np.int32(2**31 - 1)))
  many.add(ones.replace(nats=np.float32(1e8)))
  assert many.nats == 1e8 + 1000 * float(np.float32(0.1))
  assert many.tokens == 1000 * (2**31 - 1) + 7


def test_order_does_not_matter():
  values = [1e16, 1.0, -1e16, 3.0]
  sums = [jax.device_get(some()).replace(nats=np.float64(v)) for v in values]
  assert totals(*sums).nats == totals(*reversed(sums)).nats == 4


def depths(*steps):
  """Totals of steps, each of (sum of depths, count, deepest)."""
  one = lambda a: jnp.asarray(a, jnp.float32)
  return totals(
    *(
      some(sown={'mean_2': Ratio(one(t), one(c)), 'mean_10': Peak(one(m))})
      for t, c, m in steps
    )
  )


def test_what_modules_sowed_is_added_up_by_its_kind():
  found = depths((6.0, 3.0, 4.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)).sown
  assert found == {'mean_2': 7 / 4, 'mean_10': 4.0}
  assert list(found) == ['mean_2', 'mean_10']


def test_a_mean_of_nothing_is_left_out():
  assert depths((0.0, 0.0, 1.0)).sown == {'mean_10': 1.0}
  assert totals(some()).sown == metrics.Totals().sown == {}


def test_nothing_sown_may_be_called_like_a_figure_of_every_run():
  one = jnp.ones(())
  with pytest.raises(ValueError, match='sows the figure accuracy, and every'):
    some(sown={'accuracy': Ratio(one, one)})


def test_nothing_counted_is_an_error():
  with pytest.raises(ValueError, match='No scored token'):
    metrics.quality(metrics.Totals())
  with pytest.raises(ValueError, match='No scored token'):
    metrics.label_quality(totals(some(scored=[])))


def test_every_figure_has_a_unit():
  figures = metrics.quality(totals(some()), 1, 1)
  figures |= metrics.label_quality(totals(some()))
  figures |= metrics.speed(totals(some()), 1.0, 1.0, 1.0)
  assert all(map(units.unit, figures))


def test_import_is_light():
  code = (
    'import sys; import meliad_rec.metrics.metrics, '
    'meliad_rec.report.report, meliad_rec.report.plot; '
    'print([m for m in ("matplotlib", "tqdm", "tensorboardX", "tensorflow") '
    'if m in sys.modules])'
  )
  out = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == '[]'
