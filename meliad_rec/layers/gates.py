"""Joins, which combine the input of a sublayer with the sublayer's result.

A join is a module called as join(x_BSD, h). It returns [B, S, D], where S is a
number of tokens or slots. x is the input of the sublayer. h [B, S, ...] is what
the sublayer computes before its last linear map W: attention heads or hidden
units. The join applies W, so the sublayer's result is W h. Gates compute in
float32. Hutchins et al. 2022, section 3.3.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.linear import all_but_bias
from meliad_rec.layers.linear import dot_general
from meliad_rec.metrics import pictures
from meliad_rec.metrics import state_use


class Residual(nn.Module):
  """Residual connection: x + W h, a sublayer's input plus its result.

  Attributes:
    dtype: dtype of the product.
    rate: rate of dropout on W h.
    dropout: a class from dropout.py.
    use_bias: whether to add a bias to W h.
    scale: the standard deviation of the initial W is scale / sqrt(I), where W
      has I inputs. This field has no effect if kernel_init is given.
    kernel_init: initializer of W.
  """

  dtype: str = 'float32'
  rate: float = 0.0
  dropout: Callable[..., nn.Module] = TiledDropout
  use_bias: bool = False
  scale: float = 1.0
  kernel_init: Callable | None = None

  @nn.compact
  def __call__(self, x_BSD, h):
    D = x_BSD.shape[-1]
    kernel_init = self.kernel_init or nn.initializers.variance_scaling(
      self.scale**2, 'fan_in', 'truncated_normal'
    )
    y_BSD = contract(
      D,
      h,
      self.dtype,
      use_bias=self.use_bias,
      kernel_init=kernel_init,
      name='linear',
    )(h).astype(self.dtype)
    return x_BSD + self.dropout(self.rate)(y_BSD)


class FixedGate(nn.Module):
  """Weighted mean of a sublayer's input x and its result W h.

  Each of the D elements has a learned weight, which does not depend on x or h.

  Attributes:
    dtype: dtype of W and h when they are multiplied; sums are float32.
    tanh: whether W h passes through a tanh.
    use_bias: whether to add a bias to W h.
    keep_bias: mean of the initial logits of the weight of x. With 0, the
      published value, about half of x is kept at first.
  """

  dtype: str = 'float32'
  tanh: bool = False
  use_bias: bool = False  # b_z of eq. 1; the authors' code has none.
  keep_bias: float = 0.0

  @nn.compact
  def __call__(self, x_BSD, h):
    D = x_BSD.shape[-1]
    z_BSD = contract32(D, h, self.dtype, use_bias=self.use_bias, name='z')(h)
    z_BSD = jnp.tanh(z_BSD) if self.tanh else z_BSD
    init = lambda *a: self.keep_bias + nn.initializers.normal(0.1)(*a)
    g_D = jax.nn.sigmoid(self.param('gate', init, (D,)))  # eq. 2
    state_use.sow_gate(self, g_D)
    for name, weight_D in ('state_keep', g_D), ('state_write', 1 - g_D):
      like = lambda weight_D=weight_D: jnp.broadcast_to(weight_D, x_BSD.shape)
      pictures.sow(self, name, like)
    y_BSD = x_BSD.astype(jnp.float32) * g_D + z_BSD * (1 - g_D)  # eq. 3
    return y_BSD.astype(x_BSD.dtype)


class LSTMGate(nn.Module):
  """Sum of a sublayer's input x and its result W h, each multiplied by a gate.

  The gates depend on h, like the forget gate and the input gate of an LSTM.

  Attributes:
    dtype, tanh, use_bias: see FixedGate.
    keep_bias: constant in the logits of the weight of x; published is 1.
  """

  dtype: str = 'float32'
  tanh: bool = True
  use_bias: bool = False  # b_z of eq. 4.
  keep_bias: float = 1.0

  @nn.compact
  def __call__(self, x_BSD, h):
    D = x_BSD.shape[-1]
    z_BSD = contract32(D, h, self.dtype, use_bias=self.use_bias, name='z')(h)
    z_BSD = jnp.tanh(z_BSD) if self.tanh else z_BSD  # eq. 4
    small = {
      'kernel_init': nn.initializers.variance_scaling(
        0.1, 'fan_in', 'truncated_normal'
      ),
      'bias_init': nn.initializers.normal(0.1),
    }
    i_BSD = contract32(D, h, self.dtype, name='i', **small)(h)
    f_BSD = contract32(D, h, self.dtype, name='f', **small)(h)
    i_BSD = jax.nn.sigmoid(i_BSD - 1)  # eq. 5
    f_BSD = jax.nn.sigmoid(f_BSD + self.keep_bias)  # eq. 6
    state_use.sow_gate(self, f_BSD)
    pictures.sow(self, 'state_keep', lambda: f_BSD)
    pictures.sow(self, 'state_write', lambda: i_BSD)
    y_BSD = x_BSD.astype(jnp.float32) * f_BSD + z_BSD * i_BSD  # eq. 7
    return y_BSD.astype(x_BSD.dtype)


def contract(features: int, h, dtype, **options) -> nn.DenseGeneral:
  """Returns a linear map from [B, S, ...] to [B, S, features].

  With a bias, its results are float32; see linear.all_but_bias.

  Args:
    features: width of the result.
    h: any array with the shape of the map's input, [B, S, ...].
    dtype: dtype of the product.
    **options: other fields of nn.DenseGeneral.
  """
  options = {'dot_general': dot_general} | options
  return nn.DenseGeneral(
    features,
    tuple(range(2, h.ndim)),
    dtype=dtype,
    promote_dtype=all_but_bias,
    **options,
  )


def contract32(features: int, h, dtype, **options) -> nn.DenseGeneral:
  """Returns the map of `contract`, but with float32 sums and results.

  Only its operands have the given dtype.
  """
  sums = functools.partial(dot_general, preferred_element_type=jnp.float32)
  return contract(features, h, dtype, dot_general=sums, **options)
