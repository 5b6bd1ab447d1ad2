"""Floats are taken out of a pytree and put back, others left as they are."""

import jax.numpy as jnp
import numpy as np

from meliad_rec.recurrence import early_exit


def test_join_undoes_split():
  tree = {
    'a': jnp.ones(2),
    'b': (jnp.arange(3), None, jnp.ones(1, jnp.bfloat16)),
    'c': jnp.array([True, False]),
  }
  floats, others, join = early_exit.split(tree)
  assert [a.dtype for a in floats] == [jnp.float32, jnp.bfloat16]
  assert [a.dtype for a in others] == [jnp.int32, jnp.bool_]
  again = join([2 * a for a in floats], others)
  np.testing.assert_array_equal(again['a'], [2, 2])
  np.testing.assert_array_equal(again['b'][0], [0, 1, 2])
  assert again['b'][1] is None
  assert again['b'][2].dtype == jnp.bfloat16
  np.testing.assert_array_equal(again['c'], [True, False])


def test_a_tree_may_have_only_one_kind():
  assert early_exit.split({'a': jnp.ones(2)})[1] == []
  floats, others, join = early_exit.split([jnp.arange(2)])
  assert floats == [] and join(floats, others)[0] is others[0]
