"""Methods of a trained run that show what it does with a text."""

from collections.abc import Sequence
import copy
import functools
from typing import Any
from typing import Self
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.config.saved import DATA
from meliad_rec.config.saved import SavedConfig
from meliad_rec.config.values import check_count
from meliad_rec.config.values import ConfigError
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.pairs import first_words
from meliad_rec.data.pairs import line_ids
from meliad_rec.data.pairs import Pairs
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.evaluation import depth
from meliad_rec.evaluation.observer import Observer
from meliad_rec.evaluation.text_observer import check_labels
from meliad_rec.evaluation.text_observer import parts_of
from meliad_rec.evaluation.text_observer import TextObserver
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import reading_block
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs.checks import check_layer
from meliad_rec.runs.checks import check_text

if TYPE_CHECKING:
  import xarray


Text = str | np.ndarray

_TOP = 5  # Likely tokens that `predictions` returns unless told otherwise.


class ObservedRun:
  """Base class of TrainedRun: the methods that show what a model does.

  A text is one document: a string, or the ids of its tokens. Results are arrays
  with named axes; see https://docs.xarray.dev.

  Attributes:
    sharded, params, vocabulary, labels, config, name, identity: see TrainedRun.
  """

  sharded: ShardedModel
  params: Any
  vocabulary: Vocabulary
  labels: bool
  config: SavedConfig
  name: str
  identity: dict[str, str]

  @property
  def observer(self) -> Observer:
    """The observer of tokens and model states, on which the methods rest."""
    return self._observer.observer

  def encode(self, text: Text) -> np.ndarray:
    """Returns the ids of the tokens of a text, or the ids if given ids."""
    return self._observer.encode(text)

  @functools.cached_property
  def _observer(self) -> TextObserver:
    observer = Observer(self.sharded, self.params, self.labels)
    return TextObserver(observer, self.vocabulary)

  @property
  def begins_changed(self) -> bool:
    """Whether texts begin with another recurrent state; see `with_state`."""
    return '_observer' in vars(self) and self._observer.state is not None

  @property
  def block(self) -> int:
    """Number of tokens of a block, after which the recurrent state changes.

    If the model takes any number of tokens, it is the largest divisor of a
    segment that is at most an eighth of it.
    """
    return reading_block(self.sharded.model.cell, self.sharded.segment)

  @property
  def window(self) -> int | None:
    """Number of tokens that a layer attends to; None if it has no window."""
    cells = [self.sharded.model.cell]
    for cell in cells:
      for holder in (cell, getattr(cell, 'config', None)):
        window = getattr(holder, 'window', None)
        if window is not None:
          return window
      inner = *getattr(cell, 'cells', ()), getattr(cell, 'cell', None)
      cells += [one for one in inner if one is not None]
    return None

  def predictions(
    self,
    text: Text,
    top: int | None = None,
    *,
    clear_every: int | None = None,
    labels: np.ndarray | None = None,
  ) -> 'xarray.Dataset':
    """Returns the prediction of each token of a text, or of its label.

    Args:
      text: text to read.
      top: number of the most likely tokens to return at each place. None means
        5, or all of a vocabulary that has fewer.
      clear_every: the recurrent state is cleared every so many tokens, a
        multiple of `block`, counted from the start of the text, which changes
        nothing if the model is not recurrent. None: never,
        but at each segment if the model was trained with
        options/recurrent/clear_state.
      labels: ids of the labels of all tokens, if the model predicts labels.

    Returns:
      A Dataset with the axes token and choice, the best first. 'nats' is the
      loss -ln p of each token, 'rank' the number of tokens that were more
      likely, both NaN where a label is 0, which is not scored; and 'entropy'
      the entropy of the prediction, in nats. 'top_ids', 'top_text' and
      'top_nats' are the most likely tokens and the loss that each would have
      had. Coordinates of a token are its 'text', its 'id', and 'byte', the
      index of its first byte in the text as the tokens spell it. A vocabulary
      of words, for example, may spell spaces differently.

    Raises:
      ValueError: the text is empty or neither a string nor ids, `top` is below
        1 or above the number of tokens in the vocabulary, the arrays would take
        more than 4 GiB, labels are missing, not expected or no ids of labels,
        or the model reads pairs or a whole document at once, or attends to
        later tokens.
    """
    top = self._likely(top)
    if clear_every is not None:
      check_count('clear_every', clear_every, 1)
    self.check_readable(text, labels)
    return self._observer.predictions(text, top, clear_every, labels)

  def _likely(self, top: int | None) -> int:
    """Returns the number of likely tokens; ValueError if it is impossible."""
    head = self.sharded.model.head
    size = self.vocabulary.size if head is None else head.classes
    top = min(_TOP, size) if top is None else top
    check_count('top', top, 1)
    if top > size:
      of = 'tokens in the vocabulary' if head is None else 'labels'
      raise ValueError(
        f'top is {top:,}, but there are only {size:,} {of}. Give at most '
        f'{size:,}.'
      )
    return top

  def states(self, text: Text, every: int | None = None) -> 'xarray.Dataset':
    """Returns the recurrent state of the model while it reads a text.

    Args:
      text: text to read.
      every: number of tokens between two states, a multiple of `block`. None
        means one block.

    Returns:
      A Dataset of the parts of the state, such as 'slots' with the axes border,
      layer, slot and feature. Border 0 is before the text. Coordinates of a
      border are 'tokens', the number of tokens before it, and 'byte', the
      number of bytes before it. The attribute 'parameters' tells states of
      different models apart. Of a Staircase, 'pass_3' has the inputs of
      each layer in the fourth pass, and 'frozen' the frozen chunks.

    Raises:
      ValueError: as in `predictions`; also if the model is not recurrent, or
        `every` is not a multiple of a block.
    """
    found = self._reading(text).states(text, every)
    return found.assign_attrs(parameters=self.identity['parameters'])

  def attention(
    self, text: Text, layer: int | None = None
  ) -> dict[str, 'xarray.DataArray']:
    """Returns the weights of attention while the model reads a text.

    Args:
      text: text to read.
      layer: index of a layer, from 0; a negative one counts from the last that
        has any. None returns all layers.

    Returns:
      {name: DataArray}. Possible names are 'token_to_token', 'token_to_state',
      'token_to_source', 'state_to_state', 'state_to_token', 'recall_weight',
      'recall_back' and 'recall_share'; a model has some of them. The first axes
      are 'layer', if layers are numbered, and 'pass' and 'step', indexed from
      0, if there are several. AXES in meliad_rec/metrics/pictures.py lists the
      others: for 'token_to_token' they are token, head and back, where back 0
      is the nearest key that the token may see. The axis block
      counts blocks, whose state vectors attend to each other and to tokens. The
      weights of a query add up to 1, over all keys that it sees, or to 0 if
      there are none.

    Raises:
      ValueError: as in `predictions`; also if no layer has attention, or
        `layer` is no integer.
    """
    found = self.pictures(text, pictures.ATTENTION, layer)
    return self._some(found, 'attention', pictures.ATTENTION, layer)

  def gates(
    self, text: Text, layer: int | None = None
  ) -> dict[str, 'xarray.DataArray']:
    """Returns the values of gates while the model reads a text, from 0 to 1.

    Args:
      text: text to read.
      layer: index of a layer, from 0; a negative one counts from the last that
        has any. None returns all layers.

    Returns:
      {name: DataArray}, like `attention`. 'state_keep' and 'state_write' are
      the weights of the old state vector and of its update. In a gated
      universal transformer or an LSTM, 'token_keep' and 'token_write' are the
      same weights of a token's state; an LSTM also has 'token_output'.

    Raises:
      ValueError: as in `predictions`; also if no layer has gates, or `layer` is
        no integer.
    """
    found = self.pictures(text, pictures.GATES, layer)
    return self._some(found, 'gates', pictures.GATES, layer)

  def lens(
    self,
    text: Text,
    top: int | None = None,
    *,
    labels: np.ndarray | None = None,
  ) -> 'xarray.Dataset':
    """Returns what the model would predict if it stopped after each step.

    Args:
      text: text to read.
      top: number of the most likely tokens to return at each place, as in
        `predictions`.
      labels: ids of the labels of all tokens, if the model predicts labels.

    Returns:
      A Dataset of the same arrays as of `predictions`, with an axis step before
      the axis token. A step is one in depth of a universal transformer, or a
      pass of a Staircase; both are indexed from 0.

    Raises:
      ValueError: as in `predictions`; also if the model has no such steps.
    """
    top = self._likely(top)
    self.check_readable(text, labels)
    return self._observer.lens(text, top, labels)

  def depth(self, text: Text) -> 'xarray.Dataset':
    """Returns the number of steps in depth that the model takes at each token.

    Returns:
      A Dataset: 'steps' [token], where the token or its label is predicted,
      the sum over the layers that halt; 'by_layer' [token, layer], the same in
      each of these layers, counted from 0; and 'begins' [token], whether tokens
      that halt together begin there.

    Raises:
      ValueError: the model does not halt, texts begin with another state (see
        `with_state`), or as in `predictions`.
    """
    self.check_state_unmodified('depth')
    observer, ids_T = self._reading(text), self.encode(text)
    length = len(b''.join(self.vocabulary.token_bytes(ids_T)))
    labels_T = np.zeros_like(ids_T) if self.labels else None
    read = Document('the text', ids_T, length, 0, labels_T)
    documents = Documents.collect([read], self.vocabulary)
    found = depth.measure(self.sharded, self.params, documents, self.rows(1))
    data = {
      'steps': ('token', found.steps),
      'by_layer': (('token', 'layer'), found.steps_NH),
      'begins': ('token', found.begins),
    }
    return observer.by_token(data, ids_T)

  def with_state(self, state: Any, before: Text = '') -> Self:
    """Returns this run, but every text begins with another recurrent state.

    It generates and scores texts from the given state. Attention caches hold
    the end of `before`. `evaluate` and `depth` cannot be used.

    Args:
      state: one border of what `states` returned, such as
        run.states(book).isel(border=-1); or {name of a part: array}, such as
        {'layer_2/slots': slots}. Parts that are left out stay as they are.
      before: text that is read before each text, a multiple of `block` tokens.
        The recurrent state after it is replaced.

    Raises:
      ValueError: the state is neither of these or comes from a model with other
        parameters, a part has an unknown name or a wrong shape, `before` is not
        a multiple of a block, or the model was trained with
        options/recurrent/clear_state and would clear the state at once.
    """
    self._check_ids('before', before)
    of = getattr(state, 'attrs', {}).get('parameters')
    if of not in (None, self.identity['parameters']):
      raise ValueError(
        'The state comes from another run or step, whose model has other '
        'parameters. Give what states of this run returned; or, to put it in '
        'nevertheless, {name of a part: array}.'
      )
    run, observer = copy.copy(self), self._observer.observer
    parts = parts_of(state, observer.parts(observer.start()))
    run._observer = self._observer.from_state(parts, before)
    return run

  def with_source(self, source: str) -> Self:
    """Returns this run, but every text is the beginning of a source's target.

    For models with an encoder, whose `predictions`, `attention` and `states`
    need it: run.with_source('a dog').attention('ein Hund').

    Args:
      source: a source, without newlines.

    Raises:
      ValueError: the model has no encoder, or the source is not a single line.
    """
    self._check_encoder('read a source', 'Read texts without with_source.')
    run = copy.copy(self)
    run._observer = self._observer.from_source(self.source_ids(source))
    return run

  def _check_encoder(self, what: str, todo: str) -> None:
    if self.sharded.model.encoder is None:
      raise ValueError(
        f'This model has no encoder, so it cannot {what}. {todo}'
      )

  def source_ids(self, line: str, what: str = 'The source') -> np.ndarray:
    """Returns the ids of a source, as the model reads it.

    Args:
      line: the source.
      what: what it is, in error messages.

    Raises:
      ValueError: it is not a single line.
    """
    check_text(what, line)
    if '\n' in line:
      raise ValueError(f'{what} has several lines. Give a single line.')
    return line_ids(first_words(self._source_words)(line), self.vocabulary)

  @property
  def _source_words(self) -> int | None:
    try:
      return self.config.argument(Pairs, 'source_words', DATA)
    except ConfigError:  # The run did not read pairs.
      return None

  def _reading(self, text: Text, what: str = 'The text') -> TextObserver:
    """Returns the reader of texts; ValueError if it cannot read this one."""
    self._check_ids(what, text)
    if not len(text):
      raise ValueError(f'{what} is empty. Give at least one character.')
    return self._observer

  def check_texts(self, texts: Sequence[Text]) -> None:
    """Raises ValueError if there is no text, or the run cannot read one.

    Args:
      texts: the texts. Of several, the message says which, counted from 0.
    """
    if not len(texts):
      raise ValueError('There is no text to read. Give at least one.')
    for number, text in enumerate(texts):
      self._reading(text, f'Text {number}' if len(texts) > 1 else 'The text')

  def _check_ids(self, what: str, text: Text) -> None:
    """Raises ValueError if a text is neither a string nor ids of tokens."""
    is_array = isinstance(text, np.ndarray)
    if not (is_array and text.ndim == 1 and text.dtype.kind in 'iu'):
      if isinstance(text, np.ndarray | list | tuple):
        raise ValueError(
          f'{what} must be a string, or a one-dimensional NumPy array of '
          f'integers, the ids of its tokens, got {type(text).__name__}.'
        )
      check_text(what, text)
      return
    size = self.vocabulary.size
    wrong = text[(text < 0) | (text >= size)]
    if len(wrong):
      raise ValueError(
        f'{what} has the id {wrong[0]}, but the ids of this vocabulary are '
        f'from 0 to {size - 1}.'
      )

  def check_readable(self, text: Text, labels: np.ndarray | None) -> None:
    """Raises ValueError if the run cannot read a text with these labels.

    Args:
      text: the text.
      labels: ids of the labels of all tokens; None for a run that predicts the
        next token.
    """
    self._reading(text)
    if self.labels != (labels is not None):
      raise ValueError(
        f'The model predicts {"labels" if self.labels else "the next token"}, '
        f'but labels were {"not " if self.labels else ""}given. '
        + (
          "Give labels, the id of each token's label."
          if self.labels
          else 'Leave labels out.'
        )
      )
    if labels is not None:
      head = self.sharded.model.head
      largest = self.vocabulary.size - 1 if head is None else head.classes
      check_labels(labels, len(self.encode(text)), largest)

  def pictures(
    self, text: Text, names: Sequence[str], layer: int | None = None
  ) -> dict[str, 'xarray.DataArray']:
    """Returns some of the arrays that `attention` and `gates` return.

    Names that the model lacks are left out.

    Args:
      text: text to read.
      names: names of AXES in meliad_rec/metrics/pictures.py; fewer of them take
        less memory.
      layer: index of a layer, from 0; a negative one counts from the last that
        has any. None returns all layers.

    Raises:
      ValueError: as in `predictions`, or `layer` is no integer.
    """
    check_layer(layer)
    observer = self._reading(text)
    if layer is not None:
      numbers = observer.observer.layers(names)
      known = _from_0(numbers)
      if -len(known) <= layer < 0:
        layer = known[layer]
      if layer not in known:
        return {}
      layer = layer if layer in numbers else -1
    return observer.pictures(text, tuple(names), layer)

  def layers_with(self, names: Sequence[str]) -> list[int]:
    """Returns the indices of the layers that have some pictures.

    A model that repeats one layer, or whose layers are not numbered, has layer
    0 only.

    Args:
      names: names of AXES in meliad_rec/metrics/pictures.py.
    """
    return _from_0(self.observer.layers(names))

  def _some(
    self, found: dict, what: str, names: Sequence[str], layer: int | None
  ) -> dict:
    """Returns what was found; ValueError if it is nothing."""
    if found:
      return found
    known = [] if layer is None else self.layers_with(names)
    if known:
      raise ValueError(
        f'The run {self.name} has no {what} in layer {layer}. Choose one of '
        f'its layers {", ".join(map(str, known))}.'
      )
    raise ValueError(f'The run {self.name} has no {what}. Choose another run.')

  def check_state_unmodified(self, what: str) -> None:
    """Raises ValueError if texts begin with another recurrent state.

    Args:
      what: method that begins every text without a state.
    """
    if self.begins_changed:
      raise ValueError(
        f'{what} reads each text from its own beginning, but this run begins '
        'with another state (with_state). Use the original run, or predictions.'
      )


def _from_0(numbers: list[int]) -> list[int]:
  """Returns numbers of layers, with 0 if there are only unnumbered ones."""
  return [n for n in numbers if n >= 0] or [0] * bool(numbers)
