"""A run that begins with the parameters of another."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.config import config
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs import training
from meliad_rec.runs.initial import Source
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.checksums import digest
from meliad_rec.training import trainer
from tests import tiny_run
from tests import trained


def model(*settings) -> ShardedModel:
  """A model like that of the trained run, with other settings."""
  config.parse(
    ['arch/block_recurrent', 'size/test'],
    ['LAYERS = 2', 'RECURRENT_LAYERS = (1,)', *settings],
    kinds=('arch', 'size'),
  )
  made = config.build(Model)(vocab=Bytes().size)
  return ShardedModel(made, make_mesh(), 12)


def source_of(kind, folder):
  if kind == 'run':
    return f'{trained.folder()}:best', load_run(trained.folder(), 'best')
  run = load_run(trained.folder(), 2)
  run.export(folder / 'exported')
  return str(folder / 'exported'), run


@pytest.mark.parametrize(
  'kind', [pytest.param('run', marks=pytest.mark.slow), 'exported']
)
def test_what_fits_is_taken_and_the_rest_is_told(tmp_path, kind):
  """One layer more, a longer window, and a head for labels."""
  name, run = source_of(kind, tmp_path)
  head = 'meliad_rec.models.heads.Classifier'
  sharded = model(
    *('LAYERS = 3', 'WINDOW = 6', f'{head}.classes = 3'),
    f'model.Model.head = @{head}()',
  )
  make = jax.jit(lambda rng: initialize(sharded.model, rng, 8, 12))
  initial = make(jax.random.key(7))
  places = jax.tree.map(lambda a: a.sharding, sharded.param_shapes)
  initial = jax.device_put(initial, places)
  source = Source(name)
  params, account = source.fill(initial, Bytes())
  assert source.account(sharded.param_shapes, Bytes()) == account
  old, new = leaves_by_path(run.params), leaves_by_path(params)
  assert account.taken.keys() == old.keys()
  for path, leaf in leaves_by_path(initial).items():
    np.testing.assert_array_equal(new[path], old.get(path, leaf))
  assert f'{account}'.splitlines() == [
    f'Took {sum(a.size for a in old.values()):,} of '
    f'{sum(a.size for a in new.values()):,} parameters from step '
    f'{run.step} of {name.removesuffix(":best")}: {len(old)} of {len(new)} '
    'arrays.',
    'New, with initial values of their own: cell/cells_2 (10 arrays), '
    'head/hidden (2 arrays), head/output (2 arrays).',
  ]


def test_what_the_model_does_not_have_is_left():
  sharded = model(
    *('LAYERS = 1', 'RECURRENT_LAYERS = ()', 'stack.layers.special = None')
  )
  account = Source(f'{trained.folder()}').account(sharded.param_shapes, Bytes())
  assert not account.new
  assert {path.split('/')[1] for path in account.left} == {'cells_1'}
  assert 'the model does not have them: cell/cells_1 (' in f'{account}'


@pytest.mark.parametrize(
  ('name', 'settings', 'vocabulary', 'expected'),
  [
    ('{}', ['MLP_DIM = 40'], Bytes(), r'mlp/hidden/kernel with shape \(16, 32'),
    ('{}', [], Words(('a', 'b')), 'vocabulary bytes'),
    ('{}:3', [], Bytes(), 'no step 3'),
    ('{}/checkpoints', [], Bytes(), 'not the folder of a run'),
  ],
)
def test_what_does_not_fit_is_refused(name, settings, vocabulary, expected):
  shapes = model(*settings).param_shapes
  with pytest.raises(ValueError, match=expected) as error:
    Source(name.format(trained.folder())).account(shapes, vocabulary)
  assert '\n' not in str(error.value)


@pytest.mark.slow
def test_a_run_reads_its_source_once(tmp_path):
  """Also if it is killed before its first step, and with an average."""
  data = tiny_run.write_store(tmp_path / 'store')
  experiment = tiny_run.experiment(data, tiny_run.program())

  def fill(params):
    return jax.tree.map(lambda a: a + 1, params), 'elsewhere'

  def fail(params):
    raise AssertionError('The source is read again.')

  run = trainer.Run(experiment, tmp_path / 'run', {}, fill)
  run.begin()
  initial = experiment.program.create(experiment.seed)
  for part in run.state.params, run.state.ema:
    same = jax.tree.map(
      lambda a, b: bool(jnp.array_equal(a, b + 1)), part, initial.params
    )
    assert jax.tree.all(same)
  run.checkpoints.close()
  run.lock.release()
  again = trainer.Run(experiment, tmp_path / 'run', {}, fail)
  again.begin()
  assert again.step == 0
  assert digest(again.state) == digest(run.state)
  assert again.about['began with'] == 'elsewhere'
  assert again.live() is None


def test_the_flag_is_checked_before_the_data(tmp_path, caplog):
  caplog.set_level(logging.INFO)
  assert training.open_source(None, None) is None
  with pytest.raises(ValueError, match='not the folder of a run'):
    training.open_source(str(tmp_path), str(tmp_path / 'new'))
  assert training.open_source(str(tmp_path), str(trained.folder())) is None
  assert f'{tmp_path} is not read' in caplog.text
  load_run(trained.folder()).export(tmp_path / 'exported')
  with pytest.raises(ValueError, match='--init_from'):
    training.open_source(None, str(tmp_path / 'exported'))
  tiny_run.write_store(tmp_path / 'store')
  with pytest.raises(ValueError, match='--workdir'):
    training.open_source(None, str(tmp_path / 'store'))
