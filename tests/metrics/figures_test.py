"""What modules count, by whatever way they run."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.metrics import figures
from meliad_rec.metrics.figures import Peak
from meliad_rec.metrics.figures import Ratio

B, T, N = 3, 5, 4


class Counter(nn.Module):
  """Sows the mean and the peak of what it reads, and hands on half of it."""

  @nn.compact
  def __call__(self, x_BT):
    w = self.param('w', nn.initializers.constant(0.5), ())
    figures.sow(self, 'mean_1', Ratio(x_BT * w * 2, jnp.ones_like(x_BT)))
    figures.sow(self, 'peak', Peak(x_BT))
    return x_BT * w


class Counters(nn.Module):
  """A counter twice, another in a scan, and a third within jax.checkpoint."""

  def setup(self):
    self.a, self.b, self.c = Counter(), Counter(), Counter()

  def __call__(self, x_BT):
    x_BT = self.a(self.a(x_BT))
    scan = nn.scan(
      lambda c, x, _: (c(x), None),
      variable_broadcast='params',
      variable_axes={'figures': 0},
      split_rngs={'params': False},
      length=N,
    )
    x_BT, _ = scan(self.b, x_BT, None)
    return nn.remat(lambda c, x: c(x))(self.c, x_BT)


def given():
  return jnp.asarray(np.random.default_rng(0).normal(size=(B, T)), jnp.float32)


def apply(x_BT, params=None):
  params = params or Counters().init(jax.random.key(0), x_BT)['params']
  out, sown = Counters().apply({'params': params}, x_BT, mutable=['figures'])
  return out, figures.collect(sown['figures'])


def test_all_that_has_one_name_is_one_figure():
  x_BT = given()
  read = np.stack([np.asarray(x_BT, np.float64) / 2**i for i in range(N + 3)])
  _, found = jax.jit(apply)(x_BT)
  assert set(found) == {'mean_1', 'peak'}
  assert float(found['mean_1'].total) == pytest.approx(read.sum(), rel=1e-5)
  assert float(found['mean_1'].count) == read.size
  assert float(found['peak'].value) == pytest.approx(read.max())
  for leaf in jax.tree.leaves(found):
    assert leaf.shape == () and leaf.dtype == jnp.float32


def test_the_peak_of_what_is_below_nothing_is_no_zero():
  _, found = apply(-2 - jnp.abs(given()))
  assert float(found['peak'].value) < 0


def test_they_are_nothing_where_nobody_collects_them():
  x_BT = given()
  variables = {'params': Counters().init(jax.random.key(0), x_BT)['params']}
  alone = Counters().apply(variables, x_BT)
  np.testing.assert_array_equal(alone, apply(x_BT)[0])
  assert figures.collect({}) == {}


def test_they_have_no_gradient():
  x_BT = given()
  params = Counters().init(jax.random.key(0), x_BT)['params']

  def total(params):
    _, found = apply(x_BT, params)
    return sum(jax.tree.leaves(found))

  assert not any(jax.tree.leaves(jax.grad(total)(params)))


@pytest.mark.parametrize('dtype', ['bool', 'int32', 'bfloat16'])
def test_sums_are_float32_whatever_is_counted(dtype):
  """bfloat16 has 8 bits: sums of ones in it would stop at 256."""

  class Ones(nn.Module):
    @nn.compact
    def __call__(self):
      figures.sow(self, 'ones', Ratio(jnp.ones(1001, dtype), 7))
      figures.sow(self, 'most', Peak(jnp.ones(3, dtype)))

  _, sown = Ones().apply({}, mutable=['figures'])
  found = figures.collect(sown['figures'])
  assert (found['ones'].total, found['ones'].count) == (1001, 7)
  assert found['most'].value == 1
  assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.float32.dtype}


def test_one_name_has_one_kind():
  one = jnp.ones(())
  sown = {'a': {'x': (Ratio(one, one),)}, 'b': {'x': (Peak(one),)}}
  with pytest.raises(ValueError, match='x is sown as a Ratio and as a Peak'):
    figures.collect(sown)


def test_over_steps_means_are_weighted_and_exact():
  pairs = [(1e16, 3.0), (1.0, 0.0), (-1e16, 1.0), (3.0, 4.0)]
  steps = [Ratio(np.float64(t), np.float64(c)) for t, c in pairs]
  assert figures.over_steps(steps) == 0.5
  assert figures.over_steps(steps[::-1]) == 0.5
  assert figures.over_steps(steps[1:2]) is None


def test_over_steps_a_peak_is_the_highest_and_shows_what_is_no_number():
  peaks = [Peak(np.float32(v)) for v in (-2.0, -1.5, -3.0)]
  assert figures.over_steps(peaks) == -1.5
  assert math.isnan(figures.over_steps([*peaks, Peak(np.float32('nan'))]))
  assert math.isnan(figures.over_steps([Peak(np.float32('nan')), *peaks]))
