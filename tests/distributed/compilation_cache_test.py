"""The folder of compiled programs."""

import os
import pathlib
import subprocess
import sys

from tests import tiny_run

CODE = """
from absl import logging
from meliad_rec.report import console
from meliad_rec.distributed import compilation_cache
console.plain()
logging.set_verbosity(logging.INFO)
compilation_cache.enable()
import jax
print(jax.config.jax_compilation_cache_dir)
"""


def folder(**environment):
  """Returns the folder that a process uses, and its messages."""
  clean = {k: v for k, v in os.environ.items() if not k.startswith('JAX_COMP')}
  done = subprocess.run(
    [sys.executable, '-c', CODE],
    env=clean | {'PYTHONPATH': str(tiny_run.ROOT)} | environment,
    cwd='/',
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.strip(), done.stderr


def test_the_users_own_folder(tmp_path):
  found, messages = folder(XDG_CACHE_HOME=str(tmp_path))
  path = pathlib.Path(found)
  assert path.parent == tmp_path / 'meliad_rec'
  assert path.stat().st_mode & 0o777 == 0o700
  assert messages == ''


def test_the_variable_wins(tmp_path):
  given = str(tmp_path / 'mine')
  found, _ = folder(
    XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=given
  )
  assert found == given
  assert not (tmp_path / 'meliad_rec').exists()


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path):
  (tmp_path / 'file').write_text('')
  found, messages = folder(XDG_CACHE_HOME=str(tmp_path / 'file'))
  assert found == 'None'
  assert 'cannot be used' in messages
