"""The data of a run, found from any folder or where they have been moved."""

import json
import types

import pytest

from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.config.saved import DATA
from meliad_rec.config.saved import SavedConfig
from meliad_rec.config.values import Reference
from meliad_rec.data.listops_files import ListOpsFiles
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.runs.run_data import open_data
from tests import pieces
from tests import tiny_run

HEAD = """
from __gin__ import dynamic_registration
from meliad_rec.data import sources
from meliad_rec.data import store
from meliad_rec.data import text
from meliad_rec.data import vocabulary
from meliad_rec.training import experiment
"""
TEXT = """
experiment.Experiment.data = @text.Text()
text.Text.vocabulary = @vocabulary.open_vocabulary()
vocabulary.open_vocabulary.name = 'words.model'
text.Text.source = @sources.{0}()
sources.{0}.path = '{1}'
"""


@pytest.fixture
def opened(tmp_path, monkeypatch):
  """Opens the data of a run that was started in the folder `start`."""
  (tmp_path / 'start').mkdir()
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path / 'elsewhere')

  def run(config, vocabulary=None, **moved):
    return open_data(
      types.SimpleNamespace(
        config=SavedConfig(HEAD + config, 'config.gin'),
        vocabulary=vocabulary or Bytes(),
        started_in=str(tmp_path / 'start'),
      ),
      **moved,
    )

  return run


STORE = """
experiment.Experiment.data = @store.Store()
store.Store.path = 'data/STORE'
"""


def test_a_store(opened, tmp_path):
  where = tmp_path / 'start' / 'data' / 'STORE'
  written = tiny_run.write_store(where)
  identity = written.documents('train').identity
  assert opened(STORE).documents('train').identity == identity
  where.rename(tmp_path / 'elsewhere' / 'moved')
  with pytest.raises(
    ValueError, match=f'{where}, which does not .* as --store'
  ):
    opened(STORE)
  found = opened(STORE, store='moved')
  assert found.documents('train').identity == identity
  with pytest.raises(ValueError, match='--path cannot be used with --store'):
    opened(STORE, store='moved', path='x')
  (tmp_path / 'elsewhere' / 'moved').rename(where)
  with pytest.raises(
    ValueError, match='are the token store .*--path .*--store'
  ):
    opened(STORE, path='moved')


def test_files_their_split_file_and_the_vocabulary(opened, tmp_path):
  """The vocabulary is the one in the folder of the run; its file is gone."""
  texts = tmp_path / 'start' / 'texts'
  texts.mkdir()
  for name in 'abc':
    (texts / f'{name}.txt').write_text(f'text {name}')
  split = tmp_path / 'start' / 'split.tsv'
  split.write_text('a\ttrain\nb\tvalidation\nc\ttest\n')
  (tmp_path / 'words.model').write_bytes(
    pieces.train(['text'] * 9, 270, **pieces.IDS)
  )
  vocabulary = SentencePiece(tmp_path / 'words.model')
  (tmp_path / 'words.model').unlink()
  config = TEXT.format('Folder', 'texts')
  config += "sources.Folder.split_file = 'split.tsv'\n"

  def names(**moved):
    data = opened(config, vocabulary, **moved)
    assert data.vocabulary is vocabulary
    return [data.documents(part).names for part in data.splits]

  expected = [['a.txt'], ['b.txt'], ['c.txt']]
  assert names() == expected
  texts.rename(tmp_path / 'elsewhere' / 'here')
  with pytest.raises(ValueError, match='start/texts, .* as --path'):
    names()
  assert names(path='here') == expected
  split.rename(tmp_path / 'elsewhere' / 'other.tsv')
  with pytest.raises(ValueError, match='start/split.tsv, .* as --split_file'):
    names(path='here')
  assert names(path='here', split_file='other.tsv') == expected


def test_files_of_pairs_cannot_be_given_in_another_place(opened, tmp_path):
  text = 'from meliad_rec.data import pairs\n'
  text += 'experiment.Experiment.data = @pairs.Pairs()\n'
  text += 'pairs.Pairs.source = @pairs.Lines()\n'
  text += 'pairs.Pairs.vocabulary = @vocabulary.Bytes()\n'
  text += "pairs.Lines.source = '{split}.en'\n"
  text += "pairs.Lines.target = '{split}.de'\n"
  for suffix in 'en', 'de':
    (tmp_path / 'start' / f'test.{suffix}').write_text('one\n')
  assert opened(text).splits == ('test',)
  (tmp_path / 'start' / 'test.de').unlink()
  with pytest.raises(ValueError, match='start/{split}.de.*translate RUN'):
    opened(text)


@pytest.mark.parametrize('path', ['lines/{split}.jsonl', 'lines'])
def test_lines(opened, tmp_path, path):
  (tmp_path / 'start' / 'lines').mkdir()
  for split in 'train', 'validation':
    line = json.dumps({'text': split})
    (tmp_path / 'start' / 'lines' / f'{split}.jsonl').write_text(line)
  data = opened(TEXT.format('Jsonl', path))
  assert Bytes().decode(data.documents('validation')[0]) == 'validation'


def test_the_name_of_a_dataset_is_not_a_path(opened):
  data = opened(TEXT.format('HuggingFace', 'someone/books'))
  assert data.source.path == 'someone/books'


def test_runs_that_do_not_say_where_they_were_started(opened, tmp_path):
  where = tmp_path / 'elsewhere' / 'data' / 'STORE'
  tiny_run.write_store(where)
  config = SavedConfig(HEAD + STORE, 'config.gin')
  run = types.SimpleNamespace(config=config, vocabulary=Bytes(), started_in='')
  assert 'train' in open_data(run).splits


def parts(value):
  """Yields the references in the value of a binding."""
  match value:
    case Reference():
      yield value
    case dict():
      yield from parts([*value.items()])
    case list() | tuple():
      for part in value:
        yield from parts(part)


@pytest.mark.parametrize('task', sorted({*files.names('task')} - {'seqio'}))
def test_a_saved_run_may_open_the_data_of_every_task(task):
  bindings = config.read([f'task/{task}'], [], kinds=()).bindings.values()
  names = {one.name for one in bindings}
  names |= {value.name for one in bindings for value in parts(one.value)}
  names = {f'{name.full}.' for name in names if not isinstance(name, str)}
  folders = 'meliad_rec.data.', 'meliad_rec.reinforcement.'
  ours = {name for name in names if name.startswith(folders)}
  assert ours
  allowed = *(f'{name}.' for name in DATA), folders[1]
  assert all(name.startswith(allowed) for name in ours)


def test_moved_files_of_a_task_and_their_relative_paths(opened, tmp_path):
  """Their place is relative to the folder in which the run was started."""
  lines = (
    'from meliad_rec.data import listops_files\n'
    'experiment.Experiment.data = @listops_files.ListOpsFiles()\n'
    "listops_files.ListOpsFiles.path = 'data/{split}.tsv'\n"
    'listops_files.ListOpsFiles.max_length = 20\n'
  )
  words = ListOpsFiles.vocabulary
  assert opened(lines, words).path == str(tmp_path / 'start/data/{split}.tsv')
  moved = 'moved/{split}.tsv'
  assert opened(lines, words, path=moved).path == moved
