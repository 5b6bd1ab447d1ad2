"""Every shipped gin file builds, in every combination that makes sense.

Nothing is allocated: models are only traced, and text is never read.
"""

from fnmatch import fnmatch
import math
from pathlib import Path
import re

import jax
import pytest

from meliad_rec.archs.transformer import EncoderLayers
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

BOTTLENECKS = ('gated_latent_bottleneck', 'latent_bottleneck')
GATED = ('gated_latent_bottleneck', 'gated_universal')
HALTING = (*GATED, 'universal')
CORES = (*HALTING, 'latent_bottleneck', 'transformer')
# An architecture that reads an option, where block_recurrent does not.
READS = {
  'block_feedback/*': 'block_feedback',
  'chunks/*': 'latent_bottleneck',
  'encoder/*_lstm': 'lstm',
  'dynamic_halt/official_code_*': 'universal',
  'dynamic_halt/*_chunks': 'latent_bottleneck',
  'dynamic_halt/*_gated_chunks': 'gated_latent_bottleneck',
  'feedback/*': 'feedback',
  'halting/*': 'gated_universal',
  'layer/experts': 'universal',
  'memorizing/*': 'memorizing',
  'pool/slots': 'latent_bottleneck',
  'position/encoder_*': 'transformer',
  'position/*_shared': 'window',
  'recurrent/tall_24': 'block_recurrent',
  'remat/chunks': 'latent_bottleneck',
  'staircase/*': 'staircase',
}
# Parts of the names of files without layers that can be scanned.
UNLIKE = (
  *('algorithm', 'bottleneck', 'copy', 'feed', 'program_xl', 'random_walk'),
  *('recurrent_memory', 'reverse', 'shared', 'staircase', 'transformer'),
  *('universal', 'walk_xl'),
)
# Options that need another task than the usual one of the tests.
TASK = {
  'encoder/*': 'copying_pairs',
  '*_listops_*chunks': 'listops',
  '*_logical_inference_*chunks': 'logical_inference',
  '*_pathfinder_*chunks': 'pathfinder',
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


# Millions of all parameters at the size of ListOps, counted in the code of the
# dynamic-halt paper (2024).
OF_LISTOPS = {
  'transformer': 8.68,
  'universal': 2.64,
  'gated_universal': 3.95,
  'latent_bottleneck': 8.17,
  'gated_latent_bottleneck': 6.59,
}
# Ids and all parameters, as counted by the authors' code, whose vocabularies
# have some ids more. Theirs for enwik8 has 76.84 million. The random walk and
# the algorithm of a paper have models of one size.
IN_CODE = {
  **dict.fromkeys(
    (
      'feedback/table1_algorithm_3_feedback',
      'staircase/table1_algorithm_feedback',
    ),
    (26, 3_175_199),
  ),
  'feedback/table1_random_walk_feedback': (26, 3_175_199),
  'feedback/table1_algorithm_3_transformer': (26, 3_175_194),
  'feedback/table1_algorithm_3_transformer_8_layers': (26, 6_330_138),
  **dict.fromkeys(
    (
      *(
        'staircase/table1_algorithm_cached',
        'staircase/table1_algorithm_staircase',
      ),
      'staircase/table1_random_walk_staircase',
    ),
    (26, 3_176_986),
  ),
  'feedback/table4_feedback': (205, 76_837_178),
}
# Millions of all parameters: table 2 of Ju et al. 2021, and tables 3 and 9 of
# Fan et al. 2020, whose figure 9 keeps the number of parameters.
OF_PAPERS = {
  **{
    f'staircase/table2_{row}': millions
    for row, millions in {
      'xl': 117,
      'xl_16_layers': 218,
      'feedback': 102,
      'cached': 117,
      **{f'staircase_{passes}': 117 for passes in (2, 4, 8)},
      **{f'universal_{repeats}': 29 for repeats in (2, 4, 8, 16)},
      'universal_8_wide': 120,
    }.items()
  },
  'feedback/table3_transformer': 139,
  **{f'feedback/figure9_wikitext_transformer_{n}': 44 for n in (1, 2, 4, 8)},
  **{f'feedback/figure9_char_ptb_transformer_{n}': 10.7 for n in (1, 2, 3, 6)},
  # Counted from table 8.
  'cpu/multi30k_transformer_4': 2.3,
  'feedback/table2_transformer': 209,
  'feedback/table2_feedback': 199,
  'feedback/figure7_iwslt_transformer_6': 36.7,
  'feedback/figure7_cnn_dailymail_transformer_6': 60.5,
}
# Ids of vocabularies that are read from files which are not here.
IDS = {
  'block_recurrent/*': 259,
  'staircase/table1_base_*': 8000,
  'staircase/table1_enwik8_*': 259,
  'staircase/table[23]_*': 8000,
  'feedback/table4_*': 259,
  'feedback/table[36]_*': 267_736,
  'feedback/figure9_wikitext_*': 267_736,
  'feedback/figure[58]_*': 51,
  'feedback/figure9_char_ptb_*': 51,
  **dict.fromkeys(
    (
      *('feedback/table2_*', 'feedback/figure4_wmt_*'),
      *('feedback/section4_3_*', 'feedback/table5_translation_*'),
      'feedback/figure7_cnn_dailymail_*',
    ),
    32_000,
  ),
  'feedback/figure7_iwslt_*': 10_000,
  'cpu/multi30k_*': 8001,
}
# Ids of vocabularies of pairs, which are read from files.
PAIRS = 8001, 10_000, 32_000
# Learning rate and steps of warm-up: those of TLB and GUTLB, of the others.
RATES = {
  'listops': ((0.0125, 8000), (0.05, 1000)),
  'logical_inference': ((7e-4, 4000), (7e-4, 4000)),
  'flip_flop': ((3e-4, 50), (3e-4, 50)),
}


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
def test_every_option_builds_with_an_architecture_that_reads_it(option):
  arch = of(option, READS, 'block_recurrent')
  names = [f'arch/{arch}', 'size/test', f'task/{of(option, TASK, "code")}']
  if option != 'layer/scan':
    names.append(f'options/{option}')
  assert parameters(names, of(option, PARAMS, []))


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
    'lra_retrieval': ['SEGMENT = 24'],
  }
  if task == 'store':
    write_store(tmp_path / 'store')
  (tmp_path / 'train.txt').write_text('a b a\n')
  arch = 'feedback' if task in AGENTS else 'block_recurrent'
  config.parse(
    [f'arch/{arch}', 'size/test', f'task/{task}'],
    ['BATCH = 8', *needs.get(task, [])],
  )
  experiment = config.build(Experiment)()
  assert experiment.program.shapes.params['embed']
  config.check_read()


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_experiment_builds_and_says_its_command(name, tmp_path):
  """Its size, rates and dropout are those of the paper's code."""
  millions = OF_PAPERS.get(name)
  text = (files.root() / 'experiments' / f'{name}.gin').read_text()
  ids, expected = IN_CODE.get(name, (of(name, IDS, None), None))
  shapes = parameters([f'experiments/{name}'], data_of(name, tmp_path), ids)
  found = total(shapes)
  assert found == (expected or found)
  assert millions is None or abs(found / 1e6 - millions) < 0.6
  if counted := re.search(r'([\d.]+) million parameters without', text):
    without = found - total(shapes['embed'])
    assert round(without / 1e6, 1) == float(counted[1])
  command = ('launch/quickstart.sh', f'experiments/{name} ')
  assert command[name != 'quickstart'] in text.replace('\n', ' ')
  said = 'PUBLISHED', 'Published', 'Expected'
  assert any(word in text for word in said) or name == 'quickstart'
  folder, _, short = name.partition('/')
  task = next((task for task in RATES if f'_{task}_' in short), None)
  if folder == 'dynamic_halt' and task:
    model = short.partition(f'_{task}_')[2]
    if 'table1_listops' in short and model in OF_LISTOPS:
      assert round(found / 1e6, 2) == OF_LISTOPS[model]
    drops_as_its_code(name)
    if model in CORES:
      rate, warmup = RATES[task][model not in BOTTLENECKS]
      assert f'\nLEARNING_RATE = {rate}\n' in config.operative()
      assert f'\nWARMUP_STEPS = {warmup}\n' in config.operative()


def drops_as_its_code(name):
  """Checks that an experiment of the dynamic-halt paper drops alike in rows."""
  model, _ = built([f'experiments/{name}'])
  cell = getattr(model.cell, 'cell', model.cell)
  made = cell.encoder.layer
  layer = made() if isinstance(cell.encoder, EncoderLayers) else made
  assert layer.config.dropout_by_row and layer.config.dropout > 0
  assert getattr(cell, 'dropout_by_row', True)


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


CHUNKS = 'options/dynamic_halt/paper_text_{}_chunks'
TABLES = {
  'listops': 'table1_listops',
  'logical_inference': 'table2_logical_inference',
  'flip_flop': 'table3_flip_flop',
  **{
    f'lra_{task}': f'table4_{task}'
    for task in ('image', 'listops', 'retrieval', 'text')
  },
}
TO_AND_FRO = [
  *(
    (f'{table}_latent_bottleneck', CHUNKS.format(task))
    for task, table in TABLES.items()
  ),
  *(
    (f'{TABLES[task]}_gated_latent_bottleneck', CHUNKS.format(f'{task}_gated'))
    for task in ('listops', 'logical_inference')
  ),
  *(
    (f'{TABLES["listops"]}_{model}', 'options/halting/paper_text')
    for model in HALTING
  ),
]


@pytest.mark.parametrize(('name', 'text'), TO_AND_FRO)
def test_text_and_code_of_the_paper_go_to_and_fro(name, text, tmp_path):
  """Settings of the text, then of the code again.

  In the text, GUTLB pools END and TLB the mean, and all MLPs are equally wide.
  """
  own = tmp_path / f'{name}.gin'
  whole = f'experiments/dynamic_halt/{name}'
  own.write_text(f"include '{whole}'\ninclude '{text}'\n")
  code = text.replace('paper_text', 'official_code').replace('_gated', '')
  settings, cells = [], []
  for names in [whole], [str(own)], [str(own), code]:
    cells.append(built(names)[0].cell)
    settings.append(config.operative())
  as_code, as_text, again = settings
  assert as_code == again != as_text
  if '_chunks' in text:
    pool = 'Last' if '_gated_chunks' in text else 'Mean'
    assert f'pooling.{pool}()' in as_text or 'flip_flop' in name
    coded, written, _ = (cell.cell for cell in cells)
    assert coded.writer_mlp_dim is None
    assert written.writer_mlp_dim == written.config.mlp_dim


@pytest.mark.parametrize('model', BOTTLENECKS)
@pytest.mark.parametrize(
  ('task', 'ends', 'segment', 'chunk'),
  [
    *(('listops', False, 100, 20), ('listops', True, 102, 51)),
    ('logical_inference', False, 80, 10),
    ('logical_inference', True, 80, 10),
  ],
)
def test_chunks_of_the_paper_fit_its_documents(
  task, ends, segment, chunk, model
):
  """Its code has no START and END; each of a pair has half a segment."""
  text = [CHUNKS.format(task)] * ends
  found, experiment = built(
    [f'experiments/dynamic_halt/{TABLES[task]}_{model}', *text]
  )
  T = experiment.segment // found.sequences
  assert experiment.data.ends is ends
  assert ('START' in experiment.data.vocabulary.words) is ends
  assert experiment.segment == segment
  assert -(-T // -(-T // found.cell.length)) == chunk


def test_the_papers_transformer_xl_has_one_size_in_both_tasks():
  names = [
    f'experiments/feedback/table1_{task}_transformer'
    for task in ('random_walk', 'algorithm_3')
  ]
  walk, program = (parameters([name], (), 26) for name in names)
  assert total(walk) == total(program)
  for paper, actions in {'feedback': 100, 'staircase': 400}.items():
    name = f'experiments/{paper}/table1_random_walk_feedback'
    assert built([name])[1].data.actions == actions


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
