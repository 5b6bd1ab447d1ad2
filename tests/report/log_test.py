"""Messages are plain lines: seen in a process of its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
CODE = """
import logging
from absl import app
from absl import logging as absl_logging
from meliad_rec.report import console

def main(_):
  console.plain()
  console.plain()
  absl_logging.info('Going on from step %d.', 7)
  absl_logging.error('It is damaged.')
  logging.getLogger('matplotlib').info('generated new fontManager')
  logging.getLogger('jax').warning('slow')

app.run(main)
"""


def test_lines_without_stamps_and_only_ours():
  done = subprocess.run(
    [sys.executable, '-c', CODE],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    cwd='/',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.stderr == (
    'Going on from step 7.\nerror: It is damaged.\nwarning: slow\n'
  )
