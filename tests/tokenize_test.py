"""The command that writes a store, and what it says when it cannot."""

import subprocess
import sys

import pytest

from meliad_rec.data.store import Store


def run(*flags):
  return subprocess.run(
    [sys.executable, '-m', 'meliad_rec.tokenize', *flags],
    capture_output=True,
    text=True,
  )


def test_a_folder_becomes_a_store(tmp_path):
  for split, text in (('train', 'two wörds\r\n'), ('test', 'end')):
    (tmp_path / split).mkdir()
    (tmp_path / split / 'a.txt').write_bytes(text.encode())
  flags = ['--source=folder', f'--path={tmp_path}', f'--out={tmp_path}/store']
  done = run(*flags, '--vocabulary=bytes')
  assert done.returncode == 0, done.stderr
  told = done.stdout.splitlines()
  assert told[0].startswith('train: 1 documents, 12 tokens, 12 bytes, 2 words')
  assert told[1].startswith('test: 1 documents, 3 tokens, 3 bytes, 1 words')
  found = Store(tmp_path / 'store')
  assert found.vocabulary.decode(found.documents('train')[0]) == 'two wörds\r\n'
  # It exists now, and is left alone, before TensorFlow is even imported.
  again = run(*flags)
  assert again.returncode == 2
  assert again.stderr.startswith(f'error: The store {tmp_path}/store exists')


@pytest.mark.parametrize(
  'flags, told',
  [
    (['--source=folder'], 'needs a place to read'),
    (['--source=folder', '--path=/no/such'], 'No files in /no/such'),
    (['--source=code', '--vocabulary=x.model'], 'x.model cannot be read'),
    (['--source=code', '--field=a'], 'does not read --field'),
    (['--source=code', 'folder'], "'folder' is no flag"),
  ],
)
def test_mistakes_are_one_sentence(tmp_path, flags, told):
  done = run(*flags, f'--out={tmp_path}/store')
  assert done.returncode == 2
  assert told in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert not list(tmp_path.iterdir())


def test_help_names_every_flag():
  done = run('--help')
  assert done.returncode == 0
  for flag in ('source', 'path', 'field', 'splits', 'vocabulary', 'out'):
    assert f'--{flag}:' in done.stdout
