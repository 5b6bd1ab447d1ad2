"""Rows of forms of attention, measured and estimated."""

import pytest

from meliad_rec import bench
from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import attention_forms as forms
from tests.libtpu import needs_libtpu


def test_a_row_for_each_form():
  rows = attention.measure(forms.Setting(1, 16, 2, 4, 8, 'float32'), rounds=2)
  assert list(rows) == list(forms.FORMS)
  baseline = rows[attention.BASELINE]
  assert baseline.ratios == dict.fromkeys(attention.WAYS, 1.0)
  for row in rows.values():
    assert row.temporary_bytes > 0
    assert all(len(row.times[way].wall) == 2 for way in attention.WAYS)
  table = bench.table(rows, attention.BASELINE)
  assert len(table.splitlines()) == 1 + len(forms.FORMS)


@pytest.mark.slow
@needs_libtpu
def test_estimates_for_a_tpu():
  rows = attention.estimate(forms.SETTINGS['paper'], 'v5e:2x2')
  assert list(rows) == list(forms.TPU_FORMS)
  ours, blocked = rows['ours'], rows[attention.BASELINE]
  for way in attention.WAYS:
    assert ours.kernels[way] > 0
    assert blocked.kernels[way] == 0
    total = ours.cycles[way] + ours.kernels[way]
    assert 4 * total < blocked.cycles[way]
    assert total < rows['splash, no bias'].kernels[way]
  forward, both = (ours.kernels[way] for way in attention.WAYS)
  assert forward < 105_000
  assert both < 430_000


def test_a_slice_that_is_none_is_one_sentence():
  with pytest.raises(ValueError, match="'v5e' names no slice"):
    attention.estimate(forms.SETTINGS['paper'], 'v5e')
