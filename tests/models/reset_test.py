"""Reset: fresh rows where a document starts, and parts that see to it."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.models.cell import reset
from meliad_rec.models.cell import Resettable

B = 3


def test_reset_takes_fresh_rows_where_a_document_starts():
  fresh = {'a': np.ones((B, 2), np.float32), 'b': np.ones(B, bool)}
  state = {'a': jnp.zeros((B, 2), 'bfloat16'), 'b': jnp.zeros(B, bool)}
  start = np.array([False, True, False])
  found = reset(start, fresh, state)
  assert found['a'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(found['a'][:, 1], start)
  np.testing.assert_array_equal(found['b'], start)


class Marked(Resettable):
  """Hides its rows by a mark, and leaves the array as it is."""

  large: jax.Array
  seen: jax.Array

  def reset(self, start_B, fresh):
    return self.replace(seen=np.where(start_B, fresh.seen, self.seen))


def test_a_resettable_part_of_a_state_is_left_to_itself():
  state = {'part': Marked(jnp.ones((B, 2)), jnp.ones(B)), 'b': jnp.ones(B)}
  fresh = jax.tree.map(jnp.zeros_like, state)
  start = np.array([False, True, False])
  found = reset(start, fresh, state)
  assert found['part'].large is state['part'].large
  np.testing.assert_array_equal(found['part'].seen, ~start)
  np.testing.assert_array_equal(found['b'], ~start)
