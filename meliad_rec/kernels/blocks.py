"""What the kernels for TPU and for GPU have in common."""

import math

import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import NEVER

LOG2E = math.log2(math.e)

AB = ((1,), (0,)), ((), ())  # a @ b
AB_T = ((1,), (1,)), ((), ())  # a @ b.T
A_TB = ((0,), (0,)), ((), ())  # a.T @ b


def dot(a, b, dims=AB):
  """Product in float32."""
  return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def laid_out(q_BTHK, k_BSHK, v_BSHK, mask_BS, past: int, block: int):
  """Queries, keys and values of whole blocks, and 0 or NEVER for each key.

  Before the own keys stand as many of the past, behind the last what fills a
  block.
  """
  missing = past + q_BTHK.shape[1] - k_BSHK.shape[1]
  after = lambda a: whole_blocks(a, block)
  full = lambda a: jnp.pad(a, ((0, 0), (missing, 0), (0, 0), (0, 0)))
  mask_BS = after(jnp.pad(mask_BS, ((0, 0), (missing, 0))))
  seen_BS = jnp.where(mask_BS, 0, NEVER).astype(jnp.float32)
  return after(q_BTHK), after(full(k_BSHK)), after(full(v_BSHK)), seen_BS


def given_keys(a_BSHK, T: int, past: int, like_BSHK):
  """The other way round: of keys that were given, those alone."""
  missing = past + T - like_BSHK.shape[1]
  return a_BSHK[:, missing : past + T]


def whole_blocks(a_BS, block: int):
  """[B, S, ...] with zeros behind, up to a multiple of the block."""
  pads = [(0, 0)] * a_BS.ndim
  pads[1] = (0, -a_BS.shape[1] % block)
  return jnp.pad(a_BS, pads)


def unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK) -> str | None:
  """What no kernel takes; None: it depends on the kernel."""
  T, W = q_BTHK.shape[1], bias_HW.shape[1]
  if keys_WK is not None:
    return 'something is added to keys by distance'
  if k_BSHK.shape[1] > W + T:
    return f'{k_BSHK.shape[1]} keys are more than a window and the queries'
  return None


def keep_mask(rng, rate: float, shape: tuple[int, ...]):
  """0 with probability `rate`, else 1 / (1 - rate), float32."""
  return jax.random.bernoulli(rng, 1 - rate, shape) / (1 - rate)
