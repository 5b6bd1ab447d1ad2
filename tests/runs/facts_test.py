"""run.json of someone else: wrong or enormous values end in one sentence."""

import json

import pytest

from meliad_rec import cli
from meliad_rec.runs import folder

FACTS = {
  'vocabulary': 'bytes',
  'vocabulary_size': 259,
  'batch': 3,
  'segment': 12,
  'averages': False,
  'best_metric': 'bits_per_byte',
}


@pytest.mark.parametrize(
  'changed',
  [
    {'segment': 0},
    {'segment': 10**13},
    {'batch': 10**13},
    {'vocabulary_size': -1},
    {'started_in': 7},
    {'published': [1]},
  ],
)
def test_sizes_and_types_are_checked(tmp_path, changed):
  (tmp_path / 'config.gin').write_text('')
  path = tmp_path / 'run.json'
  path.write_text(json.dumps(FACTS))
  _, facts, _ = folder.read(tmp_path)  # As version 0.1.0 wrote it.
  added = {'parameters': 0, 'labels': False, 'started_in': ''}
  assert facts == FACTS | added | {'published': {}, 'translation': {}}
  path.write_text(json.dumps(FACTS | changed))
  with pytest.raises(ValueError, match='run.json is damaged'):
    folder.read(tmp_path)
  path.write_text('{"segment": ' + '[' * 10**5)
  with pytest.raises(ValueError, match='run.json is damaged'):
    folder.read(tmp_path)


def test_a_lack_of_memory_is_one_sentence(capsys):
  def command(_):
    raise MemoryError('Unable to allocate 73 TiB')

  assert cli.guarded(command, []) == 2
  told = capsys.readouterr().err
  assert told.startswith('error: ') and 'allocate 73 TiB' in told
  assert told.count('\n') == 1
