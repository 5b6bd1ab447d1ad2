"""Models and experiments of shipped gin files, built but not allocated.

Models are only traced, and text is never read.
"""

from fnmatch import fnmatch
import math

import jax
import pytest

from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.data import seqio_tasks
from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training.experiment import Experiment

BOTTLENECKS = ('gated_latent_bottleneck', 'latent_bottleneck')
GATED = ('gated_latent_bottleneck', 'gated_universal')
HALTING = (*GATED, 'universal')
CORES = (*HALTING, 'latent_bottleneck', 'transformer')
# Parts of the names of files without layers that can be scanned.
UNLIKE = (
  *('algorithm', 'bottleneck', 'copy', 'feed', 'program_xl', 'random_walk'),
  *('recurrent_memory', 'reverse', 'shared', 'staircase', 'transformer'),
  *('universal', 'walk_xl'),
)
# Ids of vocabularies that are read from files which are not here.
IDS = {
  'block_recurrent/*': 259,
  'staircase/table1_base_*': 8000,
  'staircase/table1_enwik8_*': 259,
  'staircase/table[23]_*': 8000,
  'staircase/table1_reddit_*': 8000,
  'feedback/table4_*': 259,
  'feedback/table[36]_*': 267_736,
  'feedback/table5_language_model_*': 267_736,
  'feedback/figure9_wikitext_*': 267_736,
  'feedback/figure[58]_*': 51,
  'feedback/figure9_char_ptb_*': 51,
  **dict.fromkeys(
    (
      *('feedback/table2_*', 'feedback/figure4_wmt_*'),
      *('feedback/section4_2_*', 'feedback/table5_translation_*'),
      'feedback/figure7_cnn_dailymail_*',
    ),
    32_000,
  ),
  'feedback/figure7_iwslt_*': 10_000,
  'cpu/multi30k_*': 8001,
  'cpu/scitldr_*': 4000,
}
# Ids of vocabularies of pairs, which are read from files.
PAIRS = 4000, 8001, 10_000, 32_000


class NoTask:
  """Stands for a seqio task: its attributes that are read before its text."""

  splits = ('train', 'validation')


@pytest.fixture(autouse=True)
def without_seqio(monkeypatch):
  monkeypatch.setattr(seqio_tasks, 'find', lambda source, vocabulary: NoTask)


def built(names, params=(), ids=None):
  """Returns the model of a whole configuration, and its experiment."""
  config.parse(list(names), list(params))
  experiment = config.build(Experiment)()
  if experiment.env is not None:
    return experiment.program.model, experiment
  return experiment.model(ids or experiment.data.vocabulary.size), experiment


def parameters(names, params=(), ids=None):
  """Returns shapes of the parameters of a whole, checked configuration."""
  names = list(names)
  # One trace for all like layers, where the architecture allows it.
  if not any(part in ' '.join(names) for part in UNLIKE):
    names.append('options/layer/scan')
  model, experiment = built(names, params, ids)
  if experiment.env is not None:
    shapes = experiment.program.shapes.params
  else:
    shapes = jax.eval_shape(
      lambda rng: initialize(model, rng, 1, experiment.segment),
      jax.random.key(0),
    )
  config.check_read()
  # Evaluation builds it from what was saved, by names of this package alone.
  saved = SavedConfig(config.operative(), 'config.gin')
  assert saved.build(Model, {'vocab': model.vocab}, MODEL)
  return shapes


def total(shapes):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def of(option, by_pattern, default):
  """Returns the value of the last pattern that matches an option."""
  fitting = [some for o, some in by_pattern.items() if fnmatch(option, o)]
  return fitting[-1] if fitting else default


def data_of(name, folder):
  """Writes the files that an experiment needs, and returns its setting."""
  text = (files.root() / f'experiments/{name}.gin').read_text()
  if of(name, IDS, None) in PAIRS:
    return ["VOCABULARY = 'bytes'"]
  if name.startswith('feedback/') and of(name, IDS, 259) != 259:
    (folder / 'train.txt').write_text('a b a\n')
    return [f'CORPUS = {str(folder / "{split}.txt")!r}']
  if 'STORE = ' not in text and 'task/store.gin' not in text:
    return []
  write_store(folder / 'store')
  return [f'STORE = {str(folder / "store")!r}']


def write_store(path):
  """Writes a store with one short document per split, if there is none."""
  if path.exists():
    return
  ids = Bytes().encode('once upon a time')
  splits = {
    split: [Document('a', ids, len(ids), 4)]
    for split in ('train', 'validation')
  }
  store.write(path, splits, Bytes(), 'test')
