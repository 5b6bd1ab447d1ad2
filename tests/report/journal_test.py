"""Records survive kills, resumes and figures that JSON lacks."""

import json
import math

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


def test_each_record_is_on_disk_at_once(tmp_path):
  out = journal.Journal(tmp_path / 'x.jsonl')
  out.append({'step': 7})
  assert steps(tmp_path / 'x.jsonl') == [7]
  out.close()


def test_non_finite_figures_are_valid_json(path):
  out = journal.Journal(path)
  values = {'a': math.nan, 'b': math.inf, 'c': -math.inf}
  out.append({'step': 4} | values)
  out.close()

  def refuse(constant):
    raise AssertionError(constant)

  last = path.read_text().splitlines()[-1]
  strict = json.loads(last, parse_constant=refuse)
  assert strict == {'step': 4, 'a': 'NaN', 'b': 'Infinity', 'c': '-Infinity'}
  read = journal.read(path)[-1]
  assert math.isnan(read['a'])
  assert (read['b'], read['c']) == (math.inf, -math.inf)


@pytest.mark.parametrize(
  'step, kept', [(2, [1, 2]), (3, [1, 2, 3, 3]), (9, [1, 2, 3, 3]), (0, [])]
)
def test_later_steps_are_dropped(path, step, kept):
  assert journal.truncate(path, step) == 4 - len(kept)
  assert steps(path) == kept
  assert [file.name for file in path.parent.iterdir()] == [journal.NAME]


def test_a_torn_line_is_left_out_and_then_removed(path):
  with path.open('a') as file:
    file.write('{"step": 4, "lo')
  assert steps(path) == [1, 2, 3, 3]
  assert journal.truncate(path, 2) == 2
  out = journal.Journal(path)
  out.append({'step': 3})
  out.close()
  assert steps(path) == [1, 2, 3]


def test_truncating_keeps_non_finite_figures(path):
  out = journal.Journal(path)
  out.append({'step': 3, 'loss': math.nan})
  out.close()
  journal.truncate(path, 3)
  assert math.isnan(journal.read(path)[-1]['loss'])


def test_no_journal_has_nothing_to_drop(tmp_path):
  assert journal.truncate(tmp_path / 'none.jsonl', 5) == 0
  assert not (tmp_path / 'none.jsonl').exists()


@pytest.mark.parametrize('line', ['not json', '[1]', '{"loss": 1}'])
def test_a_broken_line_is_named(path, line):
  path.write_text(path.read_text() + line + '\n')
  with pytest.raises(ValueError, match=r'Line 5 of .*metrics\.jsonl'):
    journal.read(path)
