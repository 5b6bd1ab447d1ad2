"""Where a reader stands, as a file: read a book once, ask about it later.

It fits only the parameters that read the text.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.generation.decoder import Reading
from meliad_rec.storage import array_file
from meliad_rec.storage.checksums import leaves_by_path

_KIND, _COMMAND = 'saved state', 'generate --save_state'


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
  facts = {
    'about': about,
    'dtypes': {p: str(a.dtype) for p, a in leaves.items()},
  }
  arrays = {p: _plain(a) for p, a in leaves.items()}
  array_file.write(path, _KIND, arrays, facts)


def load(path: str | Path, like: Reading, about: dict[str, str]) -> Reading:
  """The reading that `save` wrote, on the first device.

  Args:
    path: of the file.
    like: a reading of the same model, of one row; only shapes matter.
    about: as it was saved.

  Raises:
    ValueError: the file is none of `save`, damaged, or of another model.
  """
  arrays, facts = array_file.read(path, _KIND, _COMMAND)
  try:
    found, dtypes = dict(facts['about']), dict(facts['dtypes'])
  except (KeyError, TypeError, ValueError):
    raise array_file.damaged(path, _KIND, _COMMAND) from None
  for name, value in about.items():
    if found.get(name) != value:
      raise ValueError(
        f'{path} was saved with {name} {found.get(name)}, and this run has '
        f'{value}; load it with the --workdir and --step that saved it.'
      )
  needed = leaves_by_path(like)
  for p in sorted({*needed, *arrays}):
    want = _facts(needed[p], str(needed[p].dtype)) if p in needed else 'nothing'
    have = 'nothing'
    if p in arrays:
      have = _facts(arrays[p], str(dtypes.get(p)))
    if have != want:
      raise ValueError(
        f'{path} holds {have} at {p}, and this model needs {want}; read the '
        'text again with this model.'
      )
  leaves = [jnp.asarray(arrays[p].view(a.dtype)) for p, a in needed.items()]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _facts(array, dtype: str) -> str:
  """Shape, dtype, and how many bytes of it an element has in the file."""
  return f'{dtype}{list(array.shape)} of {array.dtype.itemsize} B'


def _plain(a: np.ndarray) -> np.ndarray:
  """The same bits in a dtype that numpy itself knows, as bfloat16 is not."""
  if a.dtype.kind != 'V':
    return a
  return a.view(f'u{a.dtype.itemsize}')
