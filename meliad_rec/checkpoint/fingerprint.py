"""Fingerprints of arrays: 64 bits each, the same however they are sharded.

Each word w at global place i adds mix(w, i), a bijection of w for every i, to
a sum modulo 2^32, in two lanes. So a change of any one element always changes
both lanes, two swapped elements escape with probability 2^-64, and since
integer addition has no order, devices, hosts and layouts do not matter. The
device does the work where the array lies; two numbers travel to the host.
"""

import hashlib
import math

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
