"""Attention of a core: over its own tokens, or over memory slots."""

from flax import linen as nn

from meliad_rec import gates
from meliad_rec.attention import Heads
from meliad_rec.cores.attend import attend
from meliad_rec.cores.core_config import CoreConfig
from meliad_rec.dropout import keep_factors


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
    # One axis, so that the weights are cut by heads.
    return self.output(x_BTD, y_BTHK.reshape(*x_BTD.shape[:2], -1))

  def keep(self, T, S):
    """Dropout factors of the probabilities, [H, T, S]; None: there are none."""
    config = self.config
    return keep_factors(self, config.attention_dropout, (config.heads, T, S))
