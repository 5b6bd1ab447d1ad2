"""The folder of a run: its configuration, its vocabulary, what reads it back.

config.gin is the operative configuration, run.json what else reading
needs, vocabulary.model a SentencePiece model if there is one, checkpoints/ the
states: complete by itself, wherever the training data have gone.
"""

import json
import os
from pathlib import Path

from etils import epath
import jax

from meliad_rec.data.vocabulary import MARK
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
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
  """Makes the folder; what is there of an earlier run is replaced.

  To be called when the run's checkpoints, if there are any, have been found to
  be of this experiment.
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
  """The configuration, the facts and the vocabulary of a run.

  Raises:
    ValueError: the folder is not a run's, or its vocabulary was changed.
  """
  folder = place(workdir)
  for name in (CONFIG, FACTS):
    if not (folder / name).is_file():
      raise ValueError(
        f'{folder} is not the folder of a run: it has no {name}; give the '
        '--workdir of a training run.'
      )
  for name in (CONFIG, FACTS, MODEL, CHECKPOINTS):
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
      raise ValueError(
        f'{folder / name} is a link that leads out of the folder of the run; '
        'put the file itself there.'
      )
  facts = _facts(folder / FACTS)
  vocabulary = _vocabulary(folder / MODEL, facts['vocabulary'])
  if vocabulary.identity != facts['vocabulary']:
    raise ValueError(
      f'The run {folder} was trained with the vocabulary '
      f'{facts["vocabulary"]}, and the folder holds {vocabulary.identity}; '
      f'put the right {MODEL} there.'
    )
  return _config(folder / CONFIG), facts, vocabulary


def check_text(labels: bool) -> None:
  """Raises ValueError where a run predicts labels, for all that is text."""
  if labels:
    raise ValueError(
      'This run was trained to label tokens, and neither writes nor scores '
      'text; evaluate it on its own data with --split.'
    )


def _vocabulary(model: _Path, identity: str) -> Vocabulary:
  if identity.startswith(MARK):
    return Words.named(identity)
  return open_vocabulary(model if model.is_file() else 'bytes')


def _replace(path: _Path, content: bytes) -> None:
  """Writes a file at once: a run killed meanwhile leaves the old one whole."""
  fresh = path.with_name(path.name + '.tmp')
  fresh.write_bytes(content)
  fresh.replace(path)


def _config(path: _Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 (byte {error.start}); restore the file that was '
      'saved.'
    ) from None


def _facts(path: _Path) -> dict:
  try:
    # Runs of before there were labels do not say so.
    facts = {'labels': False} | json.loads(path.read_bytes())
    if {name: type(facts[name]) for name in _TYPES} == _TYPES:
      return facts
  except (ValueError, KeyError, TypeError):
    pass
  raise ValueError(f'{path} is damaged; train again, or restore the file.')
