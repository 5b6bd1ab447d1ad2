"""Causal sliding-window attention: which form runs where, chosen here alone.

On a TPU the kernels of window_attention_tpu, where they take the shapes; else
the blocked form of window_attention_xla. The choice is made when a program is
compiled, for the platform that it is compiled for.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from meliad_rec.dropout import keep_mask
from meliad_rec.kernels import window_attention_tpu
from meliad_rec.kernels import window_attention_xla
from meliad_rec.kernels.per_shard import per_shard
from meliad_rec.kernels.tpu_blocks import LANES

# Names of what the backward pass reads besides the arguments, for remat.py.
SAVED = 'window_attention_output', 'window_attention_sums'
# Of the arguments of the kernels for TPU, see per_shard.
KINDS = 'tokens', 'tokens', 'tokens', 'rows', 'heads', 'heads', 'heads'


@dataclasses.dataclass(frozen=True)
class How:
  """What is known when a program is traced.

  Attributes:
    sees_self: see window_attention_ref.window_attention.
    rate: of dropout of probabilities.
    form: see window_attention.
  """

  sees_self: bool
  rate: float
  form: str | None

  @property
  def options(self) -> dict:
    """Of the kernels for TPU."""
    interpret = self.form == 'tpu_interpreted'
    return {'sees_self': self.sees_self, 'interpret': interpret}

  def choose(self, tpu: Callable, xla: Callable) -> Callable:
    """What suits the platform that is compiled for, unless one is forced."""
    if self.form:
      return tpu
    choose = jax.lax.platform_dependent
    return lambda *arguments: choose(*arguments, tpu=tpu, default=xla)


def window_attention(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  bias_HW,
  *,
  scale_H=None,
  keys_WK=None,
  sees_self=False,
  dropout_rng=None,
  dropout_rate=0.0,
  form=None,
):
  """As window_attention_ref.window_attention, which defines it.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, keys_WK, sees_self: see
      there.
    dropout_rng, dropout_rate: see window_attention_xla.window_attention.
    form: 'xla', 'tpu', or 'tpu_interpreted', the kernels for TPU without one;
      None: what suits the platform and the shapes.

  Raises:
    ValueError: there is no such form, or it does not take the arguments.
  """
  if form not in (None, 'xla', 'tpu', 'tpu_interpreted'):
    raise ValueError(
      f'form is {form!r}; it must be None, xla, tpu or tpu_interpreted.'
    )
  misfit = why_not_tpu(q_BTHK, k_BSHK, bias_HW, keys_WK)
  if form in ('tpu', 'tpu_interpreted') and misfit:
    raise ValueError(f'The kernels for TPU do not take this: {misfit}.')
  if form == 'xla' or misfit:
    return window_attention_xla.window_attention(
      q_BTHK,
      k_BSHK,
      v_BSHK,
      mask_BS,
      bias_HW,
      scale_H=scale_H,
      keys_WK=keys_WK,
      sees_self=sees_self,
      dropout_rng=dropout_rng,
      dropout_rate=dropout_rate,
    )
  operands = q_BTHK, k_BSHK, v_BSHK, bias_HW, scale_H
  constants = mask_BS, dropout_rng if dropout_rate else None
  return _attend(operands, constants, How(sees_self, dropout_rate, form))


def why_not_tpu(q_BTHK, k_BSHK, bias_HW, keys_WK) -> str | None:
  """What the kernels for TPU do not take; None: they take it all."""
  (T, K), W = q_BTHK.shape[1::2], bias_HW.shape[1]
  if keys_WK is not None:
    return 'something is added to keys by distance'
  if W % LANES or K % 64 or K > 256:
    return (
      f'a window of {W} and heads {K} wide; the window must be a multiple of '
      f'{LANES}, the width 64, 128, 192 or 256'
    )
  if 2 * T < W:
    return f'{T} queries are less than half a window of {W}'
  if k_BSHK.shape[1] > W + T:
    return f'{k_BSHK.shape[1]} keys are more than a window and the queries'
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands, constants, how):
  return _forward(operands, constants, how)[0]


def _forward(operands, constants, how):
  """operands: q, k, v, bias, scale; constants: mask, key of dropout."""

  def tpu(operands, constants):
    arguments = _arguments(operands, constants, how)
    call = functools.partial(window_attention_tpu.attend, **how.options)
    return per_shard(call, KINDS, arguments, ('tokens', 'sums'))(*arguments)

  def xla(operands, constants):
    B, T, H, _ = operands[0].shape
    return _by_xla(operands, constants, how), jnp.zeros((B, H, T))

  found = how.choose(tpu, xla)(operands, constants)
  o, lse = (checkpoint_name(a, n) for a, n in zip(found, SAVED, strict=True))
  return o, (operands, constants, o, lse)


def _backward(how, saved, do):
  def tpu(operands, constants, o, lse, do):
    arguments = *_arguments(operands, constants, how), o, lse, do
    call = functools.partial(window_attention_tpu.gradients, **how.options)
    kinds = *KINDS, 'tokens', 'sums', 'tokens'
    results = 'tokens', 'tokens', 'tokens', 'heads', 'heads'
    return per_shard(call, kinds, arguments, results)(*arguments)

  def xla(operands, constants, o, lse, do):
    del o, lse
    return jax.vjp(lambda a: _by_xla(a, constants, how), operands)[1](do)[0]

  return how.choose(tpu, xla)(*saved, do), None


_attend.defvjp(_forward, _backward)


def _arguments(operands, constants, how):
  """What the kernels take, all of it arrays."""
  q_BTHK, k_BSHK, v_BSHK, bias_HW, scale_H = operands
  mask_BS, rng = constants
  keep_HSX = None
  if rng is not None:
    H, W = bias_HW.shape
    keep_HSX = keep_mask(rng, how.rate, (H, LANES, W + LANES))
  return q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, keep_HSX


def _by_xla(operands, constants, how):
  q_BTHK, k_BSHK, v_BSHK, bias_HW, scale_H = operands
  mask_BS, rng = constants
  return window_attention_xla.window_attention(
    q_BTHK,
    k_BSHK,
    v_BSHK,
    mask_BS,
    bias_HW,
    scale_H=scale_H,
    sees_self=how.sees_self,
    dropout_rng=rng,
    dropout_rate=how.rate,
  )
