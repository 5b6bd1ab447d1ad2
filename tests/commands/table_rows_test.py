"""Rows of tables: their gin files, scales, and the settings of a sweep."""

import pytest

from meliad_rec.commands import table_rows


def test_rows_are_the_files_of_a_table_or_folder(tmp_path):
  shipped = table_rows.rows('cpu/headroom', None)
  windows = '16', '32', '64', '128'
  assert shipped == {w: f'experiments/cpu/headroom_{w}' for w in windows}
  for name in 'b', 'a10', 'a':
    (tmp_path / f'{name}.gin').write_text('')
  assert list(table_rows.rows(str(tmp_path), None)) == ['a', 'b', 'a10']
  b = str(tmp_path / 'b.gin')
  assert table_rows.rows(str(tmp_path), ['b']) == {'b': b}


def test_a_row_is_no_table():
  with pytest.raises(ValueError, match='figure5_top is one row of a table'):
    table_rows.rows('feedback/figure5_top', None)


def test_a_folder_of_runs_may_have_the_name_of_a_table(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'cpu' / 'code').mkdir(parents=True)
  assert list(table_rows.rows('cpu/code', None)) == ['rec', 'slide']


def test_a_scale_is_that_of_the_longest_name():
  xl = 'experiments/block_recurrent/table1_xl_512'
  assert table_rows.scale(xl, 'paper') == ()
  assert table_rows.scale(xl, 'cpu') == (
    'scale/cpu/block_recurrent/table1_xl_512',
  )
  assert table_rows.scale(xl.replace('xl_512', 'slide_12l'), 'cpu') == (
    'scale/cpu/block_recurrent/table1',
  )


def test_a_sweep_is_a_name_with_its_values():
  assert table_rows.settings(None) == ['']
  assert table_rows.settings("A.b=('x', 2)") == ["A.b = 'x'", 'A.b = 2']
  assert table_rows.settings('A = (1, 2), (3,)') == ['A = (1, 2)', 'A = (3,)']
