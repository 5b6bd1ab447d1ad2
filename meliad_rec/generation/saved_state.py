"""Decoder states as files, to read a long text once and continue it later.

A file holds the arrays of a DecoderState under their paths in the state:
`decode_state/...`, `recent_BN` and `count`. It also holds their dtypes, and
facts that must be the same when the file is loaded: the vocabulary and a digest
of the parameters. A state cannot be used with other parameters. Arrays of
dtypes that NumPy lacks, such as bfloat16, are stored as unsigned integers with
the same bits.
"""

from pathlib import Path
import re

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.storage import array_file

_KIND, _COMMAND = 'saved state', 'generate --save_state'
_OLD_PREFIX = 'opened'  # Version 0.1.0's name of `decode_state`.


def save(path: str | Path, state: DecoderState, about: dict[str, str]) -> None:
  """Writes a state to a file, completely or not at all.

  Args:
    path: path of the file; an existing file is replaced.
    state: decoder state of a model of any architecture and dtype.
    about: facts that must be the same when the file is loaded.

  Raises:
    ValueError: the file cannot be written.
  """
  leaves = {p: np.asarray(a) for p, a in leaves_by_path(state).items()}
  facts = {
    'about': about,
    'dtypes': {p: str(a.dtype) for p, a in leaves.items()},
  }
  arrays = {p: _as_numpy_dtype(a) for p, a in leaves.items()}
  array_file.write(path, _KIND, arrays, facts)


def load(
  path: str | Path, like: DecoderState, about: dict[str, str]
) -> DecoderState:
  """Returns the state that `save` wrote, on JAX's default device.

  Args:
    path: path of the file.
    like: a state of the same model, with as many rows as the saved state. The
      result has its structure, shapes and dtypes.
    about: facts that must be the same as those that `save` wrote.

  Raises:
    ValueError: the file is not a saved state or is damaged, or its arrays or
      facts do not fit `like` and `about`.
  """
  arrays, facts = array_file.read(path, _KIND, _COMMAND)
  try:
    saved_about, dtypes = dict(facts['about']), dict(facts['dtypes'])
  except (KeyError, TypeError, ValueError):
    raise array_file.damaged(path, _KIND, _COMMAND) from None
  for name, value in about.items():
    if saved_about.get(name) != value:
      raise ValueError(
        f'{path} was saved with {name} {saved_about.get(name)}, but this run '
        f'has {value}. Load it with the --workdir and --step that saved it.'
      )
  arrays, dtypes = _current_names(arrays), _current_names(dtypes)
  needed = leaves_by_path(like)
  for p in sorted({*needed, *arrays}):
    want = have = 'nothing'
    if p in needed:
      want = _describe(needed[p], str(needed[p].dtype))
    if p in arrays:
      have = _describe(arrays[p], str(dtypes.get(p)))
    if have != want:
      raise ValueError(
        f'{path} holds {have} at {p}, but this model needs {want}. Read the '
        'text again with this model.'
      )
  leaves = [jnp.asarray(arrays[p].view(a.dtype)) for p, a in needed.items()]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _current_names(by_path: dict) -> dict:
  return {
    re.sub(rf'^{_OLD_PREFIX}\b', 'decode_state', p): value
    for p, value in by_path.items()
  }


def _describe(array, dtype: str) -> str:
  """Returns text: the given dtype, and the array's shape and item size."""
  return f'{dtype}{list(array.shape)} of {array.dtype.itemsize} B'


def _as_numpy_dtype(a: np.ndarray) -> np.ndarray:
  """Returns the array in a dtype that NumPy has, for storage.

  An array whose dtype NumPy lacks becomes unsigned integers with the same bits.
  """
  if a.dtype.kind != 'V':
    return a
  return a.view(f'u{a.dtype.itemsize}')
