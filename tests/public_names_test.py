"""The public names of the package, which are imported when they are used."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

import meliad_rec
from meliad_rec.layers import gates
from meliad_rec.runs.trained_run import load_run
from tests.libtpu import needs_libtpu

ROOT = Path(__file__).parents[1]


def test_every_public_name_can_be_imported():
  assert set(meliad_rec.__all__) <= set(dir(meliad_rec))
  for name in meliad_rec.__all__:
    assert getattr(meliad_rec, name) is not None
  assert meliad_rec.load_run is load_run
  assert meliad_rec.gates is gates
  with pytest.raises(AttributeError, match='load_ran'):
    _ = meliad_rec.load_ran


def test_the_package_is_imported_at_once_and_without_jax():
  code = """
import sys
import meliad_rec
dir(meliad_rec)
assert not {'jax', 'flax', 'numpy', 'gin'} & {*sys.modules}
from meliad_rec import gates
assert gates.__name__ == 'meliad_rec.layers.gates'
"""
  subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)


@needs_libtpu
def test_libtpu_does_not_report_that_there_is_no_tpu():
  code = 'import meliad_rec; meliad_rec.schedules.rsqrt(total_steps=4)(1)'
  known = {k: v for k, v in os.environ.items() if 'TPU' not in k}
  known.pop('JAX_PLATFORMS', None)
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    env=known,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')
