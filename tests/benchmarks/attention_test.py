"""Rows of forms of attention, measured and estimated."""

import json
import subprocess

import pytest

from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import attention_compiled
from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.commands import bench
from meliad_rec.planning import environment
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
@pytest.mark.parametrize(
  ('name', 'kcycles'), [('v5e:2x2', (105, 430)), ('v5p:2x2x1', (60, 225))]
)
def test_estimates_for_a_tpu(name, kcycles):
  rows = attention.estimate(forms.SETTINGS['paper'], name)
  assert list(rows) == list(forms.TPU_FORMS)
  ours, blocked = rows['ours'], rows[attention.BASELINE]
  for way in attention.WAYS:
    assert ours.kernels[way] > 0
    assert blocked.kernels[way] == 0
    total = ours.cycles[way] + ours.kernels[way]
    assert 4 * total < blocked.cycles[way]
    assert total < rows['splash, no bias'].kernels[way]
  for way, most in zip(attention.WAYS, kcycles, strict=True):
    assert ours.kernels[way] < 1000 * most


def test_a_slice_that_is_none_is_one_sentence():
  with pytest.raises(ValueError, match="'v5e' names no slice"):
    attention.estimate(forms.SETTINGS['paper'], 'v5e')


@pytest.fixture
def child(monkeypatch):
  """Sets what the process that compiles ends with: code, stdout, stderr."""
  monkeypatch.setattr(environment, 'installed', lambda: True)

  def ends(code, out, error):
    done = subprocess.CompletedProcess([], code, out, error)
    monkeypatch.setattr(environment, 'run', lambda *_: done)

  return ends


@pytest.mark.parametrize(
  'error',
  ['', 'a line\n' * 1000 + 'Traceback\nOSError: lost\n\nFor more, see X'],
)
def test_a_process_that_fails_is_no_mistake(child, error):
  child(-9, '', error)
  with pytest.raises(RuntimeError, match='v5e:2x2 ended with -9') as caught:
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')
  assert ('OSError: lost' in str(caught.value)) == bool(error)
  assert len(str(caught.value)) < 400


def test_a_sentence_of_the_process_is_told(child):
  child(0, 'a word\n{"mistake": "libtpu is old; install a new one."}\n', '')
  with pytest.raises(ValueError, match='^libtpu is old; install a new one.$'):
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')


def test_the_process_tells_a_sentence_and_raises_all_else(monkeypatch, capsys):
  attention_compiled.main(['v9:2', 'small', ''])
  told = json.loads(capsys.readouterr().out)
  assert "'v9:2' names no slice" in told['mistake']

  def defect(*_):
    raise ValueError('a shape')

  monkeypatch.setattr(attention_compiled, 'rows', defect)
  with pytest.raises(ValueError, match='a shape'):
    attention_compiled.main(['v5e:2x2', 'small', ''])
