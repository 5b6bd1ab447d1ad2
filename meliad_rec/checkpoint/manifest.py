"""Manifest of a folder: the length and sha256 of every file in it.

A manifest is written before the folder is committed, so that any byte that is
later flipped, cut off or lost is found, and its file named. Files are found by
listing the folder, never by following a name in a manifest: a manifest from
elsewhere cannot lead out of its folder.
"""

import hashlib
import json
import os

from etils import epath

NAME = 'MANIFEST.json'
# orbax writes these two after the manifest; what is in them is never read.
_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_CHUNK = 1 << 22


def write(folder):
  """Writes the manifest of every file now in `folder` into it."""
  folder = epath.Path(folder)
  files = {name: _facts(path) for name, path in sorted(_files(folder))}
  text = json.dumps({'files': files, 'sha256': _seal(files)}, indent=1)
  (folder / NAME).write_text(text)


def damage(folder, part=''):
  """One phrase, naming the file, for each that differs from the manifest.

  Args:
    folder: a folder that `write` has seen.
    part: beginning of the names that are looked at; the others are not read.

  Returns:
    List of str; empty if every byte is what it was.
  """
  folder = epath.Path(folder)
  for name in (NAME, *_LATER):
    if not (folder / name).exists():
      return [f'{name} is missing']
  try:
    manifest = json.loads((folder / NAME).read_text())
    listed = {
      name: {'bytes': facts['bytes'], 'sha256': facts['sha256']}
      for name, facts in manifest['files'].items()
    }
    sealed = manifest['sha256'] == _seal(listed)
    listed = {n: facts for n, facts in listed.items() if n.startswith(part)}
  except (ValueError, KeyError, TypeError, AttributeError):
    sealed = False
  if not sealed:
    return [f'{NAME} was changed']
  found = {n: path for n, path in _files(folder) if n.startswith(part)}
  phrases = [f'{name} is missing' for name in listed if name not in found]
  phrases += [f'{name} was added' for name in found if name not in listed]
  for name in sorted(set(found) & set(listed)):
    if not _inside(found[name], folder):
      phrases.append(f'{name} leads out of the folder')
    elif (facts := _facts(found[name])) != listed[name]:
      given, needed = facts['bytes'], listed[name]['bytes']
      how = 'was changed' if given == needed else f'has {given} of {needed} B'
      phrases.append(f'{name} {how}')
  return phrases


def _files(folder, prefix=''):
  """(name relative to the first folder, path) of every file below `folder`."""
  for path in folder.iterdir():
    if path.is_dir() and _inside(path, folder):
      yield from _files(path, f'{prefix}{path.name}/')
    elif prefix or path.name not in (NAME, *_LATER):
      yield prefix + path.name, path


def _inside(path, folder):
  """False for a link that leads out of `folder`."""
  # Of gs:// paths, which know no links, this compares the beginnings.
  root = os.path.realpath(folder) + os.sep
  return os.path.realpath(path).startswith(root)


def _facts(path):
  sha256, size = hashlib.sha256(), 0
  with path.open('rb') as file:
    while chunk := file.read(_CHUNK):
      sha256.update(chunk)
      size += len(chunk)
  return {'bytes': size, 'sha256': sha256.hexdigest()}


def _seal(files):
  """sha256 of the manifest's own table, so that it guards itself too."""
  return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
