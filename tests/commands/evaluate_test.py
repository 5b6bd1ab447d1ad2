"""The command that evaluates, and what it says when it cannot."""

import json
import math
from pathlib import Path
import types

import numpy as np
import pytest

from meliad_rec.commands import evaluate
from meliad_rec.commands import run_flags
from meliad_rec.data.split_files import read_text
from meliad_rec.data.store import Store
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.runs.trained_run import load_run
from tests import command
from tests import trained


class Flags(dict):
  """The flags of the command; those that are not given are None."""

  __getattr__ = dict.get


def flags(**changes):
  return Flags({'workdir': 'run', 'out': 'x.npz'} | changes)


@pytest.fixture(scope='module')
def run():
  return load_run(trained.folder())


@pytest.fixture(scope='module')
def documents():
  return Store(trained.store()).documents('validation')


@pytest.fixture(scope='module')
def plain(run, documents):
  return evaluate.measure(run, documents, flags())


@pytest.mark.slow
def test_losses_and_figures_agree(plain, documents):
  metrics, losses = plain
  assert metrics['tokens'] == documents.lengths.sum() == len(losses.nats)
  assert losses.nats.all()
  mean = losses.nats.mean(dtype=np.float64)
  np.testing.assert_allclose(metrics['loss_nats_per_token'], mean, rtol=1e-6)
  words = np.exp(losses.nats.sum(dtype=np.float64) / documents.words.sum())
  np.testing.assert_allclose(metrics['word_perplexity'], words, rtol=1e-4)
  assert losses.about['metrics'] == metrics
  assert losses.bits_per_byte == pytest.approx(metrics['bits_per_byte'])


@pytest.mark.slow
def test_batch_and_segment_change_nothing(run, documents, plain):
  given = flags(batch=11, segment=20)  # Rounded up to 16.
  metrics, losses = evaluate.measure(run, documents, given)
  np.testing.assert_allclose(losses.nats, plain[1].nats, rtol=1e-3)
  assert metrics['tokens'] == plain[0]['tokens']
  with pytest.raises(ValueError, match='--segment .* got 6'):
    evaluate.measure(run, documents, flags(segment=6))


def test_a_cleared_state_counts_from_the_second_segment_on(
  run, documents, plain
):
  _, losses = evaluate.measure(run, documents, flags(clear_state=True))
  np.testing.assert_array_equal(losses.tokens, plain[1].tokens)
  first = run.sharded.segment
  for mine, its in zip(losses.parts, plain[1].parts, strict=True):
    np.testing.assert_allclose(mine[:first], its[:first], rtol=1e-4)
    assert np.abs(mine[first:] - its[first:]).max() > 1e-6


def test_what_is_read(run, documents, tmp_path):
  chosen = flags(split='validation', store=str(trained.store()))
  found, trivial = evaluate.choose(run, chosen)
  assert (found.identity, trivial) == (documents.identity, {})
  (tmp_path / 'deep' / 'er').mkdir(parents=True)
  for name in ('b.txt', 'a.txt', 'deep/er/c.txt'):
    (tmp_path / name).write_text(f'text ö {name}')
  names = f'{tmp_path}/*.txt', f'{tmp_path}/a.txt', f'{tmp_path}/**/*.txt'
  read, trivial = evaluate.choose(run, flags(file=names))
  assert trivial == {}
  assert [name[-5:] for name in read.names] == ['a.txt', 'b.txt', 'c.txt']
  assert run.vocabulary.decode(read[1]) == 'text ö b.txt'
  assert (read.bytes_[0], read.words[0]) == (13, 3)
  with pytest.raises(ValueError, match=r'--file=/no/\*.txt'):
    evaluate.choose(run, flags(file=['/no/*.txt']))


def test_texts_that_cannot_be_read(tmp_path):
  (tmp_path / 'a').write_bytes('ö\r\n'.encode())
  assert read_text(tmp_path / 'a') == 'ö\r\n'
  (tmp_path / 'b').write_bytes(b'ab\xff')
  with pytest.raises(ValueError, match=r'b is not UTF-8 \(byte 2\)'):
    read_text(tmp_path / 'b')
  with pytest.raises(ValueError, match=r'cannot be read \(Is a directory\)'):
    read_text(tmp_path)


@pytest.mark.parametrize(
  ('known', 'told'), [('books:1', False), (None, False), ('books:0', True)]
)
def test_data_that_have_changed_are_told(known, told, caplog):
  run = types.SimpleNamespace(validation=known)
  documents = types.SimpleNamespace(identity='books:1')
  data = types.SimpleNamespace(documents={'validation': documents}.get)
  run_flags.check_split(run, data)
  assert ('The data have changed since' in caplog.text) == told


@pytest.mark.parametrize(
  ('workdir', 'recorded'),
  [('run', str(Path('run').resolve())), ('gs://b/run', 'gs://b/run')],
)
def test_labels_are_told_beside_what_trivial_answers_reach(
  monkeypatch, capsys, tmp_path, workdir, recorded
):
  task = RandomWalk(episodes=30, actions=9, episodes_per_document=1)
  config = types.SimpleNamespace(argument=lambda *_: task)
  run = types.SimpleNamespace(
    vocabulary=task.vocabulary, config=config, step=7, validation=None
  )
  measured = {'tokens': 30, 'error': 0.125, 'scored_tokens': 27}
  measured['word_perplexity'] = math.inf
  monkeypatch.setattr(evaluate.run_flags, 'open_run', lambda *_: run)
  monkeypatch.setattr(evaluate, 'measure', lambda *_: (measured, None))
  file = tmp_path / 'test.json'
  given = f'--workdir={workdir}', '--split=test', f'--metrics={file}'
  assert command.run(evaluate, *given) == 0
  first, error, _, *trivial, wrote = capsys.readouterr().out.splitlines()
  assert wrote == f'wrote {file}'
  written = json.loads(file.read_text(), parse_constant=pytest.fail)
  written['word_perplexity'] = float(written['word_perplexity'])
  assert written.pop('trivial') == task.baselines('test')
  assert written == {'run': recorded, 'step': 7} | measured
  assert first.startswith(f'step 7 of {workdir}: 3 documents, 30 tokens, ')
  assert first.endswith('30 words, 27 scored')
  assert error.split() == ['error', '0.125', 'share', 'of', 'scored', 'tokens']
  found = {line.split()[0]: float(line.split()[1]) for line in trivial}
  assert found == pytest.approx(task.baselines('test'), abs=1e-5)


def test_data_of_another_vocabulary_are_refused():
  other = types.SimpleNamespace(identity='sentencepiece:0', size=9)
  with pytest.raises(ValueError, match='the vocabulary bytes, .* --store'):
    evaluate.choose(
      types.SimpleNamespace(vocabulary=other),
      flags(split='validation', store=str(trained.store())),
    )


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    ([], 'got neither'),
    (['--split=test', '--file=a'], 'got both'),
    (['--file=a', '--store=b'], 'Add --split'),
    (['--file=a', '--out=/no/such/x.npz'], 'The folder of /no/such/x'),
    (['--file=a', '--metrics=a.txt'], 'a.txt does not end in .json'),
    (['--compare=a,b', '--split=test', '--out=c'], 'Remove --split and --out'),
    (['--compare=a'], 'two files'),
    (['--split=test', '--top=3'], '--top can'),
    (['--compare=a,b', 'run'], 'Remove --workdir'),
  ],
)
def test_flags_that_do_not_fit(arguments, told):
  assert told in command.mistake(evaluate, *arguments)


def test_the_command_evaluates_and_compares(tmp_path, capsys):
  """The run's own data are gone; a store, then two files compared."""
  reads = f'--workdir={trained.folder()}', '--split=test'
  store, out = f'--store={trained.store()}', tmp_path / 'a.npz'
  given = *reads, store, f'--out={out}', '--step=best'
  assert command.run(evaluate, *given) == 0
  told = capsys.readouterr().out
  assert '1 document, 30 tokens, 30 bytes' in told and 'bits/byte' in told
  assert len(TokenLosses.load(out).nats) == 30
  run = str(trained.folder())
  part = '--tokens=20', '--documents=5'
  assert command.run(evaluate, run, '--split=test', store, *part) == 0
  told = capsys.readouterr().out
  assert '1 document, 20 tokens' in told and 'wrote' not in told
  assert command.run(evaluate, f'--compare={out},{out}') == 0
  assert 'By position in the document' in capsys.readouterr().out
  gone = trained.store().parent / 'store'
  assert f'{gone}, which does not' in command.mistake(evaluate, *reads)
