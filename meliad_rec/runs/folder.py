"""The folder of a run, which can be opened without the training data.

config.gin is the complete configuration, run.json has the other facts that are
needed to open the run, vocabulary.model is the SentencePiece model if the run
has one, and checkpoints/ has the states.
"""

import json
import os
from pathlib import Path

from etils import epath
import jax

from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
from meliad_rec.data.vocabulary import WORDS_PREFIX
from meliad_rec.storage.workdir import place
from meliad_rec.training.experiment import Experiment

CONFIG = 'config.gin'
FACTS = 'run.json'
MODEL = 'vocabulary.model'
CHECKPOINTS = 'checkpoints'

_Path = Path | epath.Path
_TYPES = {
  'vocabulary': str,
  'vocabulary_size': int,
  'batch': int,
  'segment': int,
  'averages': bool,
  'best_metric': str,
  'labels': bool,
}


def write(
  workdir: str | os.PathLike, experiment: Experiment, config: str
) -> None:
  """Writes config.gin, run.json and vocabulary.model, replacing earlier ones.

  Call this only after the checkpoints in the folder were found to belong to
  this experiment.
  """
  if jax.process_index():
    return
  folder = place(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  vocabulary = experiment.data.vocabulary
  facts = {
    'vocabulary': vocabulary.identity,
    'vocabulary_size': vocabulary.size,
    'batch': experiment.batch,
    'segment': experiment.segment,
    'averages': experiment.ema_decay is not None,
    'best_metric': experiment.best_metric,
    'labels': experiment.data.documents('validation').labels is not None,
  }
  if isinstance(vocabulary, SentencePiece):
    _replace(folder / MODEL, vocabulary.model)
  else:
    (folder / MODEL).unlink(missing_ok=True)
  _replace(folder / FACTS, json.dumps(facts, indent=1).encode() + b'\n')
  _replace(folder / CONFIG, config.encode())


def read(workdir: str | os.PathLike) -> tuple[str, dict, Vocabulary]:
  """Returns the configuration, the facts and the vocabulary of a run.

  Raises:
    ValueError: this is not the folder of a run, or its vocabulary was changed.
  """
  folder = place(workdir)
  for name in (CONFIG, FACTS):
    if not (folder / name).is_file():
      raise ValueError(
        f'{folder} is not the folder of a run: it has no {name}. Give the '
        '--workdir of a training run.'
      )
  for name in (CONFIG, FACTS, MODEL, CHECKPOINTS):
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
      raise ValueError(
        f'{folder / name} is a link to a place outside the folder of the run. '
        'Replace the link with the file.'
      )
  facts = _facts(folder / FACTS)
  vocabulary = _vocabulary(folder / MODEL, facts['vocabulary'])
  if vocabulary.identity != facts['vocabulary']:
    raise ValueError(
      f'The run {folder} was trained with the vocabulary '
      f'{facts["vocabulary"]}, but the folder has {vocabulary.identity}. '
      f'Restore its {MODEL}.'
    )
  return _config(folder / CONFIG), facts, vocabulary


def check_text(labels: bool) -> None:
  """Raises ValueError if a run that predicts labels is used for text."""
  if labels:
    raise ValueError(
      'This run was trained to predict labels, so it cannot generate or score '
      'text. Evaluate it on its own data with --split.'
    )


def _vocabulary(model: _Path, identity: str) -> Vocabulary:
  if identity.startswith(WORDS_PREFIX):
    return Words.from_identity(identity)
  return open_vocabulary(model if model.is_file() else 'bytes')


def _replace(path: _Path, content: bytes) -> None:
  """Replaces a file atomically: a killed run leaves the old one intact."""
  fresh = path.with_name(path.name + '.tmp')
  fresh.write_bytes(content)
  fresh.replace(path)


def _config(path: _Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 at byte {error.start}. Restore the original file.'
    ) from None


def _facts(path: _Path) -> dict:
  try:
    # Runs from before labels existed lack the entry.
    facts = {'labels': False} | json.loads(path.read_bytes())
    if {name: type(facts[name]) for name in _TYPES} == _TYPES:
      return facts
  except (ValueError, KeyError, TypeError):
    pass
  raise ValueError(f'{path} is damaged. Restore the file, or train again.')
