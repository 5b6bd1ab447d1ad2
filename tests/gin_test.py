"""Every shipped gin file builds, in every combination that makes sense.

Nothing is allocated: models are only traced, and text is never read.
"""

from fnmatch import fnmatch
import math
from pathlib import Path
import re

import jax
import pytest

from meliad_rec.archs.transformer import Layers
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
from tests import architectures

ROOT = Path(__file__).parents[1]
ARCHS, SIZES = files.names('arch'), files.names('size')
OPTIONS, TASKS = files.names('options'), files.names('task')
EXPERIMENTS = files.names('experiments')

# Options by the architectures that read them; the others fit all.
STACKS = ('block_recurrent', 'memorizing', 'vanilla', 'window')
DEEP = (*STACKS, 'lstm', 'repeated')
IN_TIME = ('feedback', 'lstm', 'memorizing', 'recurrent_memory', 'staircase')
BOTTLENECKS = ('gated_latent_bottleneck', 'latent_bottleneck')
GATED = ('gated_latent_bottleneck', 'gated_universal')
HALTING = (*GATED, 'universal')
CORES = (*HALTING, 'latent_bottleneck', 'transformer')
BLOCKS = tuple(arch for arch in ARCHS if arch not in CORES)
ATTENDING = tuple(arch for arch in BLOCKS if arch != 'lstm')
COUNTED = tuple(arch for arch in ARCHS if arch not in HALTING)
SLOTTED = (
  *('block_feedback', 'block_recurrent', 'recurrent_memory'),
  *BOTTLENECKS,
)
APPLY = {
  'ablate_*': GATED,
  'activation_*': ATTENDING,
  'attention_*': ATTENDING,
  'block_layer_norm': ATTENDING,
  'chunks_*': BOTTLENECKS,
  'clear_state': ('block_feedback', 'block_recurrent', *IN_TIME, *BOTTLENECKS),
  'compat_meliad': ('block_feedback', 'repeated', *STACKS),
  'compose_*': ('feedback',),
  'core_position_*': CORES,
  'exit_per_device': HALTING,
  'dropout_by_row': CORES,
  'experts': HALTING,
  'feedback_*': ('block_feedback',),
  'first_memory_zeros': BOTTLENECKS,
  'halt_*': HALTING,
  'inference_compacted': HALTING,
  'key_heads_*': ATTENDING,
  'keys_per_layer': ('feedback',),
  'layer_drop_*': ARCHS,
  'layers_[123]': tuple(sorted({*COUNTED} - {'block_feedback', *STACKS[:2]})),
  'layers_??': COUNTED,
  'live_*': ('staircase',),
  'loop_*': HALTING,
  'memory_*': ('memorizing',),
  'memory_lean': ('feedback', 'staircase'),
  'neighbors_*': ('memorizing',),
  'official_code_*_chunks': BOTTLENECKS,
  'paper_text_*_chunks': BOTTLENECKS,
  'paper_text_*_gated_chunks': GATED[:1],
  'passes_*': ('staircase',),
  'places_*': ('block_feedback', 'block_recurrent', 'memorizing'),
  'pool_slots': SLOTTED,
  'position_*': ATTENDING,
  'position_*_shared': ('vanilla', 'window'),
  'recall_*': ('memorizing',),
  'recurrent_*': ('block_recurrent',),
  'remat_*': ('block_recurrent', 'memorizing', 'repeated', 'window'),
  'remat_chunks': BOTTLENECKS,
  'repeats_*': ('repeated',),
  'scan_layers': DEEP,
  'slots_*': SLOTTED,
  'span_*': ATTENDING,
  'window_*': (*ATTENDING, *CORES),
}
# In names of what has no layers to scan, or cannot.
UNLIKE = (
  *('algorithm_xl', 'bottleneck', 'feed', 'program_xl', 'recurrent_memory'),
  *('shared', 'staircase', 'transformer', 'universal', 'walk_xl'),
)
# Options for a task that is not the usual one of the tests.
TASK = {
  'actions_400': 'random_walk',
  '*_listops_*chunks': 'listops',
  '*_logical_inference_*chunks': 'logical_inference',
  'pool_*': 'listops',
}
# Tasks whose models have a head, and whether tokens see no later ones there.
JUDGED = {'flip_flop': True, 'listops': False, 'logical_inference': False}
OF_THE_PAPER = [name for name in EXPERIMENTS if name.startswith(tuple(JUDGED))]
# Settings that the sizes of the tests need beside an option.
PARAMS = {
  'chunks_tpu': ['SEGMENT = 256'],
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


# Millions of all parameters at the size of ListOps: those of the code of the
# dynamic-halt paper (2024), counted.
OF_LISTOPS = {
  'transformer': 8.68,
  'universal': 2.64,
  'gated_universal': 3.95,
  'latent_bottleneck': 8.17,
  'gated_latent_bottleneck': 6.59,
}


# Ids and all parameters of models in time, as their authors' code counts them;
# theirs have some ids that ours have not. Of enwik8 theirs is 76.84 million.
IN_CODE = {
  'algorithm_feedback': (26, 3_175_199),
  'algorithm_staircase': (26, 3_176_986),
  'algorithm_xl': (26, 6_330_138),
  'enwik8_feedback': (205, 76_837_178),
}


class NoTask:
  """In place of a seqio task: what is asked of it before text is read."""

  splits = ('train', 'validation')


@pytest.fixture(autouse=True)
def without_seqio(monkeypatch):
  monkeypatch.setattr(seqio_tasks, 'find', lambda source, vocabulary: NoTask)


def built(names, params=(), ids=None):
  """The model of a whole configuration, and its experiment."""
  config.parse(list(names), list(params))
  experiment = config.build(Experiment)()
  return experiment.model(ids or experiment.data.vocabulary.size), experiment


def parameters(names, params=(), ids=None):
  """Shapes of the parameters of a whole, checked configuration."""
  names = list(names)
  # One trace for all like layers, where the architecture allows it.
  if not any(part in ' '.join(names) for part in UNLIKE):
    names.append('options/scan_layers')
  model, experiment = built(names, params, ids)
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


def millions(shapes):
  return total(shapes) / 1e6


def of(option, by_pattern, default):
  """What the last pattern that fits an option stands for."""
  fitting = [some for o, some in by_pattern.items() if fnmatch(option, o)]
  return fitting[-1] if fitting else default


def some(archs_of):
  """Pairs of all; slow but for one architecture of each, in turn."""
  for place, (name, archs) in enumerate(archs_of.items()):
    for arch in archs:
      is_quick = arch == archs[place % len(archs)]
      marks = [] if is_quick else [pytest.mark.slow]
      yield pytest.param(name, arch, marks=marks)


def options_and_archs():
  yield from some({o: tuple(of(o, APPLY, ARCHS)) for o in OPTIONS})


def sizes_and_archs():
  yield from some({size: tuple(ARCHS) for size in SIZES})


@pytest.mark.parametrize(('size', 'arch'), list(sizes_and_archs()))
def test_every_architecture_builds_at_every_size(size, arch):
  assert parameters([f'arch/{arch}', f'size/{size}', 'task/code'])


def test_the_recurrent_layer_may_be_the_only_one():
  names = ['arch/block_recurrent', 'size/test', 'task/code']
  cell = parameters(names, ['LAYERS = 1', 'RECURRENT_LAYERS = (0,)'])['cell']
  assert list(cell) == ['cells_0']


@pytest.mark.parametrize(('option', 'arch'), list(options_and_archs()))
def test_every_option_builds_with_every_architecture_that_reads_it(
  option, arch
):
  names = [f'arch/{arch}', 'size/test', f'task/{of(option, TASK, "code")}']
  if option != 'scan_layers':
    names.append(f'options/{option}')
  assert parameters(names, of(option, PARAMS, []))


@pytest.mark.parametrize(
  ('task', 'arch'), list(some({task: tuple(ARCHS) for task in JUDGED}))
)
def test_every_architecture_judges(task, arch):
  # Of a pair, each sequence has half of the segment, in whole blocks.
  names = [f'arch/{arch}', 'size/test', f'task/{task}']
  assert parameters(names, ['SEGMENT = 24'])['head']


@pytest.mark.parametrize('arch', CORES)
def test_a_task_says_what_tokens_of_a_core_see(arch):
  for task, causal in {'code': True, **JUDGED}.items():
    model, _ = built([f'arch/{arch}', 'size/test', f'task/{task}'])
    assert model.cell.causal is causal
    if arch not in BOTTLENECKS:
      assert model.cell.block_length == (None if task in JUDGED else 4)


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
    'logical_inference': ['SEGMENT = 24'],
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
  assert parameters([f'experiments/{name}'], store_of(name, tmp_path))
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


def test_all_that_the_dynamic_halt_paper_measures_has_its_file():
  ablations = [f'gated_universal_{o}' for o in OPTIONS if 'ablate_' in o]
  assert {
    f'{task}_{model}'
    for task in ('listops', 'logical_inference')
    for model in (*CORES, *ablations)
  } | {
    'flip_flop_latent_bottleneck_5_chunks',
    'listops_gated_universal_upperbound',
    'listops_gated_universal_no_halt',
    *(f'flip_flop_{model}' for model in CORES),
  } == set(OF_THE_PAPER)


def test_memory_may_have_no_positions_where_other_layers_have():
  names = ['arch/memorizing', 'size/test', 'task/code', 'options/position_t5']
  bare = 'options/memory_position_none'
  with_, without = (
    parameters([*names, *more], ['LAYERS = 5'])['cell'] for more in ([], [bare])
  )
  special = {
    name for name, layer in with_.items() if 'gate' in layer.get('output', {})
  }
  tables = lambda cell: {
    name
    for name, layer in cell.items()
    if 'table' in str(jax.tree_util.tree_leaves_with_path(layer))
  }
  assert tables(with_) - tables(without) == special and len(special) == 1


def to_and_fro(path, experiment, text, code):
  """The settings of an experiment, of the text, and of the code again."""
  own = path / f'{experiment}.gin'
  own.write_text(f"include 'experiments/{experiment}'\ninclude '{text}'\n")
  settings = []
  for names in [f'experiments/{experiment}'], [str(own)], [str(own), code]:
    assert parameters(names)
    settings.append(config.operative())
  as_code, as_text, again = settings
  assert as_code == again != as_text
  return as_text


@pytest.mark.parametrize('model', BOTTLENECKS)
@pytest.mark.parametrize('task', JUDGED)
def test_text_and_code_of_the_paper_go_to_and_fro(task, model, tmp_path):
  """A label of GUTLB is of END there, where a sequence has one label."""
  gated = model in GATED and task != 'flip_flop'
  text = f'options/paper_text_{task}{"_gated" * gated}_chunks'
  code = f'options/official_code_{task}_chunks'
  as_text = to_and_fro(tmp_path, f'{task}_{model}', text, code)
  assert ('pooling.Last' in as_text) == gated


@pytest.mark.parametrize('model', HALTING)
def test_halting_of_text_and_code_goes_to_and_fro(model, tmp_path):
  halt = 'options/halt_paper_text', 'options/halt_official_code'
  to_and_fro(tmp_path, f'listops_{model}', *halt)


@pytest.mark.parametrize('name', OF_THE_PAPER)
def test_experiments_of_the_dynamic_halt_paper_drop_as_its_code(name):
  model, _ = built([f'experiments/{name}'])
  cell = getattr(model.cell, 'cell', model.cell)
  made = cell.core.layer
  layer = made() if isinstance(cell.core, Layers) else made
  assert layer.config.dropout_by_row and layer.config.dropout > 0
  assert getattr(cell, 'dropout_by_row', True)


RATES = {
  # Learning rate and steps of warm-up: those of TLB and GUTLB, of the others.
  'listops': ((0.0125, 8000), (0.05, 1000)),
  'logical_inference': ((7e-4, 4000), (7e-4, 4000)),
  'flip_flop': ((3e-4, 50), (3e-4, 50)),
}


@pytest.mark.parametrize('model', CORES)
@pytest.mark.parametrize('task', JUDGED)
def test_rates_of_the_dynamic_halt_paper_are_those_of_its_code(task, model):
  built([f'experiments/{task}_{model}'])
  found = config.operative()
  rate, warmup = RATES[task][model not in BOTTLENECKS]
  assert re.search(rf'^LEARNING_RATE = {rate}$', found, re.M)
  assert re.search(rf'^WARMUP_STEPS = {warmup}$', found, re.M)


@pytest.mark.parametrize('model', BOTTLENECKS)
@pytest.mark.parametrize(
  ('names', 'ends', 'segment', 'chunk'),
  [
    (['experiments/listops_{}'], False, 100, 20),
    (
      ['experiments/listops_{}', 'options/paper_text_listops_chunks'],
      *(True, 102, 51),
    ),
    (['experiments/logical_inference_{}'], False, 80, 10),
    (
      [
        'experiments/logical_inference_{}',
        'options/paper_text_logical_inference_chunks',
      ],
      *(True, 80, 10),
    ),
  ],
)
def test_chunks_of_the_paper_fit_its_documents(
  names, ends, segment, chunk, model
):
  """In its code, without START and END; of a pair, each has half a segment."""
  found, experiment = built([name.format(model) for name in names])
  T = experiment.segment // found.sequences
  assert experiment.data.ends is ends
  assert ('START' in experiment.data.vocabulary.words) is ends
  assert experiment.segment == segment
  assert -(-T // -(-T // found.cell.length)) == chunk


@pytest.mark.parametrize('model', OF_LISTOPS)
def test_parameters_of_listops_are_those_of_the_code(model):
  found = millions(parameters([f'experiments/listops_{model}']))
  assert round(found, 2) == OF_LISTOPS[model]


@pytest.mark.parametrize('name', IN_CODE)
def test_parameters_in_time_are_those_of_the_code(name, tmp_path):
  ids, expected = IN_CODE[name]
  given = store_of(name, tmp_path)
  assert total(parameters([f'experiments/{name}'], given, ids)) == expected


@pytest.mark.parametrize('model', ['feedback', 'staircase', 'xl'])
def test_the_papers_random_walk_and_algorithm_are_of_one_size(model):
  names = f'experiments/random_walk_{model}', f'experiments/algorithm_{model}'
  layers = {'LAYERS = 4'} if model == 'xl' else ()
  walk, program = (parameters([name], layers, 26) for name in names)
  assert total(walk) == total(program)
  actions = built(names[:1])[1].data.actions
  assert actions == (400 if model == 'staircase' else 100)


@pytest.mark.parametrize('size', PARAMETERS)
def test_parameters_are_those_of_the_paper(size):
  for (arch, options), expected in zip(
    COLUMNS.values(), PARAMETERS[size], strict=True
  ):
    if expected is not None:
      names = [f'arch/{arch}', f'size/{size}', 'task/code', *options]
      shapes = dict(parameters(names))
      del shapes['embed']
      assert round(millions(shapes), 1) == expected, (size, arch, options)


def test_the_readme_shows_these_numbers():
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  for size, row in PARAMETERS.items():
    cells = ['-' if cell is None else f'{cell:,.1f}' for cell in row]
    assert f'| `{size}` | {" | ".join(cells)} |' in text, size


def test_every_architecture_file_is_under_the_laws():
  listed = {one.gin for one in architectures.ARCHITECTURES.values()}
  assert listed == set(ARCHS)


def store_of(name, folder):
  """The setting of a store for an experiment that needs one."""
  if name not in ('quickstart', 'enwik8_feedback'):
    return []
  write_store(folder / 'store')
  return [f'STORE = {str(folder / "store")!r}']


def write_store(path):
  """A store of one short document a split."""
  ids = Bytes().encode('once upon a time')
  splits = {
    split: [Document('a', ids, len(ids), 4)]
    for split in ('train', 'validation')
  }
  store.write(path, splits, Bytes(), 'test')
