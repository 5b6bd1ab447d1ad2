"""The manifest of a token store: what its folder holds, checked as it is read.

Nothing is ever unpickled, and no name in a manifest can lead out of its folder.
"""

import hashlib
import json
from pathlib import Path

FORMAT = 1
NAME = 'manifest.json'

_FILE = {'name': str, 'size': int, 'sha256': str}
_SPLIT = {
  'documents': int,
  'tokens': int,
  'bytes': int,
  'words': int,
  'files': dict.fromkeys(
    ('tokens', 'starts', 'bytes', 'words', 'names'), _FILE
  ),
}
_MANIFEST = {
  'format': int,
  'source': str,
  'dtype': str,
  'vocabulary': {'identity': str, 'size': int, 'files': {'*': _FILE}},
  'splits': {'*': _SPLIT},
}


def read(folder: Path) -> dict:
  """The manifest of a folder, whole and of the format this version reads.

  Raises:
    ValueError: there is none, or it is not what `write` makes.
  """
  path = folder / NAME
  try:
    manifest = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(
      f'{folder} is not a token store: {NAME} cannot be read '
      f'({error.strerror}); make one with python -m meliad_rec.tokenize.'
    ) from None
  except ValueError:
    raise ValueError(f'{path} is not JSON; write the store again.') from None
  if not _fits(manifest, _MANIFEST) or manifest['format'] != FORMAT:
    raise ValueError(
      f'{path} is not a manifest of store format {FORMAT}, the one this '
      'version reads; write the store again.'
    )
  return manifest


def write(folder: Path, manifest: dict) -> None:
  """Writes a manifest, beside files that are all there already."""
  assert _fits(manifest, _MANIFEST)
  (folder / NAME).write_text(json.dumps(manifest, indent=1) + '\n')


def facts(path: Path) -> dict:
  """What a manifest says of a file: name, size in bytes, sha256."""
  return {
    'name': path.name,
    'size': path.stat().st_size,
    'sha256': sha256(path),
  }


def find(folder: Path, file: dict) -> Path:
  """The path of a file of the manifest, which is there with its full size.

  Raises:
    ValueError: it is outside the folder, missing, or of another size.
  """
  name, path = file['name'], folder / file['name']
  inside = path.resolve().parent == folder.resolve()
  if not inside or Path(name).name != name:
    raise ValueError(
      f'The manifest of {folder} names the file {name!r}, which is not in that '
      'folder; write the store again.'
    )
  if not path.is_file():
    raise ValueError(f'{path} is missing; write the store again.')
  size = path.stat().st_size
  if size != file['size']:
    raise ValueError(
      f'{path} has {size} bytes, but {file["size"]} were written; '
      'write the store again.'
    )
  return path


def sha256(path: Path) -> str:
  """The sha256 of a file, in hexadecimal."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _fits(value: object, shape: type | dict) -> bool:
  if isinstance(shape, type):
    return type(value) is shape
  if not isinstance(value, dict):
    return False
  if '*' in shape:
    return all(_fits(item, shape['*']) for item in value.values())
  return value.keys() == shape.keys() and all(
    _fits(value[key], shape[key]) for key in shape
  )
