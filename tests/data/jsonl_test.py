"""Lines of JSON as documents, in a file a split or one of all."""

import json

import pytest

from meliad_rec.data.jsonl import Jsonl


def write(path, *lines):
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def test_each_line_is_a_document(tmp_path):
  write(tmp_path / 'train.jsonl', {'text': 'a\nb é'}, {'text': ''})
  write(tmp_path / 'test.jsonl', {'text': 'c', 'more': 1})
  source = Jsonl(str(tmp_path))
  assert source.splits == ('train', 'test')
  assert list(source.read('train')) == [
    ('train.jsonl:1', 'a\nb é'),
    ('train.jsonl:2', ''),
  ]


def test_a_pattern_and_a_field_are_followed(tmp_path):
  write(tmp_path / 'x-train-2.jsonl', {'body': 'text'})
  source = Jsonl(f'{tmp_path}/x-{{split}}-2.jsonl', field='body')
  assert source.splits == ('train',)
  assert [text for _, text in source.read('train')] == ['text']


def test_the_lines_of_a_single_file_are_split_by_hash(tmp_path):
  path = tmp_path / 'docs.jsonl'
  write(path, *({'text': f'text {i}'} for i in range(60)))
  source = Jsonl(str(path))
  assert source.description == 'jsonl: docs.jsonl, field text'
  assert source.splits == ('train', 'validation', 'test')
  parts = [list(source.read(split)) for split in source.splits]
  assert all(parts)
  found = sum(parts, [])
  assert len(set(found)) == 60
  for name, text in found:
    assert name == f'docs.jsonl:{int(text[5:]) + 1}'


def test_a_single_file_of_two_lines_is_too_few(tmp_path):
  write(tmp_path / 'docs.jsonl', {'text': 'a'}, {'text': 'b'})
  with pytest.raises(ValueError, match='2 documents, too few .* train.jsonl'):
    _ = Jsonl(str(tmp_path / 'docs.jsonl')).splits


@pytest.mark.parametrize(
  'line', ['{', '[]', '7', '{"txt": "a"}', '{"text": 1}', '{"text": "\\ud800"}']
)
def test_a_wrong_line_is_told_by_number(tmp_path, line):
  (tmp_path / 'train.jsonl').write_text(f'{{"text": "good"}}\n{line}\n')
  with pytest.raises(ValueError, match=r'train.jsonl:2 is not .* --field'):
    list(Jsonl(str(tmp_path)).read('train'))


@pytest.mark.parametrize('name', ['docs', 'train'])
def test_blank_lines_are_no_documents(tmp_path, name):
  path = tmp_path / f'{name}.jsonl'
  write(path, *({'text': f'text {i}'} for i in range(9)))
  path.write_text(path.read_text().replace('\n', '\n \n\n', 2) + '\r\n')
  source = Jsonl(str(path if name == 'docs' else tmp_path))
  found = sum((list(source.read(split)) for split in source.splits), [])
  assert sorted(int(text[5:]) for _, text in found) == [*range(9)]
  numbers = [int(name.partition(':')[2]) for name, _ in found]
  assert sorted(numbers) == [1, 4, 7, 8, 9, 10, 11, 12, 13]


def test_a_file_that_cannot_be_read_is_told(tmp_path, monkeypatch):
  write(tmp_path / 'train.jsonl', {'text': 'a'})

  def refuse(*_):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr('pathlib.Path.open', refuse)
  told = r'train.jsonl cannot be read \(Permission denied\)'
  with pytest.raises(ValueError, match=told):
    list(Jsonl(str(tmp_path)).read('train'))


def test_no_files_are_told(tmp_path):
  with pytest.raises(ValueError, match='No file .*{split}.jsonl'):
    _ = Jsonl(str(tmp_path)).splits
