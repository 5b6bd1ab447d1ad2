"""Every experiment builds, and is that of the paper or of its code."""

import re

import pytest

from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.training.experiment import Experiment
from tests.gin_files import BOTTLENECKS
from tests.gin_files import built
from tests.gin_files import CORES
from tests.gin_files import data_of
from tests.gin_files import HALTING
from tests.gin_files import IDS
from tests.gin_files import of
from tests.gin_files import parameters
from tests.gin_files import total
from tests.gin_files import without_seqio  # noqa: F401

EXPERIMENTS = files.names('experiments')
OWN = 'cpu', 'gpu', 'quickstart'  # Experiments that are not of a paper.

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
  **{
    f'feedback/figure9_wikitext_{model}_{n}': 44
    for model in ('transformer', 'feedback')
    for n in (1, 2, 4, 8)
  },
  **{f'feedback/figure9_char_ptb_transformer_{n}': 10.7 for n in (1, 2, 3, 6)},
  # Counted from table 8.
  'cpu/multi30k_transformer_4': 2.3,
  'feedback/table2_transformer': 209,
  'feedback/table2_feedback': 199,
  'feedback/figure7_iwslt_transformer_6': 36.7,
  'feedback/figure7_cnn_dailymail_transformer_6': 60.5,
}
# Parameter counts that differ from the paper's by more than rounding.
NEAR_PAPERS = {
  'staircase/table2_feedback': 103,
  'feedback/figure9_char_ptb_transformer_1': 10.9,
  'feedback/figure9_char_ptb_transformer_3': 10.8,
  'feedback/figure7_iwslt_transformer_6': 36.6,
}
# Learning rate and steps of warm-up: those of TLB and GUTLB, of the others.
RATES = {
  'listops': ((0.0125, 8000), (0.05, 1000)),
  'logical_inference': ((7e-4, 4000), (7e-4, 4000)),
  'flip_flop': ((3e-4, 50), (3e-4, 50)),
}

# Settings of AdamW, of the others and of TLB and GUTLB: b2, decay of weights,
# eps, largest norm of gradients.
ADAMW = {
  'table1_listops': ((0.98, 0.1, 1e-8, 1.0),) * 2,
  'table2_logical_inference': ((0.98, 0.1, 1e-8, 1.0),) * 2,
  'table3_flip_flop': ((0.999, 0.1, 1e-8, 1.0),) * 2,
  'table4_image': ((0.98, 0.0, 1e-9, None),) * 2,
  'table4_listops': ((0.98, 0.1, 1e-8, 1.0),) * 2,
  'table4_pathfinder': ((0.999, 0.0, 1e-6, 1.0), (0.98, 0.0, 1e-9, None)),
  'table4_retrieval': ((0.999, 0.1, 1e-8, 1.0),) * 2,
  'table4_text': ((0.98, 0.1, 1e-8, 1.0),) * 2,
}


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_experiment_builds_and_says_its_command(name, tmp_path):
  """Rates and dropout are as in the code of the paper."""
  text = (files.root() / 'experiments' / f'{name}.gin').read_text()
  command = ('launch/quickstart.sh', f'experiments/{name} ')
  assert command[name != 'quickstart'] in text.replace('\n', ' ')
  folder, _, short = name.partition('/')
  said = 'PUBLISHED', 'Published'
  assert any(word in text for word in said) or folder in OWN
  _, experiment = built(
    [f'experiments/{name}'], data_of(name, tmp_path), of(name, IDS, None)
  )
  assert experiment.steps > 0
  task = next((task for task in RATES if f'_{task}_' in short), None)
  if folder == 'dynamic_halt' and task:
    model = short.partition(f'_{task}_')[2]
    drops_as_its_code(name)
    if short.startswith('table1'):
      assert not experiment.data.validation_like_train
    if model in CORES:
      rate, warmup = RATES[task][model not in BOTTLENECKS]
      assert f'\nLEARNING_RATE = {rate}\n' in config.operative()
      assert f'\nWARMUP_STEPS = {warmup}\n' in config.operative()


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_parameters_are_those_of_the_paper(name, tmp_path):
  """To the digits given, and every setting is read.

  Of rows without a count, it is only asked that the model can be made.
  """
  ids, expected = IN_CODE.get(name, (of(name, IDS, None), None))
  shapes = parameters([f'experiments/{name}'], data_of(name, tmp_path), ids)
  found = total(shapes)
  if expected is not None:
    assert found == expected
  if millions := (OF_PAPERS | NEAR_PAPERS).get(name):
    digits = str(millions).partition('.')[2]
    assert round(found / 1e6, len(digits)) == millions
  text = (files.root() / 'experiments' / f'{name}.gin').read_text()
  if counted := re.search(r'([\d.]+) million parameters without', text):
    without = found - total(shapes['embed'])
    assert round(without / 1e6, 1) == float(counted[1])
  model = name.removeprefix('dynamic_halt/table1_listops_')
  if model in OF_LISTOPS:
    assert round(found / 1e6, 2) == OF_LISTOPS[model]


def drops_as_its_code(name):
  """Checks that an experiment of the dynamic-halt paper drops alike in rows."""
  model, _ = built([f'experiments/{name}'])
  cell = getattr(model.cell, 'cell', model.cell)
  made = cell.encoder.layer
  layer = made() if isinstance(cell.encoder, EncoderLayers) else made
  assert layer.config.dropout_by_row and layer.config.dropout > 0
  assert getattr(cell, 'dropout_by_row', True)


CHUNKS = 'options/dynamic_halt/paper_text_{}_chunks'
TABLES = {
  'listops': 'table1_listops',
  'logical_inference': 'table2_logical_inference',
  'flip_flop': 'table3_flip_flop',
  'pathfinder': 'table4_pathfinder',
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


@pytest.mark.parametrize(
  'name', [name for name in EXPERIMENTS if name.startswith('dynamic_halt/')]
)
def test_start_and_end_begin_as_in_the_code_of_the_paper(name):
  """If the sequences have them, unless words are initialized in another way."""
  bound = config.read([f'experiments/{name}'], []).bindings.values()
  values = {f'{one.name}.{one.parameter}': repr(one.value) for one in bound}
  own = 'embedding.TiedEmbedding.stddev' in values
  if own and '%ENDS' in values.values() and values['ENDS.'] == 'True':
    # Their ids are the last ones, or in texts of bytes the first ones.
    of_bytes = re.search('table4_(text|retrieval)', name)
    expected = '(1, 2)' if of_bytes else '(-2, -1)'
    assert values['embedding.TiedEmbedding.ends'] == expected


@pytest.mark.parametrize('model', CORES)
@pytest.mark.parametrize('table', ADAMW)
def test_adamw_is_that_of_the_code_of_the_paper(table, model):
  name = f'experiments/dynamic_halt/{table}_{model}'
  bound = config.read([name], []).bindings.values()
  values = {f'{one.name}.{one.parameter}': one.value for one in bound}
  found = (
    values['optax.adamw.b2'],
    values['optax.adamw.weight_decay'],
    values.get('optax.adamw.eps', 1e-8),
    values.get('optimizer.chain.clip_norm'),
  )
  assert found == ADAMW[table][model in BOTTLENECKS]


@pytest.mark.parametrize(
  ('table', 'task'),
  [
    ('table1_listops', 'listops_files'),
    ('table2_logical_inference', 'logical_inference_files'),
    ('table4_listops', 'listops_files'),
    ('table4_pathfinder', 'lra_pathfinder_files'),
  ],
)
@pytest.mark.parametrize('model', ['gated_universal', 'latent_bottleneck'])
def test_published_files_in_place_of_generated_data_change_no_model(
  model, table, task
):
  name = f'experiments/dynamic_halt/{table}_{model}'

  def chosen(*task):
    bindings = config.read([name, *task], [], kinds=()).bindings
    return [repr(bindings['', each, ''].value) for each in ('POOL', 'ENDS')]

  assert chosen(f'task/{task}') == chosen()
  pools = {'gated_universal': '@pooling.Last()'}
  assert chosen()[0] == pools.get(model, chosen()[0])


def test_nothing_is_left_of_a_file_that_another_replaces():
  """A window layer stays one where the experiment has a recurrent layer."""

  def shapes(*files):
    config.parse([f'experiments/cpu/{files[0]}', *files[1:]], [])
    return config.build(Experiment)().program.shapes.params

  assert shapes('recall_rec', 'arch/window') == shapes('recall_slide')
  assert shapes('recall_rec') != shapes('recall_slide')
  name = 'experiments/dynamic_halt/table3_flip_flop_transformer'
  more = 'task/folder', 'arch/window', 'size/tiny'
  config.parse([name, *more], ['FOLDER = "texts"'])
  assert config.build(Experiment)().best_metric == 'bits_per_byte'


@pytest.mark.parametrize(
  ('name', 'more', 'params'),
  [
    ('quickstart', 'task/folder', ['FOLDER = "texts"']),
    ('cpu/recall_rec', 'task/folder', ['FOLDER = "texts"']),
    ('cpu/recall_rec', 'options/position/rope', []),
    ('cpu/recall_rec', 'options/optimizer/translation', []),
  ],
)
def test_parts_of_an_experiment_can_be_replaced(name, more, params):
  """What they leave unread of the experiment is no mistake of the user."""
  names = [f'experiments/{name}', more]
  config.parse(names, params)
  assert config.build(Experiment)().program.shapes
  config.check_read()
  config.parse(names, [*params, 'STEPPS = 3'])
  _ = config.build(Experiment)().program.shapes
  with pytest.raises(config.ConfigError, match='nothing reads STEPPS'):
    config.check_read()
