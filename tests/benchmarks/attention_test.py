"""Forms of attention: all compute the same; their rows; TPU schedules."""

import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import attention_compiled
from meliad_rec.benchmarks import attention_forms as forms
from meliad_rec.commands import bench
from meliad_rec.kernels import reference as ref
from meliad_rec.planning import environment
from tests.libtpu import needs_libtpu

SETTING = forms.AttentionSizes(2, 24, 3, 5, 8, 'float32')


def arguments(setting):
  rng = np.random.default_rng(0)
  q, k, v, mask, bias, scale = (
    jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in setting.shapes()
  )
  heads = k.reshape(*k.shape[:2], setting.num_heads, -1)
  past, own = jnp.split(heads, [setting.window], 1)
  heads = jnp.concatenate([ref.l2_normalize(past), 3 * own], 1)
  mask = jnp.asarray(rng.random(mask.shape) < 0.8)
  return q, heads.reshape(k.shape), v, mask, bias, scale


@pytest.mark.parametrize('form', forms.FORMS)
def test_is_the_definition(form):
  given = arguments(SETTING)
  if form == 'jax, no bias':
    given = *given[:4], jnp.zeros_like(given[4]), given[5]
  found = forms.programs(form, SETTING)['forward'](*given)
  heads = lambda a: a.reshape(*a.shape[:2], SETTING.num_heads, -1)
  inputs = ref.AttentionInputs(
    *map(heads, given[:3]),
    *given[3:],
    # jax's window has the query's own key.
    include_self=form == 'jax, no bias',
    normalize_own=True,
  )
  expected = ref.window_attention(inputs)
  np.testing.assert_allclose(heads(found), expected, rtol=1e-4, atol=1e-5)


def test_backward_gives_a_gradient_of_each_operand():
  given = arguments(SETTING)
  run = forms.programs(forms.BASELINE, SETTING)['forward+backward']
  y, grads = jax.jit(run)(*given)
  assert y.shape == given[0].shape
  operands = *given[:3], *given[4:]
  assert [g.shape for g in grads] == [a.shape for a in operands]
  assert all(jnp.abs(g).max() > 0 for g in grads)


def test_a_row_for_each_form():
  sizes = forms.AttentionSizes(1, 16, 2, 4, 8, 'float32')
  rows = attention.measure(sizes, rounds=2)
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
  ('name', 'kcycles'),
  [
    ('v5e:2x2', (105, 430)),
    ('v5p:2x2x1', (60, 225)),
    # A v4 has less VMEM, so its kernel takes fewer heads in each step.
    ('v4:2x2x1', (105, 385)),
  ],
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


def test_mistakes_of_the_process_are_told_and_failures_are_defects(monkeypatch):
  ended = subprocess.CompletedProcess
  tell = lambda done: monkeypatch.setattr(environment, 'run', lambda *_: done)
  monkeypatch.setattr(environment, 'installed', lambda: True)
  tell(ended([], 0, 'a word\n{"mistake": "libtpu is old; update it."}\n', ''))
  with pytest.raises(ValueError, match='^libtpu is old'):
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')
  tell(ended([], -9, '', ''))
  with pytest.raises(ValueError, match='v5e:2x2 was killed by signal 9'):
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')
  tell(ended([], 1, '', 'OSError: lost'))
  with pytest.raises(RuntimeError, match=r'(?s)v5e:2x2.*code 1.*OSError'):
    attention.estimate(forms.SETTINGS['small'], 'v5e:2x2')
  with pytest.raises(ValueError, match="'v5e'"):
    attention.estimate(forms.SETTINGS['paper'], 'v5e')


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
  for another in '', SCHEDULE.replace('scmp', 'other'):
    with pytest.raises(ValueError, match='loop'):
      attention_compiled.cycles(another)


def test_kernels_are_found_by_name(tmp_path):
  last = 'packed-bundles-post-ra.txt'
  for name in ('attend.1-01-', 'attend.2-01-', 'other.1-01-'):
    (tmp_path / f'17-{name}{last}').write_text(SCHEDULE)
  (tmp_path / f'17-attend.1-00-schedule-analysis_{last}').write_text('')
  assert attention_compiled.read_cycles(tmp_path, 'attend') == {
    'attend.1': 51,
    'attend.2': 51,
  }
  with pytest.raises(ValueError, match='kernel none'):
    attention_compiled.read_cycles(tmp_path, 'none')
