"""Weights go from a checkpoint of meliad's into a run that goes on from it.

Every name meets its counterpart, the logits are meliad's, and what does not
fit is named.
"""

import dataclasses
import functools
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.window import VanillaLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.commands import import_meliad
from meliad_rec.commands.import_meliad import convert
from meliad_rec.config import config
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.layers import gates
from meliad_rec.layers import positions
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.embedding import ScaledEmbedding
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment
from tests import bucket
from tests import command
from tests import meliad_reference
from tests import tiny_run
from tests.meliad_reference import Sizes

# meliad's sizes of size/test, and its 260 ids for bytes.
SIZES = Sizes(
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


def experiment(files, params=()):
  config.parse(files, params, kinds=())
  mesh = functools.partial(make_mesh, devices=jax.devices()[:1])
  return dataclasses.replace(config.build(Experiment)(), mesh=mesh)


@pytest.mark.slow
def test_a_run_goes_on_from_the_weights(tmp_path, capsys):
  data = tmp_path / 'store'
  tiny_run.write_store(data)
  meliad = meliad_reference.random_params(SIZES, 0)
  source, out = str(tmp_path / 'm.npz'), str(tmp_path / 'run')
  np.savez(source, **{f'params/{k}': v for k, v in meliad.items()})
  files = ['arch/block_recurrent', 'size/test', 'task/store']
  files += ['options/recurrent/lstm_single', 'options/compat_meliad']
  built = experiment(files, [f"STORE = '{data}'", f'BATCH = {ROWS}'])
  import_meliad.import_run(source, built, out)
  printed = capsys.readouterr().out
  assert 'embeddings of the last 1 ids' in printed
  # As a process that knows only the folder goes on.
  built = experiment([f'{out}/config.gin'])
  run = trainer.Run(built, out, {})
  run.restore()
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


def test_agents_are_refused(tmp_path):
  names = 'arch/feedback', 'size/corridor', 'task/corridor'
  told = command.mistake(
    *(import_meliad, '--source=m.npz', f'--out={tmp_path / "run"}'),
    *(f'--gin_file={name}' for name in names),
  )
  assert 'meliad has no agents' in told


def test_orbax_gives_the_parameters_alone(tmp_path):
  meliad = meliad_reference.random_params(SIZES, 1)
  nested = flax.traverse_util.unflatten_dict(meliad, sep='/')
  tree = {
    'target': nested,
    'state': {'step': jnp.int32(7), 'moments': [jnp.ones(3)], 'none': None},
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
  # The configuration is checked first.
  flags = f'--source={tmp_path}', f'--out={tmp_path}/run'
  assert 'arch/' in command.mistake(import_meliad, *flags)
  pickled, text = tmp_path / 'p.npz', tmp_path / 't.npz'
  np.savez(pickled, a=np.array([{}], dtype=object))
  text.write_text('no zip')
  with pytest.raises(ValueError, match='p.npz contains more than arrays'):
    import_meliad.read(str(pickled))
  np.savez_compressed(tmp_path / 'd.npz', a=np.arange(999))
  damaged = bytearray((tmp_path / 'd.npz').read_bytes())
  damaged[200:300] = bytes(100)
  (tmp_path / 'd.npz').write_bytes(damaged)
  (tmp_path / 'orbax').mkdir()
  (tmp_path / 'orbax/_METADATA').write_text('{')
  for name in 'd.npz', 'orbax':
    with pytest.raises(ValueError, match=f'{name} is damaged'):
      import_meliad.read(str(tmp_path / name))
  for path in text, tmp_path, Path('no/such'):
    with pytest.raises(ValueError, match='is not a checkpoint'):
      import_meliad.read(str(path))


B, T = 2, 40
RECURRENT = (1,)
CASES = {
  'window': Sizes(),
  'feedback': Sizes(recurrent=RECURRENT, feedback=True),
} | {
  f'{name}_{config}': Sizes(recurrent=RECURRENT, gate=gate, gate_config=config)
  for name, gate in (('fixed', 'bias'), ('lstm', 'lstm'))
  for config in ('skip', 'dual', 'single')
}
SLOW = 'fixed_dual', 'fixed_single', 'lstm_skip'


def build(
  sizes,
  scan=False,
  layer=WindowLayer,
  divisor=None,
  keep_bias=None,
  model=None,
  **changes,
):
  """Our model of meliad's sizes."""
  config = LayerConfig(
    d_model=sizes.width,
    num_heads=sizes.num_heads,
    head_dim=sizes.head_dim,
    mlp_dim=sizes.hidden,
    window=sizes.window,
    **{'compat_meliad': True} | changes,
  )
  gate = {'bias': gates.FixedGate, 'lstm': gates.LSTMGate}[sizes.gate]
  if keep_bias is not None:
    gate = functools.partial(gate, keep_bias=keep_bias)
  options = {
    'slots': sizes.states,
    'gate': gate,
    'gate_config': sizes.gate_config,
  }
  if sizes.feedback:
    cell = BlockFeedback(config, sizes.layers, sizes.recurrent, **options)
  else:
    recurrent = functools.partial(BlockRecurrentLayer, config, **options)
    cell = stack.layers(
      sizes.layers,
      functools.partial(layer, config),
      recurrent if sizes.recurrent else None,
      sizes.recurrent,
      scan,
    )
  return Model(
    sizes.vocab, cell, sizes.width, logits_divisor=divisor, **model or {}
  )


def shapes(model):
  return jax.eval_shape(
    lambda rng: initialize(model, rng, B, T), jax.random.key(0)
  )


def differences(sizes, model):
  """Largest difference of logits in each of three segments.

  In the second the document of row 1 ends, in the third it begins another.
  """
  meliad = meliad_reference.random_params(sizes, 0)
  reference = meliad_reference.Decoder(meliad, sizes, B)
  params = convert(meliad, shapes(model))
  carry = empty_carry(model, params, B)
  step = jax.jit(functools.partial(model.apply, {'params': params}))
  rng = np.random.default_rng(1)
  found = []
  for start_B, end in ([True, True], T), ([False] * 2, 13), ([False, True], T):
    start_B = np.array(start_B)
    mask_BT = np.ones((B, T), bool)
    mask_BT[1, end:] = False
    tokens_BT = rng.integers(1, sizes.vocab, (B, T)) * mask_BT
    carry, logits_BTV = step(carry, tokens_BT, start_B, mask_BT)
    expected_BTV = reference.segment(tokens_BT, start_B)
    found.append(np.abs(expected_BTV - logits_BTV)[mask_BT].max())
  return found


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in CASES
  ],
)
def test_logits_are_meliads(name):
  sizes = CASES[name]
  assert max(differences(sizes, build(sizes))) < 1e-5


def test_layers_in_one_scan_take_theirs_in_order():
  sizes = Sizes(layers=4, recurrent=(0, 1), gate='lstm', gate_config='dual')
  assert max(differences(sizes, build(sizes, scan=True))) < 1e-5


def test_names_are_taken_from_any_holder():
  sizes = Sizes(window=4)
  target = shapes(build(sizes))
  plain = meliad_reference.random_params(sizes, 2)
  expected = convert(plain, target)
  for rename in (
    lambda name: f'params/{name}',
    lambda name: f'target/{name}',
    lambda name: f'optimizer/target/params/decoder/{name}',
    lambda name: f'target/{name}'.replace(
      '_kvq/pre_attn_layernorm', 'pre_attn_layernorm'
    ).replace('target/transformer', 'target/layer_stack/transformer'),
  ):
    held = {rename(name): value for name, value in plain.items()}
    if not rename('').startswith('params/'):
      held['state/step'] = np.zeros(())
    found = convert(held, target)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_all_that_does_not_fit_is_named_in_one_error():
  sizes = CASES['lstm_dual']
  meliad = meliad_reference.random_params(sizes, 0)
  norm = 'tbase/pre_ffn_layernorm/scale'
  for i in 0, 1:
    del meliad[f'transformer{i}/{norm}']
  meliad['transformer1/external_memory_bias'] = np.zeros(2)
  meliad['final_mlp/hidden0/kernel'] = np.zeros((3, 4))
  meliad['embed/embedding'] = meliad['embed/embedding'].T
  # As np.load returns an array of bfloat16.
  meliad['final_layernorm/scale'] = np.zeros(18, 'V2')
  with pytest.raises(ValueError) as raised:
    convert(meliad, shapes(build(sizes)))
  for told in (
    f'it lacks transformer{{0,1}}/{norm};',
    'the model has no transformer{1}/external_memory_bias, final_mlp/hidden0/',
    'it holds embed/embedding of shape (18, 31) instead of (31, 18), ',
    'final_layernorm/scale of |V2 instead of floating-point numbers.',
  ):
    assert told in str(raised.value)
  with pytest.raises(ValueError, match='no parameter like cell/cells_0/depth'):
    convert({}, {'cell': {'cells_0': {'depth': np.zeros(3)}}})


def test_the_reference_buckets_as_t5():
  buckets = [meliad_reference.bucket(distance) for distance in range(200)]
  assert buckets[:17] == [*range(16), 16]
  assert buckets.index(31) == 113
  assert buckets == sorted(buckets)


@pytest.mark.parametrize(
  'options, told',
  [
    ({'compat_meliad': False}, 'Add --gin_file=options/compat_meliad'),
    ({'include_self': True}, 'got T5Bias.* include_self True'),
    ({'position': positions.RoPE}, 'got RoPE and'),
    (
      {'position': functools.partial(positions.T5Bias, max_distance=64)},
      'got T5Bias with max_distance 64',
    ),
    ({'activation': jax.nn.gelu}, 'meliad uses ReLU'),
    ({'layer': VanillaLayer}, 'VanillaLayer'),
    ({'post_norm': True}, 'post_norm is True'),
    ({'keep_bias': 2}, 'keep_bias 1, got 2'),
    ({'model': {'embedding': ScaledEmbedding}}, 'got ScaledEmbedding'),
    ({'model': {'clear_state': True}}, 'clear_state True'),
    ({'divisor': 31**0.5}, 'logits_divisor = 4.0'),
  ],
)
def test_other_numerics_are_refused(options, told):
  meliad = {'embed/embedding': np.ones((31, 16))}
  sizes = Sizes(width=16, recurrent=RECURRENT, gate='lstm')
  import_meliad.check_numerics(build(sizes), meliad)
  with pytest.raises(ValueError, match=told):
    import_meliad.check_numerics(build(sizes, **options), meliad)


def test_a_folder_that_cannot_take_a_run_is_refused_first(
  tmp_path, monkeypatch
):
  (tmp_path / 'home/run/checkpoints').mkdir(parents=True)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  with bucket.served(tmp_path, monkeypatch):
    for out, told in (
      ('~/run', 'is not empty'),
      ('gs://home/run', 'is not empty'),
      ('s3://home/run', 'cannot hold a run'),
    ):
      with pytest.raises(ValueError, match=f'{out} {told}'):
        import_meliad.import_run('no/such.npz', None, out)


def test_the_release_of_2022_has_its_own_divisor_and_signs():
  meliad = {'target/decoder/embed/embedding': np.ones((31, 16))}
  with pytest.raises(ValueError, match='logits_divisor = 5.5677'):
    import_meliad.check_numerics(build(Sizes(width=16)), meliad)
  import_meliad.check_numerics(build(Sizes(width=16), divisor=31**0.5), meliad)
  name = 'target/decoder/transformer0/tbase/_kvq/attention_scale'
  meliad[name] = np.array([0.5, -0.1])
  with pytest.raises(ValueError, match=f'{name} is negative'):
    import_meliad.check_numerics(
      build(Sizes(width=16), divisor=31**0.5), meliad
    )
