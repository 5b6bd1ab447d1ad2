"""Fingerprints of arrays: 64 bits each, the same however they are sharded.

Each word w at global place i adds mix(w, i), a bijection of w for every i, to
a sum modulo 2^32, in two lanes. So a change of any one element always changes
both lanes, two swapped elements escape with probability 2^-64, and since
integer addition has no order, devices, hosts and layouts do not matter. The
device does the work where the array lies; two numbers travel to the host.

Manifest of a folder: the length and sha256 of every file in it.

A manifest is written before the folder is committed, so that any byte that is
later flipped, cut off or lost is found, and its file named. Files are found by
listing the folder, never by following a name in a manifest: a manifest from
elsewhere cannot lead out of its folder.
"""

import hashlib
import json
import math
import os

from etils import epath
import jax
import jax.numpy as jnp

# Multiplier of the place and starting value of each lane; odd multipliers are
# bijections modulo 2^32.
_LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))


def leaves_by_path(tree):
  """{'params/embed/kernel': leaf, ...} of any pytree; None is no leaf."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def fingerprints(tree):
  """Fingerprint of every array of `tree`.

  Args:
    tree: pytree of arrays; random keys as `jax.random.key_data`.

  Returns:
    {path: 16 hex digits}.

  Raises:
    ValueError: a leaf is of a dtype without words: typed keys, complex
      numbers, 64 bits where jax has 32.
  """
  leaves = leaves_by_path(tree)
  for path, leaf in leaves.items():
    if not _has_words(leaf.dtype):
      raise ValueError(
        f'{path} has dtype {leaf.dtype}, which has no fingerprint; keep'
        ' booleans, integers, floats or jax.random.key_data in the state.'
      )
  # One after the other: many programs at once, each with a sum over all
  # devices, can wait for each other for ever where devices share few threads.
  lanes = {path: jax.device_get(_lanes(leaf)) for path, leaf in leaves.items()}
  return {
    path: f'{int(high):08x}{int(low):08x}'
    for path, (high, low) in lanes.items()
  }


def digest(tree):
  """sha256, as hex, of the paths, dtypes, shapes and fingerprints of `tree`.

  Two states have the same digest where all their bits are the same.
  """
  leaves = leaves_by_path(tree)
  lines = [
    f'{path} {leaves[path].dtype} {list(leaves[path].shape)} {mark}\n'
    for path, mark in sorted(fingerprints(tree).items())
  ]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _has_words(dtype):
  if dtype == jnp.bool_:
    return True
  # Others are not numbers, or would be shortened on their way to the device.
  real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(
    dtype, jnp.floating
  )
  return real and jax.dtypes.canonicalize_dtype(dtype) == dtype


@jax.jit
def _lanes(x):
  """Two uint32 scalars: the two lanes of the fingerprint of `x`."""
  words = _words(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis in range(words.ndim):
    # Above 2^32 elements places repeat, 2^32 apart; changes still show.
    stride = math.prod(words.shape[axis + 1 :]) % 2**32
    iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    place += iota * jnp.uint32(stride)
  return tuple(
    jnp.sum(_mix(words ^ _mix(place * jnp.uint32(a) + jnp.uint32(b)))).astype(
      jnp.uint32
    )
    for a, b in _LANES
  )


def _words(x):
  """The bits of `x` as uint32, one or (64-bit dtypes) two an element."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
  word = unsigned[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(h):
  """A bijection of uint32 (MurmurHash3's finalizer, Appleby 2011)."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


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
