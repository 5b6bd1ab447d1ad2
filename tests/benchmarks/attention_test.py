"""Rows of forms of attention, measured and estimated, and TPU schedules."""

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
  rows = attention.measure(
    forms.AttentionSizes(1, 16, 2, 4, 8, 'float32'), rounds=2
  )
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


def test_an_unknown_slice_is_one_sentence():
  with pytest.raises(ValueError, match="'v5e'"):
    attention.estimate(forms.SETTINGS['paper'], 'v5e')


@pytest.fixture
def child(monkeypatch):
  """Sets the exit code, stdout and stderr of the process that compiles."""
  monkeypatch.setattr(environment, 'installed', lambda: True)

  def ends(code, out, error):
    done = subprocess.CompletedProcess([], code, out, error)
    monkeypatch.setattr(environment, 'run', lambda *_: done)

  return ends


@pytest.mark.parametrize(
  'error',
  ['', 'a line\n' * 1000 + 'Traceback\nOSError: lost\n\nFor more, see X'],
)
def test_a_process_that_fails_is_not_a_mistake(child, error):
  child(-9, '', error)
  with pytest.raises(RuntimeError, match='v5e:2x2 ended with -9') as caught:
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')
  assert ('OSError: lost' in str(caught.value)) == bool(error)
  assert len(str(caught.value)) < 400


def test_a_mistake_in_the_process_is_reported(child):
  child(0, 'a word\n{"mistake": "libtpu is old; install a new one."}\n', '')
  with pytest.raises(ValueError, match='^libtpu is old'):
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')


def test_the_process_prints_mistakes_and_raises_defects(monkeypatch, capsys):
  attention_compiled.main(['v9:2', 'small', ''])
  printed = json.loads(capsys.readouterr().out)
  assert "'v9:2'" in printed['mistake']

  def defect(*_):
    raise ValueError('a shape')

  monkeypatch.setattr(attention_compiled, 'rows', defect)
  with pytest.raises(ValueError, match='a shape'):
    attention_compiled.main(['v5e:2x2', 'small', ''])


# Cycles 2 to 6 run 8 times and 2 more; 4 to 5 are an inner loop.
SCHEDULE = """
 0    :  { %s1 = smov 0 }
 0x1  :  { %s9 = sld [smem:$0x0] }
 0x2   : > { %p2_p0 = scmp.ge.s32.totalorder %s1, 10 }
 0x3  LB: > { %v1 = vmatmul.bf16 %v0 }
 0x4   : >> { %p3_p1 = scmp.ge.s32.totalorder %s2, 3  ;;  %v2 = vpow2 %v1 }
 0x5   : >> { %13 = sbr.rel (!%p3_p1) target bundleno = 4 (0x4), region = 3 }
 0x6   : > { %12 = sbr.rel (!%p2_p0) target bundleno = 2 (0x2), region = 2 }
 0x7   : > {}
 0x8   :  { %99 = vsyncadd [#allocation4], 1 }
"""


def test_the_longest_loop_runs_once_per_grid_step():
  body = 6  # Cycles 2 to 6, and one in the branch's delay slot.
  assert attention_compiled.cycles(SCHEDULE) == 9 - body + 8 * body


def test_kernels_are_found_by_name(tmp_path):
  last = 'packed-bundles-post-ra.txt'
  for name in ('attend.1-01-', 'attend.2-01-', 'other.1-01-'):
    (tmp_path / f'17-{name}{last}').write_text(SCHEDULE)
  (tmp_path / f'17-attend.1-00-schedule-analysis_{last}').write_text('')
  assert attention_compiled.read_cycles(tmp_path, 'attend') == {
    'attend.1': 51,
    'attend.2': 51,
  }


@pytest.mark.parametrize('schedule', ['', SCHEDULE.replace('scmp', 'other')])
def test_another_format_is_one_sentence(schedule):
  with pytest.raises(ValueError, match='loop'):
    attention_compiled.cycles(schedule)


def test_no_schedule_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='kernel attend'):
    attention_compiled.read_cycles(tmp_path, 'attend')
