"""Parts of arrays along their tokens."""

import numpy as np
import pytest

from meliad_rec.recurrence import memory_scan


@pytest.mark.parametrize(
  'T, C, most, found',
  [(24, 1, 8, 8), (24, 1, 10, 8), (24, 3, 10, 6), (24, 4, 3, 4), (7, 1, 5, 1)],
)
def test_a_divisor_is_whole_chunks(T, C, most, found):
  assert memory_scan.divisor(T, C, most) == found


def test_join_undoes_a_scan():
  a_BTD = np.arange(2 * 6 * 3).reshape(2, 6, 3)
  stacked = np.stack([a_BTD[:, i : i + 2] for i in range(0, 6, 2)])
  np.testing.assert_array_equal(memory_scan.join(stacked), a_BTD)


def test_parts():
  a_BT = np.arange(10).reshape(2, 5)
  np.testing.assert_array_equal(
    memory_scan.slice_tokens(a_BT, 1, 2), a_BT[:, 1:3]
  )
  put = memory_scan.put(a_BT, np.zeros((2, 2), int), 3)
  np.testing.assert_array_equal(put[:, :3], a_BT[:, :3])
  assert not put[:, 3:].any()
  padded = memory_scan.pad(a_BT[..., None], 1, 2)
  assert padded.shape == (2, 8, 1)
  np.testing.assert_array_equal(padded[:, 1:6, 0], a_BT)
