"""The plan command: its questions, output and exit codes."""

import json

import pytest

from meliad_rec.commands import plan
from meliad_rec.planning import environment
from tests import command
from tests import planned
from tests.libtpu import needs_libtpu

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
    code = command.run(plan, *given)
    out, err = capsys.readouterr()
    return code, out, err, asked

  return call


def test_a_plan_that_fits(run):
  code, out, _, [asked] = run('--topology=v5p:2x2x2', '--mesh=model:2', *REC)
  assert code == 0
  assert 'v5p:2x2x2' in out and 'nothing ran on a TPU' in out
  assert asked.gin_file == ('arch/block_recurrent', 'task/pg19')
  assert (
    'meliad_rec.distributed.partition.make_mesh.model = 2' in asked.gin_param
  )
  assert not asked.fast and asked.vocab_size is None
  # Without --mesh, that of the configuration counts.
  *_, [*_, asked] = run('--topology=v5p:2x2x2', '--gin_param=SLOTS = 4')
  assert asked.gin_param == ('SLOTS = 4',)


def test_what_does_not_fit_gets_advice_and_code_3(run):
  code, out, err, asked = run('--topology=v5e:2x4,v5p:2x2x2')
  assert code == 3
  assert '20.00 of 15.75: does not fit' in out
  assert 'v5e:2x4: a step needs 20.00 GiB' in err
  assert "'BATCH = 16'" in err and 'remat/full' in err
  assert err.count('Compiling for v5e:2x4') == 1
  assert [one.topology for one in asked] == ['v5e:2x4', 'v5p:2x2x2']
  # JSON is in base units.
  _, out, _, _ = run('--json', '--topology=v5p:2x2x2,v5e:2x4')
  found = json.loads(out)
  assert 'nothing ran on a TPU' in found['source']
  fits, large = found['plans']
  assert (fits['fits'], large['fits']) == (True, False)
  assert fits['needed'] == planned.COMPILED.needed
  assert fits['rates']['step'] == 1.0 and large['rates'] is None
  assert fits['advice'] is None and 'BATCH = 16' in large['advice']


def test_what_is_not_known_has_code_4(run, monkeypatch):
  monkeypatch.setattr(environment, 'installed', lambda: False)
  answers = {'v5e:2x4': planned.unknown, 'v5e:2x2': planned.too_large}
  answer = lambda q: answers[q.topology](q.topology)
  monkeypatch.setattr(plan, 'ask', answer)
  code, out, err, _ = run('--topology=v5e:2x4')
  assert code == 4
  assert err == 'v5e:2x4: whether a step fits is not known: no libtpu.\n'
  assert 'n/a: no libtpu' in out
  code, out, _, _ = run('--topology=v5e:2x4', '--json')
  assert code == 4 and json.loads(out)['plans'][0]['fits'] is None
  # One that does not fit counts more.
  assert run('--topology=v5e:2x4,v5e:2x2')[0] == 3


@pytest.mark.parametrize(
  'given, text',
  [
    ((), 'Give --topology'),
    (('v5e:2x4',), "'v5e:2x4' is not a flag"),
    (('--topology=v5e:2x4,v9:2',), "'v9:2'"),
    (('--topology=v5e:2x4', '--mesh=x:2'), 'such as data:64,model:4'),
    (('--topology=v5e:2x4', '--by=kind', '--json'), 'Remove --by'),
    (('--topology=v5e:2x4', '--by=kind', '--fast'), 'Remove --by'),
    (('--topology=v5e:2x4', '--mesh='), 'such as data:64,model:4'),
    (
      ('--topology=v5e:2x4,v5e:2x2', '--mesh=data:4,model:2'),
      '8 devices, but v5e:2x2 has 4',
    ),
  ],
)
def test_mistakes_are_reported_before_compiling(run, given, text):
  code, _, err, asked = run(*given)
  assert code == 2 and text in err and not asked


def test_a_mistake_of_the_child_is_one_line(capsys):
  given = *TINY, '--topology=v5e:2x2', '--gin_param=BATCH = 3'
  assert command.run(plan, *given) == 2
  out, err = capsys.readouterr()
  assert err.splitlines()[-1].startswith('error: A batch of 3 rows')
  assert not out


@needs_libtpu
@pytest.mark.slow
def test_the_whole_command(capsys):
  """pytest -m slow tests/commands/plan_test.py"""
  slices = '--topology=v5e:2x2,v5p:2x2x1'
  assert command.run(plan, *TINY, slices, '--mesh=data:2,model:2') == 0
  out, err = capsys.readouterr()
  assert err.splitlines() == (
    ['Compiling for v5e:2x2 ...', 'Compiling for v5p:2x2x1 ...']
  )
  line = next(x for x in out.splitlines() if x.startswith('ms per step'))
  assert all(0 < float(cell) < 1e3 for cell in line.split()[3:])
