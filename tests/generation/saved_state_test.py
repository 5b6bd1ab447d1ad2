"""Saved states load bit for bit, into the model that made them only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.generation import saved_state
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.storage import array_file
from tests import architectures as tiny
from tests.architectures import build

ABOUT = {'vocabulary': 'bytes', 'parameters': 'abc'}


def make(name):
  m = build(name)
  decoder = Decoder(m.model, m.params, segment=tiny.W)
  state = decoder.read(decoder.start(1), np.asarray(m.tokens_BT)[:1, :11])
  return state, decoder.start(1)


@pytest.mark.parametrize('name', ['vanilla', 'recurrent_fixed_skip'])
def test_a_saved_state_loads_unchanged(name, tmp_path):
  state, like = make(name)
  saved_state.save(tmp_path / 's.npz', state, ABOUT)
  again = saved_state.load(tmp_path / 's.npz', like, ABOUT)
  jax.tree.map(np.testing.assert_array_equal, state, again)
  assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(
    lambda a: a.dtype, again
  )
  assert [path.name for path in tmp_path.iterdir()] == ['s.npz']


def test_bfloat16_survives_without_a_pickle(tmp_path):
  odd = jnp.array([[1.0, -2.5, 3e-30]], jnp.bfloat16)
  recent_BN = jnp.ones((1, 4), jnp.int32)
  state = DecoderState((odd, jnp.bfloat16(0.5)), recent_BN, jnp.int32(1))
  saved_state.save(tmp_path / 's.npz', state, ABOUT)
  with np.load(tmp_path / 's.npz', allow_pickle=False) as file:
    assert all(file[name].dtype.kind in 'uif' for name in file.files)
  again = saved_state.load(tmp_path / 's.npz', state, ABOUT)
  assert again.decode_state[0].dtype == jnp.bfloat16
  jax.tree.map(np.testing.assert_array_equal, state, again)


def test_a_state_of_version_0_1_0_loads(tmp_path):
  """It has another name of the model's decode state."""
  state, like = make('vanilla')
  saved_state.save(tmp_path / 's.npz', state, ABOUT)
  arrays, facts = array_file.read(tmp_path / 's.npz', 'saved state', '')
  old = lambda by_path: {
    path.replace('decode_state', 'opened'): v for path, v in by_path.items()
  }
  facts['dtypes'] = old(facts['dtypes'])
  array_file.write(tmp_path / 'old', 'saved state', old(arrays), facts)
  again = saved_state.load(tmp_path / 'old', like, ABOUT)
  jax.tree.map(np.testing.assert_array_equal, state, again)


def test_another_model_is_refused(tmp_path):
  state, like = make('vanilla')
  path = tmp_path / 's.npz'
  saved_state.save(path, state, ABOUT)
  with pytest.raises(ValueError, match='parameters abc'):
    saved_state.load(path, like, ABOUT | {'parameters': 'abd'})
  _, other = make('recurrent_fixed_skip')
  with pytest.raises(ValueError, match='but this model needs'):
    saved_state.load(path, other, ABOUT)
  lower = like.replace(recent_BN=like.recent_BN.astype(jnp.int16))
  with pytest.raises(ValueError, match=r'int32\[1, 4\] of 4 B at recent_BN'):
    saved_state.load(path, lower, ABOUT)


def test_other_files_are_errors(tmp_path):
  state, like = make('vanilla')
  with pytest.raises(ValueError, match='no'):
    saved_state.load(tmp_path / 'no', like, ABOUT)
  with pytest.raises(ValueError, match='no'):
    saved_state.save(tmp_path / 'no' / 's', state, ABOUT)
  saved_state.save(tmp_path / 's.npz', state, ABOUT)
  whole = (tmp_path / 's.npz').read_bytes()
  np.savez(tmp_path / 'pickle.npz', meta=np.array([{}], object))
  array_file.write(tmp_path / 'bare', 'saved state', {}, {})
  (tmp_path / 'cut').write_bytes(whole[: len(whole) // 2])
  (tmp_path / 'text').write_text('text')
  for name in ('pickle.npz', 'bare', 'cut', 'text'):
    with pytest.raises(ValueError, match=name):
      saved_state.load(tmp_path / name, like, ABOUT)
