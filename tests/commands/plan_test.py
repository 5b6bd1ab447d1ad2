"""The plan command: its questions, output and exit codes."""

import json
import os
from pathlib import Path
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.commands import plan
from meliad_rec.planning import environment
from tests import planned
from tests.libtpu import needs_libtpu

ROOT = Path(__file__).parents[2]
REC = ('--gin_file=arch/block_recurrent', '--gin_file=task/pg19')
TINY = (*REC, '--gin_file=size/tiny')


@pytest.fixture
def run(monkeypatch, capsys):
  """The command with these flags: exit code, stdout, stderr, and questions.

  Answers are those of `planned`: a step fits on v5p and does not on v5e.
  """
  asked = []

  def ask(question):
    asked.append(question)
    fits = 'v5p' in question.topology
    answer = planned.fitting if fits else planned.too_large
    return answer(question.topology)

  monkeypatch.setattr(plan, 'ask', ask)
  monkeypatch.setattr(environment, 'installed', lambda: True)

  def call(*given):
    flags.FLAGS(['plan', *given])
    code = plan.main(['plan'])
    out, err = capsys.readouterr()
    return code, out, err, asked

  call.asked = asked
  with flagsaver.flagsaver():  # Removes the flags that are defined here.
    plan.define_flags()
    yield call


def test_a_plan_that_fits(run):
  code, out, _, [asked] = run('--topology=v5p:2x2x2', '--mesh=model:2', *REC)
  assert code == 0
  assert 'v5p:2x2x2' in out and 'nothing ran on a TPU' in out
  assert asked.gin_file == ('arch/block_recurrent', 'task/pg19')
  assert (
    'meliad_rec.distributed.partition.make_mesh.model = 2' in asked.gin_param
  )
  assert not asked.fast and asked.vocab_size is None


def test_without_a_mesh_the_configurations_counts(run):
  _, _, _, [asked] = run('--topology=v5p:2x2x2', '--gin_param=SLOTS = 4')
  assert asked.gin_param == ('SLOTS = 4',)


def test_what_does_not_fit_gets_advice_and_code_3(run):
  code, out, err, asked = run('--topology=v5e:2x4,v5p:2x2x2')
  assert code == 3
  assert '20.00 of 15.75: does not fit' in out
  assert 'v5e:2x4: a step needs 20.00 GiB' in err
  assert "'BATCH = 16'" in err and 'remat/full' in err
  assert err.count('Compiling for v5e:2x4') == 1
  assert [one.topology for one in asked] == ['v5e:2x4', 'v5p:2x2x2']


@pytest.mark.parametrize('installed', [True, False])
@pytest.mark.parametrize('more', [(), ('--json',)])
def test_what_is_not_known_has_code_4(run, monkeypatch, more, installed):
  monkeypatch.setattr(environment, 'installed', lambda: installed)
  monkeypatch.setattr(plan, 'ask', lambda q: planned.unknown(q.topology))
  code, out, err, _ = run('--topology=v5e:2x4', *more)
  assert code == 4
  assert 'v5e:2x4: whether it fits is not known: no libtpu.' in err
  assert 'n/a: no libtpu' in out or json.loads(out)['plans'][0]['fits'] is None


def test_not_fitting_wins_over_not_known(run, monkeypatch):
  answers = {'v5e:2x4': planned.unknown, 'v5e:2x2': planned.too_large}
  answer = lambda q: answers[q.topology](q.topology)
  monkeypatch.setattr(plan, 'ask', answer)
  code, _, err, _ = run('--topology=v5e:2x4,v5e:2x2')
  assert code == 3
  assert 'v5e:2x2: a step needs' in err and 'v5e:2x4: whether it' in err


def test_json_is_in_base_units(run):
  _, out, _, _ = run('--json', '--topology=v5p:2x2x2,v5e:2x4')
  found = json.loads(out)
  assert 'nothing ran on a TPU' in found['source']
  fits, large = found['plans']
  assert (fits['fits'], large['fits']) == (True, False)
  assert fits['needed'] == planned.COMPILED.needed
  assert fits['rates']['step'] == 1.0 and large['rates'] is None
  assert fits['advice'] is None and 'BATCH = 16' in large['advice']


@pytest.mark.parametrize(
  'given, text',
  [
    ((), 'give --topology'),
    (('--topology=v5e:2x4,v9:2',), "'v9:2'"),
    (('--topology=v5e:2x4', '--mesh=x:2'), 'such as data:64,model:4'),
    (('--topology=v5e:2x4', '--mesh='), 'such as data:64,model:4'),
    (
      ('--topology=v5e:2x4,v5e:2x2', '--mesh=data:4,model:2'),
      '8 devices, but v5e:2x2 has 4',
    ),
  ],
)
def test_mistakes_are_reported_before_compiling(run, given, text):
  with pytest.raises(ValueError, match=text):
    run(*given)
  assert not run.asked


def test_a_word_that_is_not_a_flag_is_a_mistake(run):
  with pytest.raises(ValueError, match="'v5e:2x4'"):
    plan.main(['plan', 'v5e:2x4'])


def command(*given):
  """Runs the command as a person does."""
  return subprocess.run(
    [sys.executable, '-m', 'meliad_rec', 'plan', *given],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
    capture_output=True,
    text=True,
  )


@needs_libtpu
@pytest.mark.slow
def test_the_whole_command():
  """pytest -m slow tests/commands/plan_test.py"""
  done = command(*TINY, '--topology=v5e:2x2,v5p:2x2x1', '--mesh=data:2,model:2')
  assert done.returncode == 0, done.stderr
  assert done.stderr.splitlines() == (
    ['Compiling for v5e:2x2 ...', 'Compiling for v5p:2x2x1 ...']
  )
  line = next(
    x for x in done.stdout.splitlines() if x.startswith('ms per step')
  )
  assert all(0 < float(cell) < 1e3 for cell in line.split()[3:])


@needs_libtpu
@pytest.mark.slow
def test_the_whole_command_where_it_does_not_fit():
  done = command(
    *TINY,
    '--topology=v5e:1x1',
    '--gin_param=BATCH = 1024',
    '--gin_param=SEGMENT = 1024',
    '--json',
    '--fast',
  )
  assert done.returncode == 3
  [found] = json.loads(done.stdout)['plans']
  assert found['fits'] is False and found['needed'] > found['hbm']
  assert 'remat_full' in found['advice'] and 'BATCH = 512' in found['advice']


def test_a_mistake_of_the_child_is_one_line():
  done = command(*TINY, '--topology=v5e:2x2', '--gin_param=BATCH = 3')
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith('error: A batch of 3 rows')
  assert done.stdout == ''
