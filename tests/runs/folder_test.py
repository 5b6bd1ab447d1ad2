"""The files in the folder of a run."""

import functools
import json
import os

import pytest

from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.generation.translation import Translation
from meliad_rec.runs import folder
from tests import bucket
from tests import tiny_run


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  data = tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')
  return tiny_run.experiment(data, tiny_run.program())


def test_a_folder_is_read_as_it_was_written(tmp_path, experiment):
  folder.write(tmp_path / 'new' / 'run', experiment, '# a\n')
  config, facts, vocabulary = folder.read(tmp_path / 'new' / 'run')
  assert config == '# a\n'
  assert facts == {
    'vocabulary': 'bytes',
    'vocabulary_size': 259,
    'batch': tiny_run.ROWS,
    'segment': tiny_run.SEGMENT,
    'parameters': experiment.parameters,
    'averages': True,
    'best_metric': 'bits_per_byte',
    'labels': False,
    'published': {},
    'started_in': os.getcwd(),
    'translation': Translation().facts,
  }
  assert vocabulary.identity == 'bytes'


def test_what_a_paper_reports_of_these_data_is_that_of_the_test_split(
  tmp_path,
):
  published = {'books': 0.9, 'arXiv tokens': 1.2}
  data = tiny_run.write_store(tmp_path / 'store')
  make = functools.partial(
    tiny_run.experiment, data, tiny_run.program(), published=published
  )
  made = make(published_data='arXiv tokens')
  folder.write(tmp_path, made, '')
  _, facts, _ = folder.read(tmp_path)
  assert facts['published'] == {'books': 0.9, 'test': 1.2}
  with pytest.raises(ValueError, match='books, arXiv tokens, got .web.'):
    make(published_data='web')


def test_a_path_of_another_folder_is_named(tmp_path, experiment, monkeypatch):
  (tmp_path / 'here' / 'STORE').mkdir(parents=True)
  monkeypatch.chdir(tmp_path / 'here')
  folder.write('run', experiment, "STORE = 'STORE'\nSTEPS = 3\n")
  assert folder.left_behind('run') == folder.left_behind('new') == ''
  monkeypatch.chdir(tmp_path)
  advice = folder.left_behind('here/run')
  assert "STORE = 'STORE'" in advice and f'{tmp_path}/here,' in advice


def test_a_bucket(tmp_path, experiment, monkeypatch):
  folder.write(tmp_path / 'here', experiment, '# a\n')
  with bucket.served(tmp_path, monkeypatch):
    folder.write('gs://bucket/run', experiment, '# a\n')
    found = folder.read('gs://bucket/run')
  assert found[:2] == folder.read(tmp_path / 'here')[:2]


def test_the_vocabulary_of_an_earlier_run_is_removed(tmp_path, experiment):
  (tmp_path / folder.MODEL).write_text('of a run with pieces')
  folder.write(tmp_path, experiment, '')
  assert folder.read(tmp_path)[2].identity == 'bytes'


def test_a_vocabulary_of_words_is_stored_by_name(tmp_path):
  task = RandomWalk(episodes=20, grid=3)
  made = tiny_run.experiment(task, tiny_run.program(), best_metric='error')
  folder.write(tmp_path, made, '')
  _, facts, vocabulary = folder.read(tmp_path)
  assert facts['labels']
  assert vocabulary.words == task.vocabulary.words


def test_files_are_replaced_atomically(tmp_path, experiment, monkeypatch):
  folder.write(tmp_path, experiment, 'old')

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    folder.write(tmp_path, experiment, 'new')
  assert folder.read(tmp_path)[0] == 'old'


def test_damaged_folders(tmp_path, experiment):
  with pytest.raises(ValueError, match=r'config\.gin'):
    folder.read(tmp_path)
  folder.write(tmp_path, experiment, '# \u00e9\n')
  assert folder.read(tmp_path)[0] == '# \u00e9\n'
  config, facts = tmp_path / folder.CONFIG, tmp_path / folder.FACTS
  whole = json.loads(facts.read_text())
  # Runs from before labels existed.
  before = {name: whole[name] for name in whole if name != 'labels'}
  facts.write_text(json.dumps(before))
  assert folder.read(tmp_path)[1]['labels'] is False
  for text in '{', '[]', '{"vocabulary": 3}', '{"vocabulary": "bytes"}':
    facts.write_text(text)
    with pytest.raises(ValueError, match=r'run\.json'):
      folder.read(tmp_path)
  facts.write_text(json.dumps(whole | {'vocabulary': 'sentencepiece:12'}))
  with pytest.raises(ValueError, match='sentencepiece:12'):
    folder.read(tmp_path)
  facts.write_text(json.dumps(whole))
  config.write_bytes(b'# \xe9\n')
  with pytest.raises(ValueError, match=r'config\.gin is not UTF-8 at byte 2'):
    folder.read(tmp_path)


def test_a_link_out_of_the_folder(tmp_path, experiment):
  (tmp_path / 'elsewhere').write_text('')
  for name in folder.CONFIG, folder.MODEL:
    path = tmp_path / name / name
    folder.write(path.parent, experiment, '')
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(ValueError, match=f'{name} is a link'):
      folder.read(path.parent)
