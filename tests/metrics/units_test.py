"""Units of figures, numbered ones and strange ones too."""

import pytest

from meliad_rec.metrics import metrics


@pytest.mark.parametrize(
  'name, expected',
  [
    ('tokens', 'tokens'),
    ('loss_nats_per_token', 'nats/token'),
    ('halting_depth', 'steps in depth'),
    ('halting_p_0', 'probability'),
    ('halting_p_12', 'probability'),
    ('halting_q_1', ''),
    ('halting', ''),
    ('42', ''),
  ],
)
def test_a_unit(name, expected):
  assert metrics.unit(name) == expected


def test_names_are_sorted_by_their_numbers():
  names = ['p_10', 'q', 'p_2', 'p', 'p_2_1']
  assert sorted(names, key=metrics.parts) == ['p', 'p_2', 'p_10', 'p_2_1', 'q']


def test_no_name_has_two_units():
  assert not metrics.UNITS.keys() & metrics.SOWN_UNITS.keys()
