"""The folder of a run, which can be opened without the training data.

config.gin is the complete configuration. run.json has the other facts that are
needed to open the run. vocabulary.model, tokenizer.json or vocabulary.txt is
the vocabulary, if it has a file. checkpoints/ has the training states. The
folder of an exported model has model.safetensors in place of checkpoints/
(exported.py).
"""

from collections.abc import Mapping
import json
import os
from pathlib import Path
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from meliad_rec.config.config import settings
from meliad_rec.config.values import check_count
from meliad_rec.data.vocabulary import MODEL
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import TOKENIZER
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import vocabulary_files
from meliad_rec.data.vocabulary import WORD_LIST
from meliad_rec.data.vocabulary import Words
from meliad_rec.data.vocabulary import WORDS_PREFIX
from meliad_rec.runs import exported
from meliad_rec.storage import output_file
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.workdir import place
from meliad_rec.training.experiment import ENVIRONMENT
from meliad_rec.training.experiment import Experiment

CONFIG = 'config.gin'
FACTS = 'run.json'
VOCABULARIES = MODEL, TOKENIZER, WORD_LIST
CHECKPOINTS = 'checkpoints'

_Path = Path | epath.Path
_TYPES = {
  'vocabulary': str,
  'vocabulary_size': int,
  'batch': int,
  'segment': int,
  'parameters': int,
  'averages': bool,
  'best_metric': str,
  'labels': bool,
  'published': dict,
  'started_in': str,
  'translation': dict,
}
# Values of the facts that older runs lack.
_DEFAULTS = {
  'parameters': 0,
  'labels': False,
  'published': {},
  'started_in': '',
  'translation': {},
}
_SIZES = 'vocabulary_size', 'batch', 'segment'
_LARGEST = 2**24  # A larger size is damage, and might use up the memory.


def write(
  workdir: str | os.PathLike, experiment: Experiment, config: str
) -> None:
  """Writes config.gin, run.json and the vocabulary, replacing earlier ones.

  run.json records the current folder, to which paths in config.gin are
  relative.

  Call this only after the checkpoints in the folder were found to belong to
  this experiment.
  """
  if jax.process_index():
    return
  folder = place(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  vocabulary, labels = None, False
  if experiment.env is None:
    vocabulary = experiment.data.vocabulary
    labels = experiment.data.documents('validation').labels is not None
  facts = {
    'vocabulary': experiment.source_identity,
    'vocabulary_size': vocabulary.size if vocabulary else 1,
    'batch': experiment.batch,
    'segment': experiment.segment,
    'parameters': experiment.parameters,
    'averages': experiment.ema_decay is not None,
    'best_metric': experiment.best_metric,
    'labels': labels,
    'published': {
      'test' if name == experiment.published_data else name: value
      for name, value in experiment.published.items()
    },
    'started_in': os.getcwd(),
    'translation': experiment.translation.facts,
  }
  files = vocabulary_files(vocabulary) if vocabulary else {}
  for name in VOCABULARIES:
    if name in files:
      output_file.write(folder / name, files[name])
    else:
      (folder / name).unlink(missing_ok=True)
  text = json.dumps(facts, indent=1)
  output_file.write(folder / FACTS, f'{text}\n')
  output_file.write(folder / CONFIG, config)


def read(workdir: str | os.PathLike) -> tuple[str, dict, Vocabulary | None]:
  """Returns the text of config.gin, the facts of run.json, and the vocabulary.

  The vocabulary is None if the run trained agents.

  Raises:
    ValueError: `workdir` is not the folder of a run; a file in it is damaged or
      is a link to a place outside the folder; or the vocabulary in it is not
      the one of the training.
  """
  folder = place(workdir)
  check_is_run(folder)
  for name in (
    *(CONFIG, FACTS, *VOCABULARIES, CHECKPOINTS),
    exported.PARAMETERS,
  ):
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
      raise ValueError(
        f'{folder / name} is a link to a place outside the folder of the run. '
        'Replace the link with a copy of what it points to.'
      )
  facts = _facts(folder / FACTS)
  if is_of_agents(facts):
    return _config(folder / CONFIG), facts, None
  vocabulary = _vocabulary(folder, facts['vocabulary'])
  if vocabulary.identity != facts['vocabulary']:
    raise ValueError(
      f'The run {folder} was trained with the vocabulary '
      f'{facts["vocabulary"]}, but the folder has {vocabulary.identity}. '
      f'Restore the {" or ".join(VOCABULARIES)} that training wrote, and '
      "remove any other; the vocabulary 'bytes' has no file."
    )
  return _config(folder / CONFIG), facts, vocabulary


def is_of_agents(facts: Mapping[str, Any]) -> bool:
  """Returns whether the facts of run.json describe a run of agents."""
  return facts['vocabulary'].startswith(ENVIRONMENT)


def left_behind(workdir: str | os.PathLike) -> str:
  """Returns advice if a path in a run's configuration is not found from here.

  Paths in config.gin are relative to the folder in which the run was started.
  If one exists there but not relative to the current folder, the advice is to
  start the command in that folder or to give an absolute path. Returns '' if
  there is no such path, or no run yet.
  """
  folder = place(workdir)
  try:
    started_in = _facts(folder / FACTS)['started_in']
    saved = settings(_config(folder / CONFIG))
  except (OSError, ValueError):
    return ''
  for name, value in saved.items():
    if not isinstance(value, str) or not value or '\n' in value:
      continue
    there = os.path.join(started_in, value)
    if os.path.exists(there) and not os.path.exists(value):
      return (
        f'{name} = {value!r} is relative to {started_in}, where this run was '
        'started. Start the command in that folder, or give an absolute path.'
      )
  return ''


def check_is_run(folder: _Path) -> None:
  """Raises ValueError unless a folder has the files of a run."""
  for name in (CONFIG, FACTS):
    if not (folder / name).is_file():
      raise ValueError(
        f'{folder} is not the folder of a run: it has no {name}. Give the '
        'folder of a training run.'
      )


def check_step(step: int) -> None:
  """Raises ValueError unless a step is a whole number of at least 0."""
  if not isinstance(step, int) or isinstance(step, bool) or step < 0:
    raise ValueError(
      f"step must be the number of a checkpoint or 'best', got {step!r}."
    )


def read_params(
  folder: _Path,
  facts: Mapping[str, Any],
  target: Any,
  step: int | str | None,
  average: int = 1,
) -> tuple[int, Any, dict[str, Any]]:
  """Reads a run's parameters, or their moving average if the run keeps one.

  Args:
    folder: folder of a run or of an exported model.
    facts: from `read`.
    target: the parameters as jax.ShapeDtypeStruct with shardings, or a function
      that chooses some; see SavedStep.load.
    step: step of a checkpoint, 'best', or None for the newest.
    average: the parameters are the mean of this many checkpoints that the
      folder still has, the last of which is `step`.

  Returns:
    (step, parameters, facts about the training that were saved with them).

  Raises:
    ValueError: the step does not exist, is damaged, or does not match `target`;
      or there are fewer checkpoints than `average`.
  """
  check_count('average', average, 1)
  match = {'tokenizer': facts['vocabulary']}
  if exported.is_in(folder):
    params, about = exported.read(folder, target, match)
    if average > 1:
      raise ValueError(
        f'{folder} is an exported model, which has no checkpoints to average. '
        'Give the folder of the run, or --average=1.'
      )
    if step not in (None, about['step']):
      raise ValueError(
        f'{folder} is an exported model of step {about["step"]} only, got '
        f'{step!r}. Leave out the step.'
      )
    return about['step'], params, about
  checkpoints = Checkpoints(
    folder / CHECKPOINTS, best_metric=facts['best_metric']
  )
  if checkpoints.latest() is None:
    raise ValueError(
      f'{folder} has no checkpoint. If {CHECKPOINTS}/ was moved or deleted, put'
      ' it back; otherwise train until the first one is saved.'
    )
  part = 'ema' if facts['averages'] else 'params'
  step, params, about = checkpoints.restore_params(target, step, match, part)
  if average == 1:
    return step, params, about
  steps = [each for each in checkpoints.steps() if each <= step][-average:]
  if len(steps) < average:
    raise ValueError(
      f'{folder} has {len(steps)} checkpoints up to step {step}, fewer than '
      f'the {average} to average. Average fewer, or let training keep more '
      'with experiment.Experiment.keep.'
    )
  total = jax.tree.map(lambda a: a.astype(jnp.float32), params)
  for each in steps[:-1]:
    _, more, _ = checkpoints.restore_params(target, each, match, part)
    total = jax.tree.map(jnp.add, total, more)
  mean = lambda a, like: (a / average).astype(like.dtype)
  return step, jax.tree.map(mean, total, params), about


def files(folder: _Path) -> list[_Path]:
  """Returns the paths of a run's files that an exported model also has.

  They are config.gin, run.json and, if there is one, the file of the
  vocabulary.
  """
  vocabularies = [folder / name for name in VOCABULARIES]
  return [
    *(folder / CONFIG, folder / FACTS),
    *(path for path in vocabularies if path.is_file()),
  ]


def check_is_of_text(labels: bool) -> None:
  """Checks that a run can generate and score text.

  Args:
    labels: whether the run predicts labels.

  Raises:
    ValueError: the run predicts labels.
  """
  if labels:
    raise ValueError(
      'This run was trained to predict labels, so it cannot generate or score '
      'text. Evaluate it on its own data with --split.'
    )


def _vocabulary(folder: _Path, identity: str) -> Vocabulary:
  if identity.startswith(WORDS_PREFIX):
    return Words.from_identity(identity)
  for name in VOCABULARIES:
    if (folder / name).is_file():
      return open_vocabulary(folder / name)
  return open_vocabulary('bytes')


def _config(path: _Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 at byte {error.start}. Restore the original file.'
    ) from None


def _facts(path: _Path) -> dict:
  try:
    facts = _DEFAULTS | json.loads(path.read_bytes())
    right = {name: type(facts[name]) for name in _TYPES} == _TYPES
    if right and all(0 < facts[name] <= _LARGEST for name in _SIZES):
      return facts
  except (ValueError, KeyError, TypeError, RecursionError):
    pass
  raise ValueError(f'{path} is damaged. Restore the file, or train again.')
