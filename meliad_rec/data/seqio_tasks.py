"""Sources as seqio tasks, so that mixtures and seqio's other tools take them.

seqio and TensorFlow are imported where they are used: a run that reads a token
store needs neither.

stderr shut while a library is imported that writes there what nobody asked.

TensorFlow's C++ code tells of each GPU it did not find before any of its
settings is read. What is raised meanwhile is raised as ever.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import importlib
import os

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Reader
from meliad_rec.data.sources import Registered
from meliad_rec.data.sources import Source
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
  """Drops what this process writes to file descriptor 2."""
  kept = os.dup(2)
  try:
    with open(os.devnull, 'wb') as nowhere:
      os.dup2(nowhere.fileno(), 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


def register(source: Source, vocabulary: Vocabulary) -> str:
  """The name of the source's seqio task, registered (anew) for a vocabulary.

  Use it to build mixtures. Its features are 'targets', the ids, and beside it
  'targets_pretokenized', the text, and 'name'.
  """
  if isinstance(source, Registered):
    return source.name
  if not isinstance(source, Pg19):
    # A mistake in it is told before the seconds that importing seqio takes.
    _ = source.splits
  with silent_stderr():
    import seqio

  if isinstance(source, Pg19):
    data, columns = _pg19(source), [_pg19_columns]
  else:
    data, columns = _function(source), []
  key = f'{source!r} {vocabulary.identity}'
  name = (
    f'meliad_rec_{type(source).__name__.lower()}_'
    f'{hashlib.sha256(key.encode()).hexdigest()[:12]}'
  )
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=data,
    preprocessors=[*columns, seqio.preprocessors.tokenize],
    output_features={
      'targets': seqio.Feature(_seqio_vocabulary(vocabulary), add_eos=False)
    },
    shuffle_buffer_size=None,
  )
  return name


def find(source: Source, vocabulary: Vocabulary | None):
  """The seqio.Task of a source, or the seqio.Mixture of that name.

  Args:
    source: where the documents come from.
    vocabulary: what its ids must mean; None: only its texts are wanted.

  Raises:
    ValueError: the source is not there, or has another vocabulary.
  """
  name = register(source, vocabulary or Bytes())
  with silent_stderr():
    import seqio

  if isinstance(source, Registered) and source.module:
    try:
      importlib.import_module(source.module)
    except ModuleNotFoundError as error:
      raise ValueError(
        f'The module {source.module} cannot be imported ({error}); give '
        '--module one that Python finds, and that registers your task.'
      ) from None
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name not in known:
    raise ValueError(
      f'{name!r} is neither code, folder, jsonl or pg19 nor a registered seqio '
      'task or mixture; correct --source, or give --module the Python module '
      'that registers it.'
    )
  task = seqio.get_mixture_or_task(name)
  if 'targets' not in task.output_features:
    raise ValueError(
      f"The seqio task {name!r} has no feature 'targets' but "
      f'{", ".join(task.output_features)}; name the one to read so.'
    )
  identity = _identity(task.output_features['targets'].vocabulary)
  if vocabulary and identity != vocabulary.identity:
    raise ValueError(
      f'The seqio task {name!r} makes ids of the vocabulary {identity}, but '
      f'{vocabulary.identity} was given; give --vocabulary that of the task.'
    )
  return task


def examples(task, split: str):
  """A tf.data.Dataset: one pass over a split of a seqio task or mixture."""
  import seqio

  if isinstance(task, seqio.Task):
    return task.get_dataset(
      None, split, shuffle=False, num_epochs=1, try_in_mem_cache=False
    )
  logging.warning(
    'The mixture %s ends when the first of its tasks has no more documents; '
    'its rates say how many of the others are read.',
    task.name,
  )
  return task.get_dataset(
    None,
    split,
    shuffle=False,
    num_epochs=1,
    copy_pretokenized=True,
    passthrough_features=['name'],
    try_in_mem_cache=False,
  )


def _function(reader: Reader):
  import seqio
  import tensorflow as tf

  def dataset_fn(split, shuffle_files, seed=None):
    del shuffle_files, seed  # Lanes shuffle; documents come in one order here.
    return tf.data.Dataset.from_generator(
      lambda: (
        {'name': name, 'targets': text} for name, text in reader.read(split)
      ),
      output_signature={
        'name': tf.TensorSpec((), tf.string),
        'targets': tf.TensorSpec((), tf.string),
      },
    )

  return seqio.FunctionDataSource(dataset_fn, splits=reader.splits)


def _pg19(source: Pg19):
  import seqio
  import tensorflow_datasets as tfds

  builder = tfds.builder(source.name, data_dir=source.data_dir)
  if not builder.data_path.exists():
    raise ValueError(
      f'pg19 is not in {builder.data_path}; run `tfds build pg19 --data_dir='
      f'{source.data_dir or builder.data_path.parents[1]}` (11 GB), or give '
      '--path the folder it was built in.'
    )
  return seqio.TfdsDataSource(
    source.name, source.data_dir, splits=SPLITS, read_only=True
  )


def _pg19_columns(dataset):
  import tensorflow as tf

  return dataset.map(
    lambda book: {
      'name': tf.strings.as_string(book['book_id']),
      'targets': book['book_text'],
    }
  )


def _seqio_vocabulary(vocabulary: Vocabulary):
  import seqio

  if isinstance(vocabulary, SentencePiece):
    return seqio.SentencePieceVocabulary(vocabulary.path)
  return seqio.ByteVocabulary()


def _identity(vocabulary) -> str:
  import seqio
  import tensorflow as tf

  if isinstance(vocabulary, seqio.ByteVocabulary):
    return 'bytes'
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    with tf.io.gfile.GFile(vocabulary.sentencepiece_model_file, 'rb') as file:
      return f'sentencepiece:{hashlib.sha256(file.read()).hexdigest()}'
  return type(vocabulary).__name__
