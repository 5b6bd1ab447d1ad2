"""Memorizing Transformer layer (Wu et al. 2022, section 3).

Each token attends to its window, and to the nearest of many older keys, which
get no gradients; a gate of each head mixes the two. In google-research/meliad
this layer has no position bias, within its window either; here it has that of
its config (options/memory_position_none: none). And it is there a search by
buckets, whose keys it gathers; here a bound of scores, see `recall_target`.

A ring of keys and values that is too large to copy.

A segment is written over what is too old for it, and is read behind that, so
that no old version of the ring is needed: not by a later block, nor by the
backward pass.
"""

import functools
import math

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels.reference import NEVER
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer import scaled
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import Resettable


class Ring(Resettable):
  """The last S keys and values; the next are written over the oldest."""

  keys: jax.Array  # [B, H, S, K]: heads first, as they are multiplied.
  values: jax.Array  # [B, H, S, K]
  mask: jax.Array  # [B, 1, S, 1] bool, False at keys nobody may see.
  next_B: jax.Array  # int32: place of the next; the same in every row.

  @classmethod
  def empty(cls, batch, length, heads, head_dim, dtype) -> 'Ring':
    zeros = jnp.zeros((batch, heads, length, head_dim), dtype)
    mask = jnp.zeros((batch, 1, length, 1), bool)
    return cls(zeros, zeros, mask, jnp.zeros(batch, jnp.int32))

  def reset(self, start_B, fresh):
    # Rows keep their common place: where a row lies in the ring never matters.
    return self.hide(start_B)

  def hide(self, rows_B) -> 'Ring':
    """The ring, of which nothing is seen in these rows."""
    rows = rows_B.reshape(-1, *[1] * (self.mask.ndim - 1))
    return self.replace(mask=self.mask & ~rows)

  def write(self, new: KV, block: int) -> 'Ring':
    """The ring behind T tokens: whole blocks, or one token."""
    T, S = new.mask.shape[1], self.mask.shape[2]
    W = min(T, block)
    first = self.next_B[0] // W
    new = new.k.swapaxes(1, 2), new.v.swapaxes(1, 2), new.mask[:, None, :, None]
    cut = jax.lax.dynamic_slice_in_dim
    put = jax.lax.dynamic_update_slice_in_dim

    def write_block(i, slots):
      one = lambda a, b: put(a, cut(b, (i - first) * W, W, 2), i * W % S, 2)
      return jax.tree.map(one, slots, new)

    # Bounds that XLA does not know keep it from unrolling a loop of one block:
    # fused with each of its readers, that would copy the ring for each.
    slots = jax.lax.fori_loop(
      first, first + T // W, write_block, (self.keys, self.values, self.mask)
    )
    return Ring(*slots, (self.next_B + T) % S)

  def age_S(self):
    """By place, how many tokens were written behind it."""
    S = self.mask.shape[2]
    return (self.next_B[0] - 1 - jnp.arange(S)) % S


class MemorizingLayer(Cell):
  """State: keys and values of the last `window` tokens, and the ring.

  Attributes:
    config: sizes.
    memory: tokens before its block that a token may recall; a multiple of the
      window.
    neighbors: how many of them a query attends to: those whose keys score
      highest, and any that score the same as the last. None: to all.
    room: tokens, a multiple of the window, that the ring has places for beside
      the memory: so many are written at once. Longer segments are cut, and
      their backward pass keeps a copy of the ring for each part.
    recall_target: share of the highest scores that jax.lax.approx_max_k shall
      find, which is faster on a TPU; None: all are found. Attended to are all
      keys that score as high as the last of the `neighbors` found, or higher:
      those that the search missed too, so that there may be more than
      `neighbors`, and none of the nearest is lost.
    tile: queries that are compared with the ring at once, at most.
  """

  config: LayerConfig
  memory: int
  neighbors: int | None
  room: int
  recall_target: float | None = None
  tile: int = 128

  @property
  def block_length(self):
    return self.config.window

  @property
  def takes_segments(self):
    return True

  @property
  def is_recurrent(self):
    return True

  @property
  def can_step(self):
    return True

  def setup(self):
    W, neighbors = self.config.window, self.neighbors
    for name in 'memory', 'room':
      tokens = getattr(self, name)
      if tokens < 1 or tokens % W:
        raise ValueError(
          f'{name} is {tokens} tokens; it needs a multiple of the window, {W}. '
          f'Set {"MEMORY" if name == "memory" else "SEGMENT"}.'
        )
    if neighbors is not None and not 1 <= neighbors <= self.memory:
      raise ValueError(
        f'neighbors is {neighbors}; it needs 1 or more, and no more than the '
        f'{self.memory} tokens in memory. Set NEIGHBORS.'
      )
    if self.recall_target is not None and neighbors is None:
      raise ValueError(
        f'recall_target is {self.recall_target}, and all of the memory is '
        'attended to, without a search; leave it out, or set NEIGHBORS to a '
        'number.'
      )
    if self.recall_target is not None and not 0 < self.recall_target <= 1:
      raise ValueError(
        f'recall_target is {self.recall_target}, a share of what is searched; '
        'set it above 0, and to 1 at most.'
      )
    self.layer = Layer(self.config)
    self.output = HeadGate()

  def initial_state(self, batch):
    config = self.config
    length = self.memory + self.room
    dims = config.kv_heads, config.head_dim, config.dtype
    return config.empty_past(batch), Ring.empty(batch, length, *dims)

  def clear(self, state):
    past, ring = state
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
    heads_BTF = self.output(near_BTF, jnp.concatenate(far, 1))
    y_BTD = self.layer.output(block.x, heads_BTF)
    return (past.last(self.config.window), ring), y_BTD

  def recall(self, q_BTHK, ring: Ring):
    """Heads [B, T, H, K] of attention to memory.

    Args:
      q_BTHK: scaled queries of the last T tokens in the ring.
      ring: without gradients.
    """
    W, (B, T, _, K) = self.config.window, q_BTHK.shape
    Q, age_S = math.gcd(T, W, self.tile), ring.age_S()
    # Heads that share keys are as many queries of one head.
    H = self.config.kv_heads

    def attend(q_BHQK, since):
      """Queries of one block, since whose begin so many tokens were written."""
      score = jnp.einsum(
        'bhqk,bhsk->bhqs', q_BHQK, ring.keys, preferred_element_type=jnp.float32
      )
      near_S = (age_S >= since) & (age_S < since + self.memory)
      score = jnp.where(ring.mask.swapaxes(2, 3) & near_S, score, NEVER)
      if self.neighbors:
        score = jnp.where(score >= self.least(score), score, NEVER)
      p = jnp.where(score > NEVER, jax.nn.softmax(score, -1), 0)
      p = p.astype(ring.values.dtype)
      return jnp.einsum('bhqs,bhsk->bhqk', p, ring.values)

    # Scores are computed again in the backward pass, but not sorted again.
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

  def least(self, score_BHQS):
    """The score from which on a query attends to a key: [B, H, Q, 1]."""
    find = jax.lax.top_k
    if self.recall_target is not None:
      find = functools.partial(
        jax.lax.approx_max_k, recall_target=self.recall_target
      )
    search = lambda score_BHQS: find(score_BHQS, self.neighbors + 1)[:1]
    scores = (jax.lax.stop_gradient(score_BHQS),)
    (top,) = per_shard(search, ('sums',), scores, ('sums',))(*scores)
    # Or XLA joins the next slice with the search, and sorts all scores.
    top = jax.lax.optimization_barrier(top)
    # Half way to the next: a score computed again may differ in its last bit.
    return checkpoint_name(top[..., -2:].mean(-1, keepdims=True), 'least')


class HeadGate(nn.Module):
  """Mixes near and far by a learned gate of each head: equally, at first."""

  @nn.compact
  def __call__(self, near_BTF, far_BTHK):
    H = far_BTHK.shape[2]
    g_H1 = jax.nn.sigmoid(self.param('gate', nn.initializers.zeros, (H,)))
    g_H1 = g_H1[:, None]
    near_BTHK = near_BTF.reshape(far_BTHK.shape)
    y_BTHK = far_BTHK * g_H1 + near_BTHK * (1 - g_H1)
    return y_BTHK.reshape(near_BTF.shape).astype(near_BTF.dtype)
