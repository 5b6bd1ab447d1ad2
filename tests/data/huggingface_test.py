"""Datasets of Hugging Face: local files and streams, their order and splits."""

import sys

import pytest

from meliad_rec.data.sources import HuggingFace
from meliad_rec.data.sources import source
from meliad_rec.data.text import Text
from meliad_rec.data.vocabulary import Bytes

datasets = pytest.importorskip('datasets')


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  datasets.disable_progress_bars()


def rows(name, count):
  texts = [f'{name} {i} é' for i in range(count)]
  return datasets.Dataset.from_dict({'text': texts, 'number': range(count)})


@pytest.fixture
def saved(tmp_path):
  parts = {
    'train': rows('a', 7),
    'dev': rows('b', 3),
    'validation': rows('c', 2),
  }
  datasets.DatasetDict(parts).save_to_disk(tmp_path / 'saved')
  return str(tmp_path / 'saved')


def test_rows_are_documents_in_their_order(saved):
  data = HuggingFace(saved)
  assert data.splits == ('train', 'validation')
  assert list(data.read('validation')) == [
    ('validation:0', 'c 0 é'),
    ('validation:1', 'c 1 é'),
  ]
  renamed = HuggingFace(saved, splits_from={'train': 'train', 'test': 'dev'})
  assert renamed.splits == ('train', 'test')
  assert [text for _, text in renamed.read('test')] == [
    f'b {i} é' for i in range(3)
  ]
  assert len(list(HuggingFace(saved, limit=4).read('train'))) == 4
  first, second = (
    Text(HuggingFace(saved), Bytes()).documents('train').identity
    for _ in range(2)
  )
  assert first == second


@pytest.mark.parametrize('stream', [False, True])
def test_one_file_is_split_by_a_hash(tmp_path, stream, caplog):
  caplog.set_level('INFO')
  path = str(tmp_path / 'one.parquet')
  rows('a', 60).to_parquet(path)
  data = HuggingFace(path, stream=stream)
  parts = [list(data.read(split)) for split in data.splits]
  assert [*map(len, parts)] == [53, 4, 3]
  assert len(set(sum(parts, []))) == 60
  for number, text in sum(parts, []):
    assert text == f'a {number.removeprefix("train:")} é'
  assert ('cannot resume' in caplog.text) == stream


@pytest.mark.parametrize('name', ['dev', 'test'])
def test_only_train_alone_is_split_by_a_hash(tmp_path, name, caplog):
  caplog.set_level('INFO')
  parts = {'train': rows('a', 60), name: rows('b', 3)}
  datasets.DatasetDict(parts).save_to_disk(tmp_path / 'two')
  data = HuggingFace(str(tmp_path / 'two'))
  assert data.splits == (('train', 'test') if name == 'test' else ('train',))
  assert len([*data.read('train')]) == 60
  assert ('splits dev are not read' in caplog.text) == (name == 'dev')


def test_a_folder_of_files_has_their_splits(tmp_path):
  for split, count in ('train', 5), ('test', 2):
    rows(split, count).to_json(tmp_path / 'files' / f'{split}.jsonl')
  for stream in False, True:
    data = HuggingFace(str(tmp_path / 'files'), stream=stream)
    assert data.splits == ('train', 'test')
    assert [text for _, text in data.read('test')] == ['test 0 é', 'test 1 é']


def test_flags():
  names = ['train=train', 'validation=dev']
  assert source('hf', 'a/b', subset='en', splits_from=names, limit=3) == (
    HuggingFace(
      'a/b', 'text', 'en', {'train': 'train', 'validation': 'dev'}, limit=3
    )
  )
  with pytest.raises(ValueError, match='SPLIT=NAME'):
    source('hf', 'a/b', splits_from=['dev'])
  with pytest.raises(ValueError, match="'folder' .*--stream"):
    source('folder', 'a', stream=True)


@pytest.mark.parametrize(
  ('settings', 'told'),
  [
    ({'field': 'txt'}, "no column 'txt'. Set --field"),
    ({'field': 'number'}, "train:0 .*no text in 'number'"),
    ({'splits_from': {'train': 'x'}}, 'train=x, .* train, dev, validation'),
    ({'subset': 'en'}, "save_to_disk, .*got 'en'. Leave out --subset"),
    ({'stream': True}, 'save_to_disk, .*got True. Leave out --stream'),
    ({'path': 'broken.parquet'}, 'broken.parquet cannot be read'),
  ],
)
def test_what_cannot_be_read_is_told(saved, tmp_path, settings, told, capfd):
  (tmp_path / 'broken.parquet').write_text('nonsense')
  if 'path' in settings:
    settings = {'path': str(tmp_path / settings['path'])}
  with pytest.raises(ValueError, match=told) as caught:
    list(
      Text(HuggingFace(**{'path': saved} | settings), Bytes()).stream('train')
    )
  assert '\n' not in str(caught.value)
  assert capfd.readouterr().err == ''


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ValueError, match=r'Install meliad_rec\[hf\]'):
    _ = HuggingFace('a/b').splits


def test_a_pattern_does_not_mix_splits(tmp_path):
  for split in 'train', 'test':
    rows(split, 5).to_json(tmp_path / f'{split}-1.jsonl')
  with pytest.raises(ValueError, match='several splits, .*test-1.*train-1'):
    _ = HuggingFace(str(tmp_path / '*.jsonl')).splits
  # Their folder is no pattern.
  assert HuggingFace(str(tmp_path)).splits == ('train', 'test')
  parts = HuggingFace(str(tmp_path / 'train*.jsonl'))
  texts = [text for split in parts.splits for _, text in parts.read(split)]
  assert sorted(texts) == [f'train {i} é' for i in range(5)]
