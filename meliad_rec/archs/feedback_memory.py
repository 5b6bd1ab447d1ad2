"""What a Feedback Transformer writes to memory (Fan et al. 2020, section 3.3).

Each is a module that takes the hidden vectors of one token, layer by layer, the
embedding first: L + 1 arrays [B, T, D]. It gives what is written: one array
that all layers read, or `arrays` of them, one for each layer.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp


class Composition(nn.Module):
  """Base class."""

  def arrays(self, layers: int) -> int:
    """How many are written by a token of so many layers."""
    return 1


class WeightedSum(Composition):
  """All layers, by learned weights that sum to one: equation 1."""

  @nn.compact
  def __call__(self, hidden):
    return [_mix(self, 'mix', hidden)]


class Average(Composition):
  """The mean of all layers, the embedding among them."""

  def __call__(self, hidden):
    return [sum(hidden) / len(hidden)]


class OneLayer(Composition):
  """The output of one layer: -1 is the top, 0 the embedding."""

  layer: int = -1

  def __call__(self, hidden):
    if not -len(hidden) <= self.layer < len(hidden):
      raise ValueError(
        f'Memory is layer {self.layer} of {len(hidden) - 1}; set '
        'feedback_memory.OneLayer.layer from 0, the embedding, to '
        f'{len(hidden) - 1}.'
      )
    return [hidden[self.layer]]


class OwnAndBelow(Composition):
  """For each layer, a weighted sum of its own output and those below it.

  The paper's "recurrent" Transformer: a layer reads what it wrote itself, but
  nothing from above.
  """

  def arrays(self, layers):
    return layers

  @nn.compact
  def __call__(self, hidden):
    return [
      _mix(self, f'mix_{i}', hidden[: i + 1]) for i in range(1, len(hidden))
    ]


def _mix(module, name: str, hidden):
  weight_L = module.param(name, nn.initializers.zeros, (len(hidden),))
  weight_L = jax.nn.softmax(weight_L).astype(hidden[0].dtype)
  return jnp.einsum('l,lbtd->btd', weight_L, jnp.stack(hidden))  # eq. 1
