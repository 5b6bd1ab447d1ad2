"""Memorizing Transformer layer (Wu et al. 2022, section 3).

Each token attends to its window and to the best of many older keys: those with
the highest scores, which are products of query and key. Older keys and values
get no gradients. A gate for each head mixes the two results.

There are two differences from google-research/meliad. The layer of meliad has
no position bias, even within the window; here the config sets one, which
options/memorizing/position_none removes. The search of meliad divides the older
keys into buckets, and takes the best key of each; here a query attends to the
`neighbors` best of all older keys, and to keys that tie with the last of these.

Letters of this file: N tiles, which are groups of Q queries. All queries of a
tile are compared with the older keys at once.
"""

import functools
import math

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels.reference import MASKED
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer import scaled
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.metrics import metrics
from meliad_rec.metrics import pictures
from meliad_rec.metrics.metrics import MeanMetric
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import Resettable
from meliad_rec.recurrence.memory_scan import divisor

SHOWN = 16  # Recalled keys in pictures, at most.


class MemorizingLayer(Cell):
  """State: keys and values of the window, and a Ring of many more tokens.

  Attributes:
    config: sizes and choices.
    memory: number of tokens that each token may recall: the last ones before
      the block of this token. A multiple of the window.
    neighbors: number of keys of these tokens that a query attends to: those
      with the highest scores, plus any that tie with the last of them. None
      means all keys of these tokens.
    room: maximum number of tokens written to the ring at once, a multiple of
      the window; the ring holds memory + room tokens. Longer segments are cut
      into parts, and the backward pass keeps a copy of the ring for each part.
    recall_target: share of the highest scores that an approximate search,
      jax.lax.approx_max_k, should find; it is above 0 and at most 1. None
      selects an exact search, which is slower on a TPU. After an approximate
      search, a query attends to every key that scores at least the midpoint
      between number `neighbors` and the next of the keys found, even if the
      search missed the key. A query may thus attend to more than `neighbors`
      keys, but the `neighbors` best are always among them.
    tile: maximum number of queries compared with the ring at once. It is
      rounded down to a divisor of the window.
  """

  config: LayerConfig
  memory: int
  neighbors: int | None
  room: int
  recall_target: float | None = None
  tile: int = 128

  takes_segments = True
  is_recurrent = True
  can_step = True

  @property
  def block_length(self):
    return self.config.window

  def setup(self):
    W, neighbors = self.config.window, self.neighbors
    for name in 'memory', 'room':
      tokens = getattr(self, name)
      if tokens < 1 or tokens % W:
        raise ValueError(
          f'{name} must be a multiple of the window, {W} tokens, got {tokens}. '
          f'Set {"MEMORY" if name == "memory" else "SEGMENT"}.'
        )
    if neighbors is not None and not 1 <= neighbors <= self.memory:
      raise ValueError(
        f'neighbors must be None or from 1 to {self.memory}, the tokens in '
        f'memory, got {neighbors}. Set NEIGHBORS.'
      )
    if self.tile < 1:
      raise ValueError(
        f'tile must be at least 1, got {self.tile}. Set '
        'memorizing.MemorizingLayer.tile.'
      )
    if self.recall_target is not None and neighbors is None:
      raise ValueError(
        f'recall_target is {self.recall_target}, but queries attend to the '
        'whole memory without a search. Set NEIGHBORS to a number, or remove '
        'memorizing.MemorizingLayer.recall_target.'
      )
    if self.recall_target is not None and not 0 < self.recall_target <= 1:
      raise ValueError(
        'recall_target must be above 0 and at most 1, got '
        f'{self.recall_target}. Set memorizing.MemorizingLayer.recall_target.'
      )
    self.layer = Layer(self.config)
    self.output = HeadGate()

  def initial_state(self, batch):
    config = self.config
    length = self.memory + self.room
    dims = config.kv_heads, config.head_dim, config.dtype
    return config.empty_past(batch), Ring.empty(batch, length, *dims)

  def parts(self, state):
    return {'memory': state[1]}

  def with_parts(self, state, parts):
    return state[0], parts['memory']

  def clear(self, state):
    past, ring = state
    # Masking the keys avoids writing a ring of zeros.
    return past, ring.hide(jnp.ones_like(ring.next_B, bool))

  def __call__(self, state, block):
    past, ring = state
    n_BTD = self.layer.pre_norm(block.x)
    own = self.layer.kv(n_BTD, block.mask)
    past = past.append(own)
    near_BTF = self.layer.attention.attend_window(n_BTD, past)
    q_BTHK = scaled(*self.layer.attention.query(n_BTD))
    ring, own = jax.lax.stop_gradient((ring, own))
    far = []
    for i in range(0, block.mask.shape[1], self.room):
      part = lambda a, i=i: a[:, i : i + self.room]
      ring = ring.write(jax.tree.map(part, own), self.config.window)
      far.append(self.recall(part(q_BTHK), ring))
    self.sow_recalled(q_BTHK, ring)
    heads_BTF = self.output(near_BTF, jnp.concatenate(far, 1))
    y_BTD = self.layer.output(block.x, heads_BTF)
    return (past.last(self.config.window), ring), y_BTD

  def recall(self, q_BTHK, ring: 'Ring'):
    """Returns the result of attention to the ring's keys, [B, T, H, K].

    Args:
      q_BTHK: scaled queries of the newest T tokens in the ring.
      ring: the ring, which gets no gradients.
    """
    W, (B, T, _, K) = self.config.window, q_BTHK.shape
    Q, age_S = divisor(math.gcd(T, W), 1, self.tile), ring.age_S()
    # Query heads that share a key head are treated as more queries of one head.
    H = self.config.kv_heads

    def attend(q_BHQK, since):
      """Returns the result of attention to the ring, for Q queries of a block.

      Args:
        q_BHQK: the queries.
        since: number of tokens from the first of this block to the newest in
          the ring, both included.
      """
      score = jnp.einsum(
        'bhqk,bhsk->bhqs', q_BHQK, ring.keys, preferred_element_type=jnp.float32
      )
      near_S = (age_S >= since) & (age_S < since + self.memory)
      score = jnp.where(ring.mask.swapaxes(2, 3) & near_S, score, MASKED)
      if self.neighbors:
        score = jnp.where(score >= self.least(score), score, MASKED)
      p = jnp.where(score > MASKED, jax.nn.softmax(score, -1), 0)
      p = p.astype(ring.values.dtype)
      return jnp.einsum('bhqs,bhsk->bhqk', p, ring.values)

    # The backward pass computes scores again, but does not search again.
    attend = jax.checkpoint(
      attend,
      prevent_cse=False,
      policy=jax.checkpoint_policies.save_only_these_names('least'),
    )
    first_N = jnp.arange(0, T, Q)
    since_N = T - first_N + (ring.next_B[0] - T + first_N) % W
    q_NBQHK = q_BTHK.reshape(B, T // Q, Q, -1, K).swapaxes(0, 1)
    q_NBHQK = q_NBQHK.swapaxes(2, 3).reshape(T // Q, B, H, -1, K)
    tile = lambda _, inputs: (None, attend(*inputs))
    _, y_NBHQK = jax.lax.scan(tile, None, (q_NBHQK, since_N))
    y_NBHQK = y_NBHQK.reshape(T // Q, B, -1, Q, K)
    return y_NBHQK.transpose(1, 0, 3, 2, 4).reshape(q_BTHK.shape)

  def sow_recalled(self, q_BTHK, ring: 'Ring') -> None:
    """Sows pictures of the keys in the ring that queries attend to most.

    Args:
      q_BTHK: scaled queries of the newest block.
      ring: the ring, after this block was written.
    """
    if not pictures.wanted(self):
      return
    B, T, H, _ = q_BTHK.shape
    q_BTGRK = q_BTHK.reshape(B, T, self.config.kv_heads, -1, q_BTHK.shape[3])
    score = jnp.einsum('btgrk,bgsk->btgrs', q_BTGRK, ring.keys)
    age_S = ring.age_S()
    near_S = (age_S >= T) & (age_S < T + self.memory)
    seen_BS = ring.mask[:, 0, :, 0] & near_S
    score = jnp.where(
      seen_BS[:, None, None], score.reshape(B, T, H, -1), MASKED
    )
    most = min(self.neighbors or SHOWN, score.shape[-1])
    top, at = jax.lax.top_k(score, most)
    weights = jnp.where(top > MASKED, jax.nn.softmax(top), 0)
    if self.neighbors is None:
      share = jnp.exp(jax.nn.logsumexp(top, -1) - jax.nn.logsumexp(score, -1))
      weights = weights * share[..., None]
    back = age_S[at] - (T - 1 - jnp.arange(T))[:, None, None]
    back = jnp.where(top > MASKED, back, 0)
    n = min(SHOWN, top.shape[-1])
    pictures.sow(self, 'recall_weight', lambda: weights[..., :n])
    pictures.sow(self, 'recall_back', lambda: back[..., :n])

  def least(self, score_BHQS):
    """Returns the lowest score at which each query attends to a key.

    It is halfway between two of the scores that the search finds, sorted from
    the highest down: number `neighbors` and the one after it.

    Args:
      score_BHQS: scores of all keys for Q queries.

    Returns:
      [B, H, Q, 1], without gradients.
    """
    find = jax.lax.top_k
    if self.recall_target is not None:
      find = functools.partial(
        jax.lax.approx_max_k, recall_target=self.recall_target
      )
    search = lambda score_BHQS: (find(score_BHQS, self.neighbors + 1)[0],)
    scores = (jax.lax.stop_gradient(score_BHQS),)
    (top,) = per_shard(search, ('BH',), scores, ('BH',))(*scores)
    # Without this barrier, XLA fuses the next slice with the search, and sorts
    # all scores.
    top = jax.lax.optimization_barrier(top)
    # Halfway to the next score, because recomputed scores may differ slightly.
    return checkpoint_name(top[..., -2:].mean(-1, keepdims=True), 'least')


class HeadGate(nn.Module):
  """Mixture of the results of attention to the window and to the memory.

  Each head learns the weight of the memory, initially 1/2. The window has the
  rest of the weight.
  """

  @nn.compact
  def __call__(self, near_BTF, far_BTHK):
    H = far_BTHK.shape[2]
    g_H = jax.nn.sigmoid(self.param('gate', nn.initializers.zeros, (H,)))
    share = lambda: jnp.broadcast_to(g_H, far_BTHK.shape[:3])
    pictures.sow(self, 'recall_share', share)
    g_H1 = g_H[:, None]
    metrics.sow(self, 'memory_weight', MeanMetric(g_H1, jnp.ones_like(g_H1)))
    near_BTHK = near_BTF.reshape(far_BTHK.shape)
    y_BTHK = far_BTHK * g_H1 + near_BTHK * (1 - g_H1)
    return y_BTHK.reshape(near_BTF.shape).astype(near_BTF.dtype)


class Ring(Resettable):
  """Ring buffer of keys and values of the last S tokens, too large to copy.

  All tokens of a segment, or of each part of a long one (see
  MemorizingLayer.room), are written before any of them reads the ring. They
  replace only entries that are too old for all of their queries. All blocks of
  the part, and its backward pass, thus read the same version of the ring.

  Attributes:
    keys, values: [B, H, S, K]; heads precede tokens, as matrix products need.
    mask: [B, 1, S, 1] bool, False at keys that no query may see.
    next_B: int32, index on axis S of the next key to be written, the same in
      every row.
  """

  keys: jax.Array
  values: jax.Array
  mask: jax.Array
  next_B: jax.Array

  @classmethod
  def empty(cls, batch, length, heads, head_dim, dtype) -> 'Ring':
    zeros = jnp.zeros((batch, heads, length, head_dim), dtype)
    mask = jnp.zeros((batch, 1, length, 1), bool)
    return cls(zeros, zeros, mask, jnp.zeros(batch, jnp.int32))

  def reset(self, start_B, fresh):
    # next_B does not change: a document may begin anywhere in the ring.
    return self.hide(start_B)

  def hide(self, rows_B) -> 'Ring':
    """Returns the ring with all keys masked in rows where rows_B is True."""
    rows = rows_B.reshape(-1, *[1] * (self.mask.ndim - 1))
    return self.replace(mask=self.mask & ~rows)

  def write(self, new: KV, block: int) -> 'Ring':
    """Returns the ring after more tokens have been written.

    Args:
      new: keys and values of the tokens: whole blocks, or a single token.
      block: number of tokens in a block.
    """
    T, S = new.mask.shape[1], self.mask.shape[2]
    W = min(T, block)
    first = self.next_B[0] // W
    new = new.k.swapaxes(1, 2), new.v.swapaxes(1, 2), new.mask[:, None, :, None]
    cut = jax.lax.dynamic_slice_in_dim
    put = jax.lax.dynamic_update_slice_in_dim

    def write_block(i, slots):
      one = lambda a, b: put(a, cut(b, (i - first) * W, W, 2), i * W % S, 2)
      return jax.tree.map(one, slots, new)

    # XLA cannot unroll this loop, even for one block, as it does not know its
    # bounds. It would fuse an unrolled loop with each reader of the ring, and
    # copy the ring for each.
    slots = jax.lax.fori_loop(
      first, first + T // W, write_block, (self.keys, self.values, self.mask)
    )
    return Ring(*slots, (self.next_B + T) % S)

  def age_S(self):
    """Returns the age of each entry: the number of tokens written after it."""
    S = self.mask.shape[2]
    return (self.next_B[0] - 1 - jnp.arange(S)) % S
