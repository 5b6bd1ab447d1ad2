"""The command that shows depths, on tiny runs whose configuration was saved."""

import sys
import types

import numpy as np
import pytest

from meliad_rec import cli
from meliad_rec.commands import depth
from meliad_rec.config.saved import DATA
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.runs.trained_run import load_run
from meliad_rec.training.experiment import Experiment
from tests import halting_run
from tests import tiny_run
from tests import trained

EXPRESSION = '[MAX 2 [MIN 3 4 ] 0 ]'
WORDS = f'START {EXPRESSION} END'.split()


@pytest.fixture
def command(capsys, monkeypatch):
  """Runs the command; returns what it prints, or how it complains."""

  def run(folder, *rest, **given):
    capsys.readouterr()  # What training says.
    settings = {
      'workdir': folder,
      'step': None,
      'trusted': False,
      'text': [],
      'split': None,
      'documents': None,
      'batch': None,
      'segment': None,
      'out': None,
    }
    flags = types.SimpleNamespace(**settings | given)
    monkeypatch.setattr(depth.flags, 'FLAGS', flags)
    code = cli.guarded(depth.main, ['depth', *rest])
    out, err = capsys.readouterr()
    assert (code == 2) == bool(err), err
    return err or out

  return run


@pytest.mark.slow
def test_tokens_halt_one_by_one(command, tmp_path):
  out = tmp_path / 'depth.png'
  texts = [EXPRESSION, '7']
  told = command(halting_run.folder('universal'), text=texts, out=str(out))
  *lines, wrote = told.splitlines()
  assert wrote == f'wrote {out}'
  assert out.read_bytes().startswith(b'\x89PNG')
  heads = [0, 1 + len(WORDS)]
  for at, words in zip(heads, (WORDS, ['START', '7', 'END']), strict=True):
    rows = [line.split() for line in lines[at + 1 : at + 1 + len(words)]]
    assert [word for _, word in rows] == words
    steps = [int(steps) for steps, _ in rows]
    assert all(0 <= n <= 7 for n in steps)
    label, mean, most = lines[at].split(', ')
    assert label.split()[0] == 'label' and label.split()[1] in '0123456789'
    assert mean == f'{np.mean(steps):.2f} steps'
    assert most == f'{max(steps)} at most'
  assert lines[4].endswith('    [MIN') and lines[5].endswith('      3')
  assert len(lines) == len(WORDS) + 5


def test_all_tokens_halt_together(tmp_path):
  """The command itself, in a process of its own."""
  folder = halting_run.folder('gated_universal')
  python = [sys.executable, '-m', 'meliad_rec', 'depth']
  arguments = f'--workdir={folder}', f'--text={EXPRESSION}'
  done = tiny_run.run([*python, *arguments])
  assert (done.returncode, done.stderr) == (0, '')
  label, rest = done.stdout.strip().split(', ')
  assert label.removeprefix('label ') in '0123456789'
  steps, text = rest.split(' steps for all 10 tokens: ')
  assert 0 <= int(steps) <= 7
  assert text.split() == WORDS


def test_a_split(command, tmp_path):
  """As many as the table has, and as the data have."""
  out = tmp_path / 'depth.png'
  folder = halting_run.folder('gated_universal')
  told = command(folder, split='train', batch=16, out=str(out))
  first, *lines, wrote = told.splitlines()
  assert wrote == f'wrote {out}'
  assert out.read_bytes().startswith(b'\x89PNG')
  run = load_run(folder)
  data = run.config.argument(Experiment, 'data', DATA)
  documents = data.documents('train')
  tokens = len(documents.tokens)
  assert first.endswith(f': {len(documents)} documents, {tokens:,} tokens')
  heads = [i for i, line in enumerate(lines) if 'documents' in line]
  assert [lines[i].split()[0] for i in heads] == ['tokens', 'brackets']
  tables = lines[1 : heads[1]], lines[heads[1] + 1 :]
  for *groups, all_ in tables:
    counts = [int(line.split()[1]) for line in groups]
    assert sum(counts) == len(documents) == int(all_.split()[1])
    means = [float(line.split()[2]) for line in groups]
    mean = np.average(means, weights=counts)
    assert mean == pytest.approx(float(all_.split()[2]), abs=0.01)
    assert max(line.split()[3] for line in groups) == all_.split()[3]
  assert tables[0][-1].split() == tables[1][-1].split()


def test_the_first_documents(command):
  folder = halting_run.folder('gated_universal')
  told = command(folder, split='train', documents=5)
  assert ': 5 documents, ' in told.splitlines()[0]


def test_what_is_no_run_or_never_halts(command, tmp_path):
  text = [EXPRESSION]
  assert '--workdir=DIR' in command(None, text=text)
  assert 'is not the folder of a run' in command(tmp_path, text=text)
  told = command(trained.folder(), text=['some text'])
  assert told.startswith('error: This model does not halt')
  assert told.count('\n') == 1


def test_what_cannot_be_read_or_written(command, tmp_path):
  text, long = [EXPRESSION], [f'[MAX {"2 " * 30} ]']
  for rest, given, told in (
    ([], {}, 'Give one thing to read'),
    ([], {'text': text, 'split': 'test'}, 'Give one thing to read'),
    ([], {'text': text, 'documents': 3}, '--documents'),
    (['more'], {'text': text}, "'more' is not a flag"),
    ([], {'text': ['[MAX 2 x ]']}, "no word 'x'"),
    ([], {'split': 'tset'}, "'tset'"),
    ([], {'text': long}, '--segment must be at least 34'),
    ([], {'text': text, 'segment': 9}, '--segment must be at least 10'),
    ([], {'text': text, 'out': f'{tmp_path}/no/x.png'}, 'The folder of '),
    ([], {'text': text, 'out': 'x.jpg'}, '.png'),
  ):
    found = command(halting_run.folder('gated_universal'), *rest, **given)
    assert found.startswith('error: ') and told in found, found
    assert found.count('\n') == 1


def test_data_of_another_vocabulary():
  data = types.SimpleNamespace(vocabulary=Bytes())
  config = types.SimpleNamespace(argument=lambda *_: data)
  words = types.SimpleNamespace(identity='words: a')
  run = types.SimpleNamespace(vocabulary=words, config=config)
  with pytest.raises(ValueError, match='the vocabulary bytes, .* --text'):
    depth.split_documents(run, 'train')


def test_a_longer_segment(command):
  folder = halting_run.folder('gated_universal')
  told = command(folder, text=[f'[MAX {"2 " * 30} ]'], segment=34)
  assert 'steps for all 34 tokens' in told
