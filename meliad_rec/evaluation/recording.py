"""Selection and results of what an Observer records.

Letters of this file: N blocks, P steps in depth or passes.
"""

import dataclasses

import jax
import numpy as np

LIMIT = 4 * 2**30  # Bytes of the arrays that one call may return.


@dataclasses.dataclass(frozen=True)
class Request:
  """Selection of what an Observer records.

  Attributes:
    states: whether to record the recurrent state after blocks.
    every: number of blocks between two recorded states.
    top: number of the most likely tokens to record at each token, with the loss
      and other facts; see `predictions`. None records no predictions.
    lens: whether to record predictions after each step in depth or pass, for
      models that sow the picture 'lens'.
    pictures: names in pictures.AXES of other pictures to record.
    layer: index, from 0, of the only layer whose pictures are recorded; None
      records all layers.
  """

  states: bool = False
  every: int = 1
  top: int | None = None
  lens: bool = False
  pictures: tuple[str, ...] = ()
  layer: int | None = None


@dataclasses.dataclass
class Recording:
  """Results of an Observer that read T tokens.

  Attributes:
    states: {name of a part: array}. Axis 0 counts block borders; border 0 is
      before the first token.
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


def check_size(shapes, request: Request, tokens: int, read: int) -> None:
  """Checks that what a call records is not too large.

  Args:
    shapes: {kind: tree of shapes} of what is recorded of `read` tokens.
    request: what to record.
    tokens: number of tokens of the whole call.
    read: see `shapes`.

  Raises:
    ValueError: the arrays would take more than LIMIT.
  """
  size = {
    kind: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(part))
    for kind, part in shapes.items()
  }
  size['states'] = size.get('states', 0) / request.every
  total = sum(size.values()) * tokens / read
  if total > LIMIT:
    raise ValueError(
      f'The arrays of {tokens:,} tokens would take {total / 2**30:.1f} GiB, '
      f'but the limit is {LIMIT / 2**30:.0f} GiB. Give a shorter text, one '
      'layer, or a larger `every`.'
    )
