"""What reading prints: one sentence for a mistake, and no library's log."""

import subprocess
import sys

import pytest

from meliad_rec.data.sources import Registered
from meliad_rec.data.text import Text
from meliad_rec.data.vocabulary import SentencePiece
from tests import pieces
from tests import tiny_run

CODE = """
import sys
from meliad_rec import cli
try:
  cli.main()
finally:
  assert 'tensorflow' not in sys.modules
"""


def test_a_mistake_in_the_data_is_one_line(tmp_path):
  for split in 'train', 'validation':
    (tmp_path / split).mkdir()
    (tmp_path / split / 'a.txt').write_text('text')
  (tmp_path / 'train' / 'b.txt').write_bytes('é'.encode('latin-1'))
  given = [f'--path={tmp_path}', f'--out={tmp_path}/store']
  done = subprocess.run(
    [sys.executable, '-c', CODE, 'tokenize', '--source=folder', *given],
    env=tiny_run.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stdout == ''
  assert done.stderr.startswith(f'error: {tmp_path}/train/b.txt is not UTF-8')
  assert done.stderr.count('\n') == 1


def test_the_log_of_another_sentencepiece_is_hidden(tmp_path, capfd):
  seqio = pytest.importorskip('seqio')
  import tensorflow as tf

  path = tmp_path / 'words.model'
  settings = {'normalization_rule_name': 'identity', **pieces.IDS}
  path.write_bytes(pieces.train(['some text'] * 9, 270, **settings))
  lines = tf.data.Dataset.from_tensor_slices({'targets': ['some', 'text']})
  seqio.TaskRegistry.remove('quiet')
  seqio.TaskRegistry.add(
    'quiet',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files: lines, splits=['train']
    ),
    preprocessors=[seqio.preprocessors.tokenize],
    output_features={
      'targets': seqio.Feature(
        seqio.SentencePieceVocabulary(str(path)), add_eos=False
      )
    },
  )
  capfd.readouterr()
  data = Text(Registered('quiet'), SentencePiece(path))
  assert len(data.documents('train')) == 2
  assert capfd.readouterr() == ('', '')
