"""The window cache at the start of a document: masked, or seen as in meliad."""

import jax.numpy as jnp
import pytest

from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.layer_config import LayerConfig

SIZES = {'d_model': 11, 'num_heads': 2, 'head_dim': 5, 'mlp_dim': 7}


@pytest.mark.parametrize('compat_meliad', [False, True])
def test_empty_past(compat_meliad):
  config = LayerConfig(
    **SIZES, window=4, dtype='bfloat16', compat_meliad=compat_meliad
  )
  past = config.empty_past(3)
  assert past.k.shape == past.v.shape == (3, 4, 2, 5)
  assert past.k.dtype == jnp.bfloat16
  assert not past.k.any() and not past.v.any()
  assert (past.mask == compat_meliad).all()


def test_heads_may_share_keys():
  config = LayerConfig(**SIZES | {'num_heads': 6}, window=4, num_kv_heads=2)
  assert config.empty_past(3).k.shape == (3, 4, 2, 5)
  with pytest.raises(ValueError, match='6 heads cannot share 4 heads of keys'):
    LayerConfig(**SIZES | {'num_heads': 6}, window=4, num_kv_heads=4)


def test_compat_is_not_the_default():
  assert not LayerConfig(**SIZES, window=4).compat_meliad


def test_depth_makes_outputs_begin_small():
  scale = lambda **depth: LayerConfig(**SIZES, window=4, **depth).output_scale
  assert scale() == 1
  assert scale(depth=8) == 1 / 4


def test_dropout_may_be_locked():
  kind = lambda **lock: LayerConfig(**SIZES, window=4, **lock).dropout_kind
  assert kind() is TiledDropout
  assert kind(locked_dropout=True) is LockedDropout


@pytest.mark.parametrize(
  'change, said',
  [
    ({'num_heads': 0}, 'num_heads is 0; it needs 1 or more. Set NUM_HEADS.'),
    ({'window': -4}, 'window is -4; it needs 1 or more. Set WINDOW.'),
    ({'dropout': 1.0}, 'dropout is 1.0; it needs 0 or more and less than 1.'),
    ({'dropout': -0.5}, 'dropout is -0.5; it needs 0 or more'),
    ({'depth': 0}, 'depth is 0; it needs the number of layers, or None. Set'),
    ({'dtype': 'float31'}, "dtype is 'float31'; it needs float32 or bfloat16."),
  ],
)
def test_sizes_that_cannot_be(change, said):
  with pytest.raises(ValueError, match=said):
    LayerConfig(**SIZES | {'window': 4} | change)
