"""Sparse mixtures of experts: a token takes few of many sets of parameters.

Tan et al. 2023, "Sparse Universal Transformer", section 3: the way to give a
layer that is shared in depth more parameters for the same work. Letters of this
file: E experts, C those chosen for a token, N all tokens.
"""

import dataclasses
import math

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Experts:
  """What is mixed.

  Attributes:
    count: experts E of the MLP, and of queries and outputs of self-attention.
    chosen: of them that a token takes, C.
    in_attention: whether attention has experts too.
    balance: weight of the loss that keeps all of them in use.
  """

  count: int
  chosen: int
  in_attention: bool = True
  balance: float = 0.01

  def __post_init__(self):
    if not 1 <= self.chosen <= self.count:
      raise ValueError(
        f'{self.chosen} of {self.count} experts are chosen; set EXPERTS to 1 '
        'or more, and CHOSEN from 1 to EXPERTS.'
      )
    if self.balance < 0:
      raise ValueError(
        f'balance is {self.balance}; it needs 0 or more. Set EXPERT_BALANCE.'
      )


class Chosen(struct.PyTreeNode):
  """Which experts each token takes, and how they are sorted by expert."""

  weight_BTC: jax.Array  # float32.
  order_M: jax.Array  # int, M = N C places, sorted by expert.
  size_E: jax.Array  # int32, places of each expert.

  @property
  def count(self) -> int:
    return self.weight_BTC.shape[-1]

  def spread(self, x_BTX):
    """[M, X] of each token's vector, once for each of its experts, sorted."""
    x_NX = x_BTX.reshape(-1, x_BTX.shape[-1])
    return x_NX[self.order_M // self.count]

  def sort(self, x_BTCX):
    """[M, X] of vectors that each choice has for itself, sorted."""
    return x_BTCX.reshape(-1, x_BTCX.shape[-1])[self.order_M]

  def gather(self, y_MX):
    """[B, T, C, X] of sorted vectors: `sort` undone."""
    shape = *self.weight_BTC.shape, y_MX.shape[-1]
    # Each place occurs once: a scatter of so many is a permutation.
    places_M = jnp.argsort(self.order_M)
    return y_MX[places_M].reshape(shape)

  def mix(self, y_MX):
    """[B, T, X] float32: the sum of what the experts say, weighted."""
    y_BTCX = self.gather(y_MX).astype(jnp.float32)
    return jnp.einsum('btc,btcx->btx', self.weight_BTC, y_BTCX)


class Router(nn.Module):
  """Probabilities of all experts, [B, T, E] float32; sown as 'routes' too."""

  experts: Experts

  @nn.compact
  def __call__(self, n_BTD):
    E = self.experts.count
    dense = nn.Dense(E, use_bias=False, dtype='float32', name='router')
    p_BTE = jax.nn.softmax(dense(n_BTD.astype(jnp.float32)))
    self.sow('routes', 'p', p_BTE)
    return p_BTE


def choose(p_BTE, count: int) -> Chosen:
  """The likeliest experts of each token.

  A sort of all tokens: for those of one device, or all devices exchange them
  (see kernels.per_shard.per_row).
  """
  weight_BTC, expert_BTC = jax.lax.top_k(p_BTE, count)
  expert_M = expert_BTC.reshape(-1)
  order_M = jnp.argsort(expert_M, stable=True)
  is_of_ME = expert_M[:, None] == jnp.arange(p_BTE.shape[-1])
  size_E = jnp.sum(is_of_ME, 0, dtype=jnp.int32)
  return Chosen(weight_BTC, order_M, size_E)


class Grouped(nn.Module):
  """A matrix for each expert, [E, X, Y], for `grouped`."""

  count: int
  width: int
  dtype: str
  first: nn.initializers.Initializer

  @nn.compact
  def __call__(self, inputs: int):
    shape = self.count, inputs, self.width
    return self.param('kernel', self.first, shape).astype(self.dtype)


def grouped(x_MX, kernel_EXY, size_E):
  """Rows sorted by expert, each by the matrix of its own: [M, Y].

  On TPU only the products that are asked for are computed; XLA for a CPU
  computes those of every row with every expert.
  """
  dtype = kernel_EXY.dtype
  return jax.lax.ragged_dot(
    x_MX.astype(dtype), kernel_EXY, size_E, preferred_element_type=jnp.float32
  ).astype(dtype)


def fan_in(scale: float) -> nn.initializers.Initializer:
  """Uniform numbers of variance scale / inputs, for each expert."""

  def draw(rng, shape, dtype=jnp.float32):
    most = math.sqrt(3 * scale / shape[-2])
    return jax.random.uniform(rng, shape, dtype, -most, most)

  return draw


class Routes(struct.PyTreeNode):
  """Sums over the tokens of a row that took a step, of one router."""

  p_BE: jax.Array  # Probabilities.
  entropy_B: jax.Array  # Of a token's probabilities, nats.
  count_B: jax.Array  # Tokens.


def routes(sown, taken_BT) -> list[Routes]:
  """Those of the routers of a layer.

  Args:
    sown: the collection 'routes'.
    taken_BT: bool, tokens that count.
  """
  taken_BT = taken_BT.astype(jnp.float32)
  return [
    Routes(
      jnp.einsum('bte,bt->be', p_BTE, taken_BT),
      jnp.sum(jax.scipy.special.entr(p_BTE).sum(-1) * taken_BT, 1),
      jnp.sum(taken_BT, 1),
    )
    for p_BTE in jax.tree.leaves(sown)
  ]


def mean_imbalance(all_routes: list[Routes]) -> jax.Array:
  """The mean over routers, each over all of its tokens."""
  found = []
  for of_router in all_routes:
    total = jax.tree.map(lambda a: jnp.sum(a, 0), of_router)
    count = jnp.maximum(total.count_B, 1)
    found.append(imbalance(total.p_BE / count, total.entropy_B / count))
  return sum(found) / len(found)


def imbalance(p_E, entropy):
  """Nats that the choice of an expert lacks of saying all it can of a token.

  Mean entropy of a token's probabilities less the entropy of the mean, section
  3.2's mutual information with its sign turned. At least -ln E, where tokens
  are sure and experts are used alike; 0 where all tokens choose the same.

  Args:
    p_E: probabilities, mean over tokens.
    entropy: of each token's probabilities, mean over tokens, nats.
  """
  return entropy - jnp.sum(jax.scipy.special.entr(p_E))
