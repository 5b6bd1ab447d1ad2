"""The plan as people read it."""

import dataclasses

import pytest

from meliad_rec.planning import report
from tests import planned


def test_a_table_says_that_it_is_an_estimate():
  head, empty, *_ = report.table([planned.fitting()]).splitlines()
  assert 'Estimates of the compiler' in head and 'nothing ran' in head
  assert empty == ''


def test_columns_are_slices():
  found = report.table([planned.fitting(), planned.too_large('v5p:2x2x2')])
  lines = found.splitlines()
  assert lines[2].split() == ['v5e:2x4', 'v5p:2x2x2']
  line = lambda name: next(one for one in lines if one.startswith(name))
  assert '4.25 of 15.75 (27%)' in line('  in all')
  assert '20.00 of 15.75: does not fit' in line('  in all')
  assert line('ms a step').split() == ['ms', 'a', 'step', '1,000.0', 'n/a']
  assert line('MFU').split() == ['MFU', '25%', 'n/a']
  assert line('tokens/s').split() == ['tokens/s', '32,768', 'n/a']
  assert line('hours for 7,200 steps').split()[-2:] == ['2.0', 'n/a']
  assert 'v5p:2x2x2: n/a: too large' in lines
  assert 'v5e:2x4: note: a loop counts once' in lines
  assert any('3 x all-reduce over data, 5.0 MiB' in one for one in lines)


def test_without_a_compiler_sizes_are_known():
  found = report.column(planned.unknown())
  assert found['parameters'] == '123,456,789'
  assert found['GiB a device: parameters'] == '0.50'
  assert found['  in all'] == 'n/a of 15.75'
  assert found['MFU'] == 'n/a'


def test_rates_are_in_base_units():
  found = report.rates(planned.fitting())
  assert found['step'] == 1.0
  assert found['MFU'] == pytest.approx(0.25)
  assert found['hours'] == 2.0
  assert report.rates(planned.too_large()) is None


def test_without_flops_the_rest_is_known():
  one = planned.fitting()
  one = dataclasses.replace(one, sizes={**one.sizes, 'flops': None})
  assert report.rates(one)['MFU'] is None
  found = report.column(one)
  assert (found['TFLOP a step'], found['MFU']) == ('n/a', 'n/a')
  assert found['tokens/s'] == '32,768'
