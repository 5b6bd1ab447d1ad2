"""Pairs of lines and of JSON fields: which files are which split."""

import json

import pytest

from meliad_rec.data.pairs import JsonPairs
from meliad_rec.data.pairs import Lines
from meliad_rec.data.pairs import Pairs
from meliad_rec.data.sources import source
from meliad_rec.data.vocabulary import Bytes


def write(folder, **files):
  for name, lines in files.items():
    path = folder / name.replace('_', '.')
    path.write_text(''.join(f'{line}\n' for line in lines))


def lines(folder):
  return Lines(f'{folder}/{{split}}.en', f'{folder}/{{split}}.de')


def test_a_split_has_both_files(tmp_path):
  write(tmp_path, train_en=['a', 'b '], train_de=['c', 'd'])
  write(tmp_path, dev_en=['e'], dev_de=['f'], test2_en=['g'], test2_de=['h'])
  write(tmp_path, notes_en=['no target'])
  pairs = lines(tmp_path)
  assert pairs.splits == ('train', 'validation', 'test2')
  assert [*pairs.pairs('train')] == [
    ('train:1', 'a', 'c'),
    ('train:2', 'b', 'd'),
  ]
  assert [*pairs.pairs('validation')] == [('validation:1', 'e', 'f')]


def test_splits_may_be_folders(tmp_path):
  (tmp_path / 'train').mkdir()
  write(tmp_path / 'train', x_en=['a'], x_de=['b'])
  pairs = Lines(f'{tmp_path}/{{split}}/x.en', f'{tmp_path}/{{split}}/x.de')
  assert [*pairs.read('train')] == [('train:1', 'a\nb\n')]


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    ({}, 'There is no file .*TARGET'),
    (
      {'train_en': ['a']},
      r'no file \S*train.de, but another of the split train',
    ),
    (
      {
        f'{name}_{kind}': ['a']
        for name in ('dev', 'valid')
        for kind in ('en', 'de')
      },
      'Files of valid and dev would both be the split validation',
    ),
    ({'train_en': ['a', 'b'], 'train_de': ['c']}, 'has 2 lines, but .* has 1'),
  ],
)
def test_files_that_do_not_fit(tmp_path, files, message):
  write(tmp_path, **files)
  pairs = lines(tmp_path)
  with pytest.raises(ValueError, match=message):
    [*pairs.pairs(pairs.splits[0])]


def test_fields_of_json_objects(tmp_path):
  several = {'text': ['one.', 'two.'], 'short': ['1', '2'], 'more': 3}
  write(tmp_path, train_jsonl=[json.dumps(several)])
  write(tmp_path, test2_jsonl=['{"text": "a\\nb", "short": "c"}'])
  pairs = JsonPairs(f'{tmp_path}/{{split}}.jsonl', 'text', 'short')
  assert pairs.splits == ('train', 'test2')
  assert [*pairs.pairs('train')] == [('train:1', 'one. two.', '1')]
  assert [*pairs.pairs('test2')] == [('test2:1', 'a b', 'c')]


def test_pairs_of_train_that_are_left_out(tmp_path):
  """Lengths of sources and targets, of which a newline is one token more."""
  lengths = [(4, 4), (4, 6), (4, 7), (7, 4), (8, 7), (7, 8), (1, 1)]
  en, de = (['x' * pair[i] for pair in lengths] for i in (0, 1))
  write(tmp_path, train_en=en, train_de=de, test_en=en, test_de=de)

  def kept(split, *limits, **more):
    found = Pairs(lines(tmp_path), Bytes(), *limits, **more).documents(split)
    return [tuple(pair - 1) for pair in found.sequence_lengths]

  assert kept('train') == kept('test', 8, max_ratio=1.5) == lengths
  assert kept('train', None, None, 4) == lengths
  assert kept('train', 8) == [*lengths[:4], (1, 1)]
  assert kept('train', 8, None, 9) == [*lengths[:5], (1, 1)]
  assert kept('train', max_ratio=1.5) == [*lengths[:2], *lengths[4:]]
  with pytest.raises(ValueError, match='MAX_RATIO'):
    Pairs(lines(tmp_path), Bytes(), max_ratio=0.5)


@pytest.mark.parametrize(
  'text', ['{"x": 1}', '3', '[4]', 'null', r'"\ud83d"', '[' * 100_000]
)
def test_fields_that_are_no_text(tmp_path, text):
  write(tmp_path, train_jsonl=[f'{{"text": {text}, "short": "a"}}'])
  pairs = JsonPairs(f'{tmp_path}/{{split}}.jsonl', 'text', 'short')
  with pytest.raises(ValueError, match="train.jsonl:1 is not .* in 'text'"):
    [*pairs.pairs('train')]


def test_a_path_of_json_objects_names_the_split(tmp_path):
  with pytest.raises(ValueError, match='JSONL'):
    JsonPairs(f'{tmp_path}/all.jsonl', 'text', 'short')


def test_flags_name_files_of_lines_or_fields_of_json(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"a": ["b", "c"], "d": "e"}\n')
  path = f'{tmp_path}/{{split}}.jsonl'
  found = source('pairs', path, field='a', target='d')
  assert [*found.read('train')] == [('train:1', 'b c\ne\n')]
  assert source('pairs', 'x.{split}', target='y.{split}') == Lines(
    'x.{split}', 'y.{split}'
  )
  with pytest.raises(ValueError, match='Set --target, such as'):
    source('pairs', path, field='a')


def test_only_targets_are_counted(tmp_path):
  write(tmp_path, train_en=['ab cd', 'e'], train_de=['x', 'yz w'])
  found = Pairs(lines(tmp_path), Bytes()).documents('train')
  assert found.bytes_.tolist() == [2, 5]
  assert found.words.tolist() == [1, 2]
  assert found.tokens_read == 7
  assert found.head(tokens=2, vocabulary=Bytes()).bytes_.tolist() == [2, 2]
