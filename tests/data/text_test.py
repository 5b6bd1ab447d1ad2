"""Text and seqio tasks: the same documents as our own vocabularies give."""

import dataclasses
import os
import re
import sys
import types

import numpy as np
import pytest

from meliad_rec.config import files
from meliad_rec.data import seqio_tasks
from meliad_rec.data.documents import count_words
from meliad_rec.data.folder import Folder
from meliad_rec.data.jsonl import Jsonl
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Registered
from meliad_rec.data.synthetic import as_seqio
from meliad_rec.data.synthetic.copying_pairs import CopyingPairs
from meliad_rec.data.synthetic.flip_flop import FlipFlop
from meliad_rec.data.text import Text
from meliad_rec.data.text import texts
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.report.console import suppress_stderr
from tests import pieces

seqio = pytest.importorskip('seqio')

DOCUMENTS = ['two words\r\n\n\tthird', '', '  naïve 日本 \U0001f600\0 end ']


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'train').mkdir()
  for i, text in enumerate(DOCUMENTS):
    (tmp_path / 'train' / f'{i}.txt').write_bytes(text.encode())
  return Folder(str(tmp_path))


def register(name, folder):
  """Registers a seqio task that reads a folder; returns its name."""
  import tensorflow as tf

  def read(split, shuffle_files):
    del shuffle_files
    names, found = zip(*folder.read(split), strict=True)
    columns = {'name': list(names), 'targets': list(found)}
    return tf.data.Dataset.from_tensor_slices(columns)

  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(read, splits=folder.splits),
    preprocessors=[seqio.preprocessors.tokenize],
    output_features={
      'targets': seqio.Feature(seqio.ByteVocabulary(), add_eos=False)
    },
  )
  return name


@pytest.mark.parametrize('make', [Bytes, pieces.vocabulary])
def test_ids_are_those_of_our_own_vocabularies(folder, make, caplog):
  caplog.set_level('INFO')
  vocabulary = make()
  documents = Text(folder, vocabulary).documents('train')
  assert documents.names == [f'train/{i}.txt' for i in range(3)]
  for i, expected in enumerate(DOCUMENTS):
    np.testing.assert_array_equal(documents[i], vocabulary.encode(expected))
    assert documents.bytes_[i] == len(expected.encode())
    assert documents.words[i] == count_words(expected)
  assert 'Tokenized 3 documents' in caplog.text


def test_unknown_splits_are_refused(folder):
  with pytest.raises(ValueError, match="'test'. Choose one of train"):
    next(Text(folder, Bytes()).stream('test'))
  with pytest.raises(ValueError, match="'test'. Choose one of train"):
    next(texts(folder, 'test'))


def test_errors_of_a_source_are_not_wrapped(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"text": "good"}\n{"other": 1}\n')
  text = Text(Jsonl(str(tmp_path)), Bytes())
  with pytest.raises(ValueError, match='train.jsonl:2') as caught:
    list(text.stream('train'))
  assert '\n' not in str(caught.value)


def test_texts_are_read_with_and_without_seqio(folder):
  assert list(texts(folder, 'train')) == DOCUMENTS
  registered = Registered(register('its_task', folder))
  assert list(texts(registered, 'train')) == DOCUMENTS


def make_folder(path, count=2):
  (path / 'train').mkdir(parents=True)
  for i in range(count):
    (path / 'train' / f'{i}.txt').write_text(f'{path.name} {i}\r\né')
  return Folder(str(path))


def test_a_mixture_draws_from_its_tasks(tmp_path, caplog):
  parts = [make_folder(tmp_path / name, 20) for name in ('a', 'b')]
  names = [register(f'task_{i}', part) for i, part in enumerate(parts)]
  seqio.MixtureRegistry.remove('two_folders')
  seqio.MixtureRegistry.add('two_folders', names, default_rate=1)
  mixed = Text(Registered('two_folders'), Bytes()).documents('train')
  texts = [Bytes().decode(mixed[i]) for i in range(len(mixed))]
  assert {text[0] for text in texts} == {'a', 'b'}
  assert len(texts) == len(set(texts)) >= 20
  assert mixed.bytes_.tolist() == [len(text.encode()) for text in texts]
  assert {*mixed.names} <= {f'train/{i}.txt' for i in range(20)}
  assert 'two_folders' in caplog.text


def test_a_mixture_keeps_the_labels_that_all_its_tasks_have():
  tasks = [FlipFlop(20, 10, test_sequences=8, seed=seed) for seed in (0, 1)]
  unlabeled = types.SimpleNamespace(
    vocabulary=tasks[0].vocabulary,
    splits=tasks[0].splits,
    documents=lambda split: dataclasses.replace(
      tasks[0].documents(split), labels=None
    ),
  )
  for name, task in zip('abc', [*tasks, unlabeled], strict=True):
    seqio_tasks.register(f'flip_{name}', task)
  try:
    seqio.MixtureRegistry.add('ab', ['flip_a', 'flip_b'], default_rate=1)
    mixed = Text(Registered('ab'), tasks[0].vocabulary).documents('train')
    own = [task.documents('train') for task in tasks]
    rows = {
      (*d[i], *d.labels[slice(*d.starts[i : i + 2])])
      for d in own
      for i in range(len(d))
    }
    assert len(mixed) >= 20
    for i in range(len(mixed)):
      part = slice(*mixed.starts[i : i + 2])
      assert (*mixed[i], *mixed.labels[part]) in rows
    seqio.MixtureRegistry.add('ac', ['flip_a', 'flip_c'], default_rate=1)
    with pytest.raises(ValueError, match="'labels', but flip_c lack"):
      Text(Registered('ac'), tasks[0].vocabulary).documents('train')
  finally:
    for name in 'ab', 'ac':
      seqio.MixtureRegistry.remove(name)
    for name in 'abc':
      seqio.TaskRegistry.remove(f'flip_{name}')


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


def test_unknown_names_and_tasks_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="'my_typo'"):
    seqio_tasks.find(Registered('my_typo'), Bytes())
  with pytest.raises(ValueError, match='no_module'):
    seqio_tasks.find(Registered('my_own', 'no_module'), Bytes())
  read = lambda split, shuffle_files: None
  source = seqio.FunctionDataSource(read, splits=['train'])
  vocabulary = seqio.PassThroughVocabulary(9)
  for feature, message in {
    'targets': 'PassThrough',
    'inputs': "no feature 'targets'",
  }.items():
    features = {feature: seqio.Feature(vocabulary)}
    seqio.TaskRegistry.add(feature, source, output_features=features)
    try:
      with pytest.raises(ValueError, match=message):
        seqio_tasks.find(Registered(feature), Bytes())
    finally:
      seqio.TaskRegistry.remove(feature)


def test_missing_pg19_is_reported_with_its_command(tmp_path):
  with pytest.raises(ValueError, match='tfds build pg19 --data_dir='):
    list(Pg19(str(tmp_path)).read('test'))


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
  assert list(Pg19(str(tmp_path)).read('validation')) == [
    ('1022', 'A book\r\nof validation é')
  ]


def test_stderr_is_suppressed_only_in_the_context(capfd):
  os.write(2, b'before ')
  with pytest.raises(ValueError, match='raised'), suppress_stderr():
    os.write(2, b'meanwhile ')
    raise ValueError('raised')
  os.write(2, b'after')
  assert capfd.readouterr().err == 'before after'


@pytest.mark.parametrize(
  'task',
  [FlipFlop(sequences=20, length=10, test_sequences=8), CopyingPairs()],
)
def test_a_registered_dataset_is_read_again(task):
  seqio_tasks.register('generated', task)
  try:
    read = Text(Registered('generated'), task.vocabulary)
    assert list(read.splits) == list(task.splits)
    ours, theirs = task.documents('test'), read.documents('test')
    parts = ('tokens', 'starts', 'labels', 'first_lengths', 'bytes_', 'words')
    for part in parts:
      np.testing.assert_array_equal(getattr(theirs, part), getattr(ours, part))
    assert theirs.names == ours.names
    with pytest.raises(ValueError, match='has the vocabulary word'):
      seqio_tasks.find(Registered('generated'), Bytes())
  finally:
    seqio.TaskRegistry.remove('generated')


def test_every_synthetic_task_is_one_of_seqio():
  names = as_seqio.register_all()
  try:
    of_gin = set()
    for file in (files.root() / 'task').glob('*.gin'):
      text = file.read_text()
      for name in re.findall(r'data\.synthetic import (\w+)', text):
        of_gin.update(re.findall(rf'data = @{name}\.(\w+)\(\)', text))
    found = {name.removeprefix('meliad_rec.') for name in names}
    assert found == of_gin | as_seqio.VARIANTS.keys()
    assert len(names) == len(found) and {'Reverse', 'S5'} <= found
    for name in names:
      assert 'train' in seqio.get_mixture_or_task(name).splits
    parity = seqio.get_mixture_or_task('meliad_rec.Parity').splits
    assert 'test_40_256' in parity
  finally:
    for name in names:
      seqio.TaskRegistry.remove(name)
