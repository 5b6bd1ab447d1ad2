"""Tables of runs: rows, what is run and in which order, results, mistakes."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from meliad_rec.commands import reproduce
from meliad_rec.commands import table_rows
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report import results
from meliad_rec.runs import folder
from meliad_rec.runs import queue
from tests import command
from tests import tiny_run

NAN = math.nan
BITS = {'a_seed0': (3, 2.5, 2.75), 'a_seed1': (NAN, 2.0), 'b_seed0': (1.8, 9)}


@pytest.fixture
def own(tmp_path):
  """Returns a folder with gin files b, a and a10."""
  path = tmp_path / 'own'
  path.mkdir()
  for name in 'b', 'a10', 'a':
    (path / f'{name}.gin').write_text('')
  return path


@pytest.fixture
def out(tmp_path):
  """Returns the folder of a table whose runs BITS have been trained."""
  facts = {'vocabulary': 'bytes', 'vocabulary_size': 259, 'batch': 2}
  facts |= {'segment': 8, 'averages': False, 'best_metric': 'bits_per_byte'}
  facts |= {'published': {'test_64': 2.5, 'PG19 bytes': 2.6, 'test_8': None}}
  for name, values in BITS.items():
    path = tmp_path / 'out' / name
    path.mkdir(parents=True)
    (path / folder.CONFIG).write_text('')
    (path / folder.FACTS).write_text(json.dumps(facts | {'parameters': 1234}))
    out = journal.Journal(path / journal.NAME)
    for step, value in enumerate(values, 1):
      train = {'split': 'train', 'step_seconds': 0.5, 'tokens': 16}
      out.append({'step': step} | train)
      out.append({'step': step, 'split': 'validation', 'bits_per_byte': value})
    out.close()
  return tmp_path / 'out'


def test_the_table_has_the_best_value_of_each_run(own, out, capsys):
  arguments = own, f'--out={out}', '--seeds=2', '--rows=a,b', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  mean = '2.2500 ± 0.2500 [2.2500]'
  a = f'| a | 2 | 1,234 | 48 | 500 | {mean} | 2.0000 | 2.5 | 2.6 |  |'
  assert a in capsys.readouterr().out
  lines = (out / 'table.md').read_text().splitlines()
  b = '| b | 1 | 1,234 | 32 | 500 | 1.8000 | 1.8000 | 2.5 | 2.6 | -20.0% |'
  assert lines[-1] == b
  with (out / 'runs.csv').open() as file:
    rows = list(csv.DictReader(file))
  found = {row['run']: (row['validation'], row['best_step']) for row in rows}
  assert found == {'a_seed0': ('2.5', '2'), 'a_seed1': ('2.0', '2')} | {
    'b_seed0': ('1.8', '1')
  }
  for picture in 'curves', 'cost':
    assert (out / f'{picture}.png').read_bytes()[1:4] == b'PNG'


def test_what_papers_report_is_beside_what_was_measured(own, out, capsys):
  """Splits are those with published values, and a figure shows their sizes."""
  for name in BITS:
    for split, value in {'test_64': 2.0, 'test_8': 1.5}.items():
      path = out / name / f'{split}.json'
      path.write_text(json.dumps({'bits_per_byte': value}))
  arguments = own, f'--out={out}', '--seeds=2', '--rows=a', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  text = capsys.readouterr().out
  assert '| 2.0000 ± 0.0000 [2.0000] / 2.5 | 1.5000 ± 0.0000 [1.5000] |' in text
  assert 'published: PG19 bytes' in text and 'published: test' not in text
  found = results.over_splits(
    [
      {'row': 'a', 'validation': 1.0, 'test_8': 1.5, 'test_64': 2.0},
      {'row': 'a', 'validation': 1.0, 'test_8': 1.6, 'published test_8': 1.4},
    ]
  )
  curves = {'a': [(8, [1.5, 1.6]), (64, [2.0])]}
  assert found == {'N of the split test_N': curves}
  assert (out / 'figure.png').read_bytes()[1:4] == b'PNG'


def test_the_time_of_an_epoch_is_by_the_mean_step(own, out, capsys):
  path = out / 'a_seed0' / folder.FACTS
  published = {'minutes per 60 steps': 5, 'parameters': 1200}
  facts = json.loads(path.read_text()) | {'published': published}
  path.write_text(json.dumps(facts))
  steps = journal.Journal(out / 'a_seed0' / journal.NAME)
  steps.append({'step': 9, 'split': 'train', 'step_seconds': 4.5, 'tokens': 16})
  steps.close()
  arguments = own, f'--out={out}', '--rows=a', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  # Three steps of 0.5 s, and six of 4.5 s.
  row = '| a | 1 | 1,234 / 1,200 | 64 | 500 | 2.5000 | 3.17 / 5 |'
  assert row in capsys.readouterr().out


def test_evaluations_before_the_newest_training_are_left_out(own, out, capsys):
  for name in 'a_seed0', 'b_seed0':
    metrics = out / name / 'test_64.json'
    metrics.write_text(json.dumps({'bits_per_byte': 2.0}))
  os.utime(out / 'a_seed0' / 'test_64.json', (0, 0))
  arguments = own, f'--out={out}', '--rows=a,b', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  assert 'a_seed0/test_64.json is left out' in capsys.readouterr().out
  with (out / 'runs.csv').open() as file:
    found = {row['run']: row['test_64'] for row in csv.DictReader(file)}
  assert found == {'a_seed0': '', 'b_seed0': '2.0'}


def test_rows_are_compared_by_a_metric_that_all_have(tmp_path):
  """Pictures name this metric, and the table its column."""

  def row(name, seconds, **splits):
    values = name, name, 0, 9, seconds, seconds, 10, 5000
    values += 'loss_nats_per_token', 10, 0.5
    return dict(zip(results.COLUMNS, values, strict=True)) | splits

  bleu = 'test:tokenized_bleu'
  rows = [
    row('layers_1', 0.5, **{bleu: 20.0}),
    row('layers_2', 0.25, **{bleu: 25.0, 'more': 1.0}),
  ]
  assert results.compared(rows) == bleu
  head, _, *lines = results.table('t', rows).splitlines()[2:]
  assert f'| change of {bleu} to layers_1 |' in head
  assert lines[-1].endswith('| +25.0% |')
  found = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plot, 'compare', lambda *_: None)
    for name in 'cost', 'lines':
      patch.setattr(
        plot, name, lambda values, _, of: found.append((values, of))
      )
    reproduce.draw(tmp_path, '.png', rows, 'loss_nats_per_token')
  (costs, of_costs), (panels, of_panels) = found
  assert of_costs == of_panels == 'tokenized_bleu'
  assert costs['layers_2'] == (0.25, 25.0, 9)
  [curves] = panels.values()
  assert curves == {'layers': [(1, [20.0]), (2, [25.0])]}
  assert results.compared([row('a', 1.0, test=1.0), row('b', 1.0)]) == (
    'validation'
  )


def test_rows_of_several_metrics_have_a_table_each(own, out, capsys):
  path = out / 'b_seed0'
  facts = json.loads((path / folder.FACTS).read_text())
  facts['best_metric'] = 'error'
  (path / folder.FACTS).write_text(json.dumps(facts))
  text = (path / journal.NAME).read_text()
  (path / journal.NAME).write_text(text.replace('bits_per_byte', 'error'))
  arguments = own, f'--out={out}', '--rows=a,b', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  text = capsys.readouterr().out
  assert ': bits_per_byte (bits/byte)' in text and ': error (' in text
  for name in 'curves_bits_per_byte', 'curves_error':
    assert (out / f'{name}.png').read_bytes()[1:4] == b'PNG'
  assert not (out / 'curves.png').exists()


def test_the_table_names_failed_runs_and_cut_documents(own, out, monkeypatch):
  monkeypatch.setattr(reproduce, 'work', lambda runs, jobs: {'b_seed0': 2})
  arguments = own, f'--out={out}', '--rows=a,b', '--tokens=64'
  assert command.run(reproduce, *arguments) == 1
  text = (out / 'table.md').read_text()
  for words in '| b | 1 |', 'only the first 64 tokens of each document.\n':
    assert words in text
  assert text.endswith('their results are not final: b_seed0.\n')


def test_the_table_names_runs_that_are_not_finished(own, out):
  steps = 'STEPS = 9\nexperiment.Experiment.steps = %STEPS\n'
  for name, text in {
    'a_seed0': steps,
    'a_seed1': steps.replace('9', '2'),
    'b_seed0': 'experiment.Experiment.steps = 3000',
  }.items():
    (out / name / folder.CONFIG).write_text(text)
  arguments = own, f'--out={out}', '--seeds=2', '--rows=a,b', '--only_report'
  assert command.run(reproduce, *arguments) == 0
  text = (out / 'table.md').read_text()
  assert text.endswith(': a_seed0 (3 of 9), b_seed0 (2 of 3,000).\n')


def test_a_sweep_trains_each_row_with_each_value(own, out, capsys):
  one = table_rows.settings('RATE = 1e-3, 0.01')[0]
  run = reproduce.TableRun('a', (), 0, out, one)
  assert (run.label, run.name) == ('a, RATE = 0.001', 'a_RATE_0.001_seed0')
  for seed in range(2):
    (out / f'a_seed{seed}').rename(out / f'a_RATE_0.001_seed{seed}')
  (out / 'b_seed0').rename(out / 'a_RATE_0.01_seed0')
  arguments = own, f'--out={out}', '--seeds=2', '--rows=a', '--only_report'
  swept = *arguments, '--sweep=RATE = 0.001, 0.01'
  assert command.run(reproduce, *swept) == 0
  text = capsys.readouterr().out
  assert '\n| a, RATE = 0.01 | 1 | 1,234 | 32 | 500 | 1.8000 |' in text
  best = 'Best on the validation split: a with RATE = 0.01.'
  assert best in text and best in (out / 'table.md').read_text()


def test_a_setting_that_diverges_is_not_the_best(tmp_path):
  runs = [
    reproduce.TableRun('a', (), 0, tmp_path, f'RATE = {rate}')
    for rate in (1, 2)
  ]
  values = zip(runs, (math.nan, 0.5), strict=True)
  found = [
    {'run': run.name, 'metric': 'error', 'validation': value}
    for run, value in values
  ]
  assert reproduce.best_settings(runs, found).endswith('a with RATE = 2.')


def test_the_setting_of_a_sweep_is_given_to_the_training(own, tmp_path):
  given = []

  def start(run, command, *more):
    given.append((run.name, command[-2:]))
    return subprocess.Popen([sys.executable, '-c', ''])

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(queue, 'start', start)
    command.mistake(  # No run has been trained.
      *(reproduce, own, f'--out={tmp_path}', '--rows=a', '--sweep=X = 1, 2'),
      '--gin_param=STEPS = 9',
    )
  steps = '--gin_param=STEPS = 9'
  assert given == [
    ('a_X_1_seed0', [steps, '--gin_param=X = 1']),
    ('a_X_2_seed0', [steps, '--gin_param=X = 2']),
  ]


def test_rows_without_a_scale_leave_the_others(out, capsys):
  (out / 'xl_512_seed0').mkdir()
  for file in (out / 'b_seed0').iterdir():
    (out / 'xl_512_seed0' / file.name).write_bytes(file.read_bytes())
  with pytest.MonkeyPatch.context() as patch:
    known = table_rows.files.names('scale')
    known.remove('cpu/block_recurrent/table1')
    patch.setattr(table_rows.files, 'names', lambda kind: known)
    known += ['block_recurrent/table1_xl_512', 'block_recurrent/table1_slide']
    arguments = 'block_recurrent/table1', f'--out={out}', '--scale=cpu'
    rows = '--rows=xl_512,slide'
    assert command.run(reproduce, *arguments, rows, '--only_report') == 1
  sentence = 'gin/scale/cpu has no file for them: slide.'
  assert sentence in capsys.readouterr().out
  text = (out / 'table.md').read_text()
  assert sentence in text and '| xl_512 |' in text and '| slide' not in text


@pytest.mark.parametrize('jobs', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_fails_leaves_the_others(tmp_path, monkeypatch, jobs):
  words = {'a': [['runs'], ['--version']], 'b': [['--version'], ['runs']]}
  words['c'] = [['--version'], ['--help']]
  begun = []

  def start(run, command, *more):
    begun.append((run.row, *command))
    return begin(run, command, *more)

  begin = queue.start
  monkeypatch.setattr(queue, 'start', start)
  monkeypatch.setattr(
    reproduce.TableRun, 'commands', lambda run: iter(words[run.row])
  )
  runs = [reproduce.TableRun(row, (), 0, tmp_path) for row in words]
  assert queue.work(runs, jobs) == {'a_seed0': 2, 'b_seed0': 2}
  assert sorted(begun) == [
    *(('a', 'runs'), ('b', '--version'), ('b', 'runs')),
    *(('c', '--help'), ('c', '--version')),
  ]
  logs = {path.name for path in tmp_path.glob('*.log')}
  assert logs == ({f'{row}_seed0.log' for row in words} if jobs > 1 else set())


def test_an_error_between_the_commands_of_a_run_leaves_the_others(
  tmp_path, monkeypatch, capsys
):
  def commands(run):
    yield ['--version']
    if run.row == 'a':
      raise KeyError('lost')

  monkeypatch.setattr(reproduce.TableRun, 'commands', commands)
  runs = [reproduce.TableRun(row, (), 0, tmp_path) for row in 'ab']
  assert queue.work(runs, 1) == {'a_seed0': 1}
  assert "KeyError: 'lost'" in capsys.readouterr().err


@pytest.mark.parametrize('stop', [OSError, signal.SIGHUP])
def test_whatever_ends_the_table_stops_its_runs(tmp_path, monkeypatch, stop):
  begun = []

  def start(run, *_):
    if begun and stop is OSError:
      raise OSError('full')
    if begun:
      os.kill(os.getpid(), stop)
    begun.append(subprocess.Popen(['sleep', '60']))
    return begun[-1]

  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  monkeypatch.setattr(queue, 'start', start)
  monkeypatch.setattr(reproduce.TableRun, 'commands', lambda _: iter(['x']))
  runs = [reproduce.TableRun(row, (), 0, tmp_path) for row in 'ab']
  with pytest.raises((OSError, SystemExit)):
    queue.work(runs, 2)
  signal.signal(signal.SIGHUP, before)
  assert begun[0].poll() == -signal.SIGTERM


@pytest.mark.parametrize(
  ('published', 'commands'),
  [
    ({'minutes per 9 steps': 3.0}, ['train']),
    ({'training K steps/s': 3.0, 'ms per step': 1.0}, ['train']),
    ({'PG19 tokens': 3.5}, ['train', 'evaluate']),
    ({'validation': 2.5}, ['train', 'evaluate']),
    ({'parameters': 40_000_000}, ['train', 'evaluate']),
    ({}, ['train', 'evaluate']),
  ],
)
def test_a_table_of_times_evaluates_no_split(
  published, commands, own, out, monkeypatch
):
  begun, path = [], out / 'a_seed0' / folder.FACTS
  facts = json.loads(path.read_text()) | {'published': published}
  path.write_text(json.dumps(facts))

  def start(run, command, *more):
    begun.append(command[0])
    return subprocess.Popen([sys.executable, '-c', ''])

  monkeypatch.setattr(queue, 'start', start)
  assert command.run(reproduce, own, f'--out={out}', '--rows=a') == 0
  assert begun == commands


def test_training_is_followed_by_an_evaluation_of_its_best_step(own, out):
  """It is repeated only after the run has trained further."""

  def commands():
    begun = []

    def start(run, command, *more):
      begun.append(command)
      if command[0] == 'evaluate':
        run.metrics('test').write_text('')
      return subprocess.Popen([sys.executable, '-c', ''])

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(queue, 'start', start)
      patch.setattr(reproduce, 'result', lambda run: dict(RESULT))
      command.run(
        *(reproduce, own, f'--out={out}', '--rows=a', '--splits=test'),
        *('--tokens=64', '--gin_param=STEPS = 9'),
      )
    return begun

  workdir = out / 'a_seed0'
  train = [
    *('train', f'--workdir={workdir}', f'--gin_file={own / "a.gin"}'),
    '--gin_param=experiment.Experiment.seed = 0',
    '--gin_param=STEPS = 9',
  ]
  metrics = workdir / 'test_first_64.json'
  evaluate = [
    *('evaluate', f'--workdir={workdir}', '--step=best', '--tokens=64'),
    *(f'--out={workdir / "test_first_64.npz"}', '--split=test'),
    f'--metrics={metrics}',
  ]
  assert commands() == [train, evaluate]
  assert commands() == [train]
  os.utime(metrics, (0, 0))
  assert commands() == [train, evaluate]
  # There is no loss of each token to write if the data are labeled.
  labels = journal.Journal(workdir / journal.NAME)
  labels.append({'step': 9, 'split': 'validation', 'scored_tokens': 4})
  labels.close()
  os.utime(metrics, (0, 0))
  assert commands() == [train, [a for a in evaluate if '--out' not in a]]


RESULT = {'row': 'a', 'run': 'a_seed0', 'seed': 0, 'parameters': 1, 'steps': 1}
RESULT |= {'tokens': 1, 'step_seconds': 1.0, 'mean_step_seconds': 1.0}
RESULT |= {'metric': 'bits_per_byte', 'best_step': 1}
RESULT |= {'validation': 2.0, 'test': 2.0}


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--out=x'], 'Give the name of one table, such as cpu/code, got 0.'),
    (['cpu/code'], 'A table needs a folder. Add --out=DIR.'),
    (['cpu/coda', '--out=x'], 'nearest is cpu/code_'),
    (['cpu/code', '--out=x', '--rows=rac'], 'Choose --rows from rec, slide.'),
    (
      ['cpu/code', '--out=x', '--tokens=9', '--splits='],
      '--tokens has no effect without --splits.',
    ),
    (
      ['cpu/code', '--out=x', '--scale=cpu'],
      'no --scale=cpu of any chosen row, such as rec. The scales are paper',
    ),
    (['cpu/code', '--out=x', '--only_report'], 'has been evaluated yet.'),
    (
      ['cpu/code', '--out=x', '--sweep=RATE'],
      "at least two values, got 'RATE'",
    ),
    (['cpu/code', '--out=x', '--sweep=A = 1, 1'], 'at least two values'),
    (['cpu/code', '--out=x', '--sweep=A = 1, b'], 'must be numbers, strings'),
    (['cpu/code', '--out=x', '--sweep=A = @b, 1'], 'must be numbers, strings'),
    (
      ['cpu/code', '--out=x', '--sweep=A = (1,), 1'],
      'A = (1,) and rec, A = 1 would share the folder rec_A_1_seed0',
    ),
    (['cpu/code', '--out=gs://b/x'], 'A table must be in a local'),
    (
      ['cpu/code', '--out=x', '--splits=test:acuracy'],
      "--splits has no metric 'acuracy' (nearest is accuracy)",
    ),
    (
      ['cpu/headroom', '--out=x', '--gin_file=size/tiny'],
      'distinguishes the rows 16 and 32',
    ),
  ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert message in command.mistake(reproduce, *arguments)
  assert not list(tmp_path.iterdir())


def test_a_metric_that_an_evaluation_lacks_is_one_sentence(own, out):
  (out / 'a_seed0' / 'test.json').write_text('{"accuracy": 1}')
  arguments = own, f'--out={out}', '--rows=a', '--only_report'
  message = command.mistake(reproduce, *arguments, '--splits=test:error')
  assert "test.json has no metric 'error'. Name one of accuracy in" in message


@pytest.mark.slow
def test_if_no_run_succeeds_the_message_names_those_that_failed(own, tmp_path):
  out = tmp_path / 'new'
  message = command.mistake(reproduce, own, f'--out={out}', '--rows=b,a')
  assert 'b_seed0, a_seed0 failed' in message


@pytest.mark.slow
def test_a_table_is_trained_stopped_and_resumed(tmp_path):
  """Ctrl-C, sent to the command only, saves the runs and stops them."""
  tiny_run.write_store(tmp_path / 'store')
  for arch in 'window', 'block_recurrent':
    (tmp_path / f'{arch}.gin').write_text(
      f"include 'arch/{arch}.gin'\ninclude 'size/test.gin'\n"
      f"include 'task/store.gin'\nSTORE = '{tmp_path / 'store'}'\nSAMPLE = 0\n"
      'EVAL_EVERY = 2\n'
    )
  words = [sys.executable, '-m', 'meliad_rec', 'reproduce', str(tmp_path)]
  words += [f'--out={tmp_path / "out"}', '--jobs=2', '--splits=test']
  long = [*words, '--gin_param=STEPS = 1_000_000']
  process = subprocess.Popen(long, env=tiny_run.environment(), cwd='/')
  journals = [
    tmp_path / 'out' / f'{arch}_seed0' / journal.NAME
    for arch in ('window', 'block_recurrent')
  ]
  while not all(path.exists() and path.stat().st_size for path in journals):
    assert process.poll() is None
    time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  assert process.wait() == 130
  trained = [journal.read(path)[-1]['step'] for path in journals]
  short = [*words, f'--gin_param=STEPS = {max(trained) + 2}']
  done = tiny_run.run(short)
  assert done.returncode == 0, done.stderr
  assert 'Resuming' in (tmp_path / 'out' / 'window_seed0.log').read_text()
  with (tmp_path / 'out' / 'runs.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['row'] for row in rows] == ['block_recurrent', 'window']
  assert all(float(row['test']) > 0 for row in rows)
