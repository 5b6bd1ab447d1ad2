"""Arrays with named axes (xarray) of what a model does with a text."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.evaluation.observer import Observer
from meliad_rec.evaluation.picture_layers import with_numbers
from meliad_rec.evaluation.recording import Recording
from meliad_rec.evaluation.recording import Request
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import State

if TYPE_CHECKING:
  import xarray as xr

# Results of `predictions` that a TextObserver keeps: how many, and the bytes of
# the largest. Several figures read the same text.
_KEPT, _LARGEST = 4, 256 * 2**20
_IN_NATS = {'nats', 'entropy', 'top_nats'}  # Arrays whose unit is nats.

# Axes of parts of recurrent states, after others such as repeats of a layer.
# Parts that match none get numbered axes.
_PART_AXES = (
  ('slots', ('slot', 'feature')),
  ('cell|hidden', ('feature',)),
  # The ring of a Memorizing Transformer. All heads have the same mask.
  ('memory/(keys|values)', ('head', 'place', 'head_feature')),
  ('memory/mask', ('all_heads', 'place', 'one')),
  # Inputs of layers in a pass of a Staircase, whose passes differ in length.
  (r'(?P<name>pass_\d+)', ('{}_token', 'feature')),
  # The memory of a Feedback Transformer, or frozen chunks of a Staircase.
  ('memory|frozen', ('token', 'feature')),
  ('mask', ('token',)),
)


@dataclasses.dataclass(frozen=True)
class TextObserver:
  """Reader of texts from a given state, which describes what it observes.

  Attributes:
    observer: reads tokens.
    vocabulary: vocabulary of the model.
    before: tokens that were read before each text, whole blocks.
    state: state of the model after these tokens, with one row. None: the state
      at the start of a document.
  """

  observer: Observer
  vocabulary: Vocabulary
  before: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )
  state: State | None = None
  # Pairs of (ids of the text, clear_every, top) and results, newest last.
  _kept: list[tuple[Any, 'xr.Dataset']] = dataclasses.field(
    default_factory=list, init=False, repr=False, compare=False
  )

  def encode(self, text: str | np.ndarray) -> np.ndarray:
    """Returns the ids of the tokens of a text, or the ids if given ids."""
    return self.vocabulary.encode(text) if isinstance(text, str) else text

  def from_state(
    self, parts: Mapping[str, Any], before: str | np.ndarray
  ) -> 'TextObserver':
    """Returns a TextObserver that begins with another recurrent state.

    Args:
      parts: arrays of the recurrent state; see `parts_of`.
      before: text to read first. The recurrent state after it is replaced.

    Raises:
      ValueError: a part has an unknown name or a wrong shape, `before` has a
        number of tokens that is not a multiple of a block, or the model would
        clear the state at once.
    """
    ids_T, block = self.encode(before), self.observer.block
    if len(ids_T) % block:
      whole = len(ids_T) - len(ids_T) % block
      length = len(b''.join(self.vocabulary.token_bytes(ids_T)[:whole]))
      raise ValueError(
        f'before must have a multiple of {block} tokens, the length of a '
        f'block, got {len(ids_T)}. Its first {length} bytes are whole blocks.'
      )
    every = self.observer.clears_every
    if every and len(ids_T) % every == 0:
      raise ValueError(
        f'This model clears its state at the start of each segment of {every} '
        f'tokens, so it would lose a state given after {len(ids_T)}. Give the '
        'state within a segment.'
      )
    state = self.observer.start()
    if len(ids_T):
      _, state = self.observer.read(ids_T, Request())
    state = self.observer.with_parts(state, parts)
    return dataclasses.replace(self, before=ids_T, state=state)

  def from_source(self, source_S: np.ndarray) -> 'TextObserver':
    """Returns a TextObserver of targets; see Observer.from_source."""
    observer = self.observer.from_source(source_S)
    return dataclasses.replace(self, observer=observer)

  def read(
    self,
    text: str | np.ndarray,
    request: Request,
    clear_every: int | None = None,
    labels_T: np.ndarray | None = None,
  ) -> tuple[Recording, np.ndarray]:
    """Reads a text; returns what was recorded, and the ids of its tokens."""
    ids_T, first = self.encode(text), len(self.before)
    if labels_T is not None:
      labels_T = np.pad(labels_T, (first, 0))
    recording, _ = self.observer.read(
      np.concatenate([self.before, ids_T]),
      request,
      self.state,
      first=first,
      clear_every=clear_every,
      labels_T=labels_T,
    )
    return recording, ids_T

  def states(self, text: str | np.ndarray, every: int | None) -> 'xr.Dataset':
    """Returns the recurrent state at block borders; see TrainedRun.states."""
    import xarray as xr

    model, block = self.observer.model, self.observer.block
    if not model.cell.is_recurrent:
      raise ValueError(
        'The model has no recurrent state. Choose a run of a recurrent '
        'architecture.'
      )
    every = block if every is None else every
    check_count('every', every, 1)
    if every % block:
      raise ValueError(
        f'every must be a multiple of {block} tokens, the length of a block, '
        f'got {every}.'
      )
    request = Request(states=True, every=every // block)
    recording, ids_T = self.read(text, request)
    parts, names = recording.states, {}
    count = len(next(iter(parts.values())))
    for name in sorted(parts, key=with_numbers):
      match = re.fullmatch(r'layer_(\d+)/(.*)', name)
      own, layer = (match[2], int(match[1])) if match else (name, None)
      names.setdefault((own, parts[name].shape[1:]), []).append((layer, name))
    data, sizes = {}, {}
    for (own, shape), layers in names.items():
      # Layers whose parts differ in shape are kept apart.
      alike = sum(1 for other, _ in names if other == own) == 1
      known = _axes_of(own)
      own_sizes = zip(known, shape[-len(known) :], strict=False)
      # A part of a user's cell may have the name but not the axes.
      if len(known) > len(shape) or any(
        sizes.setdefault(axis, size) != size for axis, size in own_sizes
      ):
        known = ()
      extra = len(shape) - len(known)
      first = ['repeat'] if known else []
      axes = [f'{own}_axis_{i}' for i in range(extra)]
      axes = [*first[:extra], *axes[len(first) :], *known]
      for group in [layers] if alike else [[one] for one in layers]:
        numbers, full_names = zip(*group, strict=True)
        if numbers == (None,):
          data[own] = xr.DataArray(parts[own], dims=['border', *axes])
        else:
          data[own if alike else f'layer_{numbers[0]}/{own}'] = xr.DataArray(
            _stacked([parts.pop(name) for name in full_names]),
            dims=['border', 'layer', *axes],
            coords={'layer': list(numbers)},
          )
    tokens = every * np.arange(count)
    bytes_ = _starts(self.vocabulary.token_bytes(ids_T))
    borders = {'tokens': ('border', tokens), 'byte': ('border', bytes_[tokens])}
    return xr.Dataset(data, borders)

  def predictions(
    self,
    text: str | np.ndarray,
    top: int,
    clear_every: int | None,
    labels_T: np.ndarray | None,
  ) -> 'xr.Dataset':
    """Returns facts about each prediction; see TrainedRun.predictions."""
    ids = self.encode(text).astype(np.int64).tobytes()
    for (*key, most), found in self._kept:
      if key == [ids, clear_every] and most >= top and labels_T is None:
        return found.isel(choice=slice(top)).copy(deep=True)
    request = Request(top=top)
    recording, ids_T = self.read(text, request, clear_every, labels_T)
    found = self._predicted(recording.tokens, ('token',), ids_T)
    if labels_T is None and found.nbytes <= _LARGEST:
      self._kept.append(((ids, clear_every, top), found.copy(deep=True)))
      del self._kept[:-_KEPT]
    return found

  def lens(
    self, text: str | np.ndarray, top: int, labels_T: np.ndarray | None
  ) -> 'xr.Dataset':
    """Returns predictions after each step; see TrainedRun.lens."""
    recording, ids_T = self.read(text, Request(lens=top), labels_T=labels_T)
    return self._predicted(recording.lens, ('step', 'token'), ids_T)

  def _predicted(self, arrays, axes: tuple[str, ...], ids_T) -> 'xr.Dataset':
    """Returns facts about predictions, which have these axes."""
    dims = *axes, 'choice'
    data = {k: (dims[: a.ndim], a) for k, a in arrays.items()}
    data['top_text'] = dims, self.spelled(arrays['top_ids'])
    return self.by_token(data, ids_T)

  def pictures(
    self, text: str | np.ndarray, names: tuple[str, ...], layer: int | None
  ) -> dict[str, 'xr.DataArray']:
    """Returns pictures by name; those that the model lacks are left out."""
    import xarray as xr

    recording, ids_T = self.read(text, Request(pictures=names, layer=layer))
    tokens = dict(self.by_token({}, ids_T).coords)
    found = {}
    for name, layers in recording.pictures.items():
      axes = pictures.AXES[name]
      axes = axes if axes[0] == 'token' else ('block', *axes)
      counts = sorted({index for _, index in layers})
      numbers = sorted({number for number, _ in layers})
      shape = len(numbers), len(counts), *next(iter(layers.values())).shape
      stacked = np.empty(shape, next(iter(layers.values())).dtype)
      for i, j in np.ndindex(shape[:2]):  # Each is freed once it is copied.
        stacked[i, j] = layers.pop((numbers[i], counts[j]))
      steps = stacked.ndim - 2 - len(axes)
      index = 'gate' if name in pictures.GATES else 'pass'
      dims = ['layer', index, *['step'] * steps, *axes]
      coords = {'layer': numbers} | (tokens if axes[0] == 'token' else {})
      array = xr.DataArray(stacked, coords=coords, dims=dims, name=name)
      # Axes of one entry that say nothing.
      single = [index] if len(counts) == 1 else []
      single += ['layer'] if numbers == [-1] else []
      found[name] = array.squeeze(single, drop=True)
    return found

  def by_token(self, data: dict[str, Any], ids_T: np.ndarray) -> 'xr.Dataset':
    """Returns a Dataset with the text and place of each token.

    Args:
      data: {name: (dims, array)}.
      ids_T: ids of the tokens of the text.
    """
    import xarray as xr

    spelled = self.vocabulary.token_bytes(ids_T)
    texts = [piece.decode('utf-8', 'replace') for piece in spelled]
    coords = {
      'text': ('token', np.array(texts, object)),
      'byte': ('token', _starts(spelled)[:-1]),
      'id': ('token', ids_T),
    }
    found = xr.Dataset(data, coords)
    for name in _IN_NATS & {*found}:
      found[name].attrs['units'] = 'nats'
    return found

  def spelled(self, ids: np.ndarray) -> np.ndarray:
    """Returns the text of each id, an array of str."""
    if self.observer.model.head is not None:  # Labels are numbers.
      return np.asarray(ids).astype(str).astype(object)
    unique, at = np.unique(ids, return_inverse=True)
    # After the largest id, which is no space, an id is not spelled as at the
    # beginning of a text.
    after = np.concatenate([[self.vocabulary.size - 1], unique])
    spelled = self.vocabulary.token_bytes(after)[1:]
    texts = [piece.decode('utf-8', 'replace') for piece in spelled]
    return np.array(texts, object)[at].reshape(np.shape(ids))


def parts_of(state: Any, known: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the arrays of a recurrent state, by name and with a row axis.

  Args:
    state: a Dataset that TrainedRun.states returned, at one border; or a
      mapping from names of parts, such as 'layer_2/slots', to arrays.
    known: the arrays of a state of the model, {name: array [1, ...]}.

  Raises:
    ValueError: it is neither of these, or a Dataset has several borders.
  """
  if not isinstance(state, Mapping):
    raise ValueError(
      'The state must be one border of what states returned, or {name of a '
      f'part: array}}, got {type(state).__name__}.'
    )
  parts = {}
  for name, a in state.items():
    dims = getattr(a, 'dims', ())
    if 'border' in dims:
      raise ValueError(
        f'The state has {a.sizes["border"]} borders, but one is needed. Choose '
        'it with .isel(border=...).'
      )
    if 'layer' in dims:
      own = re.sub(r'^layer_\d+/', '', name)
      for layer in a['layer'].values:
        part = a.sel(layer=layer).values
        parts[f'layer_{layer}/{own}'] = part[None]
    else:
      a = np.asarray(a)
      whole = name in known and a.shape == known[name].shape
      parts[name] = a if whole else a[None]
  return parts


def _axes_of(part: str) -> tuple[str, ...]:
  """Returns the names of the axes of a part; () if they are not known."""
  for pattern, axes in _PART_AXES:
    if match := re.fullmatch(pattern, part):
      name = match.groupdict().get('name')
      return tuple(axis.format(name) for axis in axes)
  return ()


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
  """Returns arrays along a new axis 1, and empties the list."""
  if len(arrays) == 1:
    return arrays.pop()[:, None]
  shape = len(arrays[0]), len(arrays), *arrays[0].shape[1:]
  stacked = np.empty(shape, arrays[0].dtype)
  for i in reversed(range(len(arrays))):  # Each is freed once it is copied.
    stacked[:, i] = arrays.pop()
  return stacked


def _starts(pieces: list[bytes]) -> np.ndarray:
  """Returns where each piece begins in the joined bytes, and their length."""
  return np.cumsum([0, *map(len, pieces)])


def check_labels(labels: np.ndarray, count: int, largest: int) -> None:
  """Raises ValueError unless there are ids of labels for all tokens.

  Args:
    labels: the labels; 0 means that a token is not scored.
    count: number of tokens.
    largest: largest id of a label.
  """
  labels_T = np.asarray(labels)
  if labels_T.shape != (count,):
    raise ValueError(
      f'There are {count} tokens, but labels of shape {labels_T.shape}. Give '
      'one label for each token.'
    )
  if labels_T.dtype.kind not in 'iu':
    raise ValueError(
      f'Labels must be ids, which are integers, got {labels_T.dtype}.'
    )
  wrong = labels_T[(labels_T < 0) | (labels_T > largest)]
  if len(wrong):
    raise ValueError(
      f'There is a label with the id {wrong[0]}, but the ids of labels are '
      f'from 0 to {largest}.'
    )
