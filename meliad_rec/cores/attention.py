"""Attention of a core: over its own tokens, or over memory slots."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec import gates
from meliad_rec.attention import Heads
from meliad_rec.cores.core_config import CoreConfig
from meliad_rec.dropout import keep_mask
from meliad_rec.kernels.window_attention_ref import NEVER


class Attention(nn.Module):
  """What pre-norm attention adds to the stream.

  Attributes:
    config: sizes and choices.
    own: whether keys are of the tokens themselves, or of what comes from
      elsewhere: then with a norm of their own, without positions or causality.
  """

  config: CoreConfig
  own: bool = True

  def setup(self):
    config = self.config
    dims = config.heads, config.head_width, False, config.dtype
    half = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')
    self.norm = config.norm(dtype=config.dtype)
    if not self.own:
      self.source_norm = config.norm(dtype=config.dtype)
    self.query, self.key = Heads(*dims, half), Heads(*dims, half)
    self.value = Heads(*dims, half)
    if self.own:
      self.relative = config.position(config.heads)
    self.output = gates.Residual(
      config.dtype,
      config.dropout,
      first=nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
    )

  def __call__(self, x_BTD, source_BSD, mask_BS):
    """The stream x_BTD, with what it reads from the source added.

    Args:
      x_BTD: the stream.
      source_BSD: what keys and values are made of.
      mask_BS: bool, places of the source that may be seen.
    """
    n_BTD = self.norm(x_BTD)
    n_BSD = (self.norm if self.own else self.source_norm)(source_BSD)
    q_BTHK = self.query(n_BTD) * self.config.head_width**-0.5
    k_BSHK, v_BSHK = self.key(n_BSD), self.value(n_BSD)
    seen_BTS = mask_BS[:, None]
    if self.own and self.config.causal:
      T = x_BTD.shape[1]
      seen_BTS = seen_BTS & np.tri(T, dtype=bool)
    seen_BHTS = seen_BTS[:, None]
    logits_BHTS = self.logits(q_BTHK, k_BSHK)
    p_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, logits_BHTS, NEVER), -1)
    p_BHTS = jnp.where(seen_BHTS, p_BHTS, 0)
    p_BHTS = self.drop(p_BHTS).astype(v_BSHK.dtype)
    return self.output(x_BTD, jnp.einsum('bhts,bshk->bthk', p_BHTS, v_BSHK))

  def logits(self, q_BTHK, k_BSHK):
    """[B, H, T, S] float32."""
    if not self.own:
      return products(q_BTHK, k_BSHK)
    turn, back = self.relative.rotate, self.relative.rotate_keys
    # Only distances count: from the middle, decays stay nearest to 1.
    first = -(q_BTHK.shape[1] // 2)
    logits_BHTS = products(turn(q_BTHK, first), back(k_BSHK, first))
    if not self.relative.two_sided or self.config.causal:
      return logits_BHTS
    behind_TS = ~np.tri(q_BTHK.shape[1], dtype=bool)
    mirrored_BHTS = products(back(q_BTHK, first), turn(k_BSHK, first))
    return jnp.where(behind_TS, mirrored_BHTS, logits_BHTS)

  def drop(self, p_BHTS):
    rate = self.config.attention_dropout
    if not rate or not self.has_rng('dropout'):
      return p_BHTS
    return p_BHTS * keep_mask(self.make_rng('dropout'), rate, p_BHTS.shape[1:])


def products(q_BTHK, k_BSHK):
  return jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=jnp.float32
  )
