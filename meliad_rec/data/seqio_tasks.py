"""Tasks and mixtures of seqio: the user's, and those that are generated here.

seqio and TensorFlow are imported where they are used, because other sources
need neither.
"""

from collections.abc import Iterator
import functools
import hashlib
import importlib
import itertools

from absl import logging
import numpy as np

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.sources import Registered
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.report.console import suppress_stderr


def find(source: Registered, vocabulary: Vocabulary | None):
  """Returns the seqio.Task or seqio.Mixture of a source.

  Args:
    source: the source of the documents.
    vocabulary: the vocabulary that the task must have. None accepts any, for
      callers that use only the texts.

  Raises:
    ValueError: the module of the source cannot be imported, or the task is not
      registered, has no feature 'targets' or has another vocabulary.
  """
  with suppress_stderr():
    import seqio

  name = source.name
  if source.module:
    try:
      importlib.import_module(source.module)
    except ModuleNotFoundError as error:
      raise ValueError(
        f'The module {source.module} cannot be imported ({error}). Set '
        '--module (in gin: MODULE) to an importable module that registers your '
        'task.'
      ) from None
  known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name not in known:
    raise ValueError(
      f'{name!r} is not code, corpus, folder, jsonl, hf, pairs, pg19, '
      'projects or a registered seqio task or mixture. Correct --source (in '
      'gin: TASK), or set --module (in gin: MODULE) to the Python module that '
      'registers it.'
    )
  task = seqio.get_mixture_or_task(name)
  if 'targets' not in task.output_features:
    raise ValueError(
      f"The seqio task {name!r} has no feature 'targets', only "
      f'{", ".join(task.output_features)}. Rename the feature that holds the '
      "ids to 'targets'."
    )
  identity = _identity(task.output_features['targets'].vocabulary)
  if vocabulary and identity != vocabulary.identity:
    raise ValueError(
      f'The seqio task {name!r} has the vocabulary {identity}, but '
      f'{vocabulary.identity} was given. Set --vocabulary (in '
      "gin: VOCABULARY) to the task's."
    )
  return task


def register(name: str, dataset: Dataset) -> None:
  """Registers a dataset, such as a synthetic task, as a seqio task.

  The ids of a document are its feature 'targets'. Documents with labels have
  them as 'labels', one for each token and 0 where it is not scored, and pairs
  of sequences have 'first_length', the tokens of the first one. `name` is the
  name of the document. Nothing is generated before an example is asked for.

    register('flip_flop', FlipFlop(length=64))
    seqio.get_mixture_or_task('flip_flop').get_dataset(split='train')

  Args:
    name: name of the new task.
    dataset: the documents and their vocabulary.

  Raises:
    ValueError: there is a task of this name.
  """
  import seqio
  import tensorflow as tf

  ids = tf.TensorSpec([None], tf.int32)
  signature = {
    'targets': ids,
    'labels': ids,
    'first_length': tf.TensorSpec([], tf.int32),
    'name': tf.TensorSpec([], tf.string),
  }

  def read(split, shuffle_files, seed=None):
    del shuffle_files, seed
    documents = dataset.documents(split)
    given = {
      'labels': documents.labels is not None,
      'first_length': documents.first_lengths is not None,
    }
    shapes = {k: v for k, v in signature.items() if given.get(k, True)}

    def generate():
      for i in range(len(documents)):
        part = slice(*documents.starts[i : i + 2])
        found = {'targets': documents[i], 'name': documents.names[i]}
        if given['labels']:
          found['labels'] = documents.labels[part]
        if given['first_length']:
          found['first_length'] = documents.first_lengths[i]
        yield found

    return tf.data.Dataset.from_generator(generate, output_signature=shapes)

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(read, splits=list(dataset.splits)),
    output_features={
      'targets': seqio.Feature(
        _adapter(seqio)(dataset.vocabulary), add_eos=False
      )
    },
  )


def examples(task, split: str) -> Iterator[dict]:
  """Yields examples of a split as {feature: value}, none of them twice.

  Args:
    task: a seqio.Task, of which all examples are yielded, or a seqio.Mixture,
      which ends as soon as one of its tasks has no more examples.
    split: name of the split.

  Raises:
    ValueError: some tasks of a mixture have labels or pairs, and others none.
  """
  import seqio

  mixing = {}
  if not isinstance(task, seqio.Task):
    logging.warning(
      'The mixture %s ends as soon as one of its tasks has no more documents. '
      'The mixing rates determine how many documents of the others are read.',
      task.name,
    )
    mixing = {
      'copy_pretokenized': True,
      'passthrough_features': _common_features(task, split),
    }
  with suppress_stderr():
    dataset = task.get_dataset(
      None,
      split,
      shuffle=False,
      num_epochs=1,
      try_in_mem_cache=False,
      **mixing,
    )
    found = dataset.as_numpy_iterator()
    # TensorFlow's tokenizer prints a message when it is first used.
    first = list(itertools.islice(found, 1))
  yield from first
  yield from found


def _common_features(mixture, split: str) -> list[str]:
  """Returns the features besides the ids that all tasks of a mixture have."""
  tasks = [task for task in mixture.tasks if split in task.splits]
  with suppress_stderr():
    specs = [
      task.get_dataset(
        None, split, shuffle=False, try_in_mem_cache=False
      ).element_spec
      for task in tasks
    ]
  common = []
  for feature in 'name', 'labels', 'first_length':
    without = [
      task.name
      for task, spec in zip(tasks, specs, strict=True)
      if feature not in spec
    ]
    if not without:
      common.append(feature)
    elif feature != 'name' and len(without) < len(tasks):
      raise ValueError(
        f'Some tasks of the mixture {mixture.name!r} have the feature '
        f'{feature!r}, but {", ".join(without)} lack it. Mix only tasks that '
        'have it, or only tasks without it.'
      )
  return common


def _identity(vocabulary) -> str:
  import seqio
  import tensorflow as tf

  if isinstance(vocabulary, _adapter(seqio)):
    return vocabulary.own.identity
  if isinstance(vocabulary, seqio.ByteVocabulary):
    return 'bytes'
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    with tf.io.gfile.GFile(vocabulary.sentencepiece_model_file, 'rb') as file:
      return f'sentencepiece:{hashlib.sha256(file.read()).hexdigest()}'
  return type(vocabulary).__name__


@functools.cache
def _adapter(seqio) -> type:
  """Returns a class of seqio vocabularies around ours, which are `own`."""
  import tensorflow as tf

  class Adapter(seqio.Vocabulary):
    def __init__(self, own: Vocabulary):
      super().__init__()
      self.own = own

    eos_id = unk_id = None

    @property
    def _base_vocab_size(self):
      return self.own.size

    def _encode(self, s):
      return self.own.encode(s).tolist()

    def _decode(self, ids):
      return self.own.decode(np.asarray(ids))

    def _encode_tf(self, s):
      return tf.numpy_function(
        lambda text: np.int32(self._encode(text.decode())), [s], tf.int32
      )

    def _decode_tf(self, ids):
      return tf.numpy_function(self._decode, [ids], tf.string)

    def __eq__(self, other):
      return (
        isinstance(other, Adapter) and self.own.identity == other.own.identity
      )

    __hash__ = None

  return Adapter
