"""The laws that every architecture obeys, checked on a small model.

With the LeakyLayer of the project's README:

check_laws(LeakyLayer(d_model=16, mlp_dim=32), d_model=16)
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import State
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model

_VOCAB = 31
_ABSOLUTE, _RELATIVE = 2e-5, 1e-5  # Tolerated rounding errors.
_DIFFERENT = 1e-4  # Numbers that differ by more are not equal.


def check_laws(cell: Cell, d_model: int) -> list[str]:
  """Checks that a cell obeys the laws that the rest of the package relies on.

  It builds a small model with random parameters, so choose small sizes. This
  takes a few seconds.

  Args:
    cell: an architecture. Its parameters are float32, and it has no dropout.
    d_model: width of its inputs and outputs.

  Returns:
    A sentence for each law that was checked.

  Raises:
    ValueError: the cell breaks a law, needs a whole document at once, or
      attends to later tokens. The message says what failed, and what usually
      causes it.
  """
  if not isinstance(cell, Cell):
    raise ValueError(
      'cell must be an instance of a subclass of meliad_rec.Cell, got '
      f'{cell!r}.'
    )
  if cell.needs_whole_document or not cell.causal:
    raise ValueError(
      f'{type(cell).__name__} reads a whole document at once, or attends to '
      'later tokens, so the laws of segments and of causality do not apply to '
      'it. Choose a causal cell that reads segment by segment.'
    )
  same_state(cell, d_model)
  laws = Laws(Model(_VOCAB, cell, d_model))
  checks = [laws.split, laws.causal, laws.rows, laws.padding, laws.gradients]
  if jax.tree.leaves(laws.carry):
    checks += [laws.use_of_state]
  if cell.can_step:
    checks += [laws.steps]
  for check in checks:
    check()
  return [check.__doc__.splitlines()[0] for check in (same_state, *checks)]


def same_state(cell: Cell, d_model: int) -> None:
  """The state keeps its structure, shapes and dtypes.

  Args:
    cell, d_model: as in check_laws.

  Raises:
    ValueError: a block changes one of these.
  """
  B, W = 3, cell.block_length or 8
  block = Block(jnp.zeros((B, W, d_model)), jnp.ones((B, W), bool))

  def states(cell):
    before = cell.initial_state(B)
    return before, cell(before, block)[0]

  call = functools.partial(cell.init_with_output, method=states)
  found, _ = jax.eval_shape(call, jax.random.key(0))
  before, after = jax.tree.map(lambda a: f'{a.dtype}{[*a.shape]}', found)
  if jax.tree.flatten(before) != jax.tree.flatten(after):
    raise ValueError(
      f'The state after a block differs from the initial one: {after}, not '
      f'{before}. A call must return a state of the structure, shapes and '
      'dtypes that initial_state returns.'
    )


class Laws:
  """A small model with random parameters and tokens, and checks of its laws.

  Each check raises ValueError if the law is broken.

  Attributes:
    model: the model.
    params: its initial parameters.
    carry: zeros shaped as its state.
    tokens_BT: int, random tokens of B rows.
    block: number of tokens W in a third of a row, a multiple of a block.
    apply: (state, tokens_BT, start_B, mask_BT) -> (state, logits_BTV).
  """

  def __init__(self, model: Model, rows: int = 3, tokens: int | None = None):
    """Draws parameters and tokens.

    Args:
      model: the model.
      rows: number of rows B.
      tokens: number of tokens T in each row. None: three blocks of eight tokens
        or more.
    """
    smallest = model.cell.block_length or 1
    self.block = smallest * -(-8 // smallest)
    T = 3 * self.block if tokens is None else tokens
    self.model, self.all_rows = model, jnp.ones(rows, bool)
    make = jax.jit(lambda rng: initialize(model, rng, rows, T))
    self.params = make(jax.random.key(0))
    self.carry = empty_carry(model, self.params, rows)
    self.tokens_BT = np.asarray(
      jax.random.randint(jax.random.key(1), (rows, T), 1, model.vocab)
    )
    self.apply = jax.jit(functools.partial(model.apply, self._variables))

  @property
  def _variables(self):
    return {'params': self.params}

  def compiled(self, method) -> Callable:
    """Returns a compiled method of the model, such as 'decode_step'."""
    call = functools.partial(self.model.apply, self._variables, method=method)
    return jax.jit(call)

  def read(self, state: State, tokens_BT, start_B=None) -> tuple[State, Any]:
    """Returns the state after a segment without padding, and its logits.

    Args:
      state: state before the segment.
      tokens_BT: int, tokens of the segment.
      start_B: bool, True at rows that begin a document. None: no row does.
    """
    if start_B is None:
      start_B = ~self.all_rows
    mask_BT = np.ones(tokens_BT.shape, bool)
    return self.apply(state, tokens_BT, start_B, mask_BT)

  @functools.cached_property
  def whole(self) -> tuple[State, Any]:
    """The state after the tokens as documents, and their logits."""
    return self.read(self.carry, self.tokens_BT, self.all_rows)

  def other_tokens(self, *place) -> np.ndarray:
    """Returns tokens that differ at these places, and nowhere else."""
    changed = np.array(self.tokens_BT)
    changed[place] = (changed[place] + 1) % self.model.vocab
    return changed

  def split(self) -> None:
    """A document read in parts gives the same as one read at once."""
    # Two segments, each in one call, and a call for each block of both.
    state, logits = self.whole
    more_BT = self.other_tokens()[:, ::-1]
    scanned, more = self.read(state, more_BT)
    looped, start_B, found = self.carry, self.all_rows, []
    tokens = np.hstack([self.tokens_BT, more_BT])
    for block_BW in np.split(tokens, tokens.shape[1] // self.block, 1):
      looped, part = self.read(looped, block_BW, start_B)
      start_B = None
      found.append(part)
    hint = (
      'Everything that later tokens depend on must be in the state, and a call '
      'must not know where in the document its tokens are.'
    )
    same(
      np.hstack([logits, more]),
      np.hstack(found),
      'Outputs differ if a document is read in parts',
      hint,
    )
    same(scanned, looped, 'States differ if a document is read in parts', hint)

  def causal(self) -> None:
    """A token changes its own output and later ones, none before it."""
    _, logits = self.whole
    T, W = self.tokens_BT.shape[1], self.block
    for t in (0, 3, W - 1, W, T - 1):
      other_BT = self.other_tokens(slice(None), t)
      _, changed = self.read(self.carry, other_BT, self.all_rows)
      same(
        logits[:, :t],
        changed[:, :t],
        f'Token {t} changes outputs before it',
        'An output may depend on its own token and on earlier ones.',
        absolute=1e-6,
      )
      differs(
        logits[:, t],
        changed[:, t],
        f'Token {t} does not change its own output',
        'An output must depend on its own token.',
      )

  def use_of_state(self) -> None:
    """The state affects outputs in its document, but not in the next one."""
    state, fresh = self.whole
    after = lambda state, start_B: self.read(state, self.tokens_BT, start_B)[1]
    hint = 'Read the state that a call is given, and return the new one.'
    same(
      fresh,
      after(state, self.all_rows),
      'The old state changes outputs of a new document',
      'A Resettable part of the state must mask what it held.',
      absolute=0,
      relative=0,
    )
    goes_on = after(state, None)
    differs(fresh, goes_on, 'The state changes no output', hint)
    first_B = np.arange(len(self.all_rows)) == 0
    mixed = after(state, first_B)
    same(mixed[0], fresh[0], 'A row that begins a document is not reset', hint)
    same(mixed[1:], goes_on[1:], 'A reset of one row changes others', hint)
    state = jax.tree.map(np.asarray, state)
    zeros = jax.tree.map(np.zeros_like, state)
    differs(
      goes_on,
      after(zeros, None),
      'Setting the state to zeros changes no output',
      hint,
    )
    swapped = jax.tree.map(lambda a: a[::-1], state)
    differs(
      goes_on,
      after(swapped, None),
      'Swapping the states of rows changes no output',
      hint,
    )

  def rows(self) -> None:
    """Rows of the batch do not influence each other."""
    _, logits = self.whole
    _, changed = self.read(self.carry, self.other_tokens(1), self.all_rows)
    others = np.arange(len(self.all_rows)) != 1
    same(
      logits[others],
      changed[others],
      'Tokens of one row change outputs of another',
      'No operation may mix axis 0.',
    )

  def padding(self) -> None:
    """Padding changes nothing before it, and what it holds does not matter."""
    _, logits = self.whole
    at = self.block + 3
    mask_BT = np.ones(self.tokens_BT.shape, bool)
    mask_BT[0, at:] = False
    hint = 'What block.x holds where block.mask is False must not matter.'
    nexts = []
    for tokens_BT in self.tokens_BT, self.other_tokens(0, slice(at, None)):
      state, padded = self.apply(self.carry, tokens_BT, self.all_rows, mask_BT)
      same(
        padded[0, :at],
        logits[0, :at],
        'Padding changes outputs before it',
        hint,
      )
      nexts.append(self.read(state, self.tokens_BT)[0])
    same(*nexts, 'Tokens at padding change the state', hint)

  def gradients(self) -> None:
    """Every parameter gets a gradient, whatever the length of segments."""
    hint = 'Every parameter must be used, without jax.lax.stop_gradient.'
    found = self.gradient()
    for name, g in leaves_by_path(found).items():
      if not np.isfinite(g).all():
        raise ValueError(
          f'The gradient of {name} is not finite. Look for a division by 0 or '
          'the root of 0.'
        )
      if not np.abs(g).max() > 0:
        raise ValueError(f'The gradient of {name} is 0. {hint}')
    if jax.tree.leaves(self.carry):
      self.same_gradients(found)

  def same_gradients(self, found=None) -> None:
    """Checks that gradients pass from segment to segment.

    Args:
      found: result of `gradient`, if it is known.
    """
    found = self.gradient() if found is None else found
    scale = max(np.abs(g).max() for g in jax.tree.leaves(found))
    same(
      jax.tree.map(lambda g: g / scale, self.gradient(self.block)),
      jax.tree.map(lambda g: g / scale, found),
      'Gradients depend on where a document is cut into segments',
      'Gradients must pass through the state.',
    )

  def gradient(self, *cuts: int) -> Any:
    """Returns gradients of the loss of the documents, read in segments.

    Args:
      *cuts: the tokens before which segments begin, except the first.
    """

    def loss(params):
      state, start_B, found = self.carry, self.all_rows, []
      for part_BT in jnp.split(jnp.asarray(self.tokens_BT), cuts, 1):
        mask_BT = jnp.ones(part_BT.shape, bool)
        state, logits = self.model.apply(
          {'params': params}, state, part_BT, start_B, mask_BT
        )
        start_B = ~self.all_rows
        found.append(logits)
      targets_BT = jnp.roll(self.tokens_BT, -1, 1)
      return cross_entropy(jnp.concatenate(found, 1), targets_BT).mean()

    # Some spans outside [0, 1], where they are clipped but keep gradients.
    outside = lambda path, a: (
      jnp.linspace(-0.1, 1.1, len(a)) if path[-1].key == 'ratio' else a
    )
    params = jax.tree_util.tree_map_with_path(outside, self.params)
    return jax.jit(jax.grad(loss))(params)

  def steps(self) -> None:
    """Reading token by token gives the same as reading a segment."""
    state, logits = self.whole
    B, T = self.tokens_BT.shape
    step = self.compiled('decode_step')
    opened = self.compiled(
      lambda model: model.to_decode_state(model.initial_state(B))
    )()
    hint = 'decode_step must compute what one call for the block computes.'
    for t in range(T):
      opened, logits_BV = step(opened, self.tokens_BT[:, t])
      same(logits_BV, logits[:, t], f'Step {t} gives another output', hint)
    closed = self.compiled('to_segment_state')(opened)
    same(closed, state, 'Steps lead to another state', hint)


def same(a, b, what: str, hint: str, absolute=_ABSOLUTE, relative=_RELATIVE):
  """Raises ValueError if two pytrees of arrays differ.

  Args:
    a, b: the pytrees.
    what: what a difference means, the beginning of the message.
    hint: what to do about it.
    absolute, relative: tolerated differences, as in numpy.allclose.
  """
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    if not np.allclose(x, y, relative, absolute, equal_nan=False):
      largest = np.abs(x.astype(np.float64) - y).max()
      raise ValueError(f'{what}, by up to {largest:.2g}. {hint}')


def differs(a, b, what: str, hint: str) -> None:
  """Raises ValueError if two arrays are equal; see `same`."""
  if not np.abs(np.asarray(a) - np.asarray(b)).max() > _DIFFERENT:
    raise ValueError(f'{what}. {hint}')
