"""Limits, and what breaks them."""

import dataclasses

import pytest

from meliad_rec.planning import report
from tests import planned


def test_parse():
  found = report.parse('hbm=14GiB, forbid=all-to-all,forbid=all-gather')
  assert found == report.Budget(14 * 2**30, ('all-to-all', 'all-gather'))
  assert report.parse('hbm=1.5GB').hbm == 1.5e9
  assert report.parse('fits') == report.Budget()


@pytest.mark.parametrize(
  'text',
  [
    *('', 'hbm', 'hbm=14', 'hbm=14KiB', 'hbm=1.2.3GiB', 'fits=1'),
    *('forbid=gather', 'time=3ms'),
  ],
)
def test_other_texts_are_refused(text):
  with pytest.raises(ValueError, match='give fits, hbm=14GiB.*MiB.*all-to-all'):
    report.parse(text)


def test_what_fits_breaks_nothing():
  assert report.Budget().breaches(planned.fitting()) == []
  assert report.parse('hbm=4.25GiB').breaches(planned.fitting()) == []


def test_what_needs_more_breaks_it():
  [told] = report.parse('hbm=4.2GiB').breaches(planned.fitting())
  assert 'needs 4.25 GiB' in told and 'take 4.20 GiB' in told
  [told] = report.Budget().breaches(planned.too_large())
  assert 'needs 20.00 GiB' in told and 'take 15.75 GiB' in told
  [told] = report.parse('hbm=0GiB').breaches(planned.fitting())
  assert 'take 0.00 GiB' in told
  # A budget gives a chip no more than it has.
  [told] = report.parse('hbm=30GiB').breaches(planned.too_large())
  assert 'take 15.75 GiB' in told


def test_forbidden_collectives_are_counted():
  limits = report.parse('forbid=all-to-all,forbid=reduce-scatter')
  [told] = limits.breaches(planned.fitting())
  assert 'has 2 all-to-all over model, and none is allowed' in told


def test_what_is_not_known_breaks_nothing_and_is_told():
  for limits in report.Budget(), report.parse('hbm=1GiB,forbid=all-to-all'):
    assert limits.breaches(planned.unknown()) == []
    [told] = limits.unknown(planned.unknown())
    assert 'whether it fits is n/a: no libtpu.' in told
    assert limits.unknown(planned.fitting()) == []
    assert limits.unknown(planned.too_large()) == []
  blind = planned.fitting()
  blind = dataclasses.replace(
    blind, compiled={**blind.compiled, 'exchanges': None}
  )
  limits = report.parse('forbid=all-to-all')
  assert limits.breaches(blind) == []
  [told] = limits.unknown(blind)
  assert 'collectives are n/a' in told
  assert report.Budget().unknown(blind) == []
