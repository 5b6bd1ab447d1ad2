"""Sampling of the next token from its logits."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from meliad_rec.config.values import check_count
from meliad_rec.config.values import is_number

_LEAST, _MOST = 1e-30, 1e30  # Beyond, float32 may round to 0 or infinity.


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Sampler that draws a token for each row, but never id 0 (padding).

  Logits are divided by the temperature first; then top_k applies, and then
  top_p, to the probabilities of the tokens that are left. Tokens that are as
  likely as the last one that top_k or top_p keeps are kept too.

  Attributes:
    temperature: number, at least 0, by which logits are divided. If it is below
      1e-30, the most likely token is taken.
    top_k: number, at least 1, of most likely tokens to draw from. None means
      all tokens.
    top_p: probability, above 0 and at most 1 (nucleus sampling, Holtzman et al.
      2020). Tokens are drawn from the smallest set of most likely tokens whose
      probabilities add up to at least top_p. 1 means all tokens.

  Raises:
    ValueError: temperature, top_k or top_p is outside its range.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0

  def __post_init__(self):
    warm, p = is_number(self.temperature), is_number(self.top_p)
    if not (warm and 0 <= self.temperature < math.inf):
      raise ValueError(
        'temperature must be a finite number of at least 0, got '
        f'{self.temperature!r}.'
      )
    if self.top_k is not None:
      check_count('top_k', self.top_k, 1)
    if not (p and 0 < self.top_p <= 1):
      raise ValueError(
        f'top_p must be a number above 0 and at most 1, got {self.top_p!r}.'
      )

  def __call__(self, rng_B, logits_BV):
    """Returns the id of one token for each row, [B].

    Args:
      rng_B: a random key for each row.
      logits_BV: logits of the next token of each row.
    """
    logits_BV = logits_BV.at[:, 0].set(-jnp.inf)
    if self.temperature < _LEAST:
      return jnp.argmax(logits_BV, -1)
    logits_BV = self.keep_likely(logits_BV / min(self.temperature, _MOST))
    return jax.vmap(jax.random.categorical)(rng_B, logits_BV)

  def keep_likely(self, logits_BV):
    """Returns the logits, with -inf at tokens that top_k or top_p excludes."""
    if self.top_k is not None:
      k = min(self.top_k, logits_BV.shape[-1])
      least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
      logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if self.top_p < 1:
      sorted_BV = jnp.sort(logits_BV, -1, descending=True)
      p_BV = jax.nn.softmax(sorted_BV, -1)
      # A token is kept if the more likely ones add up to less than top_p.
      kept_BV = jnp.cumsum(p_BV, -1) - p_BV < max(self.top_p, _LEAST)
      least_B1 = jnp.min(
        jnp.where(kept_BV, sorted_BV, jnp.inf), -1, keepdims=True
      )
      logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV
