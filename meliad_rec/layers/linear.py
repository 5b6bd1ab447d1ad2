"""Products of activations and weights, with few copies in their gradients.

In a product that sums over tokens, XLA for CPUs copies the first operand to
transpose it. The gradient of the weights is such a product, of the inputs and
the gradient of the outputs. JAX puts the gradient of the outputs first, even if
the inputs are narrower, or shared by several products. Here the narrower of the
two comes first.
"""

import functools

import jax
from jax import lax


def dot_general(
  x, w, dimension_numbers, precision=None, preferred_element_type=None
):
  """Returns lax.dot_general of the same arguments.

  Gradients equal those of lax.dot_general too, except for rounding.

  Raises:
    ValueError: the contracted axes are not the last of `x` and all but the last
      of `w`, in order; or there are batch axes, or a `precision`.
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
    dw = jax.numpy.moveaxis(dot(g, x, over_tokens), 0, -1)
  return dx.astype(x.dtype), dw.astype(w.dtype)


_product.defvjp(_forward, _backward)
