"""Every row of the papers' tables has its file and, at a scale, a small run."""

import math
import os
import re

import jax
import pytest

from meliad_rec.commands import table_rows
from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.metrics.flops import PEAK_FLOPS
from meliad_rec.planning import question
from meliad_rec.planning.question import Question
from tests.experiments_test import EXPERIMENTS
from tests.gin_files import built
from tests.gin_files import CORES
from tests.gin_files import data_of
from tests.gin_files import IDS
from tests.gin_files import of
from tests.gin_files import PAIRS
from tests.gin_files import parameters
from tests.gin_files import total
from tests.gin_files import write_store
from tests.libtpu import needs_libtpu

FOLDERS = 'block_recurrent', 'dynamic_halt', 'feedback', 'staircase'
# Rows of each table, and of each figure whose points are runs.
HALTING_MODELS = {*CORES} | {
  f'gated_universal_{name}'
  for name in ('ablate_gate', 'ablate_global_halt', 'ablate_transition')
}
ROWS = {
  'block_recurrent/table1': {
    *('xl_512', 'xl_1024', 'xl_2048', 'slide_12l', 'slide_13l'),
    *('rec_lstm_dual', 'rec_lstm_skip', 'rec_lstm_single'),
    *('rec_fixed_dual', 'rec_fixed_skip', 'rec_fixed_single'),
    *('feed_lstm_single', 'feed_fixed_skip', 'memorizing_64k'),
  },
  'block_recurrent/table2': {'rec_650m', 'rec_1300m'},
  'block_recurrent/figure3': {
    f'{model}_{size}'
    for model in ('rec', 'xl')
    for size in (40, 80, 150, 300, 650, 1300)
  },
  'block_recurrent/section3_1': {'sequential'},
  'block_recurrent/section4_3': {
    *('layers_9_10', 'layers_4_10'),
    *(f'states_{n}' for n in (128, 256, 512, 1024, 2048)),
    *(f'{m}_window_{n}' for m in ('rec', 'xl') for n in (128, 256, 512)),
  },
  'dynamic_halt/table1_listops': HALTING_MODELS,
  'dynamic_halt/table2_logical_inference': {
    *HALTING_MODELS,
    'sparse_universal',
  },
  'dynamic_halt/table3_flip_flop': {*CORES, 'latent_bottleneck_5_chunks'},
  **{
    f'dynamic_halt/table4_{task}': set(CORES)
    for task in ('image', 'listops', 'pathfinder', 'retrieval', 'text')
  },
  'dynamic_halt/table5_gated_universal': {
    f'{kind}{steps}'
    for kind in ('', 'upperbound_', 'no_halt_')
    for steps in (10, 20, 30, 40)
  },
  'feedback/table1': {
    *(
      f'{task}_{model}'
      for task in (
        'copy',
        'reverse',
        'counting_50',
        'counting_1000',
        'random_walk',
        'algorithm_3',
        'algorithm_5',
      )
      for model in ('transformer', 'feedback')
    ),
    *(
      f'algorithm_{variables}_{model}'
      for variables in (3, 5)
      for model in ('transformer_8_layers', 'lstm')
    ),
  },
  **{
    f'feedback/{table}': {'feedback', 'transformer'}
    for table in (
      *('table2', 'table5_translation', 'table5_language_model'),
      'table5_maze',
    )
  },
  'feedback/section4_2': {'feedback_12_2'},
  **{
    f'feedback/{figure}': {
      f'{model}_{layers}'
      for model in ('feedback', 'transformer')
      for layers in depths
    }
    for figure, depths in {
      'figure4_wmt': range(1, 7),
      'figure7_iwslt': (1, 2, 4, 6),
      'figure7_cnn_dailymail': (1, 2, 4, 6),
    }.items()
  },
  'feedback/table3': {'transformer', 'feedback'},
  'feedback/table4': {'feedback'},
  'feedback/table6': {
    *('transformer_plain', 'transformer_longer_segments'),
    'transformer_pre_norm_longer_segments',
    'transformer_pre_norm_adaptive_span',
    *('feedback_plain', 'feedback_longer_segments'),
    'feedback_pre_norm_longer_segments',
    'feedback_pre_norm_adaptive_span_longer_segments',
  },
  'feedback/figure3': {
    f'{model}_{span}'
    for model in ('feedback', 'transformer')
    for span in (2, 3, 8)
  },
  'feedback/figure4_maze': {'feedback', 'lstm', 'transformer'},
  'feedback/figure6': {
    f'{maze}_{model}'
    for maze in ('maze_easy', 'water_maze')
    for model in ('feedback', 'lstm', 'transformer')
  },
  'feedback/figure5': {'transformer', 'feedback', 'own_and_below', 'top'},
  'feedback/figure8': {'average', *(f'layer_{layer}' for layer in range(7))},
  'feedback/figure9': {
    f'{data}_{model}_{layers}'
    for data, most in (('char_ptb', (1, 2, 3, 6)), ('wikitext', (1, 2, 4, 8)))
    for layers in most
    for model in ('transformer', 'feedback')
  },
  **{
    f'staircase/table1_{task}': {
      *('lstm', 'xl', 'feedback', 'staircase', 'cached')
    }
    for task in ('random_walk', 'algorithm', 'enwik8')
  },
  'staircase/table1_base': {'xl', 'feedback', 'staircase', 'cached'},
  'staircase/table1_reddit': {'xl', 'feedback', 'staircase', 'cached'},
  'staircase/table2': {
    *('xl', 'xl_16_layers', 'feedback', 'cached'),
    *(f'staircase_{passes}' for passes in (2, 4, 8)),
    *(f'universal_{repeats}' for repeats in (2, 4, 8, 16, '8_wide')),
  },
  'staircase/table3': {
    *(f'cached_{chunk}' for chunk in (32, 64, 128)),
    *('staircase_2_64', 'staircase_2_128', 'staircase_4_32', 'staircase_4_64'),
  },
  **{
    f'staircase/figure2_{task}': {
      f'{model}_{steps}'
      for model in ('staircase', 'universal')
      for steps in (2, 4, 8)
    }
    for task in ('random_walk', 'algorithm')
  },
}


PAPERS = [name for name in EXPERIMENTS if name.split('/')[0] in FOLDERS]


def needs(name):
  """Returns (FLOP, time, slice) that the comment of an experiment states."""
  text = (files.root() / f'experiments/{name}.gin').read_text()
  line = r'^# Needs (\S+) FLOP: (at least .*|less than a second) on (\S+)\.$'
  flop, time, slice_ = re.search(line, text, re.MULTILINE).groups()
  return float(flop), time, slice_


def model_files(name):
  """Returns the gin files of arch/ and size/ that a gin file includes."""
  text = (files.root() / f'{name}.gin').read_text()
  found = set()
  for each in re.findall(r"^include '(.*)\.gin'", text, re.MULTILINE):
    if each.startswith('experiments/'):
      found |= model_files(each)
    elif each.startswith(('arch/', 'size/')):
      found.add(each)
  return frozenset(found)


def compiled_rows():
  """Returns the row that needs most FLOP of each architecture and size.

  With EVERY_ROW in the environment, it returns all rows.
  """
  costs = sorted(PAPERS, key=lambda name: needs(name)[0])
  if os.environ.get('EVERY_ROW'):
    return costs
  return sorted(
    {model_files(f'experiments/{name}'): name for name in costs}.values()
  )


@pytest.mark.parametrize('data', ['pg19', 'arxiv', 'github'])
def test_a_column_of_table_1_is_an_option(data, tmp_path):
  """It changes the data and the metric, and nothing of the recipe."""
  names = [
    'experiments/block_recurrent/table1_rec_fixed_skip',
    f'options/data/{data}_tokens',
  ]
  with pytest.raises(config.ConfigError, match='STORE must be set'):
    built(names)
  write_store(tmp_path / 'store')
  _, experiment = built(names, [f'STORE = {str(tmp_path / "store")!r}'])
  assert experiment.data.path == tmp_path / 'store'
  assert experiment.published_data.lower() == f'{data} tokens'
  assert experiment.published_data in experiment.published
  assert experiment.best_metric == 'bits_per_token'
  assert experiment.steps == 500_000


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize('name', compiled_rows())
def test_a_step_fits_the_slice_that_the_file_names(name, tmp_path):
  flop, _, slice_ = needs(name)
  asked = Question(
    slice_,
    (f'experiments/{name}',),
    tuple(data_of(name, tmp_path)),
    vocab_size=of(name, IDS, None),
    fast=True,
  )
  answer = question.ask(asked)
  assert answer.fits
  needed = answer.sizes['flops'] * answer.sizes['steps']
  assert needed == pytest.approx(flop, rel=0.06)


@pytest.mark.parametrize('name', PAPERS)
def test_the_least_time_is_that_of_peak_speed(name):
  flop, time, slice_ = needs(name)
  kind, shape = slice_.split(':')
  peak = PEAK_FLOPS[{'v5e': 'TPU v5e', 'v5p': 'TPU v5'}[kind]]
  seconds = flop / (peak * math.prod(map(int, shape.split('x'))))
  if time == 'less than a second':
    assert seconds < 1
    return
  number, unit = time.removeprefix('at least ').split()
  stated = float(number) * {'h': 3600, 'm': 60, 's': 1}[unit[0]]
  assert 0.65 * seconds < stated < 1.1 * seconds


def test_all_that_papers_measure_has_its_file():
  for table, rows in ROWS.items():
    assert set(table_rows.rows(table, None)) == rows, table


@pytest.mark.parametrize('scale', files.names('scale'))
def test_every_scale_builds_with_the_rows_that_it_is_for(scale, tmp_path):
  for name, params in scaled(scale, tmp_path):
    built(name, params)
    config.check_read()


def test_tables_have_a_scale_for_two_cores():
  """On it, code of this machine is the text of language models."""
  for name in PAPERS:
    if not name.startswith('feedback/figure3'):  # It takes minutes as it is.
      assert table_rows.scale(f'experiments/{name}', 'cpu'), name


@pytest.mark.parametrize('task', ['algorithm', 'random_walk'])
def test_the_models_of_a_figure_read_as_many_tokens(task):
  tokens = set()
  for row in ROWS[f'staircase/figure2_{task}']:
    _, experiment = built([f'experiments/staircase/figure2_{task}_{row}'])
    tokens.add(experiment.steps * experiment.batch * experiment.segment)
  assert len(tokens) == 1


def test_staircases_of_text_learn_at_the_rates_of_their_authors_for_text():
  """Fan et al. 2020, table 9, has these rates for enwik8 and for width 1024."""
  rows = [f'experiments/{row}' for row in PAPERS]
  rows = [row for row in rows if 'size/117m' in model_files(row)]
  assert len(rows) == 32
  for row in rows:
    values = values_of(row)
    rate = '0.0015' if 'enwik8' in row else '0.0007'
    assert (values['LEARNING_RATE'], values['WARMUP_STEPS']) == (rate, '8000')


@pytest.mark.slow
def test_as_many_checkpoints_are_saved_as_are_averaged():
  for row in PAPERS:
    values = values_of(f'experiments/{row}')
    steps, every = int(values['STEPS']), int(values['SAVE_EVERY'])
    assert int(values.get('AVERAGE', 1)) <= -(-steps // every), row


def test_segments_of_the_recipe_differ_in_blocks_and_not_in_tokens():
  """Gradients reach back to the start of a segment."""
  blocks = set()
  for name in ('base', *(f'segment_{n}' for n in (64, 128, 256, 2048))):
    values = values_of(f'experiments/cpu/recipe_{name}')
    segment, window = int(values['SEGMENT']), int(values['WINDOW'])
    assert segment * int(values['BATCH']) == 16 * 512
    blocks.add(segment // window)
  assert blocks == {4, 8, 16, 32, 128}


def test_rows_of_the_recipe_read_as_many_tokens():
  """Rows with other numbers of steps have shorter or fewer sequences."""

  def tokens(name):
    values = values_of(f'experiments/cpu/recipe_{name}')
    steps = int(values['STEPS'])
    first = int(values.get('FIRST_STEPS', 0))
    shorter = first * int(values.get('FIRST_SEGMENT', 0))
    longer = (steps - first) * int(values['SEGMENT'])
    return (shorter + longer) * int(values['BATCH'])

  read = {name: tokens(name) for name in table_rows.rows('cpu/recipe', None)}
  assert set(read.values()) == {read['base']}, read


def test_a_failed_run_is_seen_in_the_published_median():
  """Mean and deviation alone look like three mediocre runs."""
  row = 'dynamic_halt/table4_pathfinder_latent_bottleneck'
  published = values_of(f'experiments/{row}')['PUBLISHED']
  assert "'test': 0.6918" in published and "'test median': 0.77" in published


def test_memory_slots_without_dropout_begin_differently():
  rows = [name for name in EXPERIMENTS if 'latent_bottleneck' in name]
  assert len(rows) == 17
  for row in (f'experiments/{name}' for name in rows):
    values = values_of(row, *table_rows.scale(row, 'cpu'))
    assert values['DROPOUT'] == '0.0'
    assert values['slots_init'] == '@initializers.normal()', row


def test_weights_start_small_only_with_norms_before_layers():
  """So it is in the code of Fan et al. 2020."""
  for name in EXPERIMENTS:
    if name.startswith('feedback/table6'):
      values = values_of(f'experiments/{name}')
      assert ('post_norm' in values) == ('pre_norm' not in name)
      assert values['depth'] == ('%LAYERS' if 'pre_norm' in name else 'None')


def test_only_the_layer_with_memory_has_no_positions(tmp_path):
  """So it is in the code of the authors of block_recurrent/table1."""
  name = 'block_recurrent/table1_memorizing_64k'
  shapes = parameters([f'experiments/{name}'], data_of(name, tmp_path), 259)
  for layer in shapes['cell'].values():
    leaves = str(jax.tree_util.tree_leaves_with_path(layer))
    assert ('table' in leaves) == ('gate' not in layer.get('output', {}))


def test_only_three_sizes_of_figure_3_are_published():
  for row in ROWS['block_recurrent/figure3']:
    published = values_of(f'experiments/block_recurrent/figure3_{row}')
    known = row.endswith(('_40', '_650', '_1300'))
    assert ("'parameters': None" in published['PUBLISHED']) != known, row


def test_speed_is_measured_at_the_whole_learning_rate():
  for model in 'feedback', 'transformer':
    row = f'experiments/feedback/table5_language_model_{model}'
    values = values_of(row, *table_rows.scale(row, 'cpu'))
    assert values['FINETUNE_STEPS'] == '0'


@pytest.mark.parametrize('scale', ['paper', 'cpu'])
def test_the_published_speed_of_agents_is_that_of_one(scale):
  for model in 'feedback', 'transformer':
    row = f'experiments/feedback/table5_maze_{model}'
    assert values_of(row, *table_rows.scale(row, scale))['AGENTS'] == '1'


@pytest.mark.slow
def test_every_scaled_row_is_smaller(tmp_path):
  for scale in files.names('scale'):
    for (row, file), params in scaled(scale, tmp_path):
      name = row.partition('/')[2]
      full = total(
        parameters([row], data_of(name, tmp_path), of(name, IDS, None))
      )
      assert total(parameters([row, file], params)) < full / 3


def values_of(*names):
  """Returns {macro or parameter: text of its value} of gin files."""
  found = config.read([*names], [], kinds=()).bindings.items()
  return {key[2] or key[1]: repr(one.value) for key, one in found}


def scaled(scale, folder):
  """Returns ((row, file of the scale), settings) of all its rows."""
  kind, beginning = scale.split('/', 1)
  names = [
    each
    for each in EXPERIMENTS
    if each.startswith(beginning)
    and table_rows.scale(f'experiments/{each}', kind) == (f'scale/{scale}',)
  ]
  assert names
  write_store(folder / 'store')
  store = [f'STORE = {str(folder / "store")!r}'] if kind == 'gpu' else []
  bytes_of = lambda name: ["VOCABULARY = 'bytes'"] * (of(name, IDS, 0) in PAIRS)
  return [
    ((f'experiments/{each}', f'scale/{scale}'), [*store, *bytes_of(each)])
    for each in names
  ]
