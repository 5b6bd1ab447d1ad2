"""What a run keeps beside its checkpoints, and how it is read back."""

import json
import os

import pytest

from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.runs import folder
from tests import bucket
from tests import tiny_run


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  data = tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')
  return tiny_run.experiment(data, tiny_run.program())


def test_what_is_written_is_read(tmp_path, experiment):
  folder.write(tmp_path / 'new' / 'run', experiment, '# a\n')
  config, facts, vocabulary = folder.read(tmp_path / 'new' / 'run')
  assert config == '# a\n'
  assert facts == {
    'vocabulary': 'bytes',
    'vocabulary_size': 259,
    'batch': tiny_run.ROWS,
    'segment': tiny_run.SEGMENT,
    'averages': True,
    'best_metric': 'bits_per_byte',
    'labels': False,
  }
  assert vocabulary.identity == 'bytes'


def test_a_bucket(tmp_path, experiment, monkeypatch):
  folder.write(tmp_path / 'here', experiment, '# a\n')
  with bucket.served(tmp_path, monkeypatch):
    folder.write('gs://bucket/run', experiment, '# a\n')
    found = folder.read('gs://bucket/run')
  assert found[:2] == folder.read(tmp_path / 'here')[:2]


def test_a_vocabulary_of_an_earlier_run_goes(tmp_path, experiment):
  (tmp_path / folder.MODEL).write_text('of a run with pieces')
  folder.write(tmp_path, experiment, '')
  assert folder.read(tmp_path)[2].identity == 'bytes'


def test_a_vocabulary_of_words_is_kept_by_its_name(tmp_path):
  task = RandomWalk(episodes=20, grid=3)
  made = tiny_run.experiment(task, tiny_run.program(), best_metric='error')
  folder.write(tmp_path, made, '')
  _, facts, vocabulary = folder.read(tmp_path)
  assert facts['labels']
  assert vocabulary.words == task.vocabulary.words


def test_a_run_of_before_there_were_labels(tmp_path, experiment):
  folder.write(tmp_path, experiment, '')
  path = tmp_path / folder.FACTS
  facts = json.loads(path.read_text())
  del facts['labels']
  path.write_text(json.dumps(facts))
  assert folder.read(tmp_path)[1]['labels'] is False


def test_files_are_replaced_at_once(tmp_path, experiment, monkeypatch):
  folder.write(tmp_path, experiment, 'old')

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    folder.write(tmp_path, experiment, 'new')
  assert folder.read(tmp_path)[0] == 'old'


def test_no_folder_of_a_run(tmp_path):
  with pytest.raises(ValueError, match=r'it has no config\.gin; give'):
    folder.read(tmp_path)


@pytest.mark.parametrize(
  'facts', ['{', '[]', '{"vocabulary": 3}', json.dumps({'vocabulary': 'bytes'})]
)
def test_damaged_facts(tmp_path, experiment, facts):
  folder.write(tmp_path, experiment, '')
  (tmp_path / folder.FACTS).write_text(facts)
  with pytest.raises(ValueError, match=r'run\.json is damaged; train again'):
    folder.read(tmp_path)


def test_a_configuration_that_is_not_utf8(tmp_path, experiment):
  folder.write(tmp_path, experiment, '# é\n')
  assert folder.read(tmp_path)[0] == '# é\n'
  (tmp_path / folder.CONFIG).write_bytes(b'# \xe9\n')
  with pytest.raises(ValueError, match=r'config\.gin is not UTF-8 \(byte 2\)'):
    folder.read(tmp_path)


def test_another_vocabulary(tmp_path, experiment):
  folder.write(tmp_path, experiment, '')
  path = tmp_path / folder.FACTS
  facts = json.loads(path.read_text()) | {'vocabulary': 'sentencepiece:12'}
  path.write_text(json.dumps(facts))
  with pytest.raises(ValueError, match='with the vocabulary sentencepiece:12'):
    folder.read(tmp_path)


def test_a_link_out_of_the_folder(tmp_path, experiment):
  folder.write(tmp_path / 'run', experiment, '')
  (tmp_path / 'elsewhere').write_text('')
  (tmp_path / 'run' / folder.CONFIG).unlink()
  (tmp_path / 'run' / folder.CONFIG).symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(ValueError, match='link that leads out of the folder'):
    folder.read(tmp_path / 'run')
