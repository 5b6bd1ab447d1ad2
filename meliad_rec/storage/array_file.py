"""Arrays by name and JSON facts in one file: an .npz, never a pickle."""

from collections.abc import Mapping
import json
import os
from pathlib import Path
import secrets
import zipfile
import zlib

import numpy as np

_META = 'meta'

# What numpy and zipfile raise at a file that is not what it should be: empty,
# cut, encrypted, or packed in a way that they do not know.
_ODD = (
  OSError,
  EOFError,
  ValueError,
  KeyError,
  TypeError,
  RuntimeError,
  zipfile.BadZipFile,
  zlib.error,
)


def check_place(path: str | Path) -> None:
  """Finds out before long work whether `write` could write the file.

  Raises:
    ValueError: it could not, or the name is not that of an .npz.
  """
  if Path(path).suffix != '.npz':
    # Or else a text that is named by mistake would be gone.
    raise ValueError(f'{path} names no .npz file; end it in .npz.')
  check_writable(path)


def check_writable(path: str | Path) -> None:
  """Finds out before long work whether any file could be written there.

  Raises:
    ValueError: it could not.
  """
  folder = Path(path).absolute().parent
  if not folder.is_dir():
    raise ValueError(f'The folder of {path} is not there; make it first.')
  if Path(path).is_dir() or not os.access(folder, os.W_OK):
    raise ValueError(f'{path} cannot be written; choose another file.')


def write(
  path: str | Path, kind: str, arrays: Mapping[str, np.ndarray], facts: dict
) -> None:
  """Writes the file, whole or not at all; one that is there is replaced.

  Args:
    path: of the file.
    kind: what it holds, as a person would say it.
    arrays: of dtypes that numpy itself knows.
    facts: JSON-able.

  Raises:
    ValueError: it cannot be written.
  """
  text = json.dumps({'kind': kind, 'facts': facts})
  meta = {_META: np.frombuffer(text.encode(), np.uint8)}
  path = Path(path)
  # Opened as any file is, so that who may read it is as the umask says.
  fresh = path.parent / f'.{path.name}.{secrets.token_hex(4)}'
  try:
    try:
      with fresh.open('xb') as whole:
        np.savez(whole, **arrays, **meta)
      os.replace(fresh, path)
    finally:
      fresh.unlink(missing_ok=True)
  except OSError as error:
    raise ValueError(
      f'{path} cannot be written ({error.strerror}); choose another file.'
    ) from None


def read(
  path: str | Path, kind: str, command: str
) -> tuple[dict[str, np.ndarray], dict]:
  """The arrays and facts that `write` wrote.

  Args:
    path: of the file.
    kind: what it must hold.
    command: what writes such files, for messages.

  Raises:
    ValueError: there is no such file, or it is damaged or of another kind.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      meta = json.loads(file[_META].tobytes())
      if meta['kind'] == kind:
        arrays = {name: file[name] for name in file.files if name != _META}
        return arrays, dict(meta['facts'])
  except FileNotFoundError:
    raise ValueError(
      f'There is no file {path}; write one with {command}.'
    ) from None
  except _ODD:
    pass
  raise damaged(path, kind, command)


def damaged(path: str | Path, kind: str, command: str) -> ValueError:
  """The error for a file that is not what it should be."""
  return ValueError(
    f'{path} holds no {kind}, or is damaged; write it again with {command}.'
  )
