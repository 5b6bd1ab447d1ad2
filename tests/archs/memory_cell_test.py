"""Properties shared by all cells that read a memory of what they wrote."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.memory_cell import Memory
from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.config import config as gin
from meliad_rec.layers.positions import AdaptiveSpan
from meliad_rec.layers.positions import NoPosition
from meliad_rec.models.cell import Block
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.train_step import auxiliary
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import feedback
from tests.architectures import staircase
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import example


class Sum(MemoryCell):
  """State: the last `window` inputs. y is w times their sum, times x."""

  tokens: int

  @property
  def chunk(self):
    return self.tokens

  @property
  def parallel(self):
    return self.tokens == 1

  def setup(self):
    self.layers = ()
    self.weight = self.param('weight', nn.initializers.constant(0.5), ())

  def empty(self, batch):
    return jnp.zeros((batch, self.config.window, self.config.d_model))

  def keys(self, written):
    return written * self.weight

  def read(self, kv, mask_BS, x_BTD, first):
    A, C, T = self.config.window, self.chunk, x_BTD.shape[1]
    kv = jnp.where(mask_BS[..., None], kv, 0)
    sums = [kv[:, i : i + A].sum(1, keepdims=True) for i in range(0, T, C)]
    return x_BTD, x_BTD * jnp.repeat(jnp.concatenate(sums, 1), C, 1)


@pytest.mark.parametrize('C', [1, 4])
def test_a_chunk_reads_the_window_before_it(C):
  block, cell = example(), Sum(config=config(), count=0, tokens=C)
  state, y = cells.apply(cell, {'weight': 0.5}, block)
  seen = np.where(block.mask[..., None], block.x, 0)
  for t in range(T):
    first = t // C * C
    expected = seen[:, max(first - W, 0) : first].sum(1) / 2 * block.x[:, t]
    assert_close(y[:, t], expected)
  np.testing.assert_array_equal(state.written, block.x[:, T - W :])
  np.testing.assert_array_equal(state.mask_BA, block.mask[:, T - W :])
  assert cell.can_step == (C == 1)


@pytest.mark.parametrize('make', [feedback, staircase])
def test_layers_may_share_their_positions(make):
  tables = lambda cell: str(jax.tree.structure(cells.shapes(cell))).count(
    "'table'"
  )
  assert tables(make()) == 1
  assert tables(make(share_position=False)) == 2


@pytest.mark.parametrize(
  'make',
  [feedback, staircase, functools.partial(staircase, diagonal=False)],
  ids=['feedback', 'steps', 'chunks'],
)
def test_adaptive_spans_are_penalised_once_a_segment(make):
  """The loss is 5e-7 nats per token of mean span of each layer."""
  cell = make()
  settings = {'span': AdaptiveSpan, 'position': NoPosition}
  cell = cell.clone(config=dataclasses.replace(cell.config, **settings))
  halves = lambda a: np.full(a.shape, 0.5, np.float32)
  params = jax.tree.map(halves, cells.shapes(cell))

  @jax.jit
  def penalty(block):
    method, mutable = cells.forward, 'losses'
    _, sown = cell.apply(
      {'params': params}, block, method=method, mutable=mutable
    )
    return auxiliary(sown)

  for tokens in (W, T):
    expected = 2 * 5e-7 * 0.5 * W
    assert penalty(example(tokens)) == pytest.approx(expected)


def test_a_staircase_drops_nothing_of_its_memory():
  """Its masks would depend on which tokens are processed at once."""
  cell = staircase()
  cell = cell.clone(config=dataclasses.replace(cell.config, dropout=0.5))
  params = cells.parameters(cell)
  state = cell.apply({'params': params}, B, method='initial_state')
  written = jax.tree.map(jnp.ones_like, state.written)
  text = lambda rng: str(
    jax.make_jaxpr(cell.pure(W).keys)((params, []), written, (None, rng))
  )
  assert text(None).count('= ') == text(jax.random.key(0)).count('= ')


def test_what_is_kept_of_a_chunk_changes_memory_alone():
  """`Sum` names no values, so 'sublayers' needs as little as 'full'."""
  block, params = example(64), {'weight': np.float32(0.5)}

  def gradient(policy):
    cell = Sum(config=config(), count=0, tokens=4, remat=policy)
    compute = functools.partial(cells.outcome, cell, compiled=False)
    compiled = jax.jit(compute).lower(params, block).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return memory, compiled(params, block)

  memory, found = zip(*map(gradient, (None, 'none', 'full')), strict=True)
  for other in found[1:]:
    assert_close(other, found[0])
  assert memory[0] == memory[2] < memory[1]


def gradient_bytes(cell, rows=8, tokens=512):
  """Returns the temporary memory of the gradients of a cell."""
  block = Block(
    jax.ShapeDtypeStruct((rows, tokens, cell.config.d_model), jnp.float32),
    jax.ShapeDtypeStruct((rows, tokens), bool),
  )
  apply = functools.partial(cell.apply, method=cells.forward)
  loss = lambda params, block: jnp.sum(apply({'params': params}, block)[1] ** 2)
  params = cells.shapes(cell, block)
  compiled = jax.jit(jax.grad(loss)).lower(params, block).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  'files, span, mib',
  [
    (['arch/feedback'], None, 12),
    (['arch/staircase', 'options/staircase/cached'], 8, 12),
  ],
)
def test_training_keeps_no_window_a_token(files, span, mib):
  """A plain scan needs 140 MiB for one memory."""
  changes = {'D_MODEL': 128, 'HEAD_DIM': 32, 'MLP_DIM': 512, 'WINDOW': 64}
  changes |= {'NUM_HEADS': 4, 'LAYERS': 1, 'SEGMENT': 512}
  changes |= {'BACKWARD_SPAN': span} if span else {}
  bindings = [f'{name} = {value}' for name, value in changes.items()]
  gin.parse(['size/test', 'task/code', *files], bindings)
  cell = gin.build(Experiment)().model(257).cell
  gin.check_read()
  assert cell.span == (span or 32)
  assert gradient_bytes(cell) < mib * 2**20


def test_the_memory_of_repeats_is_cleared_by_row():
  memory = Memory((), np.ones((3, 2, 4), bool))
  cleared = memory.reset(np.array([True, False, False]), None)
  assert cleared.mask_BA.any((1, 2)).tolist() == [False, True, True]
