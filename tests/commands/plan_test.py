"""The command: what it asks, prints and returns."""

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

  Answers are of `planned`: a step on v5p fits, one on v5e does not, but for
  half of its batch. Of changes, what is in `dead` is raised instead.
  """
  asked, dead = [], []

  def ask(question):
    asked.append(question)
    if question.fast and dead:
      raise dead[0]
    fits = 'v5p' in question.topology or 'BATCH = 16' in question.gin_param
    make = planned.fitting if fits else planned.too_large
    return make(question.topology)

  monkeypatch.setattr(plan, 'ask', ask)
  monkeypatch.setattr(environment, 'installed', lambda: True)

  def call(*given):
    flags.FLAGS(['plan', *given])
    code = plan.main(['plan'])
    out, err = capsys.readouterr()
    return code, out, err, asked

  call.asked, call.dead = asked, dead
  with flagsaver.flagsaver():  # Takes away what is defined within.
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
  assert 'v5e:2x4: a step needs 20.00 GiB' in err
  assert err.count('Compiling for v5e:2x4') == 1
  assert err.count('Trying a change for v5e:2x4') == len(asked) - 2
  assert "fits  --gin_param='BATCH = 16': 4.25 GiB" in out
  assert 'no    --gin_file=options/remat_full: 20.00 GiB' in out
  assert {question.topology for question in asked} == {'v5e:2x4', 'v5p:2x2x2'}


def test_where_no_change_compiles_there_is_the_table(run):
  run.dead.append(RuntimeError('The process ended with 1:\nKilled'))
  code, out, _, _ = run('--topology=v5e:2x4')
  assert code == 3
  assert '20.00 of 15.75: does not fit' in out
  assert 'no    --gin_file=options/remat_full: The process ended with' in out


def test_the_table_is_printed_before_changes_are_tried(run, capsys):
  run.dead.append(KeyboardInterrupt())
  with pytest.raises(KeyboardInterrupt):
    run('--topology=v5e:2x4')
  assert '20.00 of 15.75: does not fit' in capsys.readouterr().out


def test_a_budget_is_kept_or_not(run):
  fitting = '--topology=v5p:2x2x2'
  assert run(fitting, '--budget=hbm=5GiB')[0] == 0
  code, _, err, _ = run(fitting, '--budget=hbm=4GiB,forbid=all-to-all')
  assert code == 3
  assert 'may take 4.00 GiB' in err and '2 all-to-all over model' in err


@pytest.mark.parametrize('more', [(), ('--budget=fits',), ('--json',)])
def test_what_does_not_compile_is_n_a_with_code_4(run, monkeypatch, more):
  monkeypatch.setattr(plan, 'ask', lambda q: planned.unknown(q.topology))
  code, out, err, _ = run('--topology=v5e:2x4', *more)
  assert code == 4
  assert 'v5e:2x4: whether it fits is n/a: no libtpu.' in err
  assert 'fit in' not in err and 'changes' not in err
  if '--json' in more:
    found = json.loads(out)
    assert (found['breaches'], len(found['unknown'])) == ([], 1)


def test_one_that_does_not_fit_counts_before_one_that_is_unknown(
  run, monkeypatch
):
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
  assert fits['changes'] == []
  assert [t['flags'] for t in large['changes'] if t['fits']] == (
    ["--gin_param='BATCH = 16'"]
  )
  assert len(found['breaches']) == 1


def test_without_libtpu_nothing_breaks_and_a_budget_is_a_mistake(
  run, monkeypatch
):
  monkeypatch.setattr(environment, 'installed', lambda: False)
  monkeypatch.setattr(plan, 'ask', lambda q: planned.unknown(q.topology))
  code, out, err, _ = run('--topology=v5e:2x4')
  assert (code, err) == (0, '')
  assert 'v5e:2x4: n/a: no libtpu' in out
  with pytest.raises(ValueError, match=r'install meliad_rec\[tpu\]'):
    run('--topology=v5e:2x4', '--budget=hbm=4GiB')


@pytest.mark.parametrize(
  'given, told',
  [
    ((), 'give --topology, such as v5e:16x16'),
    (('--topology=v5e:2x4,v9:2',), "'v9:2' names no slice"),
    (('--topology=v5e:2x4', '--mesh=x:2'), 'such as data:64,model:4'),
    (('--topology=v5e:2x4', '--mesh='), 'such as data:64,model:4'),
    (('--topology=v5e:2x4', '--budget=hbm'), 'give fits, hbm=14GiB'),
    (('--topology=v5e:2x4', '--budget='), 'give fits, hbm=14GiB'),
    (
      ('--topology=v5e:2x4,v5e:2x2', '--mesh=data:4,model:2'),
      'of 8 devices, and v5e:2x2 has 4',
    ),
  ],
)
def test_mistakes_are_told_before_anything_is_compiled(run, given, told):
  with pytest.raises(ValueError, match=told):
    run(*given)
  assert not run.asked


def test_a_lone_word_is_a_mistake(run):
  with pytest.raises(ValueError, match="'v5e:2x4' is no flag"):
    plan.main(['plan', 'v5e:2x4'])


def command(*given):
  """The command as people call it."""
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
  budget = '--budget=hbm=15GiB,forbid=all-to-all'
  done = command(
    *TINY, '--topology=v5e:2x2,v5p:2x2x1', '--mesh=data:2,model:2', budget
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.splitlines() == (
    ['Compiling for v5e:2x2 ...', 'Compiling for v5p:2x2x1 ...']
  )
  line = next(x for x in done.stdout.splitlines() if x.startswith('ms a step'))
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
  kinds = {trial['kind'] for trial in found['changes'] if trial['fits']}
  assert kinds == {'remat', 'batch'}


def test_a_mistake_of_the_child_is_one_line():
  done = command(*TINY, '--topology=v5e:2x2', '--gin_param=BATCH = 3')
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith('error: A batch of 3 rows')
  assert done.stdout == ''
