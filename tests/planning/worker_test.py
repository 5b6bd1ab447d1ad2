"""Questions and answers: of the worker itself, and of a process."""

import dataclasses
import json
from pathlib import Path
import re
import subprocess
import sys

import jax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import pytest

from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.planning import environment
from meliad_rec.planning import hlo
from meliad_rec.planning import question
from meliad_rec.planning import topology
from meliad_rec.planning import worker
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.training.program import TrainProgram
from tests import planned
from tests.libtpu import needs_libtpu

FILES = ('arch/window', 'size/tiny', 'task/recall')
RECURRENT = ('arch/block_recurrent', *FILES[1:], 'options/layer/scan')
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
  jax.config.update('jax_optimization_level', 'UNKNOWN')


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
  assert 'Install meliad_rec[tpu]' in found.missing


def test_mistakes_are_sentences(tmp_path, without):
  for param, text in (
    ('NUM_HEADS = 0', 'Set NUM_HEADS'),
    ('BATCH = 3', 'Set BATCH to a multiple of 8'),
    ('BATCHES = 3', 'nothing reads BATCHES'),
    ('BATCH = "x"', 'BATCH'),
  ):
    found = answered(tmp_path, Question('v5e:2x4', FILES, (*SMALL, param)))
    assert set(found) == {'mistake'}
    assert text in found['mistake']


def test_missing_data_are_not_needed(tmp_path, without, monkeypatch):
  files = (*FILES[:2], 'task/store')
  params = (*SMALL, 'STORE = "/nowhere"')
  asked = Question('v5e:2x4', files, params)
  assert 'give --vocab_size' in answered(tmp_path, asked)['mistake']
  found = answered(tmp_path, dataclasses.replace(asked, vocab_size=1000))
  more = answered(tmp_path, dataclasses.replace(asked, vocab_size=1001))
  grown = more['sizes']['parameters'] - found['sizes']['parameters']
  assert grown == 64
  assert 'settings of the data are not checked' in found['notes'][0]
  stored = (*files, 'options/data/pg19_tokens')  # It has no STORE.
  unset = Question('v5e:2x4', stored, SMALL, vocab_size=1000)
  assert answered(tmp_path, unset)['sizes'] == found['sizes']
  unset = dataclasses.replace(unset, gin_param=('D_MODEL = %gin.REQUIRED',))
  assert 'D_MODEL must be set' in answered(tmp_path, unset)['mistake']
  # Data of seqio are not looked up.
  monkeypatch.setitem(sys.modules, 'seqio', None)  # Importing it fails.
  files = (*FILES[:2], 'task/pg19')
  found = answered(tmp_path, Question('v5e:2x4', files, SMALL))
  assert found['sizes']['parameters'] > 0
  assert not found['notes']


def test_agents_need_no_vocabulary(tmp_path, without):
  asked = Question('v5e:2x4', ('arch/lstm', 'size/tiny', 'task/corridor'), ())
  found = answered(tmp_path, dataclasses.replace(asked, vocab_size=9))
  assert 'Remove --vocab_size' in found['mistake']


def test_loops_that_may_end_early_count_whole_with_a_note(tmp_path, without):
  files = ('arch/universal', *FILES[1:])
  every = 'optimizer.chain.every = 4'
  params = ('D_MODEL = 64', 'SEGMENT = 128', every)

  def found(depth):
    given = (*params, f'DEPTH = {depth}')
    return Answer(**answered(tmp_path, Question('v5e:2x4', files, given)))

  two, three, five = map(found, (2, 3, 5))
  step = three.sizes['flops'] - two.sizes['flops']
  assert five.sizes['flops'] - three.sizes['flops'] == 2 * step > 0
  assert five.sizes['depth'] == 5
  assert any('maximum of 5' in note for note in five.notes)
  assert any('which one of 4 steps does' in note for note in five.notes)


@pytest.mark.parametrize(
  ('files', 'params', 'remat'),
  [
    (FILES, SMALL, '--gin_file=options/remat/full'),
    ((*FILES, 'gin/options/remat/full.gin'), SMALL, None),
    (('arch/lstm', *FILES[1:]), ('D_MODEL = 64', 'SEGMENT = 128'), None),
    (
      ('arch/latent_bottleneck', 'size/test', 'task/listops'),
      ('TREES = 400', 'BATCH = 8'),
      '--gin_file=options/remat/chunks',
    ),
    (
      ('arch/lstm', 'size/test', 'task/corridor'),
      ('SEGMENT = 60', 'BATCH = 8', 'a2c.A2C.agents = 3'),
      "--gin_param='REMAT_STEPS = 10'",
    ),
  ],
)
def test_the_model_says_how_it_can_recompute_more(
  tmp_path, without, files, params, remat
):
  found = answered(tmp_path, Question('v5e:1x1', files, params))
  assert found.get('mistake') is None
  assert found['remat'] == remat
  assert found['sizes']['agents'] == (3 if 'a2c' in str(params) else 1)


def test_a_message_of_the_compiler_is_one_short_line():
  # An error class that jax does not publish.
  facts = {'__module__': 'jax._src.pallas.mosaic'}
  MosaicError = type('MosaicError', (Exception,), facts)

  def found(error):
    with pytest.raises(type(error)) as raised:
      raise error
    return worker.compiler_message(raised.value)

  assert found(NotImplementedError('no  dot\nof these')) == 'no dot of these'
  assert found(NotImplementedError()) == 'NotImplementedError'
  assert found(ValueError('Block (3, 5) is odd.')) == 'Block (3, 5) is odd.'
  assert found(jax.errors.JaxRuntimeError('A:\nB')) == 'A: B'
  text = found(MosaicError(100 * 'many words\n'))
  assert 180 < len(text) <= 200 and text.endswith('[...]')
  # Defects and mistakes are not of the compiler.
  assert found(TypeError('x')) is None
  with pytest.raises(ValueError, match='v9:1') as mistake:
    topology.parse('v9:1')
  assert found(mistake.value) is None


@needs_libtpu
def test_a_step_that_does_not_fit_is_an_answer(tmp_path):
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
@pytest.mark.slow
@pytest.mark.parametrize('remat', ['attention', 'full'])
def test_the_trainers_step_runs_the_kernels(monkeypatch, remat):
  """Also on a mesh; full remat computes the layers' kernels again."""
  texts, read = [], hlo.read
  keep = lambda text, depth: texts.append(text) or read(text, depth)
  monkeypatch.setattr(hlo, 'read', keep)
  asked = Question(
    'v5e:2x2',
    (*RECURRENT, f'options/remat/{remat}'),
    (*WIDE, *config_flags.mesh_bindings({'data': 2, 'model': 2})),
    vocab_size=32,
    fast=True,
  )
  found = worker.answer(asked)
  assert found.fits and found.missing is None
  assert found.compiled['parts'] is None and found.compiled['exchanges']
  assert any('little optimization' in note for note in found.notes)
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


ASKED = Question('v7x:2x2x1', ('arch/window',), ('SLOTS = 2',), fast=True)


@pytest.fixture
def child(monkeypatch):
  """Sets what the process says; returns its calls."""

  def child(says, code=3):
    calls = []

    def run(module, arguments, devices):
      asked, answered = map(Path, arguments)
      calls.append((module, json.loads(asked.read_text()), devices))
      if says:
        answered.write_text(json.dumps(says))
      error = 'a line\n' * 1000 + 'Traceback: lost'
      return subprocess.CompletedProcess([], code, '', error)

    monkeypatch.setattr(environment, 'run', run)
    return calls

  return child


@pytest.mark.parametrize('there', [True, False])
def test_an_answer_comes_back_as_it_was(child, monkeypatch, there):
  monkeypatch.setattr(environment, 'installed', lambda: there)
  calls = child(dataclasses.asdict(planned.fitting()))
  answer = question.ask(ASKED)
  assert answer.fits
  assert answer.sizes == dataclasses.asdict(planned.SIZES)
  [(module, asked, devices)] = calls
  assert module == 'meliad_rec.planning.worker'
  assert Question(**asked) == dataclasses.replace(
    ASKED, gin_file=['arch/window'], gin_param=['SLOTS = 2']
  )
  # Without libtpu, the CPU has the devices.
  assert devices == (0 if there else 8)


def test_a_real_process_builds_an_experiment_without_its_data():
  asked = Question('v5e:2x4', FILES, (*SMALL, 'BATCH = 3'), vocab_size=32)
  with pytest.raises(ValueError, match='Set BATCH to a multiple of 8'):
    question.ask(asked)


def test_a_mistake_is_told_and_a_failure_is_a_defect(child):
  child({'mistake': 'BATCH is odd; set BATCH.'})
  with pytest.raises(ValueError, match='^BATCH is odd'):
    question.ask(ASKED)
  child(None)
  with pytest.raises(RuntimeError, match=r'(?s)code 3\. .*a line') as caught:
    question.ask(ASKED)
  assert str(caught.value).endswith('Traceback: lost')
  assert len(str(caught.value)) < 400
  child(None, -9)
  with pytest.raises(ValueError, match='killed by signal 9, .* of memory'):
    question.ask(ASKED)
