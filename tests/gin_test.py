"""Every shipped gin file builds, in every combination that makes sense.

Nothing is allocated: models are only traced, and text is never read.
"""

from fnmatch import fnmatch
from pathlib import Path
import re

import jax
import pytest

from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.validation import Validation
from tests import architectures
from tests.gin_files import BOTTLENECKS
from tests.gin_files import built
from tests.gin_files import CORES
from tests.gin_files import of
from tests.gin_files import parameters
from tests.gin_files import total
from tests.gin_files import UNLIKE
from tests.gin_files import without_seqio  # noqa: F401
from tests.gin_files import write_store

ROOT = Path(__file__).parents[1]
ARCHS, SIZES = files.names('arch'), files.names('size')
OPTIONS, TASKS = files.names('options'), files.names('task')

# An architecture that reads an option, where block_recurrent does not.
READS = {
  'block_feedback/*': 'block_feedback',
  'chunks/*': 'latent_bottleneck',
  'encoder/*_lstm': 'lstm',
  'dynamic_halt/*': 'universal',
  'dynamic_halt/*_chunks': 'latent_bottleneck',
  'dynamic_halt/*_gated_chunks': 'gated_latent_bottleneck',
  'feedback/*': 'feedback',
  'halting/*': 'gated_universal',
  'layer/experts': 'universal',
  'memorizing/*': 'memorizing',
  'pool/*slot*': 'latent_bottleneck',
  'position/encoder_*': 'transformer',
  'position/*_shared': 'window',
  'recurrent/tall_24': 'block_recurrent',
  'remat/chunks': 'latent_bottleneck',
  'staircase/*': 'staircase',
}
# Options that need another task than the usual one of the tests.
TASK = {
  'encoder/*': 'copying_pairs',
  '*_listops_*chunks': 'listops',
  '*_logical_inference_*chunks': 'logical_inference',
  '*_pathfinder_*chunks': 'pathfinder',
  '*_text_flip_flop': 'flip_flop',
  **{
    f'*_lra_{task}_chunks': f'lra_{task}'
    for task in ('image', 'listops', 'retrieval', 'text')
  },
  'pool/*': 'listops',
}
# Tasks whose models have a head, and whether attention is causal there.
JUDGED = {'flip_flop': True, 'listops': False, 'logical_inference': False}
# Tasks of agents, which read token by token.
AGENTS = 'corridor', 'maze', 'maze_easy', 'water_maze'
# Tasks that read a corpus.
CORPORA = 'char_ptb', 'corpus', 'wikitext103', 'wikitext2'
GATES = 'meliad_rec.layers.gates'
# Settings of architectures whose layers in size/test take long to trace.
FEW = {
  'block_recurrent': ['LAYERS = 2', 'RECURRENT_LAYERS = (-1,)'],
  'latent_bottleneck': ['LAYERS = 1'],
}
# Settings that an option needs at the size of the tests.
PARAMS = {
  **{
    f'recurrent/{name.lower()}_gate_bias': [
      f'block_recurrent.BlockRecurrentLayer.gate = @{GATES}.{name}Gate'
    ]
    for name in ('Fixed', 'LSTM')
  },
  'embedding/adaptive': ['CUTOFFS = (20, 60)'],
  'data/shorter_first': ['FIRST_SEGMENT = 4', 'FIRST_STEPS = 2'],
}

# Millions of parameters without the embedding: table 1 of Hutchins et al. 2022
# for 150m, the points of its figure 3 for fixed:skip, and for lstm:dual a count
# of the arrays that the authors' code makes.
COLUMNS = {
  '12 layers': ('window', [], []),
  '13 layers': ('window', [], ['LAYERS = 13']),
  'fixed:skip': ('block_recurrent', [], []),
  'lstm:dual': ('block_recurrent', ['options/recurrent/lstm_dual'], []),
}
PARAMETERS = {
  '40m': (37.8, 40.9, 40.4, 45.6),
  '80m': (75.5, 81.8, 80.2, 90.7),
  '150m': (151.0, 163.6, 160.5, 181.4),
  '300m': (302.0, 327.2, 319.8, 361.8),
  '650m': (None, None, 639.7, None),
  '1300m': (None, None, 1279.4, None),
}


def some(archs_of, quick=ARCHS):
  """Yields all pairs; slow but for one of `quick` for each name, in turn."""
  for place, (name, archs) in enumerate(archs_of.items()):
    for arch in archs:
      is_quick = arch == quick[place % len(quick)]
      marks = [] if is_quick else [pytest.mark.slow]
      yield pytest.param(name, arch, marks=marks)


SCANNED = [a for a in ARCHS if not any(part in a for part in UNLIKE)]


@pytest.mark.parametrize(
  ('size', 'arch'), list(some(dict.fromkeys(SIZES, ARCHS), SCANNED))
)
def test_every_architecture_builds_at_every_size(size, arch):
  # Its memory has whole windows, which have 200 tokens in mazes.
  is_uneven = arch == 'memorizing' and size in ('maze', 'water_maze')
  params = ['MEMORY = 8000'] * is_uneven
  assert parameters([f'arch/{arch}', f'size/{size}', 'task/code'], params)


def test_the_recurrent_layer_may_be_the_only_one():
  names = ['arch/block_recurrent', 'size/test', 'task/code']
  cell = parameters(names, ['LAYERS = 1', 'RECURRENT_LAYERS = (0,)'])['cell']
  assert list(cell) == ['cells_0']


@pytest.mark.parametrize('option', OPTIONS)
def test_every_option_builds_with_an_architecture_that_reads_it(
  option, tmp_path
):
  arch = of(option, READS, 'block_recurrent')
  names = [f'arch/{arch}', 'size/test', f'task/{of(option, TASK, "code")}']
  if option != 'layer/scan':
    names.append(f'options/{option}')
  params = of(option, PARAMS, [])
  if fnmatch(option, 'data/*_tokens'):
    write_store(tmp_path / 'store')
    params = [f'STORE = {str(tmp_path / "store")!r}']
  assert parameters(names, [*FEW.get(arch, []), *params])


@pytest.mark.parametrize(
  ('task', 'arch'), list(some(dict.fromkeys(JUDGED, ARCHS)))
)
def test_every_architecture_judges(task, arch):
  # Each sequence of a pair has half of the segment, in whole blocks.
  names = [f'arch/{arch}', 'size/test', f'task/{task}']
  assert parameters(names, ['SEGMENT = 24'])['head']


@pytest.mark.parametrize('arch', CORES)
def test_a_task_says_what_tokens_of_a_core_see(arch):
  for task, causal in {'code': True, **JUDGED}.items():
    model, _ = built([f'arch/{arch}', 'size/test', f'task/{task}'])
    assert model.cell.causal is causal
    if arch not in BOTTLENECKS:
      assert model.cell.block_length == (None if task in JUDGED else 4)


@pytest.mark.parametrize(('schedule', 'order'), [('cosine', 1), ('linear', -1)])
def test_adamw_and_another_schedule_are_refused(schedule, order):
  options = ['options/optimizer/adamw', f'options/schedule/{schedule}'][::order]
  names = ['arch/window', 'size/test', 'task/code', *options]
  with pytest.raises(config.ConfigError, match='nothing reads'):
    parameters(names)


@pytest.mark.parametrize('task', TASKS)
def test_every_task_builds(task, tmp_path):
  needs = {
    'hf': ["DATASET = 'someone/books'"],
    'folder': [f'FOLDER = {str(tmp_path)!r}'],
    'jsonl': [f'JSONL = {str(tmp_path / "x.jsonl")!r}'],
    'seqio': ["TASK = 'mine'"],
    'pairs': [f'{n} = "{tmp_path}/{{split}}"' for n in ('SOURCE', 'TARGET')],
    **dict.fromkeys(CORPORA, [f'CORPUS = {str(tmp_path / "{split}.txt")!r}']),
    'store': [f'STORE = {str(tmp_path / "store")!r}'],
    'logical_inference': ['SEGMENT = 24'],
    'logical_inference_files': ['SEGMENT = 24'],
    'lra_retrieval': ['SEGMENT = 24'],
  }
  if task == 'store':
    write_store(tmp_path / 'store')
  (tmp_path / 'train.txt').write_text('a b a\n')
  arch = 'feedback' if task in AGENTS else 'block_recurrent'
  config.parse(
    [f'arch/{arch}', 'size/test', f'task/{task}'],
    ['BATCH = 8', *FEW.get(arch, []), *needs.get(task, [])],
  )
  experiment = config.build(Experiment)()
  assert experiment.program.shapes.params['embed']
  config.check_read()


def test_every_file_says_first_what_it_is():
  for name in files.names():
    first = (files.root() / f'{name}.gin').read_text().partition('\n')[0]
    assert re.fullmatch(r'# \w.{10,75}[.)]', first), (name, first)


def test_memory_may_have_no_positions_where_other_layers_have():
  names = ['arch/memorizing', 'size/test', 'task/code', 'options/position/t5']
  bare = 'options/memorizing/position_none'
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


@pytest.mark.parametrize('option', ['official_code', 'paper_text'])
def test_validation_of_flip_flop_reads_whole_sequences(option):
  """The paper validates on longer documents than it trains on."""
  _, experiment = built(
    [
      'experiments/dynamic_halt/table3_flip_flop_transformer',
      f'options/dynamic_halt/{option}_flip_flop',
    ],
    ['SEQUENCES = 16'],
  )
  assert experiment.segment == 512
  assert Validation(experiment).sharded.segment == 1024


def test_articles_of_mathematics_are_not_those_of_physics():
  text = (files.root() / 'task/arxiv.gin').read_text()
  pattern = re.search(r'test\("(.*?)"\)', text)[1]
  categories = 'math.AG', 'cs.LG math.ST', 'math-ph', 'hep-th math-ph'
  found = [each for each in categories if re.search(pattern, each)]
  assert found == ['math.AG', 'cs.LG math.ST']


@pytest.mark.parametrize('size', PARAMETERS)
def test_parameters_are_those_of_the_paper(size):
  """RESULTS.md shows the same numbers."""
  for (arch, options, params), expected in zip(
    COLUMNS.values(), PARAMETERS[size], strict=True
  ):
    if expected is not None:
      names = [f'arch/{arch}', f'size/{size}', 'task/code', *options]
      shapes = dict(parameters(names, params))
      del shapes['embed']
      assert round(total(shapes) / 1e6, 1) == expected, (size, arch)
  row = ['-' if cell is None else f'{cell:,.1f}' for cell in PARAMETERS[size]]
  text = (ROOT / 'RESULTS.md').read_text(encoding='utf-8')
  assert f'| `{size}` | {" | ".join(row)} |' in text


def test_every_architecture_file_is_under_the_laws():
  listed = {one.gin for one in architectures.ARCHITECTURES.values()}
  assert listed == set(ARCHS)
