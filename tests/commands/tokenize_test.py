"""The tokenize command: stores written and verified, errors reported."""

import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.commands import tokenize
from meliad_rec.data.store import Store
from tests import tiny_run


def run(*arguments):
  return subprocess.run(
    [sys.executable, '-m', 'meliad_rec', 'tokenize', *arguments],
    capture_output=True,
    text=True,
  )


def test_a_folder_becomes_a_store(tmp_path):
  for split, text in (('train', 'two wörds\r\n'), ('test', 'end')):
    (tmp_path / split).mkdir()
    (tmp_path / split / 'a.txt').write_bytes(text.encode())
  args = ['--source=folder', f'--path={tmp_path}', f'--out={tmp_path}/store']
  done = run(*args, '--vocabulary=bytes')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].startswith('train: 1 documents, 12 tokens, 12 bytes, 2 words')
  assert lines[1].startswith('test: 1 documents, 3 tokens, 3 bytes, 1 words')
  found = Store(tmp_path / 'store')
  assert found.vocabulary.decode(found.documents('train')[0]) == 'two wörds\r\n'
  # An existing store is kept, even before TensorFlow is imported.
  again = run(*args)
  assert again.returncode == 2
  assert '--force' in again.stderr


@pytest.mark.parametrize(
  'args, message',
  [
    ([], '--source'),
    (['--source=folder'], '--path'),
    (['--source=folder', '--path=/no/such'], '/no/such'),
    (['--source=code', '--vocabulary=x.model'], 'x.model'),
    (['--source=code', 'folder'], "'folder'"),
    (['--source=code', '--splits=train,dev'], "'dev'; it has train"),
  ],
)
def test_errors_are_one_line(tmp_path, args, message):
  done = run(*args, f'--out={tmp_path}/store')
  assert done.returncode == 2
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert not list(tmp_path.iterdir())


@pytest.fixture
def command():
  if 'verify' not in flags.FLAGS:
    tokenize.define_flags()

  def main(*arguments):
    with flagsaver.flagsaver():
      flags.FLAGS(['tokenize', *arguments])
      tokenize.main(['tokenize'])

  return main


def test_a_store_is_verified(tmp_path, command, capsys):
  tiny_run.write_store(tmp_path / 'store')
  command(f'--verify={tmp_path}/store')
  assert capsys.readouterr().out == f'{tmp_path}/store is unchanged\n'
  path = tmp_path / 'store' / 'test.tokens'
  path.write_bytes(path.read_bytes()[::-1])
  with pytest.raises(ValueError, match='test.tokens.* changed'):
    command(f'--verify={tmp_path}/store')


def test_verify_excludes_other_flags_and_writing_needs_out(command):
  with pytest.raises(ValueError, match='--splits, --out, --force .* --verify'):
    command('--verify=a', '--out=b', '--splits=b', '--force')
  with pytest.raises(ValueError, match='--out'):
    command('--source=code')


def test_help_names_every_flag():
  done = run('--help')
  assert done.returncode == 0
  for flag in ('source', 'path', 'field', 'splits', 'vocabulary', 'verify'):
    assert f'--{flag}:' in done.stdout
