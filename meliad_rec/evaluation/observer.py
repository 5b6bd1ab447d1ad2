"""Reads a document and records what happens inside the model.

An `Observer` reads one document, block by block, and records the recurrent
state at block borders, predictions, and the pictures that modules sow (see
metrics/pictures.py).

Letters of this file: N blocks, W tokens of a block, P steps in depth or passes.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import copy
from typing import Any
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.hosts import mesh_jit
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.evaluation.picture_layers import by_layer
from meliad_rec.evaluation.recording import Recorder
from meliad_rec.evaluation.recording import Recording
from meliad_rec.evaluation.recording import Request
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import reading_block
from meliad_rec.models.cell import State
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel


class Observer:
  """Reader of a document that records what happens in a model.

  Attributes:
    model: the model.
    labels: whether it predicts labels of tokens instead of the next token.
    block: number of tokens W read at once: the block length of the cell; or, if
      the cell takes any number of tokens, the largest divisor of a segment that
      is at most an eighth of it.
    segment: number of tokens of a segment.
    clears_every: number of tokens after which the model itself clears its
      state: a segment if it has `clear_state`, else None.
  """

  def __init__(self, sharded: ShardedModel, params, labels: bool = False):
    """Prepares an observer.

    Args:
      sharded: the model on its mesh.
      params: parameters of the model.
      labels: whether the model predicts labels of tokens.

    Raises:
      ValueError: the model reads pairs or a whole document at once, or attends
        to later tokens.
    """
    self.segment, model, self.labels = sharded.segment, sharded.model, labels
    if model.sequences > 1:
      raise ValueError(
        'A model that reads pairs of sequences cannot be observed block by '
        'block. Choose a run of another task.'
      )
    if model.cell.needs_whole_document or not model.cell.causal:
      raise ValueError(
        f'{type(model.cell).__name__} reads a whole document at once, or '
        'attends to later tokens, so it cannot be observed block by block. '
        'Choose another architecture.'
      )
    self.clears_every = self.segment if model.clear_state else None
    # A model with clear_state clears it in every call, that is in every block.
    self.model: Model = model.clone(clear_state=False)
    self.block = reading_block(model.cell, self.segment)
    self._variables = {'params': params}
    self._mesh = sharded.mesh
    self._source_1S: np.ndarray | None = None
    self._known_shapes: dict[tuple, Any] = {}
    self._read = mesh_jit(sharded.mesh, self._traced_read, static_argnums=0)
    self._gradients = mesh_jit(sharded.mesh, self._traced_gradients)
    self._call = mesh_jit(sharded.mesh, self._traced_call, static_argnums=0)

  def from_source(self, source_S: np.ndarray) -> Self:
    """Returns an observer that reads targets of a source.

    Args:
      source_S: ids of the source, for a model with an encoder.
    """
    other = copy.copy(self)
    padded = -len(source_S) % 16  # So that few shapes are compiled.
    other._source_1S = np.pad(source_S, (0, padded))[None].astype(np.int32)
    other._known_shapes = {}
    return other

  def start(self) -> State:
    """Returns the state of one row at the start of a document."""
    return self._call(Model.initial_state, self._variables)

  def parts(self, state: State) -> dict[str, jax.Array]:
    """Returns {name: array [1, ...]} of the recurrent part of a state."""
    return self._call(Model.parts, self._variables, state)

  def with_parts(self, state: State, parts: Mapping[str, Any]) -> State:
    """Returns the state with other recurrent parts.

    Args:
      state: the state.
      parts: arrays like the results of `parts`; other parts are kept.

    Raises:
      ValueError: a part has an unknown name or a wrong shape.
    """
    known = self.parts(state)
    check_parts(parts, known)
    parts = {k: jnp.asarray(parts.get(k, a), a.dtype) for k, a in known.items()}
    return self._call(Model.with_parts, self._variables, state, parts)

  def clear(self, state: State) -> State:
    """Returns the state after Cell.clear."""
    return self._call(Model.clear, self._variables, state)

  def _traced_call(self, method: Callable, variables, *arguments):
    """Calls a method of Model; parts of states are named arrays."""
    call = lambda method, *a: self.model.apply(variables, *a, method=method)
    if method is Model.initial_state:
      return call(method, 1)
    if method is Model.parts:
      return leaves_by_path(call(method, *arguments))
    if method is Model.with_parts:
      state, named = arguments
      parts = call(Model.parts, state)
      leaves = [named[name] for name in leaves_by_path(parts)]
      parts = jax.tree.unflatten(jax.tree.structure(parts), leaves)
      return call(method, state, parts)
    return call(method, *arguments)

  def read(
    self,
    tokens_T: np.ndarray,
    request: Request,
    state: State | None = None,
    first: int = 0,
    last: int | None = None,
    clear_every: int | None = None,
    labels_T: np.ndarray | None = None,
  ) -> tuple[Recording, State]:
    """Reads tokens of a document.

    Args:
      tokens_T: ids of all tokens of the document.
      request: what to record.
      state: state before token `first`, of one row. None begins a document.
      first: index of the first token to read, a multiple of `block`.
      last: index after the last token to read; None means all.
      clear_every: the recurrent state is cleared every so many tokens, a
        multiple of `block`, counted from token `first`. None: never, or at
        each segment of the document if the model has `clear_state`.
      labels_T: ids of the labels of all tokens, if the model predicts labels;
        needed for predictions only.

    Returns:
      What was recorded, and the state after the last whole block.

    Raises:
      ValueError: there are no tokens, the arrays would take more than
        recording.LIMIT, `first` or `clear_every` is not a multiple of `block`,
        or the model has an encoder but no source was given.
    """
    self._check_source()
    last = len(tokens_T) if last is None else last
    origin = first if clear_every else 0
    clear_every = clear_every or self.clears_every
    for name, value in ('first', first), ('clear_every', clear_every or 0):
      if value % self.block:
        raise ValueError(
          f'{name} must be a multiple of {self.block}, the tokens of a block, '
          f'got {value}.'
        )
    if first >= last:
      raise ValueError('There is no token to read. Give a longer text.')
    state = self.start() if state is None else state
    initial = self.parts(state) if request.states else {}
    recorder = None
    ids = self._inputs_and_targets(tokens_T, labels_T)
    batches = self._batches(*ids, first, last, clear_every, origin)
    for number, batch in enumerate(batches):
      if recorder is None:
        shapes = self._shapes(request, state, batch)
        read = last - first, self.block
        recorder = Recorder(shapes, request, initial, *read)
      given = self._variables, self._source_1S
      state, found = self._read(request, *given, state, *batch)
      if states := found.get('states'):
        # The recorded states are those after every `every` blocks.
        begin = number * len(batch[0])
        at = slice(-(begin + 1) % request.every, None, request.every)
        found['states'] = jax.tree.map(lambda a, at=at: a[at, 0], states)
      recorder.add(found)
    return recorder.recording(), state

  def layers(self, names: Sequence[str]) -> list[int]:
    """Returns the indices of the layers that have some pictures.

    Nothing is computed. Layers that are not numbered have the index -1.

    Args:
      names: names of the pictures.
    """
    self._check_source()
    request = Request(pictures=tuple(names))
    ids_T = np.zeros(self.block, np.int32)
    batch = next(self._batches(ids_T, ids_T, 0, self.block))
    found = self._shapes(request, self.start(), batch)['pictures'].values()
    return sorted({layer for each in found for layer, _ in each})

  def state_gradients(
    self,
    tokens_T: np.ndarray,
    state: State,
    first: int,
    back: int,
    labels_T: np.ndarray | None = None,
  ) -> np.ndarray:
    """Returns how much the loss of a block depends on earlier states.

    Args:
      tokens_T: ids of all tokens of the document.
      state: state before token `first`, of one row.
      first: index of the first token to read, a multiple of `block`.
      back: number of blocks to read before the one whose loss counts.
      labels_T: ids of the labels of all tokens, if the model predicts labels.

    Returns:
      [back + 1], for the state before each block that is read, the L2 norm of
      the gradient of the loss, in nats, times the L2 norm of the state.

    Raises:
      ValueError: the model clears its state at the start of each segment.
    """
    self._check_source()
    if self.clears_every:
      raise ValueError(
        'This model clears its state at the start of each segment, so a loss '
        'depends only on states of its own segment. Choose a run without '
        'clear_state.'
      )
    last = first + (back + 1) * self.block
    shape = back + 1, self.block
    ids = (
      a[first:last].reshape(shape)
      for a in self._inputs_and_targets(tokens_T, labels_T)
    )
    given = self._variables, self._source_1S
    return np.asarray(self._gradients(*given, state, *ids))

  def _inputs_and_targets(self, tokens_T, labels_T):
    """Returns the ids to read, and those to predict."""
    if not self.labels:
      return np.concatenate([[0], tokens_T[:-1]]), tokens_T
    if labels_T is None:
      return tokens_T, np.zeros_like(tokens_T)
    return tokens_T, np.asarray(labels_T)

  def _check_source(self) -> None:
    if self.model.encoder is not None and self._source_1S is None:
      raise ValueError(
        'This model reads targets together with their source. Give the source '
        'by with_source.'
      )

  def _traced_gradients(
    self, variables, source_1S, state, inputs_NW, targets_NW
  ):
    """Returns gradients times sizes of states; see `state_gradients`."""
    apply = lambda *a, method=None: self.model.apply(
      variables, *a, method=method
    )
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    floats = lambda parts: {
      k: a for k, a in leaves_by_path(parts).items() if is_float(a)
    }

    def step(state, block):
      inputs_W, targets_W, offsets = block
      parts = apply(state, method='parts')
      names, leaves = leaves_by_path(parts), jax.tree.leaves(parts)
      moved = [
        a + offsets[name] if name in offsets else a
        for name, a in zip(names, leaves, strict=True)
      ]
      moved = jax.tree.unflatten(jax.tree.structure(parts), moved)
      state, logits_1WV = apply(
        apply(state, moved, method='with_parts'),
        inputs_W[None],
        jnp.zeros(1, bool),
        jnp.ones((1, self.block), bool),
        source_1S,
      )
      nats_W = predictions(logits_1WV[0], targets_W, 1)['nats']
      scored_W = targets_W != 0 if self.labels else True
      nats = jnp.sum(nats_W, where=scored_W)
      return state, (nats, _squares(floats(parts)))

    def loss(offsets):
      inputs = inputs_NW, targets_NW, offsets
      _, (nats_N, squares_N) = jax.lax.scan(step, state, inputs)
      return nats_N[-1], squares_N

    zeros = {
      name: jnp.zeros((len(inputs_NW), *a.shape), a.dtype)
      for name, a in floats(apply(state, method='parts')).items()
    }
    gradients, squares_N = jax.grad(loss, has_aux=True)(zeros)
    return jnp.sqrt(jax.vmap(_squares)(gradients) * squares_N)

  def _predictions(self, logits_WV, targets_W, top: int):
    """Returns `predictions`; 'nats' and 'rank' are NaN where a label is 0.

    Such a token is not scored; see data/batch.py.
    """
    found = predictions(logits_WV, targets_W, top)
    if self.labels:
      for name in ('nats', 'rank'):
        found[name] = jnp.where(targets_W == 0, jnp.nan, found[name])
    return found

  def _shapes(self, request, state, batch):
    """Returns the shapes of what reading a batch records."""
    key = request, batch[0].shape
    if key not in self._known_shapes:  # Tracing a model takes a while.
      call = lambda *a: self._traced_read(request, *a)
      given = self._variables, self._source_1S
      with jax.set_mesh(self._mesh):  # As in the compiled calls.
        _, self._known_shapes[key] = jax.eval_shape(call, *given, state, *batch)
    return self._known_shapes[key]

  def _batches(
    self,
    inputs_T,
    targets_T,
    first: int,
    last: int,
    clear_every: int | None = None,
    origin: int = 0,
  ) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields (inputs_NW, targets_NW, mask_NW, clear_N) of each segment.

    The last segment is padded. Tokens of clear_every are counted from `origin`.
    """
    W, N = self.block, self.segment // self.block
    for at in range(first, last, N * W):
      end = min(at + N * W, last)

      def place(a_T, at=at, end=end):
        part = np.asarray(a_T[at:end])
        return np.pad(part, (0, N * W - len(part))).reshape(N, W)

      mask_NW = place(np.ones(len(inputs_T), bool))
      begins_N = at + W * np.arange(N)
      clear_N = (begins_N - origin) % (clear_every or 1) == 0
      clear_N &= (begins_N < end) & (clear_every is not None)
      ids = (place(a).astype(np.int32) for a in (inputs_T, targets_T))
      yield *ids, mask_NW, clear_N

  def _traced_read(self, request, variables, source_1S, state, *blocks):
    """Reads N blocks; returns the state after them and what was recorded.

    Args:
      request: what to record.
      variables: variables of the model.
      source_1S: ids of the source, or None.
      state: state before the blocks.
      *blocks: what `_batches` yields.
    """
    model = self.model
    sows = request.lens is not None or request.pictures

    def step(state, block):
      inputs_W, targets_W, mask_W, clear = block
      cleared = model.apply(variables, state, method='clear')
      pick = lambda flag, a, b: jax.tree.map(
        lambda a, b: jnp.where(flag, a, b), a, b
      )
      state = pick(clear, cleared, state)
      (after, logits_1WV), sown = model.apply(
        variables,
        state,
        inputs_W[None],
        jnp.zeros(1, bool),
        mask_W[None],
        source_1S,
        mutable=[pictures.COLLECTION] if sows else [],
      )
      # A state is that after a whole block.
      after = pick(mask_W.all(), after, state)
      found: dict[str, Any] = {}
      if request.states:
        parts = model.apply(variables, after, method='parts')
        found['states'] = leaves_by_path(parts)
      if request.top is not None:
        found['tokens'] = self._predictions(
          logits_1WV[0], targets_W, request.top
        )
      sown = sown.get(pictures.COLLECTION, {})
      if request.pictures:
        found['pictures'] = by_layer(
          model.cell, sown, request.pictures, request.layer
        )
      if request.lens is not None:
        found['lens'] = self._lens(variables, sown, targets_W, request.lens)
      return after, found

    return jax.lax.scan(step, state, blocks)

  def _lens(self, variables, sown, targets_W, top: int):
    """Returns predictions after each step or pass, arrays [P, W, ...]."""
    outputs = [
      y.reshape(-1, *y.shape[-2:])
      for path, y in jax.tree.leaves_with_path(sown)
      if path[-2].key == 'lens'
    ]
    if not outputs:
      raise ValueError(
        f'{type(self.model.cell).__name__} has neither steps in depth nor '
        'passes. Choose a Universal Transformer, a gated one, or a Staircase.'
      )

    def look(y_WD):
      mask_1W = jnp.ones((1, len(y_WD)), bool)
      _, logits_1WV = self.model.apply(
        variables, None, y_WD[None], mask_1W, None, method='apply_head'
      )
      return self._predictions(logits_1WV[0], targets_W, top)

    return jax.lax.map(look, jnp.concatenate(outputs))


def _squares(arrays: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the sum of the squares of all elements, float32."""
  squares = (jnp.sum(a.astype(jnp.float32) ** 2) for a in arrays.values())
  return sum(squares, jnp.zeros(()))


def predictions(logits_WV, targets_W, top: int) -> dict[str, jax.Array]:
  """Returns facts about the prediction of each token.

  Args:
    logits_WV: logits, float32.
    targets_W: int, ids of the tokens.
    top: number of the most likely tokens.

  Returns:
    'nats' [W], the loss -ln p of the token; 'rank' [W], the number of tokens
    that are more likely; 'entropy' [W] of the prediction in nats; 'top_ids'
    [W, top], ids of the most likely tokens, best first; and 'top_nats'
    [W, top], the loss that each of them would have had.
  """
  logp_WV = jax.nn.log_softmax(logits_WV)
  own_W1 = jnp.take_along_axis(logp_WV, targets_W[:, None], 1)
  best, ids = jax.lax.top_k(logp_WV, min(top, logp_WV.shape[1]))
  return {
    'nats': -own_W1[:, 0],
    'rank': jnp.sum(logp_WV > own_W1, 1),
    'entropy': -jnp.sum(jnp.exp(logp_WV) * logp_WV, 1),
    'top_ids': ids,
    'top_nats': -best,
  }


def check_parts(parts: Mapping[str, Any], known: Mapping[str, Any]) -> None:
  """Raises ValueError if parts do not fit a state.

  Args:
    parts: {name: array} to put into a state.
    known: the arrays of that state.
  """
  for name, part in parts.items():
    if name not in known:
      raise ValueError(
        f'The state has no part {name!r}. Its parts are {", ".join(known)}.'
        if known
        else f'The model has no recurrent state, but was given {name!r}.'
      )
    if np.shape(part) != known[name].shape:
      raise ValueError(
        f'{name} must have the shape {list(known[name].shape)}, got '
        f'{list(np.shape(part))}.'
      )
