"""Results of a table: columns, costs, and figures over numbers in names."""

import math

import pytest

from meliad_rec.report import results


def test_figures_are_drawn_over_numbers_of_splits_or_of_rows():
  own = {'length_20_40': 0.5, 'length_40_60': 0.6, 'args_5': 0.1, 'args_9': 0.2}
  assert results.over_splits([{'row': 'a', 'validation': 1.0, **own}]) == {
    'N of the split length_N': {'a': [(30, [0.5]), (50, [0.6])]},
    'N of the split args_N': {'a': [(5, [0.1]), (9, [0.2])]},
  }
  rows = [{'row': f'layer_{n}', 'validation': n / 2} for n in (2, 0, 1)]
  assert results.over_splits(rows) == {}
  assert results.over_rows([*rows, {'row': 'average', 'validation': 1}]) == {
    'N of the row ..._N (validation)': {
      'layer': [(0, [0.0]), (1, [0.5]), (2, [1.0])],
      'average': [(0, [1]), (1, [1]), (2, [1])],
    }
  }
  two = [{'row': f'chunk_{n}', 'validation': n} for n in (1, 2)]
  rows += [*two, {'row': 'average', 'validation': 1}]
  (panel,) = results.over_rows(rows).values()
  assert [*panel] == ['layer', 'chunk']
  assert results.over_rows(rows[:1]) == {}


def test_a_series_of_sizes_is_drawn_over_parameters():
  rows = [
    {'row': f'{name}_{n}', 'parameters': 3 * n + more, 'validation': n / 80}
    for n in (80, 40)
    for name, more in (('rec', 0), ('xl', 1))
  ]
  rows[0]['published parameters'] = 80_000_000
  assert results.over_rows(rows) == {
    'parameters (validation)': {
      'rec': [(120, [0.5]), (240, [1.0])],
      'xl': [(121, [0.5]), (241, [1.0])],
    }
  }


def test_published_spread_and_median_are_beside_the_measured_ones():
  values = 'a', 'a', 0, 9, 0.1, 0.1, 10, 5000, 'accuracy', 10, 0.5
  run = dict(zip(results.COLUMNS, values, strict=True))
  published = {'test': 0.9, 'test deviation': 0, 'other deviation': 0.2}
  run |= {f'published {k}': v for k, v in published.items()}
  both = [run | {'test': value} for value in (0.6, 0.8)]
  assert results.cell(both, 'test') == '0.7000 ± 0.1000 [0.7000] / 0.9 ± 0'
  both[0]['published test median'] = 1
  found = '0.7000 ± 0.1000 [0.7000] / 0.9 ± 0 [1]'
  assert results.cell(both, 'test') == found
  part = '0.7000 ± 0.1000 [0.7000] (2 seeds) / 0.9 ± 0 [1]'
  assert results.cell([*both, run], 'test') == part
  assert results.cell([run, run | {'test': 0.6}], 'test').startswith(
    '0.6000 (1 seed) / 0.9'
  )
  assert results.cell([run, run], 'test') == '- / 0.9 ± 0'
  text = results.table('t', both)
  assert f'| {found} |' in text and 'published: other deviation' in text
  assert 'published: test' not in text


def test_a_published_time_is_beside_the_measured_one():
  def row(name, seconds, **published):
    values = name, name, 0, 9, seconds, 2 * seconds, 10, 5000, 'error', 10, 0.5
    published = {f'published {k}': v for k, v in published.items()}
    return dict(zip(results.COLUMNS, values, strict=True)) | published

  to = 'step time to b'
  a = row(
    'a', 0.00345, **{'ms per step': 178, to: 1.5, 'minutes per 60 steps': 5}
  )
  speeds = {'training K words/s': 9, 'training K steps/s': 3, 'words/s': 7}
  b = row('b', 0.25, **{to: 1}, **speeds)
  head, _, *lines = results.table('t', [a, b]).splitlines()[2:]
  columns = [each.strip() for each in head.split('|')[6:-2]]
  assert columns == [
    *('validation', to, 'minutes per 60 steps', 'training K words/s'),
    *('training K steps/s', 'published: words/s'),
  ]
  cells = [[each.strip() for each in line.split('|')[5:-2]] for line in lines]
  assert cells == [
    ['3.45 / 178', '0.5000', '0.0138 / 1.5', '0.0069 / 5', '145', '145', ''],
    ['250', '0.5000', '1 / 1', '0.5', '2 / 9', '2 / 3', '7'],
  ]


def test_a_change_from_a_negative_value_has_its_sign():
  def row(name, value):
    values = name, name, 0, 9, 0.5, 0.5, 10, 5000, 'mean_return', 10, value
    return dict(zip(results.COLUMNS, values, strict=True))

  text = results.table('t', [row('a', -4.0), row("b, C = '|'", -3.0)])
  *_, last = text.splitlines()
  assert last.startswith(r"| b, C = '\|' | 1 |") and last.endswith('| +25.0% |')


@pytest.mark.parametrize(
  'diverged, cell',
  [
    (math.nan, 'nan ± nan [nan]'),
    (math.inf, 'inf ± nan [2.0000]'),
  ],
)
def test_a_seed_that_diverged_is_neither_hidden_nor_best(diverged, cell):
  run = {'row': 'a', 'metric': 'perplexity', 'parameters': 9, 'tokens': 5}
  run |= {'seed': 0, 'step_seconds': 0.1}
  runs = [run | {'validation': value} for value in (diverged, 2.0, 1.0)]
  assert results.cell(runs, 'validation') == cell
  assert results.best_seed(runs)['validation'] == 1
  assert f'| {cell} | 1.0000 |' in results.table('t', runs)


def test_costs_are_of_rows_that_have_a_time_and_a_result():
  rows = [{'row': 'a', 'step_seconds': s, 'parameters': 9} for s in (0.1, 0.3)]
  rows[0] |= {'validation': 1.0, 'test': 2.0}
  rows[1] |= {'validation': 1.0, 'test': 4.0}
  other = {'row': 'b', 'step_seconds': math.nan, 'test': 1.0, 'parameters': 9}
  assert results.costs([*rows, other]) == {'a': (pytest.approx(0.2), 3.0, 9)}
