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
    y_BTHK = attend(
      self.config,
      self.relative if self.own else None,
      q_BTHK,
      self.key(n_BSD),
      self.value(n_BSD),
      mask_BS,
      self.keep(x_BTD.shape[1], source_BSD.shape[1]),
    )
    return self.output(x_BTD, y_BTHK)

  def keep(self, T, S):
    """Dropout factors of the probabilities, [H, T, S]; None: there are none."""
    rate = self.config.attention_dropout
    if not rate or not self.has_rng('dropout'):
      return None
    shape = self.config.heads, T, S
    return keep_mask(self.make_rng('dropout'), rate, shape)


def attend(
  config: CoreConfig,
  relative: nn.Module | None,
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  keep_HTS=None,
):
  """What queries read: [B, T, H, K], zeros where no key may be seen.

  Args:
    config: whether attention is causal.
    relative: positions, of positions.py; None: keys have none, and queries see
      them all, as they see memory.
    q_BTHK: queries, scaled.
    k_BSHK, v_BSHK: keys and values.
    mask_BS: bool, those that may be seen.
    keep_HTS: factors of the probabilities; None: 1.
  """
  T = q_BTHK.shape[1]
  seen_BTS = mask_BS[:, None]
  if relative is not None and config.causal:
    seen_BTS = seen_BTS & np.tri(T, dtype=bool)
  seen_BHTS = seen_BTS[:, None]
  logits_BHTS = position_logits(config, relative, q_BTHK, k_BSHK)
  p_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, logits_BHTS, NEVER), -1)
  p_BHTS = jnp.where(seen_BHTS, p_BHTS, 0)
  if keep_HTS is not None:
    p_BHTS = p_BHTS * keep_HTS
  return jnp.einsum('bhts,bshk->bthk', p_BHTS.astype(v_BSHK.dtype), v_BSHK)


def position_logits(config, relative, q_BTHK, k_BSHK):
  """[B, H, T, S] float32; arguments: see attend."""
  if relative is None:
    return products(q_BTHK, k_BSHK)
  turn, back = relative.rotate, relative.rotate_keys
  # Only distances count: from the middle, decays stay nearest to 1.
  first = -(q_BTHK.shape[1] // 2)
  logits_BHTS = products(turn(q_BTHK, first), back(k_BSHK, first))
  if not relative.two_sided or config.causal:
    return logits_BHTS
  behind_TS = ~np.tri(q_BTHK.shape[1], dtype=bool)
  mirrored_BHTS = products(back(q_BTHK, first), turn(k_BSHK, first))
  return jnp.where(behind_TS, mirrored_BHTS, logits_BHTS)


def products(q_BTHK, k_BSHK):
  return jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=jnp.float32
  )
