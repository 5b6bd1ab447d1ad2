"""The probability of halting, from vectors in float32."""

from flax import linen as nn
import jax
import jax.numpy as jnp


class HaltingGate(nn.Module):
  """Two linear maps and a sigmoid: p [B, U] of h [B, U, any width].

  "Investigating Recurrent Transformers with Dynamic Halt" (2024), eq. 5.

  Attributes:
    width: hidden units.
    bias_init: the last bias at first. At 0, as in the paper, p is about 0.5 and
      three quarters of the output are those of the first two steps; at -3 a new
      model goes deep, and learns to halt earlier.
  """

  width: int
  bias_init: float = 0.0

  @nn.compact
  def __call__(self, *h_BUX):
    first = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    h_BUX = jnp.concatenate([h.astype(jnp.float32) for h in h_BUX], -1)
    hidden = nn.Dense(self.width, kernel_init=first, name='hidden')
    h_BUF = jax.nn.gelu(hidden(h_BUX), approximate=False)
    bias = nn.initializers.constant(self.bias_init)
    last = nn.Dense(1, kernel_init=first, bias_init=bias, name='last')
    return jax.nn.sigmoid(last(h_BUF))[..., 0]


def mean(h_BTD, mask_BT, causal: bool):
  """Means over tokens, float32, padding left out.

  Args:
    h_BTD: vectors.
    mask_BT: False at padding.
    causal: whether each token has the mean of itself and those before it.

  Returns:
    [B, T, D] where causal, else [B, 1, D]; zeros where there is no token.
  """
  mask_BT1 = mask_BT[..., None].astype(jnp.float32)
  h_BTD = h_BTD.astype(jnp.float32) * mask_BT1
  if causal:
    total, count = jnp.cumsum(h_BTD, 1), jnp.cumsum(mask_BT1, 1)
  else:
    total, count = (jnp.sum(a, 1, keepdims=True) for a in (h_BTD, mask_BT1))
  return total / jnp.maximum(count, 1)
