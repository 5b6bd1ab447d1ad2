"""Sources as seqio tasks, for use in mixtures and with other tools of seqio.

seqio and TensorFlow are imported where they are used, because a run that reads
a token store needs neither.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import importlib
import os

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Registered
from meliad_rec.data.sources import Source
from meliad_rec.data.sources import TextReader
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary


def register(source: Source, vocabulary: Vocabulary) -> str:
  """Registers a seqio task for the source and returns the task's name.

  A task of the same name is replaced. The name can be used in mixtures. An
  example has 'targets' (the ids), 'targets_pretokenized' (the text) and 'name'.
  """
  if isinstance(source, Registered):
    return source.name
  if not isinstance(source, Pg19):
    # Reports errors in the source before the slow import of seqio.
    _ = source.splits
  with suppress_stderr():
    import seqio

  if isinstance(source, Pg19):
    data, columns = _pg19_source(source), [_pg19_columns]
  else:
    data, columns = _function_source(source), []
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
  """Returns the seqio.Task or seqio.Mixture of a source.

  Args:
    source: the source of the documents.
    vocabulary: the vocabulary that the task must have. None accepts any, for
      callers that use only the texts.

  Raises:
    ValueError: the source is missing, or has another vocabulary.
  """
  name = register(source, vocabulary or Bytes())
  with suppress_stderr():
    import seqio

  if isinstance(source, Registered) and source.module:
    try:
      importlib.import_module(source.module)
    except ModuleNotFoundError as error:
      raise ValueError(
        f'The module {source.module} cannot be imported ({error}). Set '
        '--module to an importable module that registers your task.'
      ) from None
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name not in known:
    raise ValueError(
      f'{name!r} is not code, folder, jsonl, pg19 or a registered seqio task '
      'or mixture. Correct --source, or set --module to the Python module that '
      'registers it.'
    )
  task = seqio.get_mixture_or_task(name)
  if 'targets' not in task.output_features:
    raise ValueError(
      f"The seqio task {name!r} has no feature 'targets'; its features are "
      f'{", ".join(task.output_features)}. Rename the feature that holds the '
      "ids to 'targets'."
    )
  identity = _identity(task.output_features['targets'].vocabulary)
  if vocabulary and identity != vocabulary.identity:
    raise ValueError(
      f'The seqio task {name!r} has the vocabulary {identity}, but '
      f"{vocabulary.identity} was given. Set --vocabulary to the task's."
    )
  return task


def examples(task, split: str):
  """Returns one epoch of a split of a seqio task or mixture (tf.data)."""
  import seqio

  if isinstance(task, seqio.Task):
    return task.get_dataset(
      None, split, shuffle=False, num_epochs=1, try_in_mem_cache=False
    )
  logging.warning(
    'The mixture %s ends as soon as one of its tasks has no more documents; '
    'the mixing rates determine how many documents of the others are read.',
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


def _function_source(reader: TextReader):
  import seqio
  import tensorflow as tf

  def dataset_fn(split, shuffle_files, seed=None):
    del shuffle_files, seed  # The order is fixed here; Lanes shuffles.
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


def _pg19_source(source: Pg19):
  import seqio
  import tensorflow_datasets as tfds

  builder = tfds.builder(source.name, data_dir=source.data_dir)
  if not builder.data_path.exists():
    raise ValueError(
      f'pg19 is not in {builder.data_path}. Run `tfds build pg19 --data_dir='
      f'{source.data_dir or builder.data_path.parents[1]}` (11 GB), or set '
      '--path to the data_dir it was built in.'
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


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
  """Discards everything written to file descriptor 2 inside the context.

  During its import, TensorFlow's C++ code reports missing GPUs before it reads
  the settings that would silence it. Exceptions propagate as usual.
  """
  saved = os.dup(2)
  try:
    with open(os.devnull, 'wb') as null:
      os.dup2(null.fileno(), 2)
    yield
  finally:
    os.dup2(saved, 2)
    os.close(saved)
