"""The command that evaluates, and what it says when it cannot."""

import types

import jax
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.lstm import LSTM
from meliad_rec.commands import evaluate
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.store import Store
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs.trained_run import load_run
from meliad_rec.runs.trained_run import TrainedRun
from tests import tiny_run
from tests import trained


def flags(**changes):
  """The flags of the command, as absl would hold them."""
  settings = {
    'workdir': 'run',
    'split': None,
    'store': None,
    'file': [],
    'documents': None,
    'tokens': None,
    'batch': None,
    'segment': None,
    'clear_state': False,
    'out': 'x.npz',
  }
  return types.SimpleNamespace(**settings | changes)


@pytest.fixture(scope='module')
def run():
  return load_run(trained.folder())


@pytest.fixture(scope='module')
def documents():
  return Store(trained.store()).documents('validation')


@pytest.fixture(scope='module')
def plain(run, documents):
  return evaluate.measure(run, documents, flags())


def test_losses_and_figures_agree(plain, documents):
  metrics, losses = plain
  assert metrics['tokens'] == documents.lengths.sum() == len(losses.nats)
  assert losses.nats.all()
  mean = losses.nats.mean(dtype=np.float64)
  np.testing.assert_allclose(metrics['loss_nats_per_token'], mean, rtol=1e-6)
  words = np.exp(losses.nats.sum(dtype=np.float64) / documents.words.sum())
  np.testing.assert_allclose(metrics['word_perplexity'], words, rtol=1e-4)
  assert losses.about['metrics'] == metrics


@pytest.mark.parametrize('setting', [{'batch': 16}, {'segment': 20}])
def test_batch_and_segment_change_nothing(run, documents, plain, setting):
  metrics, losses = evaluate.measure(run, documents, flags(**setting))
  np.testing.assert_allclose(losses.nats, plain[1].nats, rtol=1e-3)
  assert metrics['tokens'] == plain[0]['tokens']


def test_clear_state_covers_the_same_tokens(run, documents, plain):
  metrics, losses = evaluate.measure(run, documents, flags(clear_state=True))
  assert metrics['tokens'] == plain[0]['tokens']
  np.testing.assert_array_equal(losses.tokens, plain[1].tokens)
  first = run.sharded.segment
  for start, (mine, its) in enumerate(
    zip(losses.parts, plain[1].parts, strict=True)
  ):
    np.testing.assert_allclose(mine[:first], its[:first], rtol=1e-4)
    assert np.abs(mine[first:] - its[first:]).max() > 1e-6, start


def test_a_segment_is_whole_blocks(run, documents):
  with pytest.raises(ValueError, match='--segment .* got 6'):
    evaluate.measure(run, documents, flags(segment=6))


def test_what_is_read(run, documents, tmp_path):
  chosen = flags(split='validation', store=str(trained.store()))
  found, trivial = evaluate.choose(run, chosen)
  assert (found.identity, trivial) == (documents.identity, {})
  for name in ('b.txt', 'a.txt'):
    (tmp_path / name).write_text(f'text ö {name}')
  chosen = flags(file=[f'{tmp_path}/*.txt', f'{tmp_path}/a.txt'])
  read, trivial = evaluate.choose(run, chosen)
  assert trivial == {}
  assert [name[-5:] for name in read.names] == ['a.txt', 'b.txt']
  assert run.vocabulary.decode(read[1]) == 'text ö b.txt'
  assert (read.bytes_[0], read.words[0]) == (13, 3)
  (tmp_path / 'deep' / 'er').mkdir(parents=True)
  (tmp_path / 'deep' / 'er' / 'c.txt').write_text('c')
  found, _ = evaluate.choose(run, flags(file=[f'{tmp_path}/**/*.txt']))
  assert [name[-5:] for name in found.names] == ['a.txt', 'b.txt', 'c.txt']


def test_labels_are_told_beside_what_trivial_answers_reach(monkeypatch, capsys):
  task = RandomWalk(episodes=30, actions=9, episodes_per_document=1)
  config = types.SimpleNamespace(argument=lambda *_: task)
  run = types.SimpleNamespace(
    vocabulary=task.vocabulary, config=config, step=7, validation=None
  )
  measured = {'tokens': 30, 'error': 0.125, 'scored_tokens': 27}
  given = flags(split='test', out=None, compare=None)
  monkeypatch.setattr(evaluate.flags, 'FLAGS', given)
  monkeypatch.setattr(evaluate.config_flags, 'refuse', lambda *_: None)
  monkeypatch.setattr(evaluate.run_flags, 'open_run', lambda: run)
  monkeypatch.setattr(evaluate, 'measure', lambda *_: (measured, None))
  evaluate.main(['evaluate'])
  first, error, *trivial = capsys.readouterr().out.splitlines()
  assert first.startswith('step 7 of run: 3 documents, 30 tokens, ')
  assert first.endswith('30 words, 27 scored')
  assert error.split() == ['error', '0.125', 'share', 'of', 'scored', 'tokens']
  found = {line.split()[0]: float(line.split()[1]) for line in trivial}
  assert found == pytest.approx(task.baselines('test'), abs=1e-5)


def pairs():
  """Documents whose label says whether both sequences begin alike."""
  rng = np.random.default_rng(0)

  def document(i):
    sides = rng.integers(1, 20, 2)
    ids = rng.integers(1, 9, sides.sum())
    labels = np.zeros(len(ids), int)
    labels[-1] = 1 + (ids[0] == ids[sides[0]])
    return Document(f'{i}', ids, len(ids), 1, labels, int(sides[0]))

  return Documents.collect(map(document, range(11)), Bytes())


def matching(**changes):
  """A run, so far as it is asked, that matches pairs."""
  model = Model(9, stack.layers(1, lambda: LSTM(6)), 6, head=Matcher(2))
  forward = ShardedModel(model, make_mesh(devices=jax.devices()[:1]), 64)
  params = initialize(model, jax.random.key(0), 1, 2)
  facts = {'batch': 3, 'labels': True, 'averages': False}
  run = TrainedRun(forward, params, Bytes(), None, facts, 7)
  return evaluate.measure(run, pairs(), flags(out=None, **changes))


def test_pairs_give_the_same_figures_in_any_segments():
  metrics, losses = matching()
  assert losses is None
  assert metrics['scored_tokens'] == len(pairs())
  assert metrics['tokens'] == len(pairs().tokens)
  for changes in {'segment': 6}, {'segment': 10, 'batch': 11}:
    again, _ = matching(**changes)
    for name in 'loss_nats_per_token', 'accuracy', 'tokens', 'scored_tokens':
      np.testing.assert_allclose(again[name], metrics[name], rtol=1e-5)


def test_a_segment_that_pairs_cannot_share_is_told():
  with pytest.raises(ValueError, match='^--segment .* got 7'):
    matching(segment=7)


def test_a_run_with_a_head_writes_no_text():
  model = Model(9, stack.layers(1, lambda: LSTM(6)), 6, head=Matcher(2))
  forward = ShardedModel(model, make_mesh(devices=jax.devices()[:1]), 64)
  facts = {'batch': 3, 'labels': False, 'averages': False}
  run = TrainedRun(forward, {}, Bytes(), None, facts, 7)
  with pytest.raises(ValueError, match='Matcher .* SAMPLE'):
    run.generate('x')
  with pytest.raises(ValueError, match='Matcher .* remove model.Model.head'):
    run.evaluate('x')


def test_data_of_another_vocabulary_are_refused(run):
  other = types.SimpleNamespace(identity='sentencepiece:0', size=9)
  with pytest.raises(ValueError, match='the vocabulary bytes, .* --store'):
    evaluate.choose(
      types.SimpleNamespace(vocabulary=other),
      flags(split='validation', store=str(trained.store())),
    )


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({}, '--split=validation, or --file'),
    ({'split': 'test', 'file': ['a']}, '--split=validation, or --file'),
    ({'file': ['a'], 'store': 'b'}, '--store .* --split'),
    ({'file': ['a'], 'out': '/no/such/x.npz'}, 'The folder of /no/such/x'),
  ],
)
def test_flags_that_do_not_fit(changes, told):
  with pytest.raises(ValueError, match=told):
    evaluate.check_flags(flags(**changes))


def test_files_that_cannot_be_read(run, tmp_path):
  with pytest.raises(ValueError, match=r'--file=/no/\*.txt'):
    evaluate.choose(run, flags(file=['/no/*.txt']))
  (tmp_path / 'latin').write_bytes(b'ab\xe9')
  with pytest.raises(ValueError, match=r'not UTF-8 \(byte 2\)'):
    evaluate.choose(run, flags(file=[str(tmp_path / 'latin')]))
  with pytest.raises(ValueError, match=r'cannot be read \(Is a directory\)'):
    evaluate.choose(run, flags(file=[str(tmp_path)]))


def test_the_command_evaluates_and_compares(tmp_path):
  """The run's own data are gone; a store, then two files compared."""

  def command(*arguments):
    python = tiny_run.command('', '')[0]
    return tiny_run.run([python, '-m', 'meliad_rec', 'evaluate', *arguments])

  workdir = f'--workdir={trained.folder()}'
  out = tmp_path / 'a.npz'
  store = f'--store={trained.store()}'
  done = command(workdir, '--split=test', store, f'--out={out}', '--step=best')
  assert done.returncode == 0, done.stderr
  assert '1 documents, 30 tokens, 30 bytes' in done.stdout
  assert 'bits/byte' in done.stdout
  assert len(TokenLosses.load(out).nats) == 30
  done = command(f'--compare={out},{out}', '--split=test', '--out=b.npz')
  assert done.returncode == 2
  assert '--split, --out cannot be combined with --compare' in done.stderr
  done = command(f'--compare={out},{out}')
  assert done.returncode == 0, done.stderr
  assert 'By position in the document' in done.stdout
  done = command(workdir, '--split=test')
  assert done.returncode == 2
  assert done.stderr.startswith(f'error: {trained.store().parent / "store"} is')
