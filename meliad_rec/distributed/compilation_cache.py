"""Compiled programs kept on disk, so that a run that goes on starts quickly."""

import hashlib
import os
from pathlib import Path

from absl import logging
import jax


def enable() -> None:
  """Keeps what takes a second or more to compile in the user's cache folder.

  What the variables JAX_COMPILATION_CACHE_DIR (another folder) and
  JAX_ENABLE_COMPILATION_CACHE=0 (none) say, stays.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  folder = Path(home) / 'meliad_rec' / f'jax-{_processor()}'
  # What lies there is run: nobody else may write it.
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
  except OSError:
    logging.info('%s cannot be used: nothing compiled is kept.', folder)
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))


def _processor() -> str:
  """A mark of what this processor can do.

  Homes are shared between machines, and code made for one may not run on
  another.
  """
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return 'any'
  told = {line for line in lines if line.startswith(('flags', 'Features'))}
  return hashlib.sha256('\n'.join(sorted(told)).encode()).hexdigest()[:12]
