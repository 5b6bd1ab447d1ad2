"""Shorter segments in the beginning; lanes_test.py reads them."""

import pytest

from meliad_rec.data.lanes import ShorterFirst


@pytest.mark.parametrize('name', ['segment', 'steps'])
def test_none_at_all_is_refused(name):
  with pytest.raises(ValueError, match=f'set FIRST_{name.upper()} to 1 or'):
    ShorterFirst(**({'segment': 4, 'steps': 2} | {name: 0}))
