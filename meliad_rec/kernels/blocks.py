"""Dropout of attention, and functions that kernels for TPU and GPU share.

The kernels compute exponentials to base 2. In their docstrings, a logit or bias
"to base 2" has been multiplied by LOG2E. The "band" is an array that is added
to logits: MASKED (-1e30) where a key is outside a query's window, and 0
elsewhere.
"""

import math

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MASKED

LOG2E = math.log2(math.e)

# Dimension numbers of `dot`.
AB = ((1,), (0,)), ((), ())  # a @ b
AB_T = ((1,), (1,)), ((), ())  # a @ b.T
A_TB = ((0,), (0,)), ((), ())  # a.T @ b


class Dropout(struct.PyTreeNode):
  """Dropout of attention probabilities.

  Attributes:
    rng: key of JAX's random numbers.
    rate: fraction of the probabilities that is dropped.
    first: position of the first query. If it is given, a query's mask depends
      on its position, and not on which queries are processed at once.
  """

  rng: jax.Array
  rate: float = struct.field(pytree_node=False)
  first: jax.Array | int | None = None

  def keep_mask(self, shape: tuple[int, ...]):
    return keep_mask(self.rng, self.rate, shape)

  def keep_by_position(self, at, count: int, shape: tuple[int, ...]):
    """Returns factors [count, *shape]: one mask for each query.

    Args:
      at: index of the first of these queries.
      count: number of queries.
      shape: shape of the mask of a query.
    """
    first = self.first + at
    return keep_by_position(self.rng, self.rate, first, count, shape)


def keep_mask(rng, rate: float, shape: tuple[int, ...]):
  """Returns random dropout factors in float32.

  Each is 0 with probability `rate`, else 1 / (1 - rate).
  """
  return jax.random.bernoulli(rng, 1 - rate, shape) / (1 - rate)


def keep_by_position(rng, rate: float, first, count: int, shape):
  """Returns random dropout factors in float32, [count, *shape].

  They are drawn as in `keep_mask`, with a random key for each position.

  Args:
    rng: key of JAX's random numbers.
    rate: fraction of the factors that is 0.
    first: int, the first position.
    count: number of positions, one after another.
    shape: shape of the mask of a position.
  """
  positions = first + jnp.arange(count)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, positions)
  return jax.vmap(lambda key: keep_mask(key, rate, shape))(keys)


def dot(a, b, dims=AB):
  """Returns the product of two matrices in float32.

  Args:
    a, b: the matrices.
    dims: AB for a @ b, AB_T for a @ b.T, or A_TB for a.T @ b.
  """
  return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def pad_to_blocks(inputs: AttentionInputs, past: int, block: int):
  """Pads queries, keys and values to whole blocks.

  Args:
    inputs: queries, keys and values of any length.
    past: number of past keys to return; those that `inputs` lacks are zeros,
      which the mask hides.
    block: number of tokens in a block.

  Returns:
    The padded queries, keys and values; and the mask [B, S] float32, to be
    added to logits: MASKED at keys that no query may see, and 0 elsewhere.
  """
  missing = past + inputs.q_BTHK.shape[1] - inputs.k_BSHK.shape[1]
  pad_after = lambda a: pad_to_multiple(a, block)
  pad_before = lambda a: jnp.pad(a, ((0, 0), (missing, 0), (0, 0), (0, 0)))
  mask_BS = pad_after(jnp.pad(inputs.mask_BS, ((0, 0), (missing, 0))))
  return (
    pad_after(inputs.q_BTHK),
    pad_after(pad_before(inputs.k_BSHK)),
    pad_after(pad_before(inputs.v_BSHK)),
    jnp.where(mask_BS, 0, MASKED).astype(jnp.float32),
  )


def unpad_keys(a_BSHK, inputs: AttentionInputs, past: int):
  """Removes the keys that `pad_to_blocks` added.

  Args:
    a_BSHK: keys, values or their gradients, of padded length.
    inputs, past: arguments that `pad_to_blocks` was called with.
  """
  end = past + inputs.q_BTHK.shape[1]
  return a_BSHK[:, end - inputs.k_BSHK.shape[1] : end]


def pad_to_multiple(a_BS, block: int):
  """Appends zeros to [B, S, ...] until S is a multiple of `block`."""
  pads = [(0, 0)] * a_BS.ndim
  pads[1] = (0, -a_BS.shape[1] % block)
  return jnp.pad(a_BS, pads)


def unsupported_reason(
  inputs: AttentionInputs, dropout: Dropout | None
) -> str | None:
  """Returns why no kernel supports the inputs; None if a kernel may."""
  if inputs.keys_WK is not None:
    return 'the position module adds vectors to the keys'
  if dropout is not None and dropout.first is not None:
    return 'each position has its own dropout mask'
  return None
