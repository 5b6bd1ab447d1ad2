"""Changes of what does not fit."""

import dataclasses

import pytest

from meliad_rec.planning import advice
from meliad_rec.planning.question import Question
from tests import planned

DEAD = RuntimeError('The process ended with -9:\nTraceback\nKilled')
QUESTION = Question('v5e:2x4', ('arch/window',), ('SLOTS = 2',))
SIZES = dataclasses.asdict(planned.SIZES)  # 32 rows; data 4, model 2.


def answers(fits):
  """Answers that fit where `fits` says so of a question, and what was asked."""
  asked = []

  def ask(question):
    asked.append(question)
    return planned.fitting() if fits(question) else planned.too_large()

  return ask, asked


def run(fits, question=QUESTION):
  ask, asked = answers(fits)
  return list(advice.trials(question, planned.too_large(), ask)), asked


def test_changes_are_the_mildest_of_a_kind_first():
  found = [(kind, flags) for kind, flags, _ in advice.changes(QUESTION, SIZES)]
  remat, mesh = '--gin_file=options/remat_full', '--mesh=fsdp:4,model:2'
  assert found == [
    ('remat', remat),
    ('mesh', mesh),
    ('mesh', '--mesh=fsdp:2,model:4'),
    ('batch', "--gin_param='BATCH = 16'"),
    ('batch', "--gin_param='BATCH = 8'"),
    ('batch', "--gin_param='BATCH = 4'"),
    ('all', f"{remat} {mesh} --gin_param='BATCH = 4'"),
  ]


def test_a_batch_divides_over_the_places():
  mesh = {'data': 8, 'fsdp': 1, 'model': 1}
  sizes = {**SIZES, 'mesh': mesh, 'batch': 24}
  kinds = [kind for kind, _, _ in advice.changes(QUESTION, sizes)]
  assert 'batch' not in kinds  # 3 rows a device.


def test_a_kind_ends_where_it_fits_and_all_is_for_none():
  tried, asked = run(lambda q: 'BATCH = 16' in q.gin_param)
  assert [t.fits for t in tried if t.kind == 'batch'] == [True]
  assert {t.kind for t in tried} == {'remat', 'mesh', 'batch'}
  assert all(question.fast for question in asked)
  tried, _ = run(lambda q: False)
  assert tried[-1].kind == 'all' and not any(t.fits for t in tried)


def test_what_is_there_already_is_not_tried():
  there = dataclasses.replace(QUESTION, gin_file=(advice.REMAT,))
  tried, _ = run(lambda q: True, there)
  assert {t.kind for t in tried} == {'mesh', 'batch'}


@pytest.mark.parametrize('noted', [False, True])
def test_what_the_architecture_does_not_have_is_not_advised(noted):
  """Whether it is refused, or noted where there are no data."""

  def ask(question):
    if advice.REMAT not in question.gin_file:
      return planned.too_large()
    told = f'nothing reads what {advice.REMAT} sets'
    if not noted:
      raise ValueError(told)
    return dataclasses.replace(planned.fitting(), notes=(told,))

  tried = list(advice.trials(QUESTION, planned.too_large(), ask))
  assert tried[0].kind == 'remat' and 'nothing reads' in tried[0].told
  assert tried[-1].kind == 'all' and advice.REMAT not in tried[-1].flags


def test_what_the_architecture_does_not_have_is_told():
  def ask(question):
    if advice.REMAT in question.gin_file:
      raise ValueError('nothing reads remat.')
    return planned.fitting()

  tried = list(advice.trials(QUESTION, planned.too_large(), ask))
  assert tried[0].told == 'nothing reads remat.' and not tried[0].fits
  head, first, second, _ = advice.lines('v5e:2x4', tried)
  assert head.startswith('v5e:2x4: changes that were tried')
  assert first.split() == (
    ['no', '--gin_file=options/remat_full:', 'nothing', 'reads', 'remat.']
  )
  assert second.split() == (
    ['fits', '--mesh=fsdp:4,model:2:', '4.25', 'GiB', 'a', 'device']
  )
  assert advice.lines('v5e:1x1', []) == ['v5e:1x1: there was nothing to try.']


@pytest.mark.parametrize(
  'broken, told',
  [
    (planned.unknown(), 'no libtpu'),
    (DEAD, 'The process ended with -9: Killed'),
  ],
)
def test_a_change_that_does_not_compile_is_told_and_others_are_tried(
  broken, told
):
  def ask(question):
    if 'BATCH = 16' not in question.gin_param:
      return planned.too_large()
    if isinstance(broken, Exception):
      raise broken
    return broken

  tried = list(advice.trials(QUESTION, planned.too_large(), ask))
  [trial] = [one for one in tried if one.flags.endswith("BATCH = 16'")]
  assert (trial.told, trial.fits, trial.needed) == (told, False, None)
  assert tried[-1].kind == 'all'
  lines = advice.lines('v5e:2x4', tried)
  assert f"  no    --gin_param='BATCH = 16': {told}" in lines
