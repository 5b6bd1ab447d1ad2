"""Keeps compiled programs on disk, so that a resumed run starts quickly."""

import hashlib
import os
from pathlib import Path

from absl import logging
import jax

_MIN_SECONDS = 0.02


def enable() -> None:
  """Lets JAX cache compiled programs that take 0.02 seconds or more to compile.

  The programs are kept in ~/.cache/meliad_rec/jax-P, where P is the result of
  `_processor`. If this folder cannot be written, nothing is cached. Three
  environment variables change this. XDG_CACHE_HOME replaces ~/.cache.
  JAX_COMPILATION_CACHE_DIR replaces the whole path; JAX's own minimum of 1
  second then applies. JAX_ENABLE_COMPILATION_CACHE=0 disables the cache.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  folder = Path(home) / 'meliad_rec' / f'jax-{_processor()}'
  # Cached programs are executed, so no other user may write to the folder.
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
  except OSError:
    logging.info(
      'Compiled programs are not cached, because %s cannot be written. Set'
      ' JAX_COMPILATION_CACHE_DIR to another folder.',
      folder,
    )
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # JAX's default, 1 s, leaves out the dozens of small programs of a start.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_SECONDS)


def _processor() -> str:
  """Returns a hash of the instruction sets that the processor supports.

  Machines may share a home folder, and code compiled for one processor may not
  run on another. Where the instruction sets are not known, returns 'any'.
  """
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return 'any'
  features = {line for line in lines if line.startswith(('flags', 'Features'))}
  return hashlib.sha256('\n'.join(sorted(features)).encode()).hexdigest()[:12]
