"""Every name meets its counterpart, and what does not fit is named."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs import window
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.commands.import_meliad import convert
from meliad_rec.layers import gates
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests import meliad_reference
from tests.meliad_reference import Sizes

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


def build(sizes, scan=False):
  """Our model of meliad's sizes."""
  config = LayerConfig(
    d_model=sizes.width,
    num_heads=sizes.num_heads,
    head_dim=sizes.head_dim,
    mlp_dim=sizes.hidden,
    window=sizes.window,
    compat_meliad=True,
  )
  gate = {'bias': gates.FixedGate, 'lstm': gates.LSTMGate}[sizes.gate]
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
      functools.partial(window.WindowLayer, config),
      recurrent if sizes.recurrent else None,
      sizes.recurrent,
      scan,
    )
  return Model(sizes.vocab, cell, sizes.width)


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


@pytest.mark.parametrize('name', CASES)
def test_logits_are_meliads(name):
  sizes = CASES[name]
  assert max(differences(sizes, build(sizes))) < 1e-5


def test_layers_in_one_scan_take_theirs_in_order():
  sizes = Sizes(layers=4, recurrent=(0, 1), gate='lstm', gate_config='dual')
  assert max(differences(sizes, build(sizes, scan=True))) < 1e-5


@pytest.mark.parametrize(
  'rename',
  [
    lambda name: f'params/{name}',
    lambda name: f'target/{name}',
    lambda name: f'optimizer/target/params/decoder/{name}',
    lambda name: f'target/{name}'.replace(
      '_kvq/pre_attn_layernorm', 'pre_attn_layernorm'
    ).replace('target/transformer', 'target/layer_stack/transformer'),
  ],
)
def test_names_are_taken_from_any_holder(rename):
  sizes = Sizes(window=4)
  target = shapes(build(sizes))
  plain = meliad_reference.random_params(sizes, 2)
  held = {rename(name): value for name, value in plain.items()}
  if not rename('').startswith('params/'):
    held['state/step'] = np.zeros(())
  found, expected = convert(held, target), convert(plain, target)
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
  with pytest.raises(ValueError) as raised:
    convert(meliad, shapes(build(sizes)))
  for told in (
    f'it lacks transformer{{0,1}}/{norm};',
    'the model has no transformer{1}/external_memory_bias, final_mlp/hidden0/',
    'it holds embed/embedding of shape (18, 31) for (31, 18).',
  ):
    assert told in str(raised.value)
  assert '\n' not in str(raised.value)


def test_a_parameter_unknown_to_meliad_is_named():
  with pytest.raises(ValueError, match='no parameter like cell/cells_0/depth'):
    convert({}, {'cell': {'cells_0': {'depth': np.zeros(3)}}})


def test_the_reference_buckets_as_t5():
  buckets = [meliad_reference.bucket(distance) for distance in range(200)]
  assert buckets[:17] == [*range(16), 16]
  assert buckets.index(31) == 113
  assert buckets == sorted(buckets)
