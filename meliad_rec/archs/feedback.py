"""Feedback Transformer (Fan et al. 2020, section 3.3).

All layers read one memory. Each token writes to it one vector, a mix of the
outputs of all layers for this token. Even the lowest layer thus sees what the
highest layer computed for earlier tokens. Tokens are therefore read one by one.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.archs.memory_cell import extend
from meliad_rec.archs.memory_cell import Memory
from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.archs.stack import named_by_layer
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Attention
from meliad_rec.models.cell import Resettable


class Composition(nn.Module):
  """Base class of modules that compute the vectors that tokens write to memory.

  A call takes a list of L + 1 arrays [B, T, D]: the embeddings of tokens, and
  then the outputs of the L layers, from the lowest up. It returns a list of
  arrays [B, T, D] to write: a single one that all layers read, or one for each
  layer. Fan et al. 2020, sections 3.3, 4.3.2 and 6.4.
  """

  def arrays(self, layers: int) -> int:
    """Returns how many arrays a call returns for a stack of `layers` layers."""
    return 1


class WeightedSum(Composition):
  """Weighted sum of the embedding and of the outputs of all layers.

  There is one learned weight for the embedding and one for each layer; they add
  up to 1. Fan et al. 2020, equation 1.
  """

  @nn.compact
  def __call__(self, hidden):
    return [_mix(self, 'mix', hidden)]


class Average(Composition):
  """Mean of the embedding and of the outputs of all layers."""

  def __call__(self, hidden):
    return [sum(hidden) / len(hidden)]


class OneLayer(Composition):
  """Composition that takes the output of one layer as the memory of a token.

  Attributes:
    layer: index of the layer: -1 is the top layer, 1 the lowest, and 0 stands
      for the embedding.
  """

  layer: int = -1

  def __call__(self, hidden):
    if not -len(hidden) <= self.layer < len(hidden):
      raise ValueError(
        f'layer must be from {-len(hidden)} to {len(hidden) - 1}, where 0 is '
        f'the embedding and -1 the top layer, got {self.layer}. Set '
        'feedback.OneLayer.layer.'
      )
    return [hidden[self.layer]]


class OwnAndBelow(Composition):
  """For each layer, a weighted sum of its own output and of those below it.

  The embedding counts as the lowest output. The weights of each sum are
  learned, and add up to 1. Fan et al. 2020 call this model a "recurrent"
  Transformer: a layer reads nothing that comes from layers above it.
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


class FeedbackDecodeState(Resettable):
  """State while decoding token by token.

  Attributes:
    memory: the memory that the last `window` tokens wrote.
    kv: keys and values of this memory, followed by zeros that leave room
      for the next token.
  """

  memory: Memory
  kv: Any

  def reset(self, start_B, fresh):
    return self.replace(memory=self.memory.reset(start_B, fresh.memory))


class Feedback(MemoryCell):
  """State: the memory that the last `window` tokens wrote.

  Attributes:
    config: sizes and choices of the layers. Dropout applies after the norm
      before attention, both of a layer's input and of the memory, and after the
      MLP. Each time, all tokens of a row share one mask. Dropout of attention
      probabilities and of hidden units has a mask for each token, which all
      rows share; attention probabilities have none if `attention_dropout` is
      None.
    count, share_position, layer_drop, span: see MemoryCell.
    compose: a subclass of Composition, which computes the vectors that tokens
      write.
    share_keys: whether all layers share the projections of memory to keys and
      values. If False, each layer has its own.
  """

  compose: Callable[..., nn.Module] = WeightedSum
  share_keys: bool = True

  parallel = True

  def setup(self):
    if self.config.include_self:
      raise ValueError(
        'include_self is True, but a token of a Feedback Transformer cannot '
        'attend to itself: it is written to memory only after the last layer. '
        'Remove layer_config.LayerConfig.include_self.'
      )
    config = dataclasses.replace(self.config, locked_dropout=True)
    self.layers = self.make_layers(config)
    self.memory = self.compose()
    if self.share_keys:
      self.memory_attention = Attention(config, rate=config.dropout)

  def empty(self, batch):
    config = self.config
    shape = batch, config.window, config.d_model
    arrays = self.memory.arrays(self.count)
    return [jnp.zeros(shape, config.dtype)] * arrays

  def parts(self, state):
    parts = [{'memory': memory} for memory in state.written]
    named = parts[0] if len(parts) == 1 else named_by_layer(enumerate(parts))
    return named | {'mask': state.mask_BA}

  def with_parts(self, state, parts):
    names = [name for name in self.parts(state) if name != 'mask']
    return Memory([parts[name] for name in names], parts['mask'])

  def keys(self, written):
    readers = [layer.attention for layer in self.layers]
    if self.share_keys:
      readers = [self.memory_attention] * len(written)
    elif len(written) == 1:
      written = written * self.count
    kv = [r.kv(r.pre_norm(m)) for r, m in zip(readers, written, strict=True)]
    return [(each.k, each.v) for each in kv]

  def source_kv(self, encoded_BSD, mask_BS):
    return [layer.source_kv(encoded_BSD, mask_BS) for layer in self.layers]

  def read(self, kv, mask_BS, x_BTD, first, source=None):
    if len(kv) == 1:
      kv = kv * self.count
    sources = source or [None] * self.count
    hidden = [x_BTD]
    for layer, (k, v), each in zip(self.layers, kv, sources, strict=True):
      x_BTD = hidden[-1]
      n_BTD = layer.pre_norm(x_BTD)
      past = KV(k, v, mask_BS)
      y_BTD = self.apply_layer(layer, x_BTD, n_BTD, past, first, each)
      hidden.append(y_BTD)
    return self.memory(hidden), hidden[-1]

  def to_decode_state(self, state):
    return FeedbackDecodeState(state, extend(self.keys(state.written), 1))

  def decode_step(self, decode_state, block):
    memory = decode_state.memory
    mask_BS = jnp.concatenate([memory.mask_BA, block.mask], 1)
    written, y_B1D = self.read(
      decode_state.kv, mask_BS, block.x, 0, *block.sources
    )
    push = lambda a, new: jnp.concatenate([a[:, 1:], new], 1)
    kv = jax.tree.map(
      lambda a, new: extend(push(a[:, :-1], new), 1),
      decode_state.kv,
      self.keys(written),
    )
    written = jax.tree.map(push, memory.written, written)
    return FeedbackDecodeState(Memory(written, mask_BS[:, 1:]), kv), y_B1D

  def to_segment_state(self, decode_state):
    return decode_state.memory
