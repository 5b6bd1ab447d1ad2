"""Base class of cells that read a memory and write to it, chunk by chunk.

Letters of this file: A tokens of memory before a segment, C tokens of a chunk.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import kept
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import check_not_unrolled
from meliad_rec.models.cell import Resettable
from meliad_rec.models.cell import to_blocks
from meliad_rec.recurrence.memory_scan import memory_scan
from meliad_rec.recurrence.memory_scan import MemoryScanBody

_FLOATS = 'real floating'


class Memory(Resettable):
  """The memory that the last A tokens wrote.

  Attributes:
    written: pytree of the vectors that they wrote. Every leaf is [B, n, ...],
      for the last n of these tokens. n is at most A, and may differ between
      leaves.
    mask_BA: bool, False at padding and before the start of the document.
  """

  written: Any
  mask_BA: jax.Array

  def reset(self, start_B, fresh):
    # In a Repeat, each leaf has an axis of repeats after the rows.
    start_B = start_B.reshape(-1, *[1] * (self.mask_BA.ndim - 1))
    return self.replace(mask_BA=self.mask_BA & ~start_B)


class MemoryCell(Cell, kw_only=True):
  """State: a Memory. Subclasses implement `empty`, `keys` and `read`.

  Attributes:
    config: sizes and choices of the layers.
    count: number of layers L.
    share_position: whether the layers share one position module.
    layer_drop: probability that each layer is skipped in a training step.
    span: maximum number of tokens that the backward pass processes at once; see
      memory_scan.py. A shorter span uses less device memory, but spans below 32
      tokens are slower. Steps of several chunks (see `by_steps`) have no spans.
    remat: name in remat.POLICIES, which says which values the backward pass
      keeps. It applies to each chunk, or to each step of several chunks if
      `by_steps` is True. None means 'sublayers' in the scan, where policies
      that keep more are slower, since the scan copies all that is kept, and
      'none' in steps before and after it. It must be None if `parallel` is
      True.
    chunk: number of tokens C that read the same memory and write together.
    parallel: whether `read` can process any number of tokens at once, each as a
      chunk of its own. If True, a dropout mask must be the same at all tokens
      of a row, or depend on the position of the token; in `keys` it must be the
      same. If False, masks depend on which tokens are processed
      at once, so `keys`, which sees the same tokens in different groups, must
      apply no dropout.
    by_steps: whether segments are read in steps of several chunks, as by
      staircase.run_diagonal.
  """

  config: LayerConfig
  count: int
  share_position: bool = True
  layer_drop: float = 0.0
  span: int = 32
  remat: str | None = None

  chunk = 1
  parallel = False
  by_steps = False
  takes_segments = True
  scans_blocks = True
  is_recurrent = True

  def empty(self, batch: int):
    """Returns Memory.written at the start of a document: zeros."""
    raise NotImplementedError

  def keys(self, written):
    """Returns keys and values, computed from the vectors that tokens wrote.

    The keys and values of each token depend only on the vectors of that token.

    Args:
      written: pytree like Memory.written, of any number of tokens.
    """
    raise NotImplementedError

  def read(self, kv, mask_BS, x_BTD, first, *source):
    """Reads n chunks; n is 1 unless `parallel`.

    Args:
      kv: keys and values of the tokens of memory before the first chunk, then
        of the n chunks. The keys and values of the last chunk are never read,
        and may be anything.
      mask_BS: bool, False at padding, for the tokens of memory and the chunks.
      x_BTD: the tokens of the n chunks.
      first: int, position of the first of these tokens in the segment.
      *source: Block.source_kv, if there is one: only for cells with a method
        `source_kv`.

    Returns:
      The vectors that the chunks write, a pytree like Memory.written; and the
      outputs y_BTD.
    """
    raise NotImplementedError

  def make_layers(self, config: LayerConfig) -> list[Layer]:
    """Returns `count` new layers; `setup` must assign them to an attribute.

    Raises:
      ValueError: count or span is below 1, compat_meliad is set, or remat or
        unroll is set for a cell that is `parallel`.
    """
    if self.count < 1:
      raise ValueError(
        f'count must be at least 1, got {self.count}. Set LAYERS.'
      )
    if self.span < 1:
      raise ValueError(
        f'span must be at least 1, got {self.span}. Set BACKWARD_SPAN.'
      )
    if config.compat_meliad:
      raise ValueError(
        f'compat_meliad is True, but google-research/meliad has no '
        f'{type(self).__name__} model. Remove '
        'layer_config.LayerConfig.compat_meliad.'
      )
    if self.remat and self.parallel:
      raise ValueError(
        f'remat is {self.remat!r}, but {type(self).__name__} has a fixed '
        f'policy of rematerialization. Remove {type(self).__name__}.remat.'
      )
    if self.parallel:
      check_not_unrolled(self)
    position = None
    if self.share_position:
      position = config.position(config.num_heads, name='position')
    return [Layer(config, position=position) for _ in range(self.count)]

  def apply_layer(
    self, layer: Layer, x_BTD, n_BTD, kv, first=None, source_kv=None
  ):
    """Returns the outputs of a layer, or x_BTD if LayerDrop skips the layer.

    `n_BTD`, `kv`, `first` and `source_kv` are passed to the layer.
    """
    y_BTD = layer(x_BTD, n_BTD, kv, first=first, source_kv=source_kv)
    return drop_layer(self, self.layer_drop, x_BTD, y_BTD)

  @property
  def policy(self) -> str:
    """Name in remat.POLICIES of the policy in use: `remat` or its default."""
    return self.remat or 'sublayers'

  @property
  def block_length(self):
    return None if self.chunk == 1 else self.chunk

  def initial_state(self, batch):
    written = self.empty(batch)
    A = max((a.shape[1] for a in jax.tree.leaves(written)), default=0)
    return Memory(written, jnp.zeros((batch, A), bool))

  def parts(self, state):
    return {'memory': state}

  def with_parts(self, state, parts):
    return parts['memory']

  def __call__(self, state, block):
    C, A = self.chunk, state.mask_BA.shape[1]
    mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)
    if self.is_initializing():
      # Only creates the parameters; the outputs do not matter.
      kv = extend(self.keys(state.written), C)
      self.read(kv, mask_BS[:, : A + C], block.x[:, :C], 0, *block.sources)
      return state, block.x
    if pictures.wanted(self):
      return self.read_chunks(state, block)
    written, y_BTD = memory_scan(
      self.pure(A),
      # Gathered once rather than for each chunk. A source gets gradients too.
      (all_gather_params(self.variables['params']), floats(block.sources)),
      state.written,
      block.x,
      (
        mask_BS,
        self.make_rng('dropout') if self.has_rng('dropout') else None,
        block.sources,
      ),
    )
    self.penalize_spans()
    return Memory(written, mask_BS[:, mask_BS.shape[1] - A :]), y_BTD

  def read_chunks(self, state, block):
    """Does what `__call__` does, chunk by chunk, so that `read` may sow.

    The functions of memory_scan are pure. Here, keys are computed again for
    each chunk.
    """
    C, A = self.chunk, state.mask_BA.shape[1]

    def read(cell, state, chunk, first):
      mask_BS = jnp.concatenate([state.mask_BA, chunk.mask], 1)
      kv = extend(cell.keys(state.written), C)
      written, y_BCD = cell.read(kv, mask_BS, chunk.x, first, *block.sources)
      push = lambda a, new: jnp.concatenate([a, new], 1)[:, C:]
      written = jax.tree.map(push, state.written, written)
      return Memory(written, mask_BS[:, mask_BS.shape[1] - A :]), y_BCD

    scan = nn.scan(
      read,
      variable_broadcast='params',
      variable_axes={pictures.COLLECTION: 0},
      split_rngs={'params': False},
      in_axes=(1, 0),
      out_axes=1,
    )
    chunks = Block(*(to_blocks(a, C) for a in (block.x, block.mask)))
    first_n = jnp.arange(0, block.mask.shape[1], C)
    state, y_BnCD = pictures.join_chunks(scan)(self, state, chunks, first_n)
    return state, y_BnCD.reshape(block.x.shape)

  def penalize_spans(self):
    """Sows the losses of the heads' adaptive attention spans.

    They cannot be sown in the scan over chunks.
    """
    if self.config.span:
      for layer in self.layers:
        layer.attention.span.penalize(self.config.window)

  def pure(self, A: int) -> MemoryScanBody:
    """Returns `keys` and `read` as functions that take the parameters.

    Args:
      A: number of tokens of memory before the segment.
    """
    cell = self.clone(parent=None)

    def apply(params, rng, *arguments, method):
      rngs = {} if rng is None else {'dropout': rng}
      return cell.apply(
        {'params': params}, *arguments, rngs=rngs, method=method
      )

    def keys(both, written, inputs):
      rng, (params, _) = inputs[1] if self.parallel else None, both
      return apply(params, rng, written, method='keys')

    def read(both, kv, x_BTD, inputs, first):
      (params, differentiable), (mask_BS, rng, sources) = both, inputs
      sources = with_floats(sources, differentiable)
      T = x_BTD.shape[1]
      mask_BS = jax.lax.dynamic_slice_in_dim(mask_BS, first, A + T, 1)
      arguments = kv, mask_BS, x_BTD, first, *sources
      return apply(params, rng, *arguments, method='read')

    C = self.chunk
    policy = kept(self.policy) or jax.checkpoint_policies.everything_saveable
    return MemoryScanBody(keys, read, C, self.span, self.parallel, policy)


def floats(tree) -> list:
  """Returns the leaves of a pytree that have gradients."""
  return [a for a in jax.tree.leaves(tree) if jnp.isdtype(a.dtype, _FLOATS)]


def with_floats(tree, leaves: list):
  """Returns a pytree with others in place of the leaves of `floats`."""
  given = iter(leaves)
  return jax.tree.map(
    lambda a: next(given) if jnp.isdtype(a.dtype, _FLOATS) else a, tree
  )


def extend(kv, C: int):
  """Returns keys and values, followed by zeros for a chunk of C tokens."""
  return jax.tree.map(
    lambda a: jnp.pad(a, ((0, 0), (0, C)) + ((0, 0),) * (a.ndim - 2)), kv
  )
