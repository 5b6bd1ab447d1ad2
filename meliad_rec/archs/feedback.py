"""Feedback Transformer (Fan et al. 2020, section 3.3).

Every layer reads one memory, to which each token writes a mix of all layers:
the lowest layer of a token sees the highest of the tokens before it. So tokens
go one by one.

What a Feedback Transformer writes to memory (Fan et al. 2020, section 3.3).

Each is a module that takes the hidden vectors of one token, layer by layer, the
embedding first: L + 1 arrays [B, T, D]. It gives what is written: one array
that all layers read, or `arrays` of them, one for each layer.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.archs.memory_cell import extend
from meliad_rec.archs.memory_cell import Memory
from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Attention


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


class DecodeState(struct.PyTreeNode):
  """Memory for token by token reading, with its keys."""

  memory: Memory
  kv: Any


class Feedback(MemoryCell):
  """State: what the last `window` tokens wrote.

  Attributes:
    config: of the layers. Dropout is locked: a row drops the same of all its
      tokens, behind the first norm of a layer for queries and memory alike, and
      of the MLP's output; attention probabilities are not dropped.
    count, share_position, layer_drop, span: see MemoryCell.
    compose: of feedback_memory.py: what a token writes.
    share_keys: whether all layers read the same keys and values, or each makes
      its own.
  """

  compose: Callable[..., nn.Module] = WeightedSum
  share_keys: bool = True

  @property
  def chunk(self):
    return 1

  @property
  def parallel(self):
    return True

  def setup(self):
    if self.config.include_self:
      raise ValueError(
        'include_self is set, but a Feedback Transformer writes a token to '
        'memory only after its last layer; remove it.'
      )
    config = dataclasses.replace(self.config, locked_dropout=True)
    self.layers = self.make_layers(config)
    self.memory = self.compose()
    if self.share_keys:
      self.memory_attention = Attention(config, rate=config.dropout, join=None)

  def empty(self, batch):
    config = self.config
    shape = batch, config.window, config.d_model
    arrays = self.memory.arrays(self.count)
    return [jnp.zeros(shape, config.dtype)] * arrays

  def keys(self, written):
    readers = [layer.attention for layer in self.layers]
    if self.share_keys:
      readers = [self.memory_attention] * len(written)
    elif len(written) == 1:
      written = written * self.count
    kv = [r.kv(r.pre_norm(m)) for r, m in zip(readers, written, strict=True)]
    return [(each.k, each.v) for each in kv]

  def read(self, kv, mask_BS, x_BTD):
    if len(kv) == 1:
      kv = kv * self.count
    hidden = [x_BTD]
    for layer, (k, v) in zip(self.layers, kv, strict=True):
      x_BTD = hidden[-1]
      n_BTD = layer.pre_norm(x_BTD)
      hidden.append(self.apply_layer(layer, x_BTD, n_BTD, KV(k, v, mask_BS)))
    return self.memory(hidden), hidden[-1]

  def to_decode_state(self, state):
    return DecodeState(state, extend(self.keys(state.written), 1))

  def decode_step(self, opened, block):
    memory = opened.memory
    mask_BS = jnp.concatenate([memory.mask_BA, block.mask], 1)
    written, y_B1D = self.read(opened.kv, mask_BS, block.x)
    push = lambda a, new: jnp.concatenate([a[:, 1:], new], 1)
    kv = jax.tree.map(
      lambda a, new: extend(push(a[:, :-1], new), 1),
      opened.kv,
      self.keys(written),
    )
    written = jax.tree.map(push, memory.written, written)
    return DecodeState(Memory(written, mask_BS[:, 1:]), kv), y_B1D

  def to_segment_state(self, opened):
    return opened.memory
