"""Records survive kills, resumes and figures that JSON lacks."""

import json
import math
import os

import pytest

from meliad_rec.report import journal


@pytest.fixture
def path(tmp_path):
  path = tmp_path / journal.NAME
  out = journal.Journal(path)
  for step in 1, 2, 3:
    out.append({'step': step, 'split': 'train', 'loss': step / 2})
  out.append({'step': 3, 'text': {'sample': 'a\nb "c" ü'}})
  out.close()
  return path


def steps(path):
  return [record['step'] for record in journal.read(path)]


def test_what_is_written_is_read(path):
  records = journal.read(path)
  assert records[1] == {'step': 2, 'split': 'train', 'loss': 1.0}
  assert records[3] == {'step': 3, 'text': {'sample': 'a\nb "c" ü'}}
  assert len(path.read_text().splitlines()) == 4
  out = journal.Journal(path)
  out.append({'step': 7})
  assert steps(path)[-1] == 7  # Before it is closed.
  out.close()


def test_later_steps_are_dropped(path):
  for step, dropped, kept in (3, 0, [1, 2, 3, 3]), (2, 2, [1, 2]), (0, 2, []):
    assert journal.truncate(path, step) == dropped
    assert steps(path) == kept
  # No journal has nothing to drop.
  assert journal.truncate(path.parent / 'none.jsonl', 5) == 0
  names = sorted(file.name for file in path.parent.iterdir())
  assert names == [journal.NAME, journal.OLD]


def test_non_finite_figures_are_valid_json(path):
  out = journal.Journal(path)
  values = {'a': math.nan, 'b': math.inf, 'c': -math.inf}
  out.append({'step': 4} | values)
  out.close()
  journal.truncate(path, 4)

  last = path.read_text().splitlines()[-1]
  strict = json.loads(last, parse_constant=pytest.fail)
  assert strict == {'step': 4, 'a': 'NaN', 'b': 'Infinity', 'c': '-Infinity'}
  read = [str(journal.read(path)[-1][name]) for name in 'abc']
  assert read == ['nan', 'inf', '-inf']


def test_a_torn_line_is_left_out_and_then_removed(path):
  with path.open('a') as file:
    file.write('{"step": 4, "lo')
  assert steps(path) == [1, 2, 3, 3]
  assert journal.truncate(path, 2) == 2
  out = journal.Journal(path)
  out.append({'step': 3})
  out.close()
  assert steps(path) == [1, 2, 3]


def test_a_journal_without_later_steps_is_left_as_it_is(path):
  os.utime(path, (5, 5))
  assert journal.truncate(path, 3) == 0
  assert path.stat().st_mtime == 5


def test_a_broken_line_is_named(path):
  whole = path.read_text()
  for line in 'not json', '[1]', '{"loss": 1}':
    path.write_text(f'{whole}{line}\n')
    with pytest.raises(ValueError, match=r'Line 5 of .*metrics\.jsonl'):
      journal.read(path)
