"""Reads and writes named arrays and JSON values as .npz, without pickles."""

from collections.abc import Mapping
import json
import os
from pathlib import Path
import secrets

import numpy as np

_META = 'meta'


def check_place(path: str | Path, suffix: str = '.npz') -> None:
  """Checks, before long work, that it will be possible to write a file.

  Args:
    path: path of the file.
    suffix: the suffix that its name must have.

  Raises:
    ValueError: the file cannot be written, or its name has another suffix.
  """
  if Path(path).suffix != suffix:
    # Otherwise a text file given by mistake would be overwritten.
    raise ValueError(f'{path} does not end in {suffix}. Give a name that does.')
  check_writable(path)


def check_writable(path: str | Path) -> None:
  """Checks, before long work, that it will be possible to write a file.

  Raises:
    ValueError: the file cannot be written.
  """
  folder = Path(path).absolute().parent
  if not folder.is_dir():
    raise ValueError(f'The folder of {path} does not exist. Create it first.')
  if Path(path).is_dir() or not os.access(folder, os.W_OK):
    raise ValueError(f'{path} cannot be written. Choose another file.')


def write(
  path: str | Path, kind: str, arrays: Mapping[str, np.ndarray], facts: dict
) -> None:
  """Writes the whole file or nothing; replaces an existing file.

  Args:
    path: path of the file.
    kind: what the file holds, such as 'saved state'.
    arrays: {name: array}. The dtypes must be numpy's own; bfloat16 is not.
    facts: {name: value that JSON can hold}.

  Raises:
    ValueError: the file cannot be written.
  """
  text = json.dumps({'kind': kind, 'facts': facts})
  meta = {_META: np.frombuffer(text.encode(), np.uint8)}
  path = Path(path)
  # Opened like any other file, so that its permissions follow the umask.
  new = path.parent / f'.{path.name}.{secrets.token_hex(4)}'
  try:
    try:
      with new.open('xb') as file:
        np.savez(file, **arrays, **meta)
      os.replace(new, path)
    finally:
      new.unlink(missing_ok=True)
  except OSError as error:
    raise ValueError(
      f'{path} cannot be written ({error.strerror}). Choose another file.'
    ) from None


def read(
  path: str | Path, kind: str, command: str
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns the arrays and the facts that `write` wrote.

  Args:
    path: path of the file.
    kind: the kind that was given to `write`.
    command: the command that writes such files, for error messages. It does not
      include 'meliad-rec'; an example is 'evaluate --out'.

  Raises:
    ValueError: the file is missing, damaged or of another kind.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      meta = json.loads(file[_META].tobytes())
      if meta['kind'] == kind:
        arrays = {name: file[name] for name in file.files if name != _META}
        return arrays, dict(meta['facts'])
  except FileNotFoundError:
    raise ValueError(
      f'The file {path} does not exist. Write it with meliad-rec {command}.'
    ) from None
  # numpy and zipfile raise errors of a dozen classes for a file that is empty,
  # cut, encrypted, nested too deeply, or claims more than it holds.
  except Exception:
    pass
  raise damaged(path, kind, command)


def damaged(path: str | Path, kind: str, command: str) -> ValueError:
  """Returns the error for a file that is damaged or of another kind.

  The arguments are as in `read`.
  """
  return ValueError(
    f'{path} is damaged, or is not a file of {kind}. '
    f'Write it again with meliad-rec {command}.'
  )
