"""What README.md shows is true: its architecture trains, its commands exist."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from meliad_rec import cli
from meliad_rec.config import files
from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / 'README.md').read_text(encoding='utf-8')


def block(start):
  """The fenced block that begins so."""
  blocks = re.findall(r'```\w*\n(.*?)```', TEXT, re.DOTALL)
  [found] = [one for one in blocks if one.startswith(start)]
  return found


def test_the_architecture_of_the_readme_trains(tmp_path):
  (tmp_path / 'leaky.py').write_text(block('"""A layer'))
  (tmp_path / 'arch').mkdir()
  (tmp_path / 'arch' / 'leaky.gin').write_text(block('from __gin__'))
  ids = Bytes().encode('it was the best of times, ' * 9)
  splits = {
    split: [Document(split, ids, len(ids), 6 * 9)]
    for split in ('train', 'validation')
  }
  store.write(tmp_path / 'store', splits, Bytes(), 'test')
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'meliad_rec.main', '--workdir=run'),
      *('--gin_file=arch/leaky.gin', '--gin_file=size/test'),
      *('--gin_file=task/store', '--gin_param=STORE = "store"'),
      *('--gin_param=STEPS = 2', '--gin_param=SAMPLE = 5'),
    ],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert 'Finished step 2' in done.stdout


def test_files_and_folders_of_the_readme_are_there():
  for path in re.findall(r'`((?:launch|tests|colab|gin)/[\w/.]*)`', TEXT):
    assert (ROOT / path).exists(), path
  for path in re.findall(r'`(archs/[\w.]*|[\w/]+\.py)`', TEXT):
    places = (ROOT / path, ROOT / 'meliad_rec' / path)
    assert path == 'leaky.py' or any(place.exists() for place in places), path


def test_gin_files_of_the_readme_are_there():
  named = r'\b((?:arch|size|task|options|experiments)/[a-z]\w+)(?!\w|\.gin|\*)'
  for name in set(re.findall(named, TEXT)):
    assert (files.root() / f'{name}.gin').is_file(), name


@pytest.mark.parametrize(
  'command', sorted(set(re.findall(r'meliad-rec (\w+)', TEXT)))
)
def test_commands_and_flags_of_the_readme_exist(command):
  """Flags are looked up in what the command's own file and helpers define."""
  assert command in cli.COMMANDS
  known = '\n'.join(
    path.read_text() for path in sorted((ROOT / 'meliad_rec').rglob('*.py'))
  )
  lines = TEXT.replace('\\\n', ' ').splitlines()
  for line in lines:
    if f'meliad-rec {command} ' in line:
      for flag in re.findall(r'--(\w+)', line):
        assert re.search(rf"DEFINE_\w+\(\s*'{flag}'", known), flag
