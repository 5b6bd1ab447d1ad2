"""Runs side by side: the table, its order, its picture, its mistakes."""

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec import cli
from meliad_rec.commands import runs
from meliad_rec.report import journal
from tests import bucket
from tests import command

MORE = 'accuracy', 'sequence_accuracy', 'tokens_per_second', 'mfu', 'epoch'


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


@pytest.fixture
def lines(capsys):
  """Runs the command; returns the words of each row of its table."""

  def run(*arguments):
    assert command.run(runs, *arguments) == 0
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert {len(head)} == {len(line) for line in lines if line[:6] != 'wrote '}
    return [line.split() for line in lines]

  return run


def test_the_best_comes_first(folder, lines):
  slide = folder('slide', {10: 3.0, 20: 2.5, 60: 2.75})
  rec = folder('rec', {10: 2.5})
  assert lines(slide, rec) == [
    ['rec', '10', '2.5000', '2.5000', '10', '100.0', '512'],
    ['slide', '60', '2.7500', '2.5000', '20', '200.0', '512'],
  ]


@pytest.mark.parametrize('metric', MORE)
def test_of_these_more_is_better(folder, lines, metric):
  a, b = folder('a', {1: 0.25}), folder('b', {1: 0.5, 2: 0.375})
  assert [line[:5] for line in lines(a, b, f'--metric={metric}')] == [
    ['b', '2', '0.3750', '0.5000', '1'],
    ['a', '1', '0.2500', '0.2500', '1'],
  ]


def test_a_run_that_diverged_comes_last(folder, lines):
  dead = folder('dead', {1: float('nan'), 2: 3.0, 3: float('nan')})
  alive = folder('alive', {1: 4.0})
  for metric in 'bits_per_byte', 'accuracy':
    assert [line[:5] for line in lines(dead, alive, f'--metric={metric}')] == [
      ['alive', '1', '4.0000', '4.0000', '1'],
      ['dead', '3', 'nan', '3.0000', '2'],
    ]


def test_the_curves_are_drawn(folder, lines, tmp_path, monkeypatch):
  out = tmp_path / 'curves.png'
  lines(folder('a', {1: 0.5}), folder('b', {1: 0.25}), f'--plot={out}')
  assert out.read_bytes().startswith(b'\x89PNG')
  drawn = []
  monkeypatch.setattr(runs.plot, 'save', lambda figure, _: drawn.append(figure))
  call = folder('c', {1: 0.5}), '--metric=tokens_per_second', f'--plot={out}'
  lines(*call)
  lines(*call, '--split=train')
  labels = [[a.get_label() for a in f.axes[0].lines] for f in drawn]
  assert labels == [['c, train', 'c, validation'], ['c, train']]


def test_a_run_may_lie_in_a_bucket(folder, lines, tmp_path, monkeypatch):
  folder('b/runs/far', {100: 2.5})
  with bucket.served(tmp_path, monkeypatch):
    assert lines('gs://b/runs/far')[-1][0] == 'far'


def test_mistakes_are_sentences(folder, tmp_path):
  a, more = folder('a', {1: 0.5}), folder('more/a', {1: 0.5})
  for arguments, told in (
    ([], 'No run was given'),
    ([tmp_path], 'metrics.jsonl'),
    ([a, more], f'{a} and {more} are both named'),
    ([a, '--split=test'], 'no bits_per_byte on test. Choose'),
    ([a, '--metric=loss'], 'It has step_seconds, tokens_per_second on train; '),
    ([a, '--metric=step', '--plot=x.png'], 'has no step on train. Choose'),
    ([a, '--metric=split'], 'has no split on train. Choose'),
    ([a, '--metric=epoch,text', '--plot=x.png'], 'has no text. Choose one of'),
    (
      [a, '--metric=mfu,step_seconds', '--plot=x.png', '--split=validation'],
      'metrics.jsonl has no step_seconds on validation, but on train.',
    ),
    ([a, '--metric='], '--metric= has an empty name'),
    ([a, '--metric=a,', '--plot=x.png'], '--metric=a, has an empty name'),
    ([a, '--plot=no/x.png'], 'The folder of no/x.png does not exist'),
    ([a, '--plot=notes.txt'], 'notes.txt does not end in'),
  ):
    assert told in command.mistake(runs, *arguments)


def test_the_help_shows_a_list_as_it_is_given():
  with flagsaver.flagsaver():
    runs.define_flags()
    told = cli._flag_line(flags.FLAGS['metric'])
  assert told.endswith('(default bits_per_byte)')
