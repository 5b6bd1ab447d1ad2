"""Saved states load bit for bit, into the model that made them only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.generation import saved_state
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.storage import array_file

ABOUT = {'vocabulary': 'bytes', 'parameters': 'abc'}


def make(width=3):
  """A state of floats, of numbers without a dtype of NumPy, and of others."""
  odd = jnp.array([[1.0, -2.5, 3e-30]], jnp.bfloat16)
  keys = np.random.default_rng(0).normal(size=(1, 2, width))
  parts = {'keys': jnp.asarray(keys, jnp.float32), 'odd': odd}
  return DecoderState(
    (parts, jnp.bfloat16(0.5)), jnp.arange(4)[None], jnp.int32(1)
  )


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
  types = [jax.tree.map(lambda leaf: leaf.dtype, tree) for tree in (a, b)]
  assert types[0] == types[1]


@pytest.fixture
def saved(tmp_path):
  saved_state.save(tmp_path / 's.npz', make(), ABOUT)
  return tmp_path / 's.npz'


def test_a_saved_state_loads_unchanged_and_without_a_pickle(saved):
  like = jax.tree.map(jnp.zeros_like, make())
  same(saved_state.load(saved, like, ABOUT), make())
  assert [path.name for path in saved.parent.iterdir()] == ['s.npz']
  with np.load(saved, allow_pickle=False) as file:
    assert all(file[name].dtype.kind in 'uif' for name in file.files)


def test_a_state_of_version_0_1_0_loads(saved, tmp_path):
  """It has another name of the model's decode state."""
  arrays, facts = array_file.read(saved, 'saved state', '')
  old = lambda by_path: {
    path.replace('decode_state', 'opened'): v for path, v in by_path.items()
  }
  facts['dtypes'] = old(facts['dtypes'])
  array_file.write(tmp_path / 'old', 'saved state', old(arrays), facts)
  same(saved_state.load(tmp_path / 'old', make(), ABOUT), make())


def test_another_model_is_refused(saved):
  like = make()
  with pytest.raises(ValueError, match='parameters abc'):
    saved_state.load(saved, like, ABOUT | {'parameters': 'abd'})
  with pytest.raises(ValueError, match='but this model needs'):
    saved_state.load(saved, make(width=4), ABOUT)
  lower = like.replace(recent_BN=like.recent_BN.astype(jnp.int16))
  with pytest.raises(ValueError, match=r'int32\[1, 4\] of 4 B at recent_BN'):
    saved_state.load(saved, lower, ABOUT)


def test_other_files_are_errors(saved, tmp_path):
  with pytest.raises(ValueError, match='no'):
    saved_state.save(tmp_path / 'no' / 's', make(), ABOUT)
  whole = saved.read_bytes()
  np.savez(tmp_path / 'pickle.npz', meta=np.array([{}], object))
  array_file.write(tmp_path / 'bare', 'saved state', {}, {})
  (tmp_path / 'cut').write_bytes(whole[: len(whole) // 2])
  (tmp_path / 'text').write_text('text')
  for name in ('no', 'pickle.npz', 'bare', 'cut', 'text'):
    with pytest.raises(ValueError, match=name):
      saved_state.load(tmp_path / name, make(), ABOUT)
