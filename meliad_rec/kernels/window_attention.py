"""Causal sliding-window attention: which form runs where, chosen here alone.

On a TPU the kernels of window_attention_tpu, on a GPU by CUDA those of
window_attention_gpu, where they take the shapes; else the blocked form of
window_attention_xla (see choice.py).
"""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import cut_alike
from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels import xla as window_attention_xla
from meliad_rec.kernels.blocks import keep_mask
from meliad_rec.kernels.choice import Choice
from meliad_rec.kernels.choice import choice
from meliad_rec.kernels.gpu import window_attention as window_attention_gpu
from meliad_rec.kernels.tpu import window_attention as window_attention_tpu

# Names of what the backward pass reads besides the arguments, for remat.py.
SAVED = 'window_attention_output', 'window_attention_sums'
# Kernels by the platform that they are compiled for.
KERNELS = {'tpu': window_attention_tpu, 'cuda': window_attention_gpu}
# Of the arguments of kernels, see per_shard.
KINDS = 'tokens', 'tokens', 'tokens', 'rows', 'heads', 'heads', 'heads'


@dataclasses.dataclass(frozen=True)
class How:
  """What is known when a program is traced.

  Attributes:
    include_self, normalize_own: see window_attention_ref.window_attention.
    rate: of dropout of probabilities.
    choice: of the form.
  """

  include_self: bool
  normalize_own: bool
  rate: float
  choice: Choice

  @property
  def options(self) -> dict:
    """Of kernels."""
    return {
      'include_self': self.include_self,
      'normalize_own': self.normalize_own,
      'interpret': self.choice.interpret,
    }


def window_attention(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  bias_HW,
  *,
  scale_H=None,
  keys_WK=None,
  include_self=False,
  normalize_own=False,
  dropout_rng=None,
  dropout_rate=0.0,
  form=None,
):
  """As window_attention_ref.window_attention, which defines it.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, keys_WK, include_self,
      normalize_own: see there.
    dropout_rng, dropout_rate: see window_attention_xla.window_attention.
    form: one of choice.FORMS; interpreted are kernels without their chip. None:
      what suits the platform and the shapes.

  Raises:
    ValueError: there is no such form, or it does not take the arguments.
  """
  unsupported = {
    name: kernels.unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK)
    for name, kernels in KERNELS.items()
  }
  if form != 'gpu_interpreted' and not unsupported['cuda']:
    unsupported['cuda'] = window_attention_gpu.refusal()
  chosen = choice(form, unsupported)
  if not chosen.has_kernels:
    y_BTHK = window_attention_xla.window_attention(
      q_BTHK,
      k_BSHK,
      v_BSHK,
      mask_BS,
      bias_HW,
      scale_H=scale_H,
      keys_WK=keys_WK,
      include_self=include_self,
      normalize_own=normalize_own,
      dropout_rng=dropout_rng,
      dropout_rate=dropout_rate,
    )
    return checkpoint_name(y_BTHK, SAVED[0])
  keys = (cut_alike(a, q_BTHK.shape[2]) for a in (k_BSHK, v_BSHK))
  operands = q_BTHK, *keys, bias_HW, scale_H
  constants = mask_BS, dropout_rng if dropout_rate else None
  how = How(include_self, normalize_own, dropout_rate, chosen)
  return _attend(operands, constants, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands, constants, how):
  return _forward(operands, constants, how)[0]


def _forward(operands, constants, how):
  """operands: q, k, v, bias, scale; constants: mask, key of dropout."""

  def kernels(platform):
    of = KERNELS[platform]

    def attend(operands, constants):
      arguments = _arguments(operands, constants, how, of)
      call = functools.partial(of.attend, **how.options)
      return per_shard(call, KINDS, arguments, ('tokens', 'sums'))(*arguments)

    return attend

  def xla(operands, constants):
    B, T, H, _ = operands[0].shape
    return _by_xla(operands, constants, how), jnp.zeros((B, H, T))

  found = how.choice.choose(kernels, xla)(operands, constants)
  o, lse = (checkpoint_name(a, n) for a, n in zip(found, SAVED, strict=True))
  return o, (operands, constants, o, lse)


def _backward(how, saved, do):
  def kernels(platform):
    of = KERNELS[platform]

    def gradients(operands, constants, o, lse, do):
      arguments = _arguments(operands, constants, how, of)
      arguments = *arguments, o, lse, do
      call = functools.partial(of.gradients, **how.options)
      kinds = *KINDS, 'tokens', 'sums', 'tokens'
      results = 'tokens', 'tokens', 'tokens', 'heads', 'heads'
      return per_shard(call, kinds, arguments, results)(*arguments)

    return gradients

  def xla(operands, constants, o, lse, do):
    del o, lse
    return jax.vjp(lambda a: _by_xla(a, constants, how), operands)[1](do)[0]

  return how.choice.choose(kernels, xla)(*saved, do), None


_attend.defvjp(_forward, _backward)


def _arguments(operands, constants, how, kernels):
  """What kernels take, all of it arrays."""
  q_BTHK, k_BSHK, v_BSHK, bias_HW, scale_H = operands
  mask_BS, rng = constants
  keep_HSX = None
  if rng is not None:
    (H, W), S = bias_HW.shape, kernels.dropout_block(q_BTHK)
    keep_HSX = keep_mask(rng, how.rate, (H, S, W + S))
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
    include_self=how.include_self,
    normalize_own=how.normalize_own,
    dropout_rng=rng,
    dropout_rate=how.rate,
  )
