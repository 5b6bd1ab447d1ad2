"""The interface that every architecture implements, and how to run a cell.

A cell maps (state, block of tokens) to (state, outputs for the same tokens). A
segment is the tokens of each row that one training step reads; it holds one or
more blocks. Unless it needs a whole document, a cell without dropout obeys the
splitting law: if a segment is split between two blocks, reading the two parts
in turn gives the same outputs and the same final state as reading it at once.

Shape letters in names, here and everywhere:

  B batch              S slots or keys       F hidden units
  T tokens, a segment  D width of the model  V vocabulary
  W tokens, a block    H heads               L layers or steps in depth
  C tokens, a chunk    K width of a head     N passes or repeats

A file that uses other letters, or these with other meanings, lists them in its
docstring. A name without a suffix is a scalar, a pytree, or an array whose axes
vary.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.remat import remat
from meliad_rec.metrics import pictures
from meliad_rec.metrics import state_use
from meliad_rec.recurrence.memory_scan import divisor

State = Any  # A pytree; every leaf is [B, ...]; the same shapes in and out.


class Block(struct.PyTreeNode):
  """Consecutive tokens of each row, at most a segment: [B, T, ...]."""

  x: jax.Array  # [B, T, D] activations.
  # [B, T] bool, False at padding. Padding comes only after the last token of a
  # document. It changes no output before it and no recurrent vector, but it
  # moves attention caches on.
  mask: jax.Array
  # The result of Cell.source_kv for the whole row, not cut into blocks. None if
  # the model has no encoder.
  source_kv: Any = None

  @property
  def sources(self) -> tuple:
    """A tuple of source_kv, or an empty one if it is None."""
    return () if self.source_kv is None else (self.source_kv,)


class Cell(nn.Module, kw_only=True):
  """Base class of every architecture.

  The docstring of each subclass begins with the content of its state.
  Subclasses override the class attributes below, by properties if they depend
  on fields.

  Attributes:
    unroll: number of blocks in one iteration of the compiled loop, if the cell
      is scanned over blocks; see `unroll` of jax.lax.scan.
    remat: name in remat.POLICIES, which says which activations the backward
      pass keeps, or 'auto' (see remat.AUTO). It applies to each call, or to
      each block if the call scans over blocks.
    block_length: number of tokens of a block; calls take whole blocks. None
      means that a call takes any number of tokens.
    block_setting: block_length in terms of settings, such as 'WINDOW / PASSES',
      for error messages.
    takes_segments: whether one call may take several blocks. If False, `run`
      scans over them. By default, True if block_length is None.
    scans_blocks: whether a call that takes several blocks scans over them
      itself, and applies `remat` to each block.
    causal: whether no output depends on a later token.
    needs_whole_document: whether a segment must hold a whole document.
    is_recurrent: whether the state has a recurrent part; see `parts`.
    shares_dropout: whether all blocks share their dropout masks, as in
      google-research/meliad. Drawing new masks for each block can cost more
      than some of the block's matrix products.
    can_step: whether the cell can read one token at a time, by `decode_step`.
      By default, True if block_length is None.
  """

  unroll: int = 1
  remat: str = 'none'

  block_length = None
  block_setting = 'WINDOW'
  scans_blocks = False
  causal = True
  needs_whole_document = False
  is_recurrent = False
  shares_dropout = True

  @property
  def takes_segments(self) -> bool:
    return self.block_length is None

  @property
  def can_step(self) -> bool:
    return self.block_length is None

  def initial_state(self, batch: int) -> State:
    """Returns the state of `batch` rows at the start of their documents."""
    raise NotImplementedError

  def __call__(self, state: State, block: Block) -> tuple[State, jax.Array]:
    """Reads one block, or several if `takes_segments` is True.

    Args:
      state: the state before these tokens.
      block: the tokens.

    Returns:
      The state after these tokens, and the outputs y_BTD.
    """
    raise NotImplementedError

  def source_kv(self, encoded_BSD: jax.Array, mask_BS: jax.Array) -> Any:
    """Returns keys and values of an encoded sequence, which tokens attend to.

    It is computed once for each row, and is the same for all of its tokens.

    Args:
      encoded_BSD: outputs of an encoder.
      mask_BS: bool, False at padding, which no token attends to.

    Returns:
      A pytree of [B, ...]: keys and values for each layer.

    Raises:
      ValueError: the cell has no attention to a source.
    """
    raise ValueError(
      f'{type(self).__name__} cannot attend to the output of an encoder. '
      'Choose arch/window, block_recurrent, feedback or lstm, or remove '
      'model.Model.encoder.'
    )

  def cast_params(self, params):
    """Returns the cell's parameters in the dtypes that its products take.

    A scan over layers calls this method once for all layers. Gradients are then
    stacked in these dtypes too; bfloat16 halves the bytes that the scan writes
    and the optimizer reads. A parameter may be cast only if a single product of
    a call reads it, since the gradients of several products must be summed in
    float32.
    """
    return params

  def memory_slots(self, state: State) -> jax.Array | None:
    """Returns vectors [B, S, D] of the state that summarize what was read.

    None means that the cell has no such vectors.
    """
    return None

  def parts(self, state: State) -> dict[str, Any]:
    """Returns the recurrent part of the state: {name: pytree of [B, ...]}.

    The recurrent part does not include attention caches. A cell whose
    `is_recurrent` is True implements this method and `with_parts`.
    """
    return {}

  def with_parts(self, state: State, parts: dict[str, Any]) -> State:
    """Returns the state, with these parts in place of its own.

    Args:
      state: the state.
      parts: all parts, named and shaped as in the result of `parts`.
    """
    return state

  def clear(self, state: State) -> State:
    """Returns the state with its recurrent part as at the start of a document.

    Attention caches are kept. The ablation of Hutchins et al. 2022, section
    4.6, clears the recurrent part at the start of each segment.
    """
    if not self.is_recurrent:
      return state
    rows = len(jax.tree.leaves(state)[0])
    return self.with_parts(state, self.parts(self.initial_state(rows)))

  # The three methods below read token by token, for generation. A cell that
  # takes any number of tokens inherits them. One that takes whole blocks may
  # implement them; if it does not, generation runs the whole unfinished block
  # again for each token.

  def to_decode_state(self, state: State) -> State:
    """Converts a state at a block boundary to one that `decode_step` takes."""
    return state

  def decode_step(
    self, decode_state: State, block: Block
  ) -> tuple[State, jax.Array]:
    """Reads a block of one token.

    Reading the tokens of a block one by one gives the same results as one call
    for the whole block.

    Returns:
      The new decode state, and the outputs y_B1D.
    """
    return self(decode_state, block)

  def to_segment_state(self, decode_state: State) -> State:
    """Converts a decode state at a block boundary back to a state."""
    return decode_state


def run(cell: Cell, state: State, segment: Block) -> tuple[State, jax.Array]:
  """Runs a cell over a segment, block by block if a call takes one block.

  Args:
    cell: any cell.
    state: the state before the segment.
    segment: T tokens, a multiple of the cell's block length.

  Returns:
    The state after the segment, and y_BTD.

  Raises:
    ValueError: the segment is not a multiple of the block length, or `unroll`
      is set for a cell that is not scanned over blocks.
  """
  B, T = segment.mask.shape
  W = cell.block_length or T
  if T % W:
    raise ValueError(
      f'{type(cell).__name__} takes blocks of {W} tokens, but the segment has '
      f'{T}, which is not a multiple. Set SEGMENT to a multiple of '
      f'{cell.block_setting}.'
    )
  if cell.takes_segments and not cell.scans_blocks:
    check_not_unrolled(cell)
  if cell.takes_segments or T == W:
    policy = 'none' if cell.scans_blocks else cell.remat
    call = remat(lambda c, s, b: c(s, b), policy)
    if cell.takes_segments:
      return call(cell, state, segment)
    slots_BSD = cell.memory_slots(state)
    state, y_BTD = call(cell, state, segment)
    if slots_BSD is not None:
      sow_slots(cell, slots_BSD[:, None], state, segment.mask[:, None])
    return state, y_BTD
  kv = segment.source_kv
  blocks = jax.tree.map(
    lambda a: to_blocks(a, W), segment.replace(source_kv=None)
  )
  call = lambda c, s, b: c(s, b.replace(source_kv=kv))
  state, y = scan_blocks(call, cell, state, blocks)
  return state, y.reshape(B, T, *y.shape[3:])


def check_not_unrolled(cell: Cell) -> None:
  """Raises ValueError if `unroll` is set for a cell without blocks."""
  if cell.unroll != 1:
    name = type(cell).__name__
    raise ValueError(
      f'unroll is {cell.unroll}, but {name} is not scanned over blocks. Remove '
      f'{name}.unroll.'
    )


def scan_blocks(body: Callable, cell: Cell, state: State, blocks):
  """Scans a function over blocks.

  The scan is nn.scan, because jax.lax.scan would leak tracers out of the
  module. Losses that blocks sow are averaged over blocks.

  Args:
    body: (cell, state, block) -> (new state, outputs of the block).
    cell: the cell.
    state: the state before the first block.
    blocks: pytree with a `mask`; axis 1 of every leaf is the axis of blocks.

  Returns:
    The state after the last block, and the outputs of all blocks, stacked along
    axis 1.
  """
  count = jax.tree.leaves(blocks)[0].shape[1]
  body = remat(body, cell.remat, in_scan=True)

  def with_slots(cell, state, block):
    slots_BSD = cell.memory_slots(state)
    state, y = body(cell, state, block)
    return state, (y, slots_BSD)

  scan = nn.scan(
    mean_of_losses(with_slots, count),
    variable_broadcast='params',
    variable_axes={'losses': 0, 'metrics': 0} | pictures.STACKED,
    split_rngs={'params': False, 'dropout': not cell.shares_dropout},
    in_axes=1,
    out_axes=1,
    unroll=cell.unroll,
  )
  if not cell.is_initializing():
    # Gathered once rather than in each block; gradients are summed once too.
    scan = nn.map_variables(scan, 'params', trans_in_fn=all_gather_params)
  state, (y, before_BNSD) = scan(cell, state, blocks)
  sow_slots(cell, before_BNSD, state, blocks.mask)
  return state, y


def sow_slots(cell: Cell, before_BNSD, state: State, mask_BNW) -> None:
  """Sows metrics of a cell's memory slots; see state_use.sow_states.

  Args:
    cell: the cell.
    before_BNSD: slots before each of N blocks. None means that the cell has no
      slots, and that nothing is sown.
    state: state after the last block.
    mask_BNW: bool, False at padding.
  """
  if before_BNSD is not None:
    after_B1SD = cell.memory_slots(state)[:, None]
    s_BNSD = jnp.concatenate([before_BNSD, after_B1SD], 1)
    state_use.sow_states(cell, s_BNSD, mask_BNW.any(2))


def mean_of_losses(body: Callable, count: int) -> Callable:
  """Returns `body`, but with the losses that it sows divided by `count`.

  If `body` is called `count` times, the sum of its losses is then their mean.
  """
  share = lambda losses: jax.tree.map(lambda a: a / count, losses)
  return nn.map_variables(body, 'losses', trans_out_fn=share, mutable=True)


def reading_block(cell: Cell, segment: int) -> int:
  """Returns the number of tokens of a block in which a text is read.

  If the cell takes any number of tokens, the text still gets blocks, so that
  most of it is not read token by token.

  Args:
    cell: the cell.
    segment: number of tokens of a segment, a multiple of the result.
  """
  return cell.block_length or divisor(segment, 1, segment // 8)


def to_blocks(a_BT: jax.Array, W: int) -> jax.Array:
  """Divides tokens into blocks: [B, T, ...] -> [B, T / W, W, ...]."""
  B, T = a_BT.shape[:2]
  return a_BT.reshape(B, T // W, W, *a_BT.shape[2:])


class Resettable(struct.PyTreeNode):
  """Part of a state that masks old values in rows that are reset.

  Masking is cheaper than overwriting, and needs no second copy of a large
  buffer.
  """

  def reset(self, start_B: jax.Array, fresh: 'Resettable') -> 'Resettable':
    """Returns this part, acting like `fresh` in rows that begin a document.

    The arguments are as in the function `reset`.
    """
    raise NotImplementedError


def reset(start_B: jax.Array, fresh: State, state: State) -> State:
  """Returns the state, reset to `fresh` in rows that begin a document.

  Args:
    start_B: bool, True at rows that begin a document.
    fresh: the state at the start of a document.
    state: the state so far.
  """
  is_resettable = lambda part: isinstance(part, Resettable)

  def pick(f, s):
    if is_resettable(f):
      return s.reset(start_B, f)
    start = start_B.reshape(-1, *[1] * (s.ndim - 1))
    return jnp.where(start, f.astype(s.dtype), s)

  return jax.tree.map(pick, fresh, state, is_leaf=is_resettable)
