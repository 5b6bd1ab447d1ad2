"""Every shipped gin file builds, in every combination that makes sense.

Nothing is allocated: models are only traced, and text is never read.
"""

from fnmatch import fnmatch
import itertools
import math
from pathlib import Path

import jax
import pytest

from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.data import store
from meliad_rec.data import tasks
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.experiment import Experiment
from meliad_rec.model import initialize
from tests import architectures

ROOT = Path(__file__).parents[1]
ARCHS, SIZES = files.names('arch'), files.names('size')
OPTIONS, TASKS = files.names('options'), files.names('task')
EXPERIMENTS = files.names('experiments')

# Options by the architectures that read them; the others fit all.
STACKS = ('block_recurrent', 'memorizing', 'vanilla', 'window')
DEEP = (*STACKS, 'lstm', 'repeated')
IN_TIME = ('feedback', 'lstm', 'memorizing', 'recurrent_memory', 'staircase')
ATTENDING = tuple(arch for arch in ARCHS if arch != 'lstm')
APPLY = {
  'activation_*': ATTENDING,
  'block_layer_norm': ATTENDING,
  'clear_state': ('block_feedback', 'block_recurrent', *IN_TIME),
  'compat_meliad': ('block_feedback', 'repeated', *STACKS),
  'compose_*': ('feedback',),
  'feedback_*': ('block_feedback',),
  'keys_per_layer': ('feedback',),
  'layers_[123]': tuple(sorted({*ARCHS} - {'block_feedback', *STACKS[:2]})),
  'layers_13': ARCHS,
  'live_*': ('staircase',),
  'memory_*': ('memorizing',),
  'neighbors_*': ('memorizing',),
  'passes_*': ('staircase',),
  'places_*': ('block_feedback', 'block_recurrent', 'memorizing'),
  'position_*': ATTENDING,
  'position_*_shared': ('vanilla', 'window'),
  'recall_*': ('memorizing',),
  'recurrent_*': ('block_recurrent',),
  'remat_full': ('block_recurrent', 'memorizing', 'repeated', 'window'),
  'repeats_*': ('repeated',),
  'scan_layers': DEEP,
  'slots_*': ('block_feedback', 'block_recurrent', 'recurrent_memory'),
  'span_*': ATTENDING,
  'window_*': ATTENDING,
}
# In names of what has no layers to scan, or cannot.
UNLIKE = ('feed', 'recurrent_memory', 'staircase', 'shared', 'algorithm_xl')
# Settings that the sizes of the tests need beside an option.
PARAMS = {
  'embedding_adaptive': ['CUTOFFS = (20, 60)'],
  'passes_8': ['WINDOW = 8', 'SEGMENT = 16'],
  'places_*': ['LAYERS = 20'],
  'shorter_first': ['FIRST_SEGMENT = 4', 'FIRST_STEPS = 2'],
  'window_*': ['SEGMENT = 4096', 'BATCH = 1'],
}

# Millions of parameters without the embedding: table 1 of Hutchins et al. 2022
# for 150m, the points of its figure 3 for fixed:skip, and for lstm:dual a count
# of the arrays that the authors' code makes.
COLUMNS = {
  '12 layers': ('window', []),
  '13 layers': ('window', ['options/layers_13']),
  'fixed:skip': ('block_recurrent', []),
  'lstm:dual': ('block_recurrent', ['options/recurrent_lstm_dual']),
}
PARAMETERS = {
  '40m': (37.8, 40.9, 40.4, 45.6),
  '80m': (75.5, 81.8, 80.2, 90.7),
  '150m': (151.0, 163.6, 160.5, 181.4),
  '300m': (302.0, 327.2, 319.8, 361.8),
  '650m': (None, None, 639.7, None),
  '1300m': (None, None, 1279.4, None),
}


class NoTask:
  """In place of a seqio task: what is asked of it before text is read."""

  splits = ('train', 'validation')


@pytest.fixture(autouse=True)
def without_seqio(monkeypatch):
  monkeypatch.setattr(tasks, 'find', lambda source, vocabulary: NoTask)


def parameters(names, params=()):
  """Shapes of the parameters of a whole, checked configuration."""
  names, params = list(names), list(params)
  # One trace for all like layers, where the architecture allows it.
  if not any(part in ' '.join(names) for part in UNLIKE):
    names.append('options/scan_layers')
  config.parse(names, params)
  experiment = config.build(Experiment)()
  model = experiment.model(experiment.data.vocabulary.size)
  shapes = jax.eval_shape(
    lambda rng: initialize(model, rng, 1, experiment.segment),
    jax.random.key(0),
  )
  config.check_read()
  return shapes


def millions(names):
  """Parameters without the embedding, in millions."""
  shapes = dict(parameters(names))
  del shapes['embed']
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) / 1e6


def options_and_archs():
  for option in OPTIONS:
    archs = ARCHS
    for pattern, some in APPLY.items():
      archs = some if fnmatch(option, pattern) else archs
    yield from itertools.product([option], archs)


TALL = [
  pytest.param(size, arch, marks=[pytest.mark.slow])
  if arch == 'block_feedback' and size in ('650m', '1300m')
  else (size, arch)
  for size, arch in itertools.product(SIZES, ARCHS)
]


@pytest.mark.parametrize(('size', 'arch'), TALL)
def test_every_architecture_builds_at_every_size(size, arch):
  assert parameters([f'arch/{arch}', f'size/{size}', 'task/code'])


def test_the_recurrent_layer_may_be_the_only_one():
  names = ['arch/block_recurrent', 'size/test', 'task/code']
  cell = parameters(names, ['LAYERS = 1', 'RECURRENT_LAYERS = (0,)'])['cell']
  assert list(cell) == ['cells_0']


@pytest.mark.parametrize(('option', 'arch'), options_and_archs())
def test_every_option_builds_with_every_architecture_that_reads_it(
  option, arch
):
  names = [f'arch/{arch}', 'size/test', 'task/code']
  if option != 'scan_layers':
    names.append(f'options/{option}')
  params = [p for o, some in PARAMS.items() if fnmatch(option, o) for p in some]
  assert parameters(names, params)


@pytest.mark.parametrize('schedule', ['cosine', 'linear', 'constant'])
@pytest.mark.parametrize('order', [1, -1])
def test_adamw_and_another_schedule_are_refused(schedule, order):
  options = ['options/optimizer_adamw', f'options/schedule_{schedule}'][::order]
  names = ['arch/window', 'size/test', 'task/code', *options]
  with pytest.raises(config.ConfigError, match='nothing reads'):
    parameters(names)


@pytest.mark.parametrize('task', TASKS)
def test_every_task_builds(task, tmp_path):
  needs = {
    'folder': [f'FOLDER = {str(tmp_path)!r}'],
    'jsonl': [f'JSONL = {str(tmp_path / "x.jsonl")!r}'],
    'seqio': ["TASK = 'mine'"],
    'store': [f'STORE = {str(tmp_path / "store")!r}'],
  }
  if task == 'store':
    write_store(tmp_path / 'store')
  config.parse(
    ['arch/block_recurrent', 'size/test', f'task/{task}'],
    ['BATCH = 8', *needs.get(task, [])],
  )
  experiment = config.build(Experiment)()
  assert experiment.program.shapes.params['embed']
  config.check_read()


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_experiment_builds_and_says_its_command(name, tmp_path):
  params = []
  if name in ('quickstart', 'enwik8_feedback'):
    write_store(tmp_path / 'store')
    params = [f'STORE = {str(tmp_path / "store")!r}']
  assert parameters([f'experiments/{name}'], params)
  text = (files.root() / 'experiments' / f'{name}.gin').read_text()
  first, *_ = text.splitlines()
  assert f'experiments/{name} ' in first or f'launch/{name}.sh' in first
  assert 'Expected' in text or name == 'quickstart'


def test_every_row_of_table_1_has_its_file():
  rows = {name.removeprefix('table1_') for name in EXPERIMENTS}
  assert rows >= {
    *('xl_512', 'xl_1024', 'xl_2048', 'slide_12l', 'slide_13l'),
    *('rec_lstm_dual', 'rec_lstm_skip', 'rec_lstm_single'),
    *('rec_fixed_dual', 'rec_fixed_skip', 'rec_fixed_single'),
    *('feed_lstm_single', 'feed_fixed_skip'),
  }


@pytest.mark.parametrize('size', PARAMETERS)
def test_parameters_are_those_of_the_paper(size):
  for (arch, options), expected in zip(
    COLUMNS.values(), PARAMETERS[size], strict=True
  ):
    if expected is not None:
      found = millions([f'arch/{arch}', f'size/{size}', 'task/code', *options])
      assert round(found, 1) == expected, (size, arch, options)


def test_the_readme_shows_these_numbers():
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  for size, row in PARAMETERS.items():
    cells = ['-' if cell is None else f'{cell:,.1f}' for cell in row]
    assert f'| `{size}` | {" | ".join(cells)} |' in text, size


def test_every_architecture_file_is_under_the_laws():
  listed = {one.gin for one in architectures.ARCHITECTURES.values()}
  assert listed == set(ARCHS)


def write_store(path):
  """A store of one short document a split."""
  ids = Bytes().encode('once upon a time')
  splits = {
    split: [Document('a', ids, len(ids), 4)]
    for split in ('train', 'validation')
  }
  store.write(path, splits, Bytes(), 'test')
