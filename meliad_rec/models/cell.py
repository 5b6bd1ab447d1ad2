"""The one interface that every architecture implements, and how to run it.

A cell maps (state, block of tokens) to (state, outputs for the same tokens).
The splitting law gives recurrence over a long document its meaning: running
a ++ b from a state equals running a, then b from where that ended.

Shape letters in names, here and everywhere: B batch, T tokens in a segment,
W tokens in a block, S slots or keys, D model width, H heads, K head width,
C sources, F hidden width, V vocabulary, L layers.

What becomes of a state where a new document begins.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.remat import remat

State = Any  # A pytree; every leaf is [B, ...]; the same shapes in and out.


class Block(struct.PyTreeNode):
  """Consecutive tokens: every leaf is [B, T, ...]."""

  x: jax.Array  # [B, T, D] embeddings.
  mask: jax.Array  # [B, T] bool, False at padding.


class Cell(nn.Module, kw_only=True):
  """Base class of every architecture.

  Attributes:
    unroll: blocks that one iteration of the scan over blocks holds, where there
      is one.
    remat: a name in remat.POLICIES, applied to each call, or to each block of a
      call that scans them.
  """

  unroll: int = 1
  remat: str = 'none'

  @property
  def block_length(self) -> int | None:
    """Calls take whole blocks of so many tokens; None: any number."""
    return None

  @property
  def block_setting(self) -> str:
    """What block_length is, in names of settings."""
    return 'WINDOW'

  @property
  def takes_segments(self) -> bool:
    """Whether one call may take several blocks; if not, `run` scans them."""
    return self.block_length is None

  @property
  def scans_blocks(self) -> bool:
    """Whether a call of several blocks scans them, `remat` within."""
    return False

  @property
  def causal(self) -> bool:
    """Whether no output depends on a later token."""
    return True

  @property
  def needs_whole_document(self) -> bool:
    """Whether a segment must hold all of a document."""
    return False

  def initial_state(self, batch: int) -> State:
    """State at the start of a document."""
    raise NotImplementedError

  def __call__(self, state: State, block: Block) -> tuple[State, jax.Array]:
    """Returns the state after the block, and the outputs y_BTD."""
    raise NotImplementedError

  def memory_slots(self, state: State) -> jax.Array:
    """Vectors [B, S, D] of the state that sum up what was read.

    Raises:
      ValueError: the cell has none.
    """
    raise ValueError(
      f'{type(self).__name__} has no memory slots to pool; take an '
      'architecture that has, or another of options/pool_*.'
    )

  def clear(self, state: State) -> State:
    """State without what only recurrence carries; attention caches stay.

    The ablation "clear the state at each segment", Hutchins et al. 2022,
    section 4.
    """
    return state

  @property
  def is_recurrent(self) -> bool:
    """Whether `clear` forgets anything."""
    return False

  # Token by token, for generation. A cell that takes any number of tokens has
  # it for nothing; one that takes whole blocks may add it, and is then opened
  # at a block border. Without it, generation runs the open block again.

  @property
  def can_step(self) -> bool:
    """Whether `step` reads one token at a time."""
    return self.block_length is None

  def to_decode_state(self, state: State) -> State:
    """The state of a block border in the form that `step` takes."""
    return state

  def decode_step(self, opened: State, block: Block) -> tuple[State, jax.Array]:
    """Reads blocks of one token; together they equal the whole block."""
    return self(opened, block)

  def to_segment_state(self, opened: State) -> State:
    """`open` undone, at a block border."""
    return opened


def run(cell: Cell, state: State, segment: Block) -> tuple[State, jax.Array]:
  """Runs a cell over a segment, block by block where it must.

  Args:
    cell: any cell.
    state: where the tokens before the segment left it.
    segment: T tokens, a multiple of the cell's block length.

  Returns:
    The state after the segment, and y_BTD.

  Raises:
    ValueError: the segment is no multiple of the block length.
  """
  B, T = segment.mask.shape
  W = cell.block_length or T
  if T % W:
    raise ValueError(
      f'{type(cell).__name__} takes blocks of {W} tokens; the segment has {T}, '
      'which is not a multiple. Set SEGMENT to a multiple of '
      f'{cell.block_setting}.'
    )
  if cell.takes_segments or T == W:
    policy = 'none' if cell.scans_blocks else cell.remat
    return remat(lambda c, s, b: c(s, b), policy)(cell, state, segment)
  blocks = jax.tree.map(lambda a: to_blocks(a, W), segment)
  state, y = scan_blocks(lambda c, s, b: c(s, b), cell, state, blocks)
  return state, y.reshape(B, T, *y.shape[3:])


def scan_blocks(body: Callable, cell: Cell, state: State, blocks):
  """lax.scan of body(cell, state, block) over axis 1 of every leaf.

  A scan over a module must be lifted, or its tracers leak. Blocks share their
  dropout masks, as in the authors' code: drawing new ones in each would cost
  more than some of its matrix products. Of losses that they sow, the mean over
  blocks counts.
  """
  count = jax.tree.leaves(blocks)[0].shape[1]
  scan = nn.scan(
    mean_of_losses(remat(body, cell.remat, in_scan=True), count),
    variable_broadcast='params',
    variable_axes={'losses': 0, 'figures': 0, 'pictures': 0},
    split_rngs={'params': False, 'dropout': False},
    in_axes=1,
    out_axes=1,
    unroll=cell.unroll,
  )
  if not cell.is_initializing():
    # Gathered once, and not in each block; so are gradients added up.
    scan = nn.map_variables(scan, 'params', trans_in_fn=all_gather_params)
  return scan(cell, state, blocks)


def mean_of_losses(body: Callable, count: int) -> Callable:
  """A body that runs `count` times and sows of each loss so small a part."""
  share = lambda losses: jax.tree.map(lambda a: a / count, losses)
  return nn.map_variables(body, 'losses', trans_out_fn=share, mutable=True)


def to_blocks(a_BT: jax.Array, W: int) -> jax.Array:
  """[B, T, ...] -> [B, T / W, W, ...]."""
  B, T = a_BT.shape[:2]
  return a_BT.reshape(B, T // W, W, *a_BT.shape[2:])


class Resettable(struct.PyTreeNode):
  """A part of a state that is too large to pick rows from, and hides them."""

  def reset(self, start_B: jax.Array, fresh: 'Resettable') -> 'Resettable':
    """The part, as good as `fresh` in the rows that begin a new document."""
    raise NotImplementedError


def reset(start_B: jax.Array, fresh: State, state: State) -> State:
  """State in which the rows that begin a new document are fresh."""
  itself = lambda part: isinstance(part, Resettable)

  def pick(f, s):
    if itself(f):
      return s.reset(start_B, f)
    start = start_B.reshape(-1, *[1] * (s.ndim - 1))
    return jnp.where(start, f.astype(s.dtype), s)

  return jax.tree.map(pick, fresh, state, is_leaf=itself)
