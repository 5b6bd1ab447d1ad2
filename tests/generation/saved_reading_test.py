"""A reading comes back bit for bit, to the model that made it alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.generation import saved_state
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import Reading
from meliad_rec.storage import array_file
from tests import architectures as tiny
from tests.architectures import build

ABOUT = {'vocabulary': 'bytes', 'parameters': 'abc'}


def make(name):
  m = build(name)
  decoder = Decoder(m.model, m.params, segment=tiny.W)
  reading = decoder.read(decoder.start(1), np.asarray(m.tokens_BT)[:1, :11])
  return reading, decoder.start(1)


@pytest.mark.parametrize('name', ['vanilla', 'recurrent_fixed_skip'])
def test_it_comes_back(name, tmp_path):
  reading, like = make(name)
  saved_state.save(tmp_path / 's.npz', reading, ABOUT)
  again = saved_state.load(tmp_path / 's.npz', like, ABOUT)
  jax.tree.map(np.testing.assert_array_equal, reading, again)
  assert jax.tree.map(lambda a: a.dtype, reading) == jax.tree.map(
    lambda a: a.dtype, again
  )
  assert [path.name for path in tmp_path.iterdir()] == ['s.npz']


def test_bfloat16_survives_without_a_pickle(tmp_path):
  odd = jnp.array([[1.0, -2.5, 3e-30]], jnp.bfloat16)
  recent_BN = jnp.ones((1, 4), jnp.int32)
  reading = Reading((odd, jnp.bfloat16(0.5)), recent_BN, jnp.int32(1))
  saved_state.save(tmp_path / 's.npz', reading, ABOUT)
  with np.load(tmp_path / 's.npz', allow_pickle=False) as file:
    assert all(file[name].dtype.kind in 'uif' for name in file.files)
  again = saved_state.load(tmp_path / 's.npz', reading, ABOUT)
  assert again.opened[0].dtype == jnp.bfloat16
  jax.tree.map(np.testing.assert_array_equal, reading, again)


def test_another_model_is_refused(tmp_path):
  reading, like = make('vanilla')
  path = tmp_path / 's.npz'
  saved_state.save(path, reading, ABOUT)
  with pytest.raises(ValueError, match='with parameters abc, and this run has'):
    saved_state.load(path, like, ABOUT | {'parameters': 'abd'})
  _, other = make('recurrent_fixed_skip')
  with pytest.raises(ValueError, match=r'holds .* at .*, and this model needs'):
    saved_state.load(path, other, ABOUT)
  lower = like.replace(recent_BN=like.recent_BN.astype(jnp.int16))
  with pytest.raises(ValueError, match=r'int32\[1, 4\] of 4 B at recent_BN'):
    saved_state.load(path, lower, ABOUT)


def test_files_that_are_none(tmp_path):
  reading, like = make('vanilla')
  with pytest.raises(ValueError, match='There is no file'):
    saved_state.load(tmp_path / 'no', like, ABOUT)
  with pytest.raises(ValueError, match='cannot be written'):
    saved_state.save(tmp_path / 'no' / 's', reading, ABOUT)
  saved_state.save(tmp_path / 's.npz', reading, ABOUT)
  whole = (tmp_path / 's.npz').read_bytes()
  np.savez(tmp_path / 'pickle.npz', meta=np.array([{}], object))
  array_file.write(tmp_path / 'bare', 'saved state', {}, {})
  (tmp_path / 'cut').write_bytes(whole[: len(whole) // 2])
  (tmp_path / 'text').write_text('text')
  for name in ('pickle.npz', 'bare', 'cut', 'text'):
    with pytest.raises(ValueError, match='holds no saved state, or is damaged'):
      saved_state.load(tmp_path / name, like, ABOUT)
