"""How the next token is drawn from its logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws tokens; id 0, which no document holds, is never drawn.

  Attributes:
    temperature: logits are divided by it; 0 takes the likeliest token.
    top_k: only so many of the likeliest tokens may be drawn; None: all.
    top_p: only the likeliest tokens that together reach this probability
      (nucleus sampling, Holtzman et al. 2020); 1: all.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0

  def __post_init__(self):
    if not 0 <= self.temperature < math.inf:
      raise ValueError(
        f'temperature is {self.temperature}; it must be 0 or more.'
      )
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f'top_k is {self.top_k}; it must be 1 or more.')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p is {self.top_p}; it must be in (0, 1].')

  def __call__(self, rng_B, logits_BV):
    """Ids [B], one drawn in each row by its own key."""
    logits_BV = logits_BV.at[:, 0].set(-jnp.inf)
    if self.temperature == 0:
      return jnp.argmax(logits_BV, -1)
    logits_BV = self.keep_likely(logits_BV / self.temperature)
    return jax.vmap(jax.random.categorical)(rng_B, logits_BV)

  def keep_likely(self, logits_BV):
    """Logits, -inf at tokens that top_k or top_p leave out."""
    if self.top_k is not None:
      k = min(self.top_k, logits_BV.shape[-1])
      least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
      logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if self.top_p < 1:
      sorted_BV = jnp.sort(logits_BV, -1, descending=True)
      p_BV = jax.nn.softmax(sorted_BV, -1)
      # A token stays while those before it have not reached top_p.
      stays_BV = jnp.cumsum(p_BV, -1) - p_BV < self.top_p
      least_B1 = jnp.min(
        jnp.where(stays_BV, sorted_BV, jnp.inf), -1, keepdims=True
      )
      logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV
