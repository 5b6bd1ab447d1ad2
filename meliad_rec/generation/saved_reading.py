"""Where a reader stands, as a file: read a book once, ask about it later.

An .npz of plain arrays and one JSON text, never a pickle. It fits only the
parameters that read the text.
"""

import json
import os
from pathlib import Path
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.checkpoint.fingerprint import leaves_by_path
from meliad_rec.generation.decode import Reading

_FORMAT = 1
_ABOUT = 'about'


def save(path: str | Path, reading: Reading, about: dict[str, str]) -> None:
  """Writes the file, whole or not at all.

  Args:
    path: of the file; one that is there is replaced.
    reading: of any architecture, in any dtype.
    about: what must be the same where it is loaded: the tokenizer, and the
      parameters.

  Raises:
    ValueError: it cannot be written.
  """
  leaves = {p: np.asarray(a) for p, a in leaves_by_path(reading).items()}
  meta = {
    'format': _FORMAT,
    'about': about,
    'dtypes': {p: str(a.dtype) for p, a in leaves.items()},
  }
  arrays = {p: _plain(a) for p, a in leaves.items()}
  arrays[_ABOUT] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
  path = Path(path)
  try:
    file, name = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
    try:
      with os.fdopen(file, 'wb') as whole:
        np.savez(whole, **arrays)
      os.replace(name, path)
    except BaseException:
      os.unlink(name)
      raise
  except OSError as error:
    raise ValueError(
      f'{path} cannot be written ({error.strerror}); choose another file.'
    ) from None


def load(path: str | Path, like: Reading, about: dict[str, str]) -> Reading:
  """The reading that `save` wrote, on the first device.

  Args:
    path: of the file.
    like: a reading of the same model, of one row; only shapes matter.
    about: as it was saved.

  Raises:
    ValueError: the file is none of `save`, damaged, or of another model.
  """
  path = Path(path)
  try:
    with np.load(path, allow_pickle=False) as file:
      meta = json.loads(file[_ABOUT].tobytes())
      _check(path, meta, about)
      arrays = {p: file[p] for p in file.files if p != _ABOUT}
  except FileNotFoundError:
    raise ValueError(
      f'There is no file {path}; --save_state writes one.'
    ) from None
  except _Unfit as error:
    raise ValueError(str(error)) from None
  except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
    raise ValueError(
      f'{path} is not a saved state, or is damaged; write it again with '
      '--save_state.'
    ) from None
  needed = leaves_by_path(like)
  for p in sorted({*needed, *arrays}):
    want = _facts(needed[p], str(needed[p].dtype)) if p in needed else 'nothing'
    have = 'nothing'
    if p in arrays:
      have = _facts(arrays[p], str(meta['dtypes'].get(p)))
    if have != want:
      raise ValueError(
        f'{path} holds {have} at {p}, and this model needs {want}; read the '
        'text again with this model.'
      )
  leaves = [jnp.asarray(arrays[p].view(a.dtype)) for p, a in needed.items()]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


class _Unfit(Exception):
  """A whole file that does not fit."""


def _check(path, meta, about):
  if meta['format'] != _FORMAT:
    raise _Unfit(
      f'{path} has format {meta["format"]}, this version reads {_FORMAT}; '
      'write it again with --save_state.'
    )
  for name, value in about.items():
    if meta['about'].get(name) != value:
      raise _Unfit(
        f'{path} was saved with {name} {meta["about"].get(name)}, and this '
        f'run has {value}; load it with the --workdir and --step that saved it.'
      )


def _facts(array, dtype: str) -> str:
  """Shape, dtype, and how many bytes of it an element has in the file."""
  return f'{dtype}{list(array.shape)} of {array.dtype.itemsize} B'


def _plain(a: np.ndarray) -> np.ndarray:
  """The same bits in a dtype that numpy itself knows, as bfloat16 is not."""
  if a.dtype.kind != 'V':
    return a
  return a.view(f'u{a.dtype.itemsize}')
