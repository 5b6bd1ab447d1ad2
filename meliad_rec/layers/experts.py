"""Sparse mixtures of experts: each token uses a few of many sets of weights.

Tan et al. 2023, "Sparse Universal Transformer", section 3; section 3.1 is about
the MLP and 3.3 about self-attention. Experts give more parameters to a layer
that is repeated in depth. The layer's cost per token grows with the number of
experts chosen for a token, not with the number of all experts. On a CPU,
however, it grows with the number of all experts (see `grouped`). In
self-attention, all experts share the keys and values, and each expert has its
own maps to queries and outputs.

Letters of this file: E experts, C experts chosen for a token, N = B T tokens of
a batch, M = N C choices, G = H C heads of all experts chosen for a token, X and
Y any widths.
"""

import dataclasses
import functools
import math

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import per_row
from meliad_rec.layers.attention import attend
from meliad_rec.layers.attention import attention_weights
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.dropout import attention_keep
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.linear import with_cheap_gradient
from meliad_rec.metrics import pictures


@dataclasses.dataclass(frozen=True)
class Experts:
  """Settings of a mixture of experts.

  Attributes:
    count: number of experts E, in the MLP and in self-attention.
    chosen: number of experts C that a token uses.
    in_attention: whether self-attention has experts too.
    balance: weight of `mean_imbalance` as a loss, which keeps all experts in
      use.
  """

  count: int
  chosen: int
  in_attention: bool = True
  balance: float = 0.01

  def __post_init__(self):
    if not 1 <= self.chosen <= self.count:
      raise ValueError(
        f'chosen must be from 1 to the number of experts, {self.count}, got '
        f'{self.chosen}. Set CHOSEN or EXPERTS.'
      )
    if self.balance < 0:
      raise ValueError(
        f'balance must be at least 0, got {self.balance}. Set EXPERT_BALANCE.'
      )


class Chosen(struct.PyTreeNode):
  """The experts chosen for each token, and an order of choices by expert.

  For each of the B T tokens, C experts are chosen. A choice is one such pair of
  token and expert; there are M = B T C. X is any width of vectors.

  Attributes:
    weight_BTC: float32, probabilities of the chosen experts.
    order_M: int, indices of the choices, flattened from [B, T, C], in an order
      that sorts them by expert.
    size_E: int32, how many choices fell on each of the E experts.
  """

  weight_BTC: jax.Array
  order_M: jax.Array
  size_E: jax.Array

  @property
  def count(self) -> int:
    """Number C of experts chosen for a token."""
    return self.weight_BTC.shape[-1]

  def spread(self, x_BTX):
    """Copies each token's vector for each of its choices.

    Returns:
      [M, X]: the vectors of all M choices, sorted by expert.
    """
    x_NX = x_BTX.reshape(-1, x_BTX.shape[-1])
    return x_NX[self.order_M // self.count]

  def sort(self, x_BTCX):
    """Returns [M, X]: the vectors of all M choices, sorted by expert."""
    return x_BTCX.reshape(-1, x_BTCX.shape[-1])[self.order_M]

  def gather(self, y_MX):
    """Undoes `sort`: returns [B, T, C, X], the vectors of all choices."""
    shape = *self.weight_BTC.shape, y_MX.shape[-1]
    # order_M is a permutation, so argsort inverts it.
    places_M = jnp.argsort(self.order_M)
    return y_MX[places_M].reshape(shape)

  def mix(self, y_MX):
    """Sums the vectors of each token's choices, weighted by `weight_BTC`.

    Args:
      y_MX: vectors of all M choices, sorted by expert.

    Returns:
      [B, T, X] float32.
    """
    y_BTCX = self.gather(y_MX).astype(jnp.float32)
    return jnp.einsum('btc,btcx->btx', self.weight_BTC, y_BTCX)


class Router(nn.Module):
  """Linear map and softmax: n_BTD -> p_BTE float32, probabilities of experts.

  The probabilities are also sown in the collection 'routes'.

  Attributes:
    experts: number of experts, and how many each token chooses.
  """

  experts: Experts

  @nn.compact
  def __call__(self, n_BTD):
    E = self.experts.count
    dense = nn.Dense(E, use_bias=False, dtype='float32', name='router')
    p_BTE = jax.nn.softmax(dense(n_BTD.astype(jnp.float32)))
    self.sow('routes', 'p', p_BTE)
    return p_BTE


def choose(p_BTE, count: int) -> Chosen:
  """Chooses the `count` most probable experts of each token.

  The function sorts the choices of all tokens. It must be called within
  per_shard.per_row; otherwise the devices of a mesh would exchange tokens.
  """
  weight_BTC, expert_BTC = jax.lax.top_k(p_BTE, count)
  expert_M = expert_BTC.reshape(-1)
  order_M = jnp.argsort(expert_M, stable=True)
  is_of_ME = expert_M[:, None] == jnp.arange(p_BTE.shape[-1])
  size_E = jnp.sum(is_of_ME, 0, dtype=jnp.int32)
  return Chosen(weight_BTC, order_M, size_E)


class Grouped(nn.Module):
  """Parameter [E, X, Y], one matrix for each expert; see `grouped`.

  The argument of a call is the input width X.

  Attributes:
    count: number of experts E.
    width: output width Y.
    dtype: dtype of the result.
    kernel_init: initializer of the matrices.
  """

  count: int
  width: int
  dtype: str
  kernel_init: nn.initializers.Initializer

  @nn.compact
  def __call__(self, inputs: int):
    shape = self.count, inputs, self.width
    return self.param('kernel', self.kernel_init, shape).astype(self.dtype)


def grouped(x_MX, kernel_EXY, size_E):
  """Multiplies each vector by the matrix of its expert: returns [M, Y].

  The result has the dtype of the matrices. On a TPU, XLA computes only
  these products. On a CPU, XLA multiplies every vector by the matrix of every
  expert.

  Args:
    x_MX: M vectors of width X, sorted by expert.
    kernel_EXY: matrices [X, Y] of the E experts.
    size_E: number of vectors of each expert.
  """
  dtype = kernel_EXY.dtype
  return jax.lax.ragged_dot(
    x_MX.astype(dtype), kernel_EXY, size_E, preferred_element_type=jnp.float32
  ).astype(dtype)


def fan_in(scale: float) -> nn.initializers.Initializer:
  """Returns an initializer of matrices [E, X, Y], where X is the input width.

  It draws from a uniform distribution of mean 0 and variance scale / X.
  """

  def draw(rng, shape, dtype=jnp.float32):
    most = math.sqrt(3 * scale / shape[-2])
    return jax.random.uniform(rng, shape, dtype, -most, most)

  return draw


class Routes(struct.PyTreeNode):
  """Sums of one router's probabilities over the selected tokens of each row.

  Attributes:
    p_BE: sum of the probabilities of each of the E experts.
    entropy_B: sum of the entropies of the tokens' probabilities, in nats.
    count_B: number of tokens in the sums.
  """

  p_BE: jax.Array
  entropy_B: jax.Array
  count_B: jax.Array


def routes(sown, taken_BT) -> list[Routes]:
  """Returns the Routes of each router in one call of a layer.

  Args:
    sown: the collection 'routes', which the routers sowed in this call.
    taken_BT: bool, True at tokens to include in the sums.
  """
  taken_BT = taken_BT.astype(jnp.float32)
  return [
    Routes(
      jnp.einsum('bte,bt->be', p_BTE, taken_BT),
      jnp.sum(entropy_of(p_BTE) * taken_BT, 1),
      jnp.sum(taken_BT, 1),
    )
    for p_BTE in jax.tree.leaves(sown)
  ]


def mean_imbalance(all_routes: list[Routes]) -> jax.Array:
  """Returns the mean of `imbalance` over routers, in nats.

  The imbalance of a router is computed over the selected tokens of all rows.

  Args:
    all_routes: the sums of each router.
  """
  values = []
  for router in all_routes:
    total = jax.tree.map(lambda a: jnp.sum(a, 0), router)
    count = jnp.maximum(total.count_B, 1)
    values.append(imbalance(total.p_BE / count, total.entropy_B / count))
  return sum(values) / len(values)


def imbalance(p_E, entropy):
  """Returns the negative mutual information of token and expert, in nats.

  It is the mean entropy of a token's probabilities, minus the entropy of the
  mean probabilities; section 3.2. It is lowest, -ln E, if each token chooses
  one expert with certainty and all experts are used equally. It is 0 if all
  tokens have the same probabilities.

  Args:
    p_E: probability of each expert, mean over tokens.
    entropy: entropy of a token's probabilities in nats, mean over tokens.
  """
  return entropy - entropy_of(p_E)


def entropy_of(p_E):
  """Returns the entropy in nats of probabilities on the last axis.

  Its gradient is finite even at probabilities of 0. They occur if a softmax
  underflows, and in means over no tokens.
  """
  least = jnp.finfo(p_E.dtype).tiny
  return -jnp.sum(p_E * jnp.log(jnp.maximum(p_E, least)), -1)


class ExpertMLP(nn.Module):
  """MLP with experts, from n_BTD to y_BTD.

  Each expert has `config.mlp_dim` hidden units. Dropout applies to the hidden
  units of the chosen experts, and to the weighted sum of their outputs.

  Attributes:
    config: sizes and choices of the layer.
    experts: number of experts, and how many each token chooses.
  """

  config: EncoderConfig
  experts: Experts

  @nn.compact
  def __call__(self, n_BTD):
    config, E, D = self.config, self.experts.count, n_BTD.shape[-1]
    p_BTE = Router(self.experts, name='choice')(n_BTD)
    kernel = functools.partial(
      Grouped, E, dtype=config.dtype, kernel_init=fan_in(1 / 3)
    )
    kernels = (
      kernel(width=config.mlp_dim, name='hidden')(D),
      kernel(width=D, name='output')(config.mlp_dim),
    )

    def mixed(rows, kernels):
      (n_BTD, p_BTE, keep_BTCF), (hidden, output) = rows, kernels
      chosen = choose(p_BTE, self.experts.chosen)
      h_MF = grouped(chosen.spread(n_BTD), hidden, chosen.size_E)
      if keep_BTCF is not None:
        h_MF = h_MF * chosen.sort(keep_BTCF)
      h_MF = with_cheap_gradient(config.activation)(h_MF)
      y_MD = grouped(h_MF, output, chosen.size_E)
      return chosen.mix(y_MD)

    keep_BTCF = None
    if self.has_rng('dropout') and config.hidden_rate:
      shape = *n_BTD.shape[:2], self.experts.chosen, config.mlp_dim
      ones_BTX = jnp.ones((*shape[:2], shape[2] * shape[3]), config.dtype)
      drop = config.dropout_kind(config.hidden_rate)
      keep_BTCF = drop(ones_BTX).reshape(shape)
    rows = n_BTD, p_BTE, keep_BTCF
    y_BTD = per_row(mixed, rows, kernels).astype(config.dtype)
    return config.dropout_kind(config.dropout)(y_BTD)


class ExpertAttention(nn.Module):
  """Self-attention with experts, added to the residual stream.

  Attributes:
    config: sizes and choices of the layer.
    experts: number of experts, and how many each token chooses.
  """

  config: EncoderConfig
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
    """Returns the residual stream plus the result of attention, [B, T, D].

    The arguments are as in EncoderAttention.__call__.
    """
    config, C = self.config, self.experts.chosen
    (B, T, _), H, K = x_BTD.shape, config.num_heads, config.head_dim
    pre_norm = (lambda x_BTD: x_BTD) if config.post_norm else self.norm
    n_BTD, n_BSD = pre_norm(x_BTD), pre_norm(source_BSD)
    p_BTE = self.choice(n_BTD)

    def queries(rows, kernel):
      n_BTD, p_BTE = rows
      chosen = choose(p_BTE, C)
      return chosen.gather(grouped(chosen.spread(n_BTD), kernel, chosen.size_E))

    def outputs(rows, kernel):
      y_BTCF, p_BTE = rows
      chosen = choose(p_BTE, C)
      return chosen.mix(grouped(chosen.sort(y_BTCF), kernel, chosen.size_E))

    kernel = self.query(n_BTD.shape[-1])
    q_BTCF = per_row(queries, (n_BTD, p_BTE), kernel) * K**-0.5
    # Each of its C experts gives a token one query per head. Heads are the
    # first of these axes, since they are sharded over devices.
    q_BTHCK = q_BTCF.reshape(B, T, C, H, K).swapaxes(2, 3)
    q_BTGK = q_BTHCK.reshape(B, T, H * C, K)
    repeated = lambda kv_BSHK: jnp.repeat(kv_BSHK, C, 2)
    k_BSGK = repeated(self.key(n_BSD))
    weights = lambda: attention_weights(
      self.relative, q_BTGK, k_BSGK, mask_BS, config.causal
    )
    pictures.sow(self, 'token_to_token', weights)
    y_BTGK = attend(
      self.relative,
      q_BTGK,
      k_BSGK,
      repeated(self.value(n_BSD)),
      mask_BS,
      causal=config.causal,
      keep=attention_keep(
        self,
        config.attention_dropout,
        (B, H * C, T, source_BSD.shape[1]),
        config.dropout_by_row,
      ),
      dropout_rate=config.attention_dropout,
    )
    y_BTCHK = y_BTGK.reshape(B, T, H, C, K).swapaxes(2, 3)
    y_BTCF = y_BTCHK.reshape(B, T, C, H * K)
    y_BTD = per_row(outputs, (y_BTCF, p_BTE), self.output(H * K))
    y_BTD = x_BTD + self.drop(y_BTD.astype(x_BTD.dtype))
    return self.norm(y_BTD) if config.post_norm else y_BTD
