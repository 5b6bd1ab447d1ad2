"""Sources as seqio tasks: found by name, mixed, of the right vocabulary."""

import sys

import numpy as np
import pytest

from meliad_rec.data import seqio_tasks
from meliad_rec.data.folder import Folder
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Registered
from meliad_rec.data.vocabulary import Bytes

seqio = pytest.importorskip('seqio')


def folder(path, count=2):
  (path / 'train').mkdir(parents=True)
  for i in range(count):
    (path / 'train' / f'{i}.txt').write_text(f'{path.name} {i}\r\né')
  return Folder(str(path))


def test_a_registered_source_is_a_seqio_task(tmp_path):
  name = seqio_tasks.register(folder(tmp_path / 'a'), Bytes())
  task = seqio.TaskRegistry.get(name)
  (first, second) = task.get_dataset(None, 'train', shuffle=False)
  assert (
    first['targets'].numpy().tolist() == Bytes().encode('a 0\r\né').tolist()
  )
  assert second['targets_pretokenized'].numpy().decode() == 'a 1\r\né'
  assert second['name'].numpy() == b'train/1.txt'


def test_registering_again_reads_what_is_there_now(tmp_path):
  name = seqio_tasks.register(folder(tmp_path / 'a'), Bytes())
  (tmp_path / 'a' / 'train' / '9.txt').write_text('new')
  assert seqio_tasks.register(Folder(str(tmp_path / 'a')), Bytes()) == name
  found = seqio_tasks.examples(seqio.TaskRegistry.get(name), 'train')
  assert len(list(found)) == 3


def test_other_sources_have_other_names(tmp_path):
  names = {
    seqio_tasks.register(folder(tmp_path / name), Bytes())
    for name in ('a', 'b')
  }
  assert len(names) == 2


def test_a_mixture_draws_from_its_tasks(tmp_path, caplog):
  parts = [folder(tmp_path / name, 20) for name in ('a', 'b')]
  names = [seqio_tasks.register(part, Bytes()) for part in parts]
  seqio.MixtureRegistry.remove('two_folders')
  seqio.MixtureRegistry.add('two_folders', names, default_rate=1)
  mixture = seqio_tasks.find(Registered('two_folders'), Bytes())
  texts = [
    example['targets_pretokenized'].decode()
    for example in seqio_tasks.examples(mixture, 'train').as_numpy_iterator()
  ]
  assert {text[0] for text in texts} == {'a', 'b'}
  assert len(texts) == len(set(texts)) >= 20
  assert 'ends when the first of its tasks' in caplog.text


def test_a_task_of_your_own_is_found_through_its_module(tmp_path, monkeypatch):
  (tmp_path / 'my_tasks.py').write_text(
    'import seqio\n'
    'seqio.TaskRegistry.add(\n'
    "  'my_own', seqio.TextLineDataSource({'train': __file__}), "
    "{'targets': seqio.Feature(seqio.ByteVocabulary())})\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  try:
    task = seqio_tasks.find(Registered('my_own', 'my_tasks'), Bytes())
    assert task.name == 'my_own'
  finally:
    seqio.TaskRegistry.remove('my_own')
    sys.modules.pop('my_tasks', None)


def test_unknown_names_and_modules_are_told():
  with pytest.raises(ValueError, match="'my_typo' is neither code, folder"):
    seqio_tasks.find(Registered('my_typo'), Bytes())
  with pytest.raises(ValueError, match='no_module cannot be imported'):
    seqio_tasks.find(Registered('my_own', 'no_module'), Bytes())


@pytest.mark.parametrize(
  'feature, told',
  [
    ({'targets': seqio.Feature(seqio.PassThroughVocabulary(9))}, 'PassThrough'),
    ({'inputs': seqio.Feature(seqio.ByteVocabulary())}, "no feature 'targets'"),
  ],
)
def test_tasks_that_do_not_fit_are_told(feature, told):
  source = seqio.FunctionDataSource(
    lambda split, shuffle_files: None, splits=['train']
  )
  seqio.TaskRegistry.add('odd_task', source, output_features=feature)
  try:
    with pytest.raises(ValueError, match=told):
      seqio_tasks.find(Registered('odd_task'), Bytes())
  finally:
    seqio.TaskRegistry.remove('odd_task')


def test_absent_pg19_is_told_with_its_command(tmp_path):
  with pytest.raises(ValueError, match='tfds build pg19 --data_dir='):
    seqio_tasks.find(Pg19(str(tmp_path)), Bytes())


def test_pg19_is_read_where_it_was_prepared(tmp_path):
  tf = pytest.importorskip('tensorflow')
  tfds = pytest.importorskip('tensorflow_datasets')
  folder = tmp_path / 'pg19' / '0.1.1'
  folder.mkdir(parents=True)
  text = {'book_text': tfds.features.Text(), 'book_id': np.int32}
  others = ('book_title', 'publication_date', 'book_link')
  features = tfds.features.FeaturesDict(text | dict.fromkeys(others, np.str_))
  splits = []
  for split in ('train', 'validation', 'test'):
    book = {'book_text': f'A book\r\nof {split} é', 'book_id': 1022}
    file = folder / f'pg19-{split}.tfrecord-00000-of-00001'
    with tf.io.TFRecordWriter(str(file)) as writer:
      writer.write(features.serialize_example(book | dict.fromkeys(others, '')))
    names = tfds.core.ShardedFileTemplate(
      data_dir=folder,
      dataset_name='pg19',
      split=split,
      filetype_suffix='tfrecord',
    )
    splits.append(
      tfds.core.SplitInfo(
        name=split, shard_lengths=[1], num_bytes=0, filename_template=names
      )
    )
  tfds.folder_dataset.write_metadata(
    data_dir=folder,
    features=features,
    split_infos=splits,
    filename_template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
  )
  task = seqio_tasks.find(Pg19(str(tmp_path)), Bytes())
  (found,) = seqio_tasks.examples(task, 'validation').as_numpy_iterator()
  assert found['name'] == b'1022'
  assert Bytes().decode(found['targets']) == 'A book\r\nof validation é'
