"""Window caches, and settings that both configurations refuse."""

import functools

import jax.numpy as jnp
import pytest

from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.layer_config import ENCODER_POSITIONS
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.layer_config import LayerConfig

SIZES = {'d_model': 11, 'num_heads': 6, 'head_dim': 5, 'mlp_dim': 7}
windowed = functools.partial(LayerConfig, window=4)
encoder = functools.partial(EncoderConfig, causal=True)


@pytest.mark.parametrize('compat_meliad', [False, True])
def test_empty_past(compat_meliad):
  """Masked, or visible as in meliad; heads may share keys."""
  past = windowed(
    **SIZES, num_kv_heads=2, dtype='bfloat16', compat_meliad=compat_meliad
  ).empty_past(3)
  assert past.k.shape == past.v.shape == (3, 4, 2, 5)
  assert past.k.dtype == jnp.bfloat16
  assert not past.k.any() and not past.v.any()
  assert (past.mask == compat_meliad).all()


@pytest.mark.parametrize(
  ('configs', 'name', 'value'),
  [
    *(((windowed, encoder), name, 0) for name in SIZES),
    ((windowed, encoder), 'dropout', 1.0),
    ((windowed, encoder), 'dropout', -0.5),
    ((windowed, encoder), 'dtype', 'float31'),
    ((windowed,), 'window', -4),
    ((encoder,), 'attention_dropout', 1.0),
  ],
)
def test_impossible_settings(configs, name, value):
  for config in configs:
    with pytest.raises(ValueError, match=f'{name} must .* Set {name.upper()}'):
      config(**SIZES | {name: value})


@pytest.mark.parametrize(
  ('name', 'value'), [('depth', 0), ('attention', 'fast'), ('num_kv_heads', 4)]
)
def test_impossible_settings_of_layers(name, value):
  with pytest.raises(ValueError, match=f'LayerConfig.{name}'):
    windowed(**SIZES, **{name: value})


class Turned(positions.Position):
  def rotate(self, x_BSHK, first):
    return -x_BSHK


class Biased(positions.NoPosition):
  def bias(self, steps_back):
    return 1.0


def test_encoders_refuse_positions_that_add_to_logits():
  """They would be ignored."""
  for position in (*ENCODER_POSITIONS, Turned):
    encoder(**SIZES, position=functools.partial(position))
  refused = positions.T5Bias, positions.ALiBi, positions.RelativeKeys, Biased
  for position in (*refused, positions.AdaptiveSpan, norms.NoNorm):
    with pytest.raises(ValueError, match='EncoderConfig.position'):
      encoder(**SIZES, position=position)


@pytest.mark.parametrize(
  ('name', 'module'),
  [
    ('position', positions.AdaptiveSpan),
    ('position', norms.NoNorm),
    ('span', positions.ALiBi),
  ],
)
def test_modules_of_another_kind_are_refused(name, module):
  with pytest.raises(ValueError, match=f'Set layer_config.LayerConfig.{name}'):
    windowed(**SIZES, **{name: functools.partial(module)})
