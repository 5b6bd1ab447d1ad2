"""Selection and results of what an Observer records.

Letters of this file: N blocks, P steps in depth or passes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.metrics import pictures

LIMIT = 4 * 2**30  # Bytes of the arrays that one call may return.


@dataclasses.dataclass(frozen=True)
class Request:
  """Selection of what an Observer records.

  Attributes:
    states: whether to record the recurrent state after blocks.
    every: number of blocks between two recorded states.
    top: number of the most likely tokens to record at each token, with the loss
      and other facts; see `predictions`. None records no predictions.
    lens: the same as `top`, after each step in depth or pass, for models that
      sow the picture 'lens'.
    pictures: names in pictures.AXES of other pictures to record.
    layer: index, from 0, of the only layer whose pictures are recorded; None
      records all layers.
  """

  states: bool = False
  every: int = 1
  top: int | None = None
  lens: int | None = None
  pictures: tuple[str, ...] = ()
  layer: int | None = None


@dataclasses.dataclass
class Recording:
  """Results of an Observer that read T tokens.

  Attributes:
    states: {name of a part: array}, float32 if the part has floating-point
      numbers. Axis 0 counts block borders; border 0 is before the first token.
    tokens: {name: array [T, ...]}, see `predictions`.
    lens: {name: array [P, T, ...]}, see `predictions`.
    pictures: {name: {(layer, index): array}}. If a layer has several pictures
      of one name, such as one for each pass or gate, the index counts them. The
      layer is -1 if the model's layers are not numbered. The axes are those in
      pictures.AXES. An axis of N blocks precedes the slots, and an axis of
      P steps in depth comes first, if the layer is repeated in depth.
  """

  states: dict[str, np.ndarray]
  tokens: dict[str, np.ndarray]
  lens: dict[str, np.ndarray]
  pictures: dict[str, dict[tuple[int, int], np.ndarray]]


class Recorder:
  """Arrays of a Recording, which are filled segment by segment.

  They are allocated once, so a call needs little more memory than its result
  and what is recorded in one segment.
  """

  def __init__(
    self, shapes, request: Request, initial, tokens: int, block: int
  ):
    """Allocates the arrays.

    Args:
      shapes: {kind: tree of shapes} of what is recorded in a segment, with an
        axis of blocks.
      request: what to record.
      initial: parts of the state before the first token, if states are
        recorded.
      tokens: number of tokens of all segments, without padding.
      block: number of tokens of a block.

    Raises:
      ValueError: the arrays would take more than LIMIT.
    """
    blocks = tokens // block

    def growing(path, a):
      kind = path[0].key
      if kind == 'states':
        return _Growing(
          a.shape[2:],
          _kept_dtype(kind, a),
          0,
          1 + blocks // request.every,
          False,
        )
      if kind == 'pictures':
        axes = pictures.AXES[path[1].key]
        axis = a.ndim - len(axes) - 1
        if axes[0] != 'token':
          return _Growing(a.shape[1:], a.dtype, axis, blocks, False)
      else:
        axis = 1 if kind == 'lens' else 0
      shape = a.shape[1 : 1 + axis] + a.shape[2 + axis :]
      return _Growing(shape, a.dtype, axis, tokens, True)

    _check_size(shapes, request, tokens, block)
    self._found = jax.tree.map_with_path(growing, shapes)
    for name, a in initial.items():
      self._found['states'][name].add(np.asarray(a))

  def add(self, found) -> None:
    """Adds what was recorded in the next segment.

    Args:
      found: arrays like `shapes`, but states only after every `every` blocks,
        and without the axis of rows.
    """
    add = lambda growing, a: growing.add(a)
    jax.tree.map(add, self._found, jax.device_get(found))

  def recording(self) -> Recording:
    """Returns the arrays, after all segments were added."""
    arrays = jax.tree.map(lambda growing: growing.array, self._found)
    kinds = 'states', 'tokens', 'lens', 'pictures'
    return Recording(*(arrays.get(kind, {}) for kind in kinds))


class _Growing:
  """Array of a document that is filled part by part along one axis.

  Attributes:
    array: the whole array.
  """

  def __init__(self, shape, dtype, axis: int, length: int, by_token: bool):
    """Allocates the array.

    Args:
      shape: its shape without the axis along which it grows.
      dtype: its dtype.
      axis: index of this axis.
      length: length of this axis; anything added beyond it is padding.
      by_token: whether the axis counts tokens instead of blocks. Parts have an
        axis of blocks, and then also one of the tokens of a block.
    """
    self.array = np.empty((*shape[:axis], length, *shape[axis:]), dtype)
    self._axis, self._end, self._by_token = axis, 0, by_token

  def add(self, part: np.ndarray) -> None:
    """Adds a part, whose axis 0 is the axis of blocks."""
    if self._by_token:
      part = np.moveaxis(part, self._axis + 1, 1)
      part = part.reshape(-1, *part.shape[2:])
    rest = np.moveaxis(self.array, self._axis, 0)[self._end :]
    part = part[: len(rest)]
    rest[: len(part)] = part
    self._end += len(part)


def _kept_dtype(kind: str, a) -> np.dtype:
  """Returns the dtype of the array into which recorded parts `a` are put."""
  if kind == 'states' and jnp.issubdtype(a.dtype, jnp.floating):
    return np.dtype(np.float32)  # NumPy knows no bfloat16.
  return np.dtype(a.dtype)


def _check_size(shapes, request: Request, tokens: int, block: int) -> None:
  """Checks that what a call records is not too large.

  Args:
    shapes, request, tokens, block: see Recorder.

  Raises:
    ValueError: the arrays would take more than LIMIT.
  """
  total = 0.0
  for kind, part in shapes.items():
    blocks = tokens / block / (request.every if kind == 'states' else 1)
    for a in jax.tree.leaves(part):
      total += a.size / a.shape[0] * _kept_dtype(kind, a).itemsize * blocks
  if total > LIMIT:
    raise ValueError(
      f'The arrays of {tokens:,} tokens would take {total / 2**30:.1f} GiB, '
      f'but the limit is {LIMIT / 2**30:.0f} GiB. Give a shorter text, one '
      'layer, or a larger `every`.'
    )
