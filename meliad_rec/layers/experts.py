"""Sparse mixtures of experts: a token takes few of many sets of parameters.

Tan et al. 2023, "Sparse Universal Transformer", section 3: the way to give a
layer that is shared in depth more parameters for the same work. Letters of this
file: E experts, C those chosen for a token, N all tokens.

The sublayers of a core, of experts: MLP and self-attention.

Tan et al. 2023, "Sparse Universal Transformer", sections 3.1 and 3.3. Keys and
values are shared; queries and outputs are of the experts that a token chose.
"""

import dataclasses
import functools
import math

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import per_row
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.core_attention import attend
from meliad_rec.layers.core_attention import kept
from meliad_rec.layers.core_config import CoreConfig


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


class ExpertMLP(nn.Module):
  """y_BTD of n_BTD; each expert is as wide as an MLP without experts.

  Dropout is behind both linear maps, as there: of the hidden units of each
  expert that a token chose, and of what they say together.
  """

  config: CoreConfig
  experts: Experts

  @nn.compact
  def __call__(self, n_BTD):
    config, E, D = self.config, self.experts.count, n_BTD.shape[-1]
    p_BTE = Router(self.experts, name='choice')(n_BTD)
    kernel = functools.partial(
      Grouped, E, dtype=config.dtype, first=fan_in(1 / 3)
    )
    kernels = (
      kernel(width=config.mlp_dim, name='hidden')(D),
      kernel(width=D, name='output')(config.mlp_dim),
    )

    drop = functools.partial(config.dropout_kind, config.dropout)

    def mixed(of_rows, kernels):
      (n_BTD, p_BTE, keep_BTCF), (hidden, output) = of_rows, kernels
      chosen = choose(p_BTE, self.experts.chosen)
      h_MF = grouped(chosen.spread(n_BTD), hidden, chosen.size_E)
      if keep_BTCF is not None:
        h_MF = h_MF * chosen.sort(keep_BTCF)
      y_MD = grouped(config.activation(h_MF), output, chosen.size_E)
      return chosen.mix(y_MD)

    keep_BTCF = None
    if self.has_rng('dropout') and config.dropout:
      shape = *n_BTD.shape[:2], self.experts.chosen, config.mlp_dim
      ones_BTX = jnp.ones((*shape[:2], shape[2] * shape[3]), config.dtype)
      keep_BTCF = drop()(ones_BTX).reshape(shape)
    of_rows = n_BTD, p_BTE, keep_BTCF
    y_BTD = per_row(mixed, of_rows, kernels).astype(config.dtype)
    return drop()(y_BTD)


class ExpertAttention(nn.Module):
  """What pre-norm self-attention of experts adds to the stream.

  As cores.attention.Attention.
  """

  config: CoreConfig
  experts: Experts

  def setup(self):
    config, E = self.config, self.experts.count
    width = config.num_heads * config.head_dim
    dims = config.num_heads, config.head_dim, False, config.dtype
    half = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')
    self.norm = config.norm(dtype=config.dtype)
    self.choice = Router(self.experts)
    self.query = Grouped(E, width, config.dtype, fan_in(0.5))
    self.key, self.value = Heads(*dims, half), Heads(*dims, half)
    self.relative = config.position(config.num_heads)
    self.output = Grouped(E, config.d_model, config.dtype, fan_in(1.0))
    self.drop = config.dropout_kind(config.dropout)

  def __call__(self, x_BTD, source_BSD, mask_BS):
    """The stream; arguments: see Attention."""
    config, C = self.config, self.experts.chosen
    (B, T, _), H, K = x_BTD.shape, config.num_heads, config.head_dim
    n_BTD, n_BSD = self.norm(x_BTD), self.norm(source_BSD)
    p_BTE = self.choice(n_BTD)

    def queries(of_rows, kernel):
      n_BTD, p_BTE = of_rows
      chosen = choose(p_BTE, C)
      return chosen.gather(grouped(chosen.spread(n_BTD), kernel, chosen.size_E))

    def outputs(of_rows, kernel):
      y_BTCF, p_BTE = of_rows
      chosen = choose(p_BTE, C)
      return chosen.mix(grouped(chosen.sort(y_BTCF), kernel, chosen.size_E))

    kernel = self.query(n_BTD.shape[-1])
    q_BTCF = per_row(queries, (n_BTD, p_BTE), kernel) * K**-0.5
    # A token's chosen experts are so many more of each head, over its keys;
    # heads in front, as they are cut over devices.
    q_BTHCK = q_BTCF.reshape(B, T, C, H, K).swapaxes(2, 3)
    q_BTGK = q_BTHCK.reshape(B, T, H * C, K)
    same = lambda kv_BSHK: jnp.repeat(kv_BSHK, C, 2)
    y_BTGK = attend(
      config,
      self.relative,
      q_BTGK,
      same(self.key(n_BSD)),
      same(self.value(n_BSD)),
      mask_BS,
      kept(self, config, H * C, x_BTD, source_BSD),
    )
    y_BTCHK = y_BTGK.reshape(B, T, H, C, K).swapaxes(2, 3)
    y_BTCF = y_BTCHK.reshape(B, T, C, H * K)
    y_BTD = per_row(outputs, (y_BTCF, p_BTE), self.output(H * K))
    return x_BTD + self.drop(y_BTD.astype(x_BTD.dtype))
