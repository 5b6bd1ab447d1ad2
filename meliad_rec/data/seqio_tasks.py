"""Tasks and mixtures that the user has registered with seqio.

seqio and TensorFlow are imported where they are used, because other sources
need neither.
"""

from collections.abc import Iterator
import hashlib
import importlib
import itertools

from absl import logging

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
      f'{name!r} is not code, corpus, folder, jsonl, hf, pg19, projects or a '
      'registered seqio task or mixture. Correct --source (in gin: TASK), or '
      'set --module (in gin: MODULE) to the Python module that registers it.'
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


def examples(task, split: str) -> Iterator[dict]:
  """Yields examples of a split as {feature: value}, none of them twice.

  Args:
    task: a seqio.Task, of which all examples are yielded, or a seqio.Mixture,
      which ends as soon as one of its tasks has no more examples.
    split: name of the split.
  """
  import seqio

  mixing = {}
  if not isinstance(task, seqio.Task):
    logging.warning(
      'The mixture %s ends as soon as one of its tasks has no more documents. '
      'The mixing rates determine how many documents of the others are read.',
      task.name,
    )
    mixing = {'copy_pretokenized': True, 'passthrough_features': ['name']}
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


def _identity(vocabulary) -> str:
  import seqio
  import tensorflow as tf

  if isinstance(vocabulary, seqio.ByteVocabulary):
    return 'bytes'
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    with tf.io.gfile.GFile(vocabulary.sentencepiece_model_file, 'rb') as file:
      return f'sentencepiece:{hashlib.sha256(file.read()).hexdigest()}'
  return type(vocabulary).__name__
