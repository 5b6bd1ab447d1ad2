"""Files as documents: byte for byte, each in the split it was given."""

import pytest

from meliad_rec.data.folder import Folder

ODD = ' first\r\nsecond\n\n\tthird\rž\ufeff'


def put(folder, *names):
  for name in names:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(f'text of {name}'.encode())


def names(source, split):
  return [name for name, _ in source.read(split)]


def test_every_byte_is_kept(tmp_path):
  put(tmp_path, 'train/b.txt')
  (tmp_path / 'train' / 'a.txt').write_bytes(ODD.encode())
  assert list(Folder(str(tmp_path)).read('train')) == [
    ('train/a.txt', ODD),
    ('train/b.txt', 'text of train/b.txt'),
  ]


def test_folders_are_splits(tmp_path, caplog):
  caplog.set_level('INFO')
  put(tmp_path, 'train/a.txt', 'train/sub/b', 'test/c', 'README', '.git/d')
  source = Folder(str(tmp_path))
  assert source.splits == ('train', 'test')
  assert names(source, 'train') == ['train/a.txt', 'train/sub/b']
  assert names(source, 'test') == ['test/c']
  assert 'left out 1 files' in caplog.text


def test_a_pattern_chooses_files(tmp_path):
  put(tmp_path, 'train/a.txt', 'train/b.md', 'train/sub/c.txt', 'test/d.txt')
  source = Folder(f'{tmp_path}/**/*.txt')
  assert names(source, 'train') == ['train/a.txt', 'train/sub/c.txt']
  assert names(source, 'test') == ['test/d.txt']


@pytest.mark.parametrize('name', ['old [1]', 'what?', 'a*b'])
def test_a_folder_that_is_there_is_no_pattern(tmp_path, name):
  put(tmp_path / name, 'train/a.txt', 'train/b.md')
  put(tmp_path, 'a-b/train/c.txt')
  source = Folder(str(tmp_path / name))
  assert names(source, 'train') == ['train/a.txt', 'train/b.md']
  source = Folder(f'{tmp_path / name}/**/*.md')
  assert names(source, 'train') == ['train/b.md']


def test_a_split_file_goes_before_folders(tmp_path, caplog):
  caplog.set_level('INFO')
  put(tmp_path, 'train/a.txt', 'train/b.txt', 'test/c.txt', 'd.txt', 'e.txt')
  listed = tmp_path / 'split.tsv'
  listed.write_text(
    'id\tsplit\tnote\ntrain/a.txt\tvalidation\tx\nc\ttrain\nd.txt\tdrop\n\n'
  )
  source = Folder(str(tmp_path), str(listed))
  assert source.splits == ('train', 'validation')
  assert names(source, 'train') == ['test/c.txt']
  assert names(source, 'validation') == ['train/a.txt']
  assert '6 files, 2 of them listed' in caplog.text


@pytest.mark.parametrize(
  'line, told',
  [
    ('a.txt\ttrian', "tsv:2 gives 'a.txt' the split 'trian'"),
    ('z.txt\ttrain', "tsv:2 names 'z.txt', which fits 0"),
    ('b\ttrain', "tsv:2 names 'b', which fits 2"),
    ('a\ttrain', "tsv:2 lists 'a.txt' again; keep one"),
  ],
)
def test_a_wrong_split_file_is_told_by_line(tmp_path, line, told):
  put(tmp_path, 'a.txt', 'x/b.txt', 'y/b.txt')
  (tmp_path / 'split.tsv').write_text(f'a.txt\ttest\n{line}\n')
  with pytest.raises(ValueError, match=told):
    _ = Folder(str(tmp_path), str(tmp_path / 'split.tsv')).splits


@pytest.mark.parametrize('name', ['a.txt', 'a'])
def test_a_first_line_that_names_a_file_is_no_heading(tmp_path, name):
  put(tmp_path, 'a.txt', 'b.txt')
  (tmp_path / 'split.tsv').write_text(f'{name}\ttrian\nb.txt\ttest\n')
  with pytest.raises(ValueError, match=f"tsv:1 gives '{name}' the split"):
    _ = Folder(str(tmp_path), str(tmp_path / 'split.tsv')).splits


def test_without_splits_names_decide(tmp_path):
  put(tmp_path, *(f'{i}.txt' for i in range(60)))
  source = Folder(str(tmp_path))
  parts = {split: names(source, split) for split in source.splits}
  assert {len(part) for part in parts.values()} == {50, 7, 3}
  assert sorted(sum(parts.values(), [])) == sorted(
    f'{i}.txt' for i in range(60)
  )
  assert parts == {s: names(Folder(str(tmp_path)), s) for s in parts}


def test_too_few_files_to_split_are_told(tmp_path):
  put(tmp_path, 'a.txt', 'b.txt')
  with pytest.raises(ValueError, match='2 documents, too few .* --split_file'):
    _ = Folder(str(tmp_path)).splits


def test_no_files_are_told(tmp_path):
  with pytest.raises(ValueError, match='No files in'):
    _ = Folder(str(tmp_path)).splits


def test_what_is_not_utf8_is_told_by_name(tmp_path):
  put(tmp_path, 'train/a.txt')
  (tmp_path / 'train' / 'b.txt').write_bytes(b'caf\xe9')
  with pytest.raises(ValueError, match=r'b.txt is not UTF-8 \(byte 3\)'):
    list(Folder(str(tmp_path)).read('train'))
