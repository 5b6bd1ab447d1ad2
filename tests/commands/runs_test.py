"""Runs side by side: the table, its order, its picture, its mistakes."""

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.commands import runs
from meliad_rec.report import journal
from tests import bucket

MORE = ('accuracy', 'tokens_per_second', 'mfu', 'epoch')


@pytest.fixture
def given():
  if 'split' not in flags.FLAGS:
    runs.define_flags()
  flags.FLAGS(['runs'])
  with flagsaver.flagsaver():
    yield flags.FLAGS


@pytest.fixture
def folder(tmp_path):
  def write(name, values):
    (tmp_path / name).mkdir(parents=True)
    out = journal.Journal(tmp_path / name / journal.NAME)
    for step, value in values.items():
      training = {'step_seconds': step / 100, 'tokens_per_second': 512.0}
      out.append({'step': step, 'split': 'train', **training})
      figures = dict.fromkeys(('bits_per_byte', *MORE), value)
      out.append({'step': step, 'split': 'validation', **figures})
      out.append({'step': step, 'text': {'sample': 'x'}})
    out.close()
    return str(tmp_path / name)

  return write


def test_the_best_comes_first(folder, given, capsys):
  slide = folder('slide', {10: 3.0, 20: 2.5, 60: 2.75})
  rec = folder('rec', {10: 2.5})
  runs.main(['runs', slide, rec])
  _, head, *lines = capsys.readouterr().out.splitlines()
  assert [line.split() for line in lines] == [
    ['rec', '10', '2.5000', '2.5000', '10', '100.0', '512'],
    ['slide', '60', '2.7500', '2.5000', '20', '200.0', '512'],
  ]
  assert {len(head)} == set(map(len, lines))


@pytest.mark.parametrize('metric', MORE)
def test_of_these_more_is_better(folder, given, capsys, metric):
  given.metric = metric
  runs.main(['runs', folder('a', {1: 0.25}), folder('b', {1: 0.5, 2: 0.375})])
  lines = capsys.readouterr().out.splitlines()[2:]
  assert [line.split()[:5] for line in lines] == [
    ['b', '2', '0.3750', '0.5000', '1'],
    ['a', '1', '0.2500', '0.2500', '1'],
  ]


def test_the_curves_are_drawn(folder, given, tmp_path):
  given.plot = str(tmp_path / 'curves.png')
  runs.main(['runs', folder('a', {1: 0.5}), folder('b', {1: 0.25})])
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_a_picture_takes_the_place_of_no_text(folder, given, tmp_path):
  given.plot = str(tmp_path / 'notes.txt')
  with pytest.raises(ValueError, match='--plot=.*notes.txt'):
    runs.main(['runs', folder('a', {1: 0.5})])


def test_a_run_may_lie_in_a_bucket(
  folder, given, tmp_path, monkeypatch, capsys
):
  folder('b/runs/far', {100: 2.5})
  with bucket.served(tmp_path, monkeypatch):
    runs.main(['runs', 'gs://b/runs/far'])
  assert 'far' in capsys.readouterr().out.splitlines()[-1]


def test_mistakes_are_sentences(folder, given, tmp_path):
  a = folder('a', {1: 0.5})
  with pytest.raises(ValueError, match='No run was given'):
    runs.main(['runs'])
  with pytest.raises(ValueError, match='metrics.jsonl'):
    runs.main(['runs', str(tmp_path)])
  with pytest.raises(ValueError, match='the same last name'):
    runs.main(['runs', a, folder('more/a', {1: 0.5})])
  given.split = 'test'
  with pytest.raises(ValueError, match='no bits_per_byte on test yet; choose'):
    runs.main(['runs', a])
