"""The window cache at the start of a document: masked, or seen as in meliad."""

import jax.numpy as jnp
import pytest

from meliad_rec.layer_config import LayerConfig

SIZES = {'d_model': 11, 'heads': 2, 'head_width': 5, 'mlp_width': 7}


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


def test_compat_is_not_the_default():
  assert not LayerConfig(**SIZES, window=4).compat_meliad
