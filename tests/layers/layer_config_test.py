"""Window caches, and settings that both configurations refuse."""

import functools

import jax.numpy as jnp
import pytest

from meliad_rec.layers import positions
from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.layer_config import ENCODER_POSITIONS
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.layer_config import LayerConfig

SIZES = {'d_model': 11, 'num_heads': 2, 'head_dim': 5, 'mlp_dim': 7}
windowed = functools.partial(LayerConfig, window=4)
encoder = functools.partial(EncoderConfig, causal=True)


@pytest.mark.parametrize('compat_meliad', [False, True])
def test_empty_past(compat_meliad):
  """Masked, or visible as in meliad."""
  past = windowed(
    **SIZES, dtype='bfloat16', compat_meliad=compat_meliad
  ).empty_past(3)
  assert past.k.shape == past.v.shape == (3, 4, 2, 5)
  assert past.k.dtype == jnp.bfloat16
  assert not past.k.any() and not past.v.any()
  assert (past.mask == compat_meliad).all()


def test_heads_may_share_keys():
  config = windowed(**SIZES | {'num_heads': 6}, num_kv_heads=2)
  assert config.empty_past(3).k.shape == (3, 4, 2, 5)
  with pytest.raises(ValueError, match='num_kv_heads'):
    windowed(**SIZES | {'num_heads': 6}, num_kv_heads=4)


def test_depth_scales_initial_outputs():
  assert windowed(**SIZES).output_scale == 1
  assert windowed(**SIZES, depth=8).output_scale == 1 / 4


def test_dropout_may_be_locked():
  assert windowed(**SIZES).dropout_kind is TiledDropout
  assert windowed(**SIZES, locked_dropout=True).dropout_kind is LockedDropout


@pytest.mark.parametrize('config', [windowed, encoder])
@pytest.mark.parametrize(
  'name, value',
  [
    *((name, 0) for name in SIZES),
    ('dropout', 1.0),
    ('dropout', -0.5),
    ('dtype', 'float31'),
  ],
)
def test_impossible_settings(config, name, value):
  with pytest.raises(ValueError, match=f'{name} must .* Set {name.upper()}'):
    config(**SIZES | {name: value})


@pytest.mark.parametrize(
  'config, name, value',
  [
    (windowed, 'window', -4),
    (windowed, 'depth', 0),
    (encoder, 'attention_dropout', 1.0),
  ],
)
def test_impossible_settings_of_one_kind(config, name, value):
  with pytest.raises(ValueError, match=f'{name} must be .* {value}'):
    config(**SIZES | {name: value})


def test_encoders_refuse_positions_that_add_to_logits():
  """They would be ignored."""
  for position in ENCODER_POSITIONS:
    assert encoder(**SIZES, position=position).position is position
    encoder(**SIZES, position=functools.partial(position))
  for position in (positions.T5Bias, positions.ALiBi, positions.RelativeKeys):
    with pytest.raises(ValueError, match='EncoderConfig.position'):
      encoder(**SIZES, position=position)
