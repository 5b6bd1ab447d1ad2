"""A cell that reads a memory of what it wrote before, chunk by chunk."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import kept
from meliad_rec.models.cell import Cell
from meliad_rec.recurrence.memory_scan import memory_scan
from meliad_rec.recurrence.memory_scan import MemoryScanBody


class Memory(struct.PyTreeNode):
  """What the last A tokens wrote; leaves may go back less far than A."""

  written: Any  # A pytree; every leaf [B, A or less, ...].
  mask_BA: jax.Array  # bool, False at padding and before the document.


class MemoryCell(Cell, kw_only=True):
  """State: Memory. Base class: add `chunk`, `empty`, `keys` and `read`.

  Attributes:
    config: of the layers.
    count: layers L.
    share_position: whether the layers have one position module together.
    layer_drop: share of training steps in which a layer is left out.
    span: tokens that the backward pass treats at once; see memory_scan. Fewer
      need less memory, and below 32 more time.
    remat: of each chunk, or of each step of several; None: 'sublayers', which
      is faster than to keep more, and to copy it. Where chunks are read in
      parallel there is none: what they make again is fixed.
  """

  config: LayerConfig
  count: int
  share_position: bool = True
  layer_drop: float = 0.0
  span: int = 32
  remat: str | None = None

  @property
  def chunk(self) -> int:
    """Tokens C that read the same memory, and write together."""
    raise NotImplementedError

  @property
  def parallel(self) -> bool:
    """Whether `read` takes any number of chunks, of one token each.

    What is dropped must then be the same at all tokens of a row; `keys` drops
    too. Elsewhere what is dropped depends on which tokens are read at once, and
    keys are made anew of others: they drop nothing.
    """
    return False

  def empty(self, batch: int):
    """What is written before a document begins: zeros, leaves [B, A, ...]."""
    raise NotImplementedError

  def keys(self, written):
    """What queries see of what was written, each token by itself."""
    raise NotImplementedError

  def read(self, kv, mask_BS, x_BTD):
    """Reads n chunks, one unless `parallel`: what they write, and y_BTD.

    Args:
      kv: of the tokens before the first chunk and up to the last; of the last
        chunk itself it need not hold what `read` will write.
      mask_BS: which tokens are real; S is A and then n C.
      x_BTD: the n C tokens.
    """
    raise NotImplementedError

  def make_layers(self, config: LayerConfig) -> list[Layer]:
    """The layers, for `setup`."""
    if self.count < 1:
      raise ValueError(
        f'{type(self).__name__} has {self.count} layers; set LAYERS to 1 or '
        'more.'
      )
    if config.compat_meliad:
      raise ValueError(
        f'compat_meliad is set, and google-research/meliad has no '
        f'{type(self).__name__}; leave it out.'
      )
    if self.remat and self.parallel:
      raise ValueError(
        f'remat is {self.remat!r}, and {type(self).__name__} makes again what '
        'it can as it is; leave it out.'
      )
    position = None
    if self.share_position:
      position = config.position(config.num_heads, name='position')
    return [Layer(config, position=position) for _ in range(self.count)]

  def apply_layer(self, layer: Layer, x_BTD, n_BTD, kv):
    """Outputs y_BTD of a layer, or its inputs where LayerDrop says so."""
    y_BTD = layer(x_BTD, n_BTD, kv)
    return drop_layer(self, self.layer_drop, x_BTD, y_BTD)

  @property
  def policy(self) -> str:
    """What is kept, a name in remat.POLICIES."""
    return self.remat or 'sublayers'

  @property
  def block_length(self):
    return None if self.chunk == 1 else self.chunk

  @property
  def takes_segments(self):
    return True

  @property
  def by_steps(self) -> bool:
    """Whether segments are read in steps of several chunks."""
    return False

  @property
  def scans_blocks(self):
    return True

  @property
  def is_recurrent(self):
    return True

  def initial_state(self, batch):
    written = self.empty(batch)
    A = max((a.shape[1] for a in jax.tree.leaves(written)), default=0)
    return Memory(written, jnp.zeros((batch, A), bool))

  def clear(self, state):
    return self.initial_state(len(state.mask_BA))

  def __call__(self, state, block):
    C, A = self.chunk, state.mask_BA.shape[1]
    mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)
    if self.is_initializing():
      # Draws the parameters; what the outputs are is of no matter.
      kv = extend(self.keys(state.written), C)
      self.read(kv, mask_BS[:, : A + C], block.x[:, :C])
      return state, block.x
    written, y_BTD = memory_scan(
      self.pure(A),
      # Gathered once, and not for each chunk.
      all_gather_params(self.variables['params']),
      state.written,
      block.x,
      (mask_BS, self.make_rng('dropout') if self.has_rng('dropout') else None),
    )
    self.penalise_spans()
    return Memory(written, mask_BS[:, mask_BS.shape[1] - A :]), y_BTD

  def penalise_spans(self):
    """Sows what adaptive spans cost: a scan within the cell would lose it."""
    if self.config.span:
      for layer in self.layers:
        layer.attention.span.penalise(self.config.window)

  def pure(self, A: int) -> MemoryScanBody:
    """`keys` and `read` as functions of parameters, with A tokens before."""
    cell = self.clone(parent=None)

    def apply(params, rng, *arguments, method):
      rngs = {} if rng is None else {'dropout': rng}
      return cell.apply(
        {'params': params}, *arguments, rngs=rngs, method=method
      )

    def keys(params, written, inputs):
      rng = inputs[1] if self.parallel else None
      return apply(params, rng, written, method='keys')

    def read(params, kv, x_BTD, inputs, first):
      mask_BS, rng = inputs
      T = x_BTD.shape[1]
      mask_BS = jax.lax.dynamic_slice_in_dim(mask_BS, first, A + T, 1)
      return apply(params, rng, kv, mask_BS, x_BTD, method='read')

    C = self.chunk
    policy = kept(self.policy) or jax.checkpoint_policies.everything_saveable
    return MemoryScanBody(keys, read, C, self.span, self.parallel, policy)


def extend(kv, C: int):
  """Keys with room for those of a chunk that is not yet written."""
  return jax.tree.map(
    lambda a: jnp.pad(a, ((0, 0), (0, C)) + ((0, 0),) * (a.ndim - 2)), kv
  )
