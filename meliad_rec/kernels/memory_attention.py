"""Attention to memory slots, in no order: which form runs where.

On a TPU the kernels of memory_attention_tpu, where they take the shapes; else
the definition, by XLA (see choice.py). It pays: for a block of 512 states and
512 tokens of a row (8 heads of width 128, bfloat16), by the compiler's estimate
for a v5e in thousands of cycles, those of kernels at most, and beside them what
XLA prepares:

    slots    XLA: forward, with backward    kernels: the same
      512             54, 161                10 + 16,  34 + 44
    1,024             69, 233                19 + 16,  64 + 59
    2,048             94, 394                37 + 16, 125 + 89
    4,096            419, 1,216              75 + 16, 247 + 147
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import cut_alike
from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels import reference
from meliad_rec.kernels.choice import choice
from meliad_rec.kernels.tpu import memory_attention as memory_attention_tpu

# Names of what the backward pass reads besides the arguments, for remat.py.
SAVED = 'memory_attention_output', 'memory_attention_sums'
# Of the arguments of kernels, see per_shard.
KINDS = 'tokens', 'tokens', 'tokens', 'rows', 'heads', 'heads'


def memory_attention(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  *,
  scale_H=None,
  keep_HTS=None,
  form=None,
):
  """As memory_attention_ref.memory_attention, which defines it.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H, keep_HTS: see there.
    form: see window_attention.window_attention; there are none for GPU.

  Raises:
    ValueError: there is no such form, or it does not take the arguments.
  """
  unsupported_reason = memory_attention_tpu.unsupported_reason(
    q_BTHK, k_BSHK, keep_HTS
  )
  chosen = choice(form, {'tpu': unsupported_reason})
  operands, constants = (q_BTHK, k_BSHK, v_BSHK, scale_H), (mask_BS, keep_HTS)
  if not chosen.has_kernels:
    return checkpoint_name(_by_xla(operands, constants), SAVED[0])
  keys = (cut_alike(a, q_BTHK.shape[2]) for a in (k_BSHK, v_BSHK))
  operands = q_BTHK, *keys, scale_H
  return _attend(operands, constants, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands, constants, chosen):
  return _forward(operands, constants, chosen)[0]


def _forward(operands, constants, chosen):
  """operands: q, k, v, scale; constants: mask, factors of dropout."""

  def kernels(platform):
    del platform

    def attend(operands, constants):
      arguments = _arguments(operands, constants)
      call = functools.partial(
        memory_attention_tpu.attend, interpret=chosen.interpret
      )
      return per_shard(call, KINDS, arguments, ('tokens', 'sums'))(*arguments)

    return attend

  def xla(operands, constants):
    B, T, H, _ = operands[0].shape
    return _by_xla(operands, constants), jnp.zeros((B, H, T))

  found = chosen.choose(kernels, xla)(operands, constants)
  o, lse = (checkpoint_name(a, n) for a, n in zip(found, SAVED, strict=True))
  return o, (operands, constants, o, lse)


def _backward(chosen, saved, do):
  def kernels(platform):
    del platform

    def gradients(operands, constants, o, lse, do):
      arguments = *_arguments(operands, constants), o, lse, do
      call = functools.partial(
        memory_attention_tpu.gradients, interpret=chosen.interpret
      )
      kinds = *KINDS, 'tokens', 'sums', 'tokens'
      results = 'tokens', 'tokens', 'tokens', 'heads'
      return per_shard(call, kinds, arguments, results)(*arguments)

    return gradients

  def xla(operands, constants, o, lse, do):
    del o, lse
    return jax.vjp(lambda a: _by_xla(a, constants), operands)[1](do)[0]

  return chosen.choose(kernels, xla)(*saved, do), None


_attend.defvjp(_forward, _backward)


def _arguments(operands, constants):
  q_BTHK, k_BSHK, v_BSHK, scale_H = operands
  mask_BS, keep_HTS = constants
  return q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H, keep_HTS


def _by_xla(operands, constants):
  q_BTHK, k_BSHK, v_BSHK, scale_H = operands
  mask_BS, keep_HTS = constants
  return reference.memory_attention(
    q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H=scale_H, keep_HTS=keep_HTS
  )
