"""The bench command: its table, JSON and mistakes."""

import json

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec import cli
from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import training
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.commands import bench
from tests import command
from tests.gin_files import write_store


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


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    ([], 'attention'),
    (['stop'], 'nearest is step'),
    (['step', '--setting=meliat'], "'meliat' (nearest is meliad)"),
    (
      ['recurrence', '--setting=meliad'],
      'Set --setting to one of bench',
    ),
    (['step', '--topology=v5e:2x2'], '--topology'),
    (['step', '--setting='], "no setting ''"),
    (['step', '--topology='], 'does not use --topology'),
    (['attention', '--topology='], "'' is not a slice of TPUs"),
    (['step', '--gin_param=STEPS = 1'], 'of the benchmarks experiments and'),
    (['step', '--generate'], 'of the benchmark experiments only'),
    (['experiments', 'cpu/code_rec'], 'two or more'),
    (['experiments', 'cpu/code_rek', 'cpu/code_rec'], 'code_rek'),
    (
      ['experiments', 'feedback/figure3_feedback_2', 'quickstart'],
      'trains agents',
    ),
    (
      ['experiments', 'dynamic_halt/table3_flip_flop_universal', 'quickstart'],
      'with labels',
    ),
    (['experiments', 'quickstart', 'x', '--setting=meliad'], 'is no flag'),
    (['tasks', '--out=gs://b/x'], 'A table must be in a local'),
    (
      ['attention', '--topology=v5e:2x2', '--rounds=50'],
      '--rounds cannot be combined with --topology',
    ),
  ],
)
def test_mistakes(arguments, told):
  assert told in command.mistake(bench, *arguments)


@pytest.mark.slow
def test_experiments_are_timed_in_turn(tmp_path, capsys):
  write_store(store := tmp_path / 'store')
  small = [f'STORE = {str(store)!r}', 'SEGMENT = 64', 'BATCH = 8']
  small += ['LAYERS = 2', 'RECURRENT_LAYERS = (1,)']
  params = [f'--gin_param={each}' for each in small]
  names = ['cpu/recipe_base', 'cpu/recipe_states_2']
  arguments = ['experiments', *names, *params, '--rounds=2', '--json']
  assert command.run(bench, *arguments) == 0
  rows = json.loads(capsys.readouterr().out)['rows']
  assert [*rows] == names
  assert rows[names[0]]['ratio'] == 1
  assert {row['tokens'] for row in rows.values()} == {512}
  mistaken = *arguments, '--gin_param=DROPOUTS = 0.5'
  assert 'DROPOUTS' in command.mistake(bench, *mistaken)
  assert command.run(bench, *arguments, '--generate') == 0
  rows = json.loads(capsys.readouterr().out)['rows']
  assert [*rows] == names
  assert rows[names[0]]['ratio'] == 1
  # 8 state vectors or 2, of 96 numbers in float32, beside the same keys.
  states = [row['state_bytes'] for row in rows.values()]
  assert states[0] - states[1] == 6 * 96 * 4


def test_a_model_that_cannot_generate_is_named(tmp_path):
  for arch in ('window', 'universal'):
    names = f'arch/{arch}', 'size/test', 'task/code', 'defaults'
    text = ''.join(f"include '{name}.gin'\n" for name in names)
    (tmp_path / f'{arch}.gin').write_text(text)
  files = [str(tmp_path / f'{arch}.gin') for arch in ('window', 'universal')]
  with open(files[1], 'a') as file:
    file.write('BLOCK = None\n')
  more = '--generate', '--gin_param=BATCH = 8'
  told = command.mistake(bench, 'experiments', *more, *files)
  assert f'{files[1]} reads a whole document at once' in told


def test_rounds_are_checked_before_compiling():
  with pytest.raises(flags.IllegalFlagValueError, match='--rounds=0'):
    command.run(bench, 'step', '--rounds=0')


def test_settings_are_suggested_for_experiments_only():
  error = flags.UnrecognizedFlagError('batch', '--batch=8')
  with flagsaver.flagsaver():
    bench.define_flags()
    for name, told in ('experiments', 'BATCH = 8'), ('step', 'See --help'):
      words = 'bench', name, '--batch=8'
      assert told in cli._unknown_flag(error, bench.ARGUMENTS, words)


def test_json_has_every_time(monkeypatch, capsys):
  monkeypatch.setattr(step, 'measure', lambda *_: {'rec': row(0.5)})
  assert command.run(bench, 'step', '--json') == 0
  found = json.loads(capsys.readouterr().out)
  assert len(found['rows']['rec']['times']['wall']) == 2
  assert found['source'] == 'Measured on this machine.'


def test_an_estimate_says_that_it_is_one(monkeypatch, capsys):
  ways = dict.fromkeys(attention.WAYS, 3000)
  row = attention.Estimate(ways, ways, 1.5e9, 2**20)
  monkeypatch.setattr(attention, 'estimate', lambda *_: {'ours': row})
  arguments = 'attention', '--topology=v5e:2x2'
  command.run(bench, *arguments)
  head, columns, ours = capsys.readouterr().out.splitlines()
  assert head == 'Compiler estimates for v5e:2x2, not measured.'
  assert 'forward us' in columns and ours.startswith('ours')
  command.run(bench, *arguments, '--json')
  found = json.loads(capsys.readouterr().out)
  assert found['source'] == head
  assert found['rows']['ours']['kernels']['forward'] == 3000
