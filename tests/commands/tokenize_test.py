"""The command that writes a store, and what it says when it cannot."""

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
  place = ['--source=folder', f'--path={tmp_path}', f'--out={tmp_path}/store']
  done = run(*place, '--vocabulary=bytes')
  assert done.returncode == 0, done.stderr
  told = done.stdout.splitlines()
  assert told[0].startswith('train: 1 documents, 12 tokens, 12 bytes, 2 words')
  assert told[1].startswith('test: 1 documents, 3 tokens, 3 bytes, 1 words')
  found = Store(tmp_path / 'store')
  assert found.vocabulary.decode(found.documents('train')[0]) == 'two wörds\r\n'
  # It exists now, and is left alone, before TensorFlow is even imported.
  again = run(*place)
  assert again.returncode == 2
  assert again.stderr.startswith(f'error: The store {tmp_path}/store exists')


@pytest.mark.parametrize(
  'given, told',
  [
    ([], 'What to read? Give --source'),
    (['--source=folder'], 'needs a place to read'),
    (['--source=folder', '--path=/no/such'], 'No files in /no/such'),
    (['--source=code', '--vocabulary=x.model'], 'x.model cannot be read'),
    (['--source=code', '--field=a'], "source 'code' does not read --field"),
    (['--source=foldr', '--path=a'], 'taken for a seqio task as it is none of'),
    (['--source=code', 'folder'], "'folder' is no flag"),
    (['--source=code', '--splits=train,dev'], "no split 'dev'; it has train"),
  ],
)
def test_mistakes_are_one_sentence(tmp_path, given, told):
  done = run(*given, f'--out={tmp_path}/store')
  assert done.returncode == 2
  assert told in done.stderr
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
  assert capsys.readouterr().out == f'{tmp_path}/store is as it was written\n'
  path = tmp_path / 'store' / 'test.tokens'
  path.write_bytes(path.read_bytes()[::-1])
  with pytest.raises(ValueError, match='test.tokens.* changed'):
    command(f'--verify={tmp_path}/store')


def test_verifying_goes_alone_and_writing_needs_a_place(command):
  with pytest.raises(ValueError, match='^--out is of writing, and --verify'):
    command('--verify=a', '--out=b')
  with pytest.raises(ValueError, match='^--splits, --force is of writing'):
    command('--verify=a', '--splits=b', '--force')
  with pytest.raises(ValueError, match='Give --out=STORE'):
    command('--source=code')


def test_help_names_every_flag():
  done = run('--help')
  assert done.returncode == 0
  for flag in ('source', 'path', 'field', 'splits', 'vocabulary', 'verify'):
    assert f'--{flag}:' in done.stdout
