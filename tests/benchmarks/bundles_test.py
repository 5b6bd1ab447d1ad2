"""Schedules as libtpu writes them."""

import pytest

from meliad_rec.benchmarks import tpu_schedules

# Cycles 2 to 5 are turned 8 times and 2 more; 4 to 5 are a loop within.
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


def test_the_longest_loop_is_turned_as_often_as_the_grid_has_steps():
  body = 6  # Cycles 2 to 6, and that in the branch's shadow.
  assert tpu_schedules.cycles(SCHEDULE) == 9 - body + 8 * body


def test_kernels_are_found_by_name(tmp_path):
  last = 'packed-bundles-post-ra.txt'
  for name in ('attend.1-01-', 'attend.2-01-', 'other.1-01-'):
    (tmp_path / f'17-{name}{last}').write_text(SCHEDULE)
  (tmp_path / f'17-attend.1-00-schedule-analysis_{last}').write_text('')
  assert tpu_schedules.read(tmp_path, 'attend') == {
    'attend.1': 51,
    'attend.2': 51,
  }


@pytest.mark.parametrize('schedule', ['', SCHEDULE.replace('scmp', 'other')])
def test_another_format_is_one_sentence(schedule):
  with pytest.raises(ValueError, match='no loop over grid steps'):
    tpu_schedules.cycles(schedule)


def test_no_schedule_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='no schedule of a kernel attend'):
    tpu_schedules.read(tmp_path, 'attend')
