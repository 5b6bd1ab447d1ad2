"""Which source the flags of a command name."""

import pytest

from meliad_rec.data.code import Code
from meliad_rec.data.folder import Folder
from meliad_rec.data.jsonl import Jsonl
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Registered
from meliad_rec.data.sources import source


def test_each_kind_is_its_class():
  assert source('code') == Code()
  assert source('folder', 'x', split_file='y') == Folder('x', 'y')
  assert source('jsonl', 'x', field='body') == Jsonl('x', 'body')
  assert source('pg19', 'x') == Pg19('x')
  assert source('my_task', module='mine') == Registered('my_task', 'mine')


@pytest.mark.parametrize('kind', ['folder', 'jsonl'])
def test_files_need_a_place(kind):
  with pytest.raises(ValueError, match='give --path'):
    source(kind)


def test_flags_that_the_source_does_not_read_are_refused():
  with pytest.raises(ValueError, match="'code' .*--path"):
    source('code', path='x')
  with pytest.raises(ValueError, match="'folder' .*--field"):
    source('folder', path='x', field='body')
  with pytest.raises(ValueError, match="'jsonl' .*--split_file, --module"):
    source('jsonl', path='x', split_file='y', module='z')
