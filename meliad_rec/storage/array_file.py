"""Reads and writes named arrays and JSON values as .npz, without pickles."""

from collections.abc import Mapping
import json
from pathlib import Path

import numpy as np

from meliad_rec.storage import output_file

_META = 'meta'


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
  try:
    with output_file.replacing(path) as new, new.open('wb') as file:
      np.savez(file, **arrays, **meta)
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
    PermissionError: the user may not read the file.
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
  except PermissionError:
    raise
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
