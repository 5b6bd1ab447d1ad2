"""Products of activations and weights, their biases, and ReLU.

The gradient of the weights is a product of the inputs and the gradient of the
outputs, summed over tokens. In such a product, XLA for CPUs copies the first
operand to transpose it. JAX always puts the gradient of the outputs first. It
does so even if the inputs are narrower, or if several products could share one
copy of the inputs. Here the narrower operand comes first.

The gradient of a bias is a sum over tokens. In flax.linen, a bias is cast to
the dtype of activations, and XLA may then add up numbers in bfloat16. Here it
is added in float32; see `all_but_bias`.

The gradient of jax.nn.relu is computed from the signs of its inputs. XLA for
TPUs packs these into bits and keeps them, which can take longer than the
product before. Here it is computed from the outputs, which are kept anyway.
"""

from collections.abc import Callable
import functools
import inspect

import jax
from jax import lax
import jax.numpy as jnp


def dot_general(
  x, w, dimension_numbers, precision=None, preferred_element_type=None
):
  """Returns the result of lax.dot_general for the same arguments.

  Gradients equal the gradients of lax.dot_general too, except for rounding.

  Raises:
    ValueError: there are batch axes, or a `precision`; or the contracted axes
      are not, in order, the last axes of `x` and all axes but the last of `w`.
  """
  (axes, first_axes), batch = dimension_numbers
  count = len(axes)
  last_axes = tuple(range(x.ndim - count, x.ndim))
  if (
    tuple(axes) != last_axes
    or tuple(first_axes) != tuple(range(count))
    or any(batch)
    or w.ndim != count + 1
    or precision is not None
  ):
    raise ValueError(
      'linear.dot_general contracts the last axes of x with the first axes of '
      f'w, got {dimension_numbers} for shapes {x.shape} and {w.shape}.'
    )
  return _product(x, w, count, preferred_element_type)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, w, count, dtype):
  axes = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
  return lax.dot_general(x, w, (axes, ((), ())), preferred_element_type=dtype)


def _forward(x, w, count, dtype):
  return _product(x, w, count, dtype), (x, w)


def _backward(count, dtype, saved, g):
  x, w = saved
  dot = functools.partial(lax.dot_general, preferred_element_type=dtype)
  dx = dot(g, w, (((g.ndim - 1,), (w.ndim - 1,)), ((), ())))
  tokens = tuple(range(x.ndim - count))
  over_tokens = (tokens, tokens), ((), ())
  if w.size // w.shape[-1] <= w.shape[-1]:
    dw = dot(x, g, over_tokens)
  else:
    dw = jnp.moveaxis(dot(g, x, over_tokens), 0, -1)
  return dx.astype(x.dtype), dw.astype(w.dtype)


_product.defvjp(_forward, _backward)


def all_but_bias(x, kernel, bias, *, dtype):
  """Casts the operands of a product to `dtype`, but leaves the bias float32.

  This is the `promote_dtype` of a flax.linen module. With a bias, the results
  of the module are float32, and the caller must cast them to `dtype`.
  """
  return x.astype(dtype), kernel.astype(dtype), bias


def with_cheap_gradient(activation: Callable) -> Callable:
  """Returns `relu` in place of jax.nn.relu, and any other function as it is."""
  is_relu = inspect.unwrap(activation) is inspect.unwrap(jax.nn.relu)
  return relu if is_relu else activation


@jax.custom_vjp
def relu(x):
  """Returns the maximum of x and 0, as jax.nn.relu does."""
  return jnp.maximum(x, 0)


def _relu_forward(x):
  y = jnp.maximum(x, 0)
  return y, y


relu.defvjp(_relu_forward, lambda y, g: (g * jnp.sign(y),))
