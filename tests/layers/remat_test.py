"""What is computed again, and how often."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers.remat import remat

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


class Twice(nn.Module):
  """Two layers, called as a function of the module."""

  policy: str

  @nn.compact
  def __call__(self, x):
    return remat(Twice.body, self.policy)(self, x)

  def body(self, x):
    hidden = jnp.tanh(nn.Dense(4, name='hidden')(x))
    return nn.Dense(2, name='output')(hidden)


def gradient(policy):
  module = Twice(policy)
  params = Twice('none').init(jax.random.key(0), X)
  return jax.grad(lambda p: jnp.sum(jnp.sin(module.apply(p, X)))), params


@pytest.mark.parametrize(
  'policy, tanhs',
  [
    ('none', 1),
    ('dots', 2),
    ('projections', 2),
    ('attention', 2),
    ('sublayers', 2),
    ('full', 2),
  ],
)
def test_values_stay_and_what_is_not_kept_is_computed_again(policy, tanhs):
  gradient_of, params = gradient(policy)
  expected, _ = gradient('none')
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.jit(gradient_of)(params),
    jax.jit(expected)(params),
  )
  assert str(jax.make_jaxpr(gradient_of)(params)).count('= tanh') == tanhs


def test_unknown_remat_is_an_error():
  with pytest.raises(
    ValueError, match="remat is 'all'; it must be one of none"
  ):
    remat(lambda c: c, 'all')
