"""The bench command: its table, JSON and mistakes."""

import json

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import training
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.commands import bench


@pytest.fixture
def given():
  with flagsaver.flagsaver():  # Removes the flags that are defined here.
    bench.define_flags()
    flags.FLAGS(['bench'])
    yield flags.FLAGS


def row(seconds):
  return training.StepCost(
    times=Times([seconds, seconds], [seconds, seconds]),
    ratio=seconds / 0.4,
    tokens=2048,
    flops=3 * 10**9,
    temporary_bytes=5 * 2**20,
    compile_seconds=1.25,
    parameters=2_340_000,
  )


def test_a_table_has_a_line_per_row():
  table = bench.table({'slide L+1': row(0.4), 'rec': row(0.5)}, 'slide L+1')
  head, baseline, rec = table.splitlines()
  assert head.split()[0] == 'step' and '/ slide L+1' in head
  assert baseline.split()[2:] == (
    ['400.0', '0%', '1.000', '400', '5120', '5.0', '1.2', '3.00', '-', '2.34']
  )
  assert rec.split()[1:4] == ['500.0', '0%', '1.250']
  assert len(head) == len(baseline) == len(rec)


@pytest.mark.parametrize('argv', [['bench'], ['bench', 'stop'], ['bench'] * 3])
def test_an_unknown_benchmark_is_an_error(argv, given):
  with pytest.raises(ValueError, match='no benchmark .*step'):
    bench.main(argv)


def test_unknown_setting_is_an_error(given):
  given.setting = 'meliat'
  with pytest.raises(ValueError, match="'meliat'.*meliad"):
    bench.main(['bench', 'step'])


def test_each_benchmark_has_its_settings(given):
  given.setting = 'meliad'
  with pytest.raises(ValueError, match="'meliad'.*bench"):
    bench.main(['bench', 'recurrence'])


def test_rounds_are_checked_before_compiling(given):
  with pytest.raises(flags.IllegalFlagValueError, match='--rounds=0'):
    flags.FLAGS(['bench', '--rounds=0'])


def test_json_has_every_time(given, monkeypatch, capsys):
  given.json = True
  monkeypatch.setattr(step, 'measure', lambda *_: {'rec': row(0.5)})
  bench.main(['bench', 'step'])
  found = json.loads(capsys.readouterr().out)
  assert len(found['rows']['rec']['times']['wall']) == 2
  assert found['source'] == 'Measured on this machine.'


@pytest.fixture
def estimated(given, monkeypatch):
  """The flags for an estimate, without compiling."""
  ways = dict.fromkeys(attention.WAYS, 3000)
  row = attention.Estimate(ways, ways, 1.5e9, 2**20)
  monkeypatch.setattr(attention, 'estimate', lambda *_: {'ours': row})
  given.topology = 'v5e:2x2'
  return given


def test_json_says_that_it_is_an_estimate(estimated, capsys):
  estimated.json = True
  bench.main(['bench', 'attention'])
  found = json.loads(capsys.readouterr().out)
  assert found['source'] == 'Compiler estimates for v5e:2x2, not measured.'
  assert found['rows']['ours']['kernels']['forward'] == 3000


def test_a_table_says_that_it_is_an_estimate(estimated, capsys):
  bench.main(['bench', 'attention'])
  head, columns, row = capsys.readouterr().out.splitlines()
  assert head == 'Compiler estimates for v5e:2x2, not measured.'
  assert 'forward us' in columns and row.startswith('ours')
