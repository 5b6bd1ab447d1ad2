"""Weights go from a checkpoint of meliad's into a run that goes on from it."""

import dataclasses
import functools
from pathlib import Path
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.window import VanillaLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.commands import import_meliad
from meliad_rec.config import config
from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.layers import positions
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.model import Model
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment
from tests import meliad_reference

# meliad's sizes of size/test, and its 260 ids for bytes.
SIZES = meliad_reference.Sizes(
  vocab=260,
  width=16,
  num_heads=2,
  head_dim=8,
  hidden=32,
  window=4,
  layers=4,
  recurrent=(1,),
  gate='lstm',
  gate_config='single',
)
ROWS = 3


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  text = 'Something to read: a book, and another. ' * 3
  vocabulary = Bytes()
  book = Document('a', vocabulary.encode(text), len(text), len(text.split()))
  path = tmp_path_factory.mktemp('data') / 'store'
  store.write(
    path, {'train': [book], 'validation': [book]}, vocabulary, 'a book'
  )
  return path


def experiment(files, params=()):
  config.parse(files, params, kinds=())
  mesh = functools.partial(make_mesh, devices=jax.devices()[:1])
  return dataclasses.replace(config.build(Experiment)(), mesh=mesh)


def test_a_run_goes_on_from_the_weights(tmp_path, data, capsys):
  meliad = meliad_reference.random_params(SIZES, 0)
  source, out = str(tmp_path / 'm.npz'), str(tmp_path / 'run')
  np.savez(source, **{f'params/{k}': v for k, v in meliad.items()})
  files = ['arch/block_recurrent', 'size/test', 'task/store']
  files += ['options/recurrent/lstm_single', 'options/compat_meliad']
  built = experiment(files, [f"STORE = '{data}'", f'BATCH = {ROWS}'])
  import_meliad.import_run(source, built, out)
  printed = capsys.readouterr().out
  assert 'embeddings of the last 1 ids' in printed
  assert f'wrote {out}: ' in printed
  # As a process that knows only the folder goes on.
  built = experiment([f'{out}/config.gin'])
  run = trainer.Run(built, out, {})
  run.begin()
  run.checkpoints.close()
  assert run.saved == run.step == 0
  tokens_BT = np.random.default_rng(1).integers(1, 259, (ROWS, 12))
  start_B = np.ones(ROWS, bool)
  _, logits_BTV = jax.jit(built.program.model.apply)(
    {'params': run.state.params},
    run.state.carry,
    tokens_BT,
    start_B,
    np.ones(tokens_BT.shape, bool),
  )
  reference = meliad_reference.Decoder(meliad, SIZES, ROWS)
  expected_BTV = reference.segment(tokens_BT, start_B)[..., :259]
  np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-5)
  # Nothing is written over.
  with pytest.raises(ValueError, match='--out=.*run is not empty'):
    import_meliad.import_run(source, built, out)


def test_mistakes_are_one_sentence(tmp_path):
  flags = [f'--source={tmp_path}', f'--out={tmp_path}/run']
  done = subprocess.run(
    [sys.executable, '-m', 'meliad_rec', 'import_meliad', *flags],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert len(done.stderr.splitlines()) == 1
  assert 'arch/' in done.stderr


def test_orbax_gives_the_parameters_alone(tmp_path):
  meliad = meliad_reference.random_params(SIZES, 1)
  nested = flax.traverse_util.unflatten_dict(meliad, sep='/')
  tree = {
    'target': nested,
    'state': {'step': jnp.int32(7), 'moments': [jnp.ones(3)], 'none': None},
    'flax_mutables': {'state': {'previous_keys_train': jnp.zeros((2, 3))}},
  }
  manager = ocp.CheckpointManager(
    tmp_path, options=ocp.CheckpointManagerOptions(step_prefix='checkpoint')
  )
  save = ocp.args.Composite(tstate=ocp.args.PyTreeSave(tree))
  manager.save(7, args=save)
  manager.close()
  for folder in 'checkpoint_7', 'checkpoint_7/tstate':
    found = import_meliad.read(str(tmp_path / folder))
    assert found.keys() == {f'target/{name}' for name in meliad}
    for name, value in meliad.items():
      np.testing.assert_array_equal(found[f'target/{name}'], value)


def test_what_is_no_checkpoint_is_refused(tmp_path):
  pickled, text = tmp_path / 'p.npz', tmp_path / 't.npz'
  np.savez(pickled, a=np.array([{}], dtype=object))
  text.write_text('no zip')
  with pytest.raises(ValueError, match='p.npz contains more than arrays'):
    import_meliad.read(str(pickled))
  for path in text, tmp_path, Path('no/such'):
    with pytest.raises(ValueError, match='is not a checkpoint'):
      import_meliad.read(str(path))


def model(layer=WindowLayer, divisor=None, **changes):
  settings = LayerConfig(
    d_model=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=4,
    **{'compat_meliad': True} | changes,
  )
  cell = stack.layers(2, functools.partial(layer, settings))
  return Model(31, cell, 16, logits_divisor=divisor)


@pytest.mark.parametrize(
  'options, told',
  [
    ({'compat_meliad': False}, 'add --gin_file=options/compat_meliad'),
    ({'include_self': True}, 'include_self False, got T5Bias and True'),
    ({'position': positions.RoPE}, 'got RoPE and False'),
    (
      {'position': functools.partial(positions.T5Bias, max_distance=64)},
      'T5Bias with max_distance 128',
    ),
    ({'layer': VanillaLayer}, 'VanillaLayer'),
    ({'divisor': 31**0.5}, 'logits_divisor = 4.0'),
  ],
)
def test_other_numerics_are_refused(options, told):
  import_meliad.check_numerics(model(), {'embed/embedding': np.ones((31, 16))})
  with pytest.raises(ValueError, match=told):
    import_meliad.check_numerics(
      model(**options), {'embed/embedding': np.ones((31, 16))}
    )


def test_the_release_of_2022_has_its_own_divisor_and_signs():
  meliad = {'target/decoder/embed/embedding': np.ones((31, 16))}
  with pytest.raises(ValueError, match='logits_divisor = 5.5677'):
    import_meliad.check_numerics(model(), meliad)
  import_meliad.check_numerics(model(divisor=31**0.5), meliad)
  name = 'target/decoder/transformer0/tbase/_kvq/attention_scale'
  meliad[name] = np.array([0.5, -0.1])
  with pytest.raises(ValueError, match=f'{name} is negative'):
    import_meliad.check_numerics(model(divisor=31**0.5), meliad)
