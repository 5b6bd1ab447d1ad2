"""The process that compiles, without the process."""

import dataclasses
import json
import re

import jax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import pytest

from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.planning import environment
from meliad_rec.planning import hlo
from meliad_rec.planning import worker
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.training.program import TrainProgram
from tests.libtpu import needs_libtpu

FILES = ('arch/window', 'size/tiny', 'task/recall')
RECURRENT = ('arch/block_recurrent', *FILES[1:], 'options/scan_layers')
# Two window layers in one scan, and a recurrent one; wide enough for kernels.
WIDE = (
  'LAYERS = 3',
  'RECURRENT_LAYERS = (-1,)',
  'D_MODEL = 128',
  'NUM_HEADS = 2',
  'HEAD_DIM = 128',
  'WINDOW = 128',
  'SLOTS = 128',
  'SEGMENT = 256',
  'DTYPE = "bfloat16"',
)
SMALL = ('LAYERS = 1', 'D_MODEL = 64', 'SEGMENT = 128', 'WINDOW = 64')


@pytest.fixture(autouse=True)
def forget():
  yield
  config.reset()
  jax.config.update('jax_exec_time_optimization_effort', 0.0)


@pytest.fixture
def without(monkeypatch):
  """No libtpu."""
  monkeypatch.setattr(environment, 'installed', lambda: False)


def answered(tmp_path, question):
  asked = tmp_path / 'question'
  asked.write_text(json.dumps(dataclasses.asdict(question)))
  worker.main([str(asked), str(tmp_path / 'answer')])
  return json.loads((tmp_path / 'answer').read_text())


def test_without_libtpu_all_but_the_compilers_is_known(tmp_path, without):
  found = Answer(**answered(tmp_path, Question('v5e:2x4', FILES, SMALL)))
  assert found.sizes['mesh'] == {'data': 8, 'fsdp': 1, 'model': 1}
  assert found.sizes['parameters'] > 0
  assert found.compiled is None and found.fits is None
  assert 'install meliad_rec[tpu]' in found.missing


@pytest.mark.parametrize(
  'params, told',
  [
    (['NUM_HEADS = 0'], 'Set NUM_HEADS'),
    (['BATCH = 3'], 'set BATCH to a multiple of 8'),
    (['BATCHES = 3'], 'nothing reads BATCHES'),
    (['BATCH = "x"'], 'BATCH'),
  ],
)
def test_mistakes_are_sentences(tmp_path, without, params, told):
  asked = Question('v5e:2x4', FILES, (*SMALL, *params))
  found = answered(tmp_path, asked)
  assert set(found) == {'mistake'}
  assert told in found['mistake']


def test_what_is_not_here_may_be_planned_without(tmp_path, without):
  files = (*FILES[:2], 'task/store')
  params = (*SMALL, 'STORE = "/nowhere"')
  asked = Question('v5e:2x4', files, params)
  assert 'give --vocab_size' in answered(tmp_path, asked)['mistake']
  found = answered(tmp_path, dataclasses.replace(asked, vocab_size=1000))
  more = answered(tmp_path, dataclasses.replace(asked, vocab_size=1001))
  grown = more['sizes']['parameters'] - found['sizes']['parameters']
  assert grown == 64
  # Settings of what is left out are not checked, and that is said.
  assert 'the data are not built' in found['notes'][0]


def test_loops_that_may_end_early_count_whole_and_that_is_said(
  tmp_path, without
):
  files = ('arch/universal', *FILES[1:])
  params = ('D_MODEL = 64', 'SEGMENT = 128')

  def found(depth):
    given = (*params, f'DEPTH = {depth}')
    return Answer(**answered(tmp_path, Question('v5e:2x4', files, given)))

  products = [found(depth).sizes['flops'] for depth in (2, 3, 5)]
  assert products[2] - products[1] == 2 * (products[1] - products[0]) > 0
  assert any('count as the 5 turns' in note for note in found(5).notes)


@needs_libtpu
def test_a_step_is_compiled_with_little_care(tmp_path):
  asked = Question('v5e:1x1', FILES, SMALL, fast=True)
  found = Answer(**answered(tmp_path, asked))
  assert found.fits and found.missing is None
  assert found.compiled['seconds'] is None
  assert found.compiled['exchanges'] == []
  assert any('little care' in note for note in found.notes)


@needs_libtpu
def test_what_does_not_fit_is_an_answer(tmp_path):
  params = (*SMALL, 'BATCH = 65536', 'SEGMENT = 4096')
  found = Answer(**answered(tmp_path, Question('v5e:1x1', FILES, params)))
  assert found.fits is False and found.needed > found.hbm
  assert found.missing == 'the step does not fit'


@needs_libtpu
def test_a_kernel_that_does_not_lower_is_an_answer(tmp_path, monkeypatch):
  def train_step(program):
    kernel = pl.pallas_call(
      lambda x, y: None,
      jax.ShapeDtypeStruct((9, 200), 'float32'),
      grid=(3,),
      in_specs=[pl.BlockSpec((3, 200), lambda i: (i, 0))],
      out_specs=pl.BlockSpec((3, 200), lambda i: (i, 0)),
    )
    place = NamedSharding(program.mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((9, 200), 'float32', sharding=place)
    return jax.jit(kernel).lower(x).compile()

  monkeypatch.setattr(TrainProgram, 'train_step', property(train_step))
  found = Answer(**answered(tmp_path, Question('v5e:1x1', FILES, SMALL)))
  assert 'does not compile: The Pallas TPU lowering' in found.missing
  assert found.fits is None


@needs_libtpu
@pytest.mark.parametrize(
  'remat', ['attention', pytest.param('full', marks=pytest.mark.slow)]
)
def test_the_trainers_step_runs_the_kernels(monkeypatch, remat):
  """Over rows and heads; where all is computed again, those of layers too."""
  texts, read = [], hlo.read
  keep = lambda text, depth: texts.append(text) or read(text, depth)
  monkeypatch.setattr(hlo, 'read', keep)
  asked = Question(
    'v5e:2x2',
    (*RECURRENT, f'options/remat_{remat}'),
    (*WIDE, *config_flags.mesh_bindings({'data': 2, 'model': 2})),
    vocab_size=32,
    fast=True,
  )
  assert worker.answer(asked).fits
  calls = [
    line for line in texts[0].splitlines() if '"tpu_custom_call"' in line
  ]
  kernels = re.compile(r'%((?:window|memory)_attention_(?:for|back)ward)')
  names = [kernels.search(line)[1] for line in calls]
  assert set(names) == {
    f'{kind}_attention_{way}ward'
    for kind in ('window', 'memory')
    for way in ('for', 'back')
  }
  again = [
    'transpose' in line and 'cells_0' in line  # The scan over window layers.
    for name, line in zip(names, calls, strict=True)
    if name == 'window_attention_forward'
  ]
  assert any(again) == (remat == 'full')
