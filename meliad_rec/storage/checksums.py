"""Checksums of arrays and of files.

The fingerprint of an array has 64 bits: two sums of 32-bit numbers, modulo
2^32. The array is read as 32-bit words. The word w at index i of the whole
array adds mix(w, i) to a sum. Each of the two sums has its own function mix,
and for every i, it maps different words to different numbers. So changing one
word always changes both sums. Swapping two words leaves both sums unchanged
with probability 2^-64. Since the order of addition does not matter, the
fingerprint is the same for all shardings. The sums are computed on the devices,
and only these two numbers per array are sent to the host.

The manifest of a folder lists the length and sha256 of every file. It is
written before the folder is committed (see step_writer.py). If bytes of a file
are changed or lost later, `damage` detects this and names the file.
Files are found by listing the folder, never by following a name in the
manifest, so that a forged manifest cannot lead out of its folder.
"""

from collections.abc import Iterator
import errno
import hashlib
import json
import math
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from meliad_rec.distributed.partition import leaves_by_path

# Multiplier of the index and starting value of each lane; multiplication by an
# odd number is a bijection modulo 2^32.
_LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))


def fingerprints(tree: Any) -> dict[str, str]:
  """Returns {path: fingerprint as 16 hex digits} of every array of a tree.

  Args:
    tree: pytree of arrays; random keys must be `jax.random.key_data`.

  Raises:
    ValueError: a leaf is a `jax.random.key`, is complex, or has 64 bits while
      JAX is limited to 32.
  """
  leaves = leaves_by_path(tree)
  for path, leaf in leaves.items():
    if not _has_words(leaf.dtype):
      raise ValueError(
        f'{path} has dtype {leaf.dtype}, which has no fingerprint. Store'
        ' booleans, integers or floats of at most 32 bits, or'
        ' jax.random.key_data, in the state.'
      )
  # One after another: many programs at once, each with a sum over all devices,
  # can deadlock when the devices share few threads.
  lanes = {path: jax.device_get(_lanes(leaf)) for path, leaf in leaves.items()}
  return {
    path: f'{int(high):08x}{int(low):08x}'
    for path, (high, low) in lanes.items()
  }


def digest(tree: Any) -> str:
  """Returns one sha256, in hex, for all arrays of a tree.

  It is the sha256 of their paths, dtypes, shapes and fingerprints. Trees whose
  paths, dtypes, shapes and values are equal have the same digest.
  """
  leaves = leaves_by_path(tree)
  lines = [
    f'{path} {leaves[path].dtype} {list(leaves[path].shape)} {mark}\n'
    for path, mark in sorted(fingerprints(tree).items())
  ]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _has_words(dtype: Any) -> bool:
  if dtype == jnp.bool_:
    return True
  # Other dtypes are not numbers, or lose bits when they are put on a device.
  real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(
    dtype, jnp.floating
  )
  return real and jax.dtypes.canonicalize_dtype(dtype) == dtype


@jax.jit
def _lanes(x: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the two sums of the fingerprint of an array, as uint32 scalars."""
  words = _words(x)
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis in range(words.ndim):
    # Beyond 2^32 elements, indices repeat; changes are still detected.
    stride = math.prod(words.shape[axis + 1 :]) % 2**32
    iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index += iota * jnp.uint32(stride)
  return tuple(
    jnp.sum(_mix(words ^ _mix(index * jnp.uint32(a) + jnp.uint32(b)))).astype(
      jnp.uint32
    )
    for a, b in _LANES
  )


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of `x` as uint32 words.

  The result has the shape of `x`, with one word for each element. For elements
  of 64 bits, a last axis of two words is added.
  """
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
  word = unsigned[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
  """Maps uint32 numbers one to one (MurmurHash3's finalizer, Appleby 2011)."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


NAME = 'MANIFEST.json'
# orbax writes these two after the manifest; their contents are never read.
_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_CHUNK = 1 << 22


def write(folder: str | os.PathLike) -> None:
  """Writes the manifest of a folder, MANIFEST.json, into the folder.

  It lists all files that the folder and its subfolders hold now.
  """
  folder = epath.Path(folder)
  files = {name: _measure(path) for name, path in sorted(_files(folder))}
  text = json.dumps({'files': files, 'sha256': sha256(files)}, indent=1)
  (folder / NAME).write_text(text)


def damage(folder: str | os.PathLike, part: str = '') -> list[str]:
  """Compares a folder with the manifest that `write` made.

  Args:
    folder: folder with a manifest.
    part: only files whose path relative to the folder begins with this text are
      checked, such as 'meta/'. '' means all files.

  Returns:
    A list of phrases, such as 'meta/metadata was changed', one for each file
    that differs or that the disk cannot read; empty if there is none. If the
    manifest was changed, or if it or a file that orbax writes after it is
    missing, there is only one phrase.

  Raises:
    OSError: a file cannot be read for another reason than an error of the disk.
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
    sealed = manifest['sha256'] == sha256(listed)
    listed = {n: facts for n, facts in listed.items() if n.startswith(part)}
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    sealed = False
  except OSError as error:
    return [_unreadable(NAME, error)]
  if not sealed:
    return [f'{NAME} was changed']
  found = {n: path for n, path in _files(folder) if n.startswith(part)}
  phrases = [f'{name} is missing' for name in listed if name not in found]
  phrases += [f'{name} was added' for name in found if name not in listed]
  for name in sorted(set(found) & set(listed)):
    if not _inside(found[name], folder):
      phrases.append(f'{name} leads out of the folder')
      continue
    try:
      facts = _measure(found[name])
    except OSError as error:
      phrases.append(_unreadable(name, error))
      continue
    if facts != listed[name]:
      given, needed = facts['bytes'], listed[name]['bytes']
      how = 'was changed' if given == needed else f'has {given} of {needed} B'
      phrases.append(f'{name} {how}')
  return phrases


def _unreadable(name: str, error: OSError) -> str:
  """Returns a phrase about a file; raises errors that may be temporary."""
  if error.errno != errno.EIO:
    raise error
  return f'{name} cannot be read ({error.strerror})'


def seal(value: Any) -> str:
  """Returns a JSON value as text that `unseal` can verify."""
  value = json.loads(json.dumps(value))  # Integer keys become strings.
  return json.dumps({'value': value, 'sha256': sha256(value)})


def unseal(text: str) -> Any:
  """Returns the value that was passed to `seal`.

  Integers that were keys of objects are returned as strings, as in JSON.

  Raises:
    ValueError: the text has changed since `seal` returned it.
  """
  try:
    sealed = json.loads(text)
    if sealed['sha256'] == sha256(sealed['value']):
      return sealed['value']
  except (ValueError, KeyError, TypeError, RecursionError):
    pass
  raise ValueError('its content has changed since it was written')


def _files(
  folder: epath.Path, prefix: str = ''
) -> Iterator[tuple[str, epath.Path]]:
  """Yields (name, path) of all files in a folder and its subfolders.

  Leaves out the manifest and the files that orbax writes after it.

  Args:
    folder: path of the folder.
    prefix: text that is put before each name. With '', a name is the path
      relative to `folder`.
  """
  for path in folder.iterdir():
    if path.is_dir() and _inside(path, folder):
      yield from _files(path, f'{prefix}{path.name}/')
    elif prefix or path.name not in (NAME, *_LATER):
      yield prefix + path.name, path


def _inside(path: epath.Path, folder: epath.Path) -> bool:
  """Returns whether a path is inside `folder` after links are followed."""
  # A bucket has no links, and a gs:// path always begins with its folder.
  root = os.path.realpath(folder) + os.sep
  return os.path.realpath(path).startswith(root)


def _measure(path: epath.Path) -> dict[str, Any]:
  hasher, size = hashlib.sha256(), 0
  with path.open('rb') as file:
    while chunk := file.read(_CHUNK):
      hasher.update(chunk)
      size += len(chunk)
  return {'bytes': size, 'sha256': hasher.hexdigest()}


def sha256(value: Any) -> str:
  """Returns the sha256, in hex, of a JSON value such as a table of files."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
