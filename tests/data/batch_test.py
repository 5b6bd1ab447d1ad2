"""A batch crosses jit, and its fields keep their places."""

import jax
import numpy as np

from meliad_rec.data.batch import Batch


def test_a_batch_is_a_pytree_of_seven_arrays():
  batch = Batch(
    tokens_BT=np.array([[0, 5, 6]]),
    targets_BT=np.array([[5, 6, 7]]),
    mask_BT=np.array([[True, True, True]]),
    scored_BT=np.array([[False, True, True]]),
    start_B=np.array([True]),
    document_B=np.array([4]),
    offset_B=np.array([0]),
  )
  assert len(jax.tree.leaves(batch)) == 7
  doubled = jax.jit(lambda b: b.replace(targets_BT=b.targets_BT * 2))(batch)
  np.testing.assert_array_equal(doubled.targets_BT, [[10, 12, 14]])
  np.testing.assert_array_equal(doubled.tokens_BT, batch.tokens_BT)
