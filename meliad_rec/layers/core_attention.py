"""Attention of a core: over its own tokens, or over memory slots.

What queries of a core read from keys, in blocks of queries.

Each block's probabilities are made again in the backward pass, so no array of
all queries by all keys is kept, and a causal block reads no key behind it. On a
CPU rows go one after another: the probabilities of a block then stay in cache.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels.reference import NEVER
from meliad_rec.layers import gates
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.dropout import kept_by_row

QUERIES = 128  # Of a block.


def attend(
  config: CoreConfig,
  relative: nn.Module | None,
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  kept=None,
):
  """What queries read: [B, T, H, K], zeros where no key may be seen.

  Args:
    config: whether attention is causal.
    relative: positions, of positions.py; None: keys have none, and queries see
      them all, as they see memory.
    q_BTHK: queries, scaled.
    k_BSHK, v_BSHK: keys and values.
    mask_BS: bool, those that may be seen.
    kept: probabilities that dropout keeps, bool [H, T, S], or of each row [B,
      H, T, S]; None: all.
  """
  pairs = turned(config, relative, q_BTHK, k_BSHK)
  causal = relative is not None and config.causal
  call = functools.partial(_own, causal, config.attention_dropout)
  arguments = mask_BS, kept, v_BSHK, *sum(pairs, ())
  # Left to itself, a compiler may cut rows and queries over the axis of heads.
  kind = 'sums' if _of_rows(kept) else 'heads'
  kinds = 'rows', kind, *['tokens'] * (1 + 2 * len(pairs))
  (y_BTHK,) = per_shard(call, kinds, arguments, ['tokens'])(*arguments)
  return y_BTHK


def _of_rows(kept):
  return kept is not None and kept.ndim == 4


def _own(causal: bool, rate: float, mask_BS, kept, v_BSHK, *pairs_BTHK):
  """`attend` of the rows and heads of a device; pairs one after another."""
  heads_first = lambda a_BSHK: a_BSHK.swapaxes(1, 2)
  v_BHSK, *pairs_BHTK = map(heads_first, (v_BSHK, *pairs_BTHK))
  pairs = list(zip(pairs_BHTK[::2], pairs_BHTK[1::2], strict=True))
  own, shared = (kept, None) if _of_rows(kept) else (None, kept)
  of_rows = (pairs, v_BHSK), mask_BS, own
  read = functools.partial(_read, causal, rate)

  def row_by_row(of_rows, shared):
    each = lambda of_row: read(of_row, shared)
    return jax.lax.map(jax.checkpoint(each), of_rows)

  if pairs[0][0].shape[2] <= QUERIES:
    return (heads_first(read(of_rows, shared)),)
  y_BHTK = jax.lax.platform_dependent(
    of_rows, shared, cpu=row_by_row, default=read
  )
  return (heads_first(y_BHTK),)


def turned(config: CoreConfig, relative: nn.Module | None, q_BTHK, k_BSHK):
  """Queries and keys by their positions: pairs, as `logits` takes them."""
  if relative is None:
    return [(q_BTHK, k_BSHK)]
  turn, back = relative.rotate, relative.rotate_keys
  # Only distances count: from the middle, decays stay nearest to 1.
  first = -(q_BTHK.shape[1] // 2)
  pairs = [(turn(q_BTHK, first), back(k_BSHK, first))]
  if relative.two_sided and not config.causal:
    pairs.append((back(q_BTHK, first), turn(k_BSHK, first)))
  return pairs


def logits(pairs, behind_QS):
  """[..., H, Q, S] float32.

  Args:
    pairs: queries [..., H, Q, K] and keys [..., H, S, K]; of two pairs, the
      second is for keys behind a query.
    behind_QS: bool, those.
  """
  products = [
    jnp.einsum(
      '...qk,...sk->...qs', q_HQK, k_HSK, preferred_element_type=jnp.float32
    )
    for q_HQK, k_HSK in pairs
  ]
  return (
    products[0] if len(pairs) == 1 else jnp.where(behind_QS, *products[::-1])
  )


def _read(causal: bool, rate: float, of_rows, shared_HTS):
  """Of rows, or of one: heads first, [..., H, T, K].

  What dropout keeps is the rows' own, or shared.
  """
  (pairs, v_HSK), mask_S, _ = of_rows
  T, S = pairs[0][0].shape[-2], v_HSK.shape[-2]

  def block(first, of_rows, shared_HTS):
    (pairs, v_HSK), mask_S, kept_HTS = of_rows
    kept_HTS = shared_HTS if kept_HTS is None else kept_HTS
    last = min(first + QUERIES, T)
    end = last if causal else S
    pairs = [(q[..., first:last, :], k[..., :end, :]) for q, k in pairs]
    behind_QS = np.arange(first, last)[:, None] < np.arange(end)
    seen_1QS = mask_S[..., None, None, :end]
    if causal:
      seen_1QS = seen_1QS & ~behind_QS
    logits_HQS = jnp.where(seen_1QS, logits(pairs, behind_QS), NEVER)
    # The floor keeps the exponentials of a query without keys at 0.
    top_HQ1 = jnp.maximum(jnp.max(logits_HQS, -1, keepdims=True), NEVER / 2)
    p_HQS = jnp.exp(logits_HQS - jax.lax.stop_gradient(top_HQ1))
    total_HQ1 = jnp.sum(p_HQS, -1, keepdims=True)
    total_HQ1 = jnp.where(total_HQ1 > 0, total_HQ1, 1)
    if kept_HTS is not None:
      p_HQS = p_HQS * (kept_HTS[..., first:last, :end] / (1 - rate))
    v_HSK = v_HSK[..., :end, :]
    y_HQK = jnp.einsum('...qs,...sk->...qk', p_HQS.astype(v_HSK.dtype), v_HSK)
    return (y_HQK / total_HQ1).astype(v_HSK.dtype)

  if T <= QUERIES:
    return block(0, of_rows, shared_HTS)
  again = jax.checkpoint(block, static_argnums=0)
  blocks = [again(first, of_rows, shared_HTS) for first in range(0, T, QUERIES)]
  return jnp.concatenate(blocks, -2)


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
    dims = config.num_heads, config.head_dim, False, config.dtype
    half = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')
    self.norm = config.norm(dtype=config.dtype)
    if not self.own:
      self.source_norm = config.norm(dtype=config.dtype)
    self.query, self.key = Heads(*dims, half), Heads(*dims, half)
    self.value = Heads(*dims, half)
    if self.own:
      self.relative = config.position(config.num_heads)
    self.output = gates.Residual(
      config.dtype,
      config.dropout,
      config.dropout_kind,
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
    config = self.config
    q_BTHK = self.query(n_BTD) * config.head_dim**-0.5
    y_BTHK = attend(
      config,
      self.relative if self.own else None,
      q_BTHK,
      self.key(n_BSD),
      self.value(n_BSD),
      mask_BS,
      kept(self, config, config.num_heads, x_BTD, source_BSD),
    )
    # One axis, so that the weights are cut by heads.
    return self.output(x_BTD, y_BTHK.reshape(*x_BTD.shape[:2], -1))


def kept(module: nn.Module, config: CoreConfig, heads: int, x_BTD, source_BSD):
  """Which probabilities dropout keeps; None: all.

  Args:
    module: draws from its rng.
    config: rate, and whether each row has its own.
    heads: H.
    x_BTD, source_BSD: what queries and keys are made of.

  Returns:
    bool [H, T, S], or [B, H, T, S] where each row has its own.
  """
  rate, (B, T, _) = config.attention_dropout, x_BTD.shape
  if not rate or not module.has_rng('dropout'):
    return None
  rng, of_row = module.make_rng('dropout'), (heads, T, source_BSD.shape[1])
  if config.dropout_by_row:
    return kept_by_row(rng, rate, (B, *of_row))
  return jax.random.bernoulli(rng, 1 - rate, of_row)
