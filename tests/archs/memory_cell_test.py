"""Properties shared by all cells that read a memory of what they wrote."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.config import config as gin
from meliad_rec.layers import positions
from meliad_rec.layers import positions as span
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from meliad_rec.training.experiment import Experiment
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import feedback
from tests.architectures import staircase
from tests.architectures import T
from tests.architectures import W


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

  def read(self, kv, mask_BS, x_BTD):
    A, C, T = self.config.window, self.chunk, x_BTD.shape[1]
    kv = jnp.where(mask_BS[..., None], kv, 0)
    sums = [kv[:, i : i + A].sum(1, keepdims=True) for i in range(0, T, C)]
    return x_BTD, x_BTD * jnp.repeat(jnp.concatenate(sums, 1), C, 1)


def example(T=T):
  rng = np.random.default_rng(0)
  mask_BT = rng.random((B, T)) < 0.8
  return Block(rng.normal(size=(B, T, D)).astype(np.float32), mask_BT)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


def applied(cell, block):
  return cell.apply({'params': {'weight': 0.5}}, block, method=forward)


def gradient_bytes(cell, rows=8, tokens=512):
  """Returns the temporary memory of the gradients of a cell."""
  shape = rows, tokens
  block = Block(
    jax.ShapeDtypeStruct((*shape, cell.config.d_model), jnp.float32),
    jax.ShapeDtypeStruct(shape, bool),
  )
  read = lambda cell, block: run(cell, cell.initial_state(rows), block)[1]
  params = jax.eval_shape(
    functools.partial(cell.init, method=read), jax.random.key(0), block
  )

  def loss(params, block):
    return jnp.sum(cell.apply(params, block, method=read) ** 2)

  compiled = jax.jit(jax.grad(loss)).lower(params, block).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('C', [1, 4])
def test_a_chunk_reads_the_window_before_it(C):
  block = example()
  state, y = applied(Sum(config=config(), count=0, tokens=C), block)
  seen = np.where(block.mask[..., None], block.x, 0)
  for t in range(T):
    first = t // C * C
    expected = seen[:, max(first - W, 0) : first].sum(1) / 2 * block.x[:, t]
    np.testing.assert_allclose(y[:, t], expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(state.written, block.x[:, T - W :])
  np.testing.assert_array_equal(state.mask_BA, block.mask[:, T - W :])


def test_the_first_chunk_sees_nothing():
  cell = Sum(config=config(), count=0, tokens=4)
  _, y = applied(cell, example(4))
  assert not y.any()


def test_chunks_of_one_token_stream():
  assert Sum(config=config(), count=0, tokens=1).can_step
  assert not Sum(config=config(), count=0, tokens=4).can_step


def tables(cell):
  init = functools.partial(cell.init, method=forward)
  shapes = jax.eval_shape(init, jax.random.key(0), example())
  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  return sum('table' in str(path) for path, _ in leaves)


@pytest.mark.parametrize('make', [feedback, staircase])
def test_layers_may_share_their_positions(make):
  assert tables(make()) == 1
  assert tables(make(share_position=False)) == 2


@pytest.mark.parametrize(
  'make',
  [
    feedback,
    functools.partial(staircase, diagonal=False),
    staircase,
    functools.partial(staircase, live=1, diagonal=True),
  ],
  ids=['feedback', 'chunks', 'steps', 'cached in steps'],
)
def test_adaptive_spans_are_penalised_once_a_segment(make):
  """The loss is 5e-7 nats per token of mean span of each layer."""
  cell = make()
  settings = dataclasses.replace(
    cell.config, span=span.AdaptiveSpan, position=positions.NoPosition
  )
  cell = cell.clone(config=settings)
  init = jax.jit(lambda r: cell.init(r, example(), method=forward))
  params = init(jax.random.key(0))['params']
  # Spans begin with 0, which costs nothing.
  params = {'params': jax.tree.map(lambda a: a + 0.5, params)}
  apply = functools.partial(cell.apply, method=forward, mutable=['losses'])
  for n in 1, 3:
    sown = jax.jit(apply)(params, example(n * W))[1]['losses']
    total = sum(map(np.sum, jax.tree.leaves(sown)))
    assert total == pytest.approx(2 * 5e-7 * 0.5 * W)


@pytest.mark.parametrize('make, drops', [(feedback, True), (staircase, False)])
def test_memory_is_dropped_where_all_tokens_drop_the_same(make, drops):
  cell = make()
  cell = cell.clone(config=dataclasses.replace(cell.config, dropout=0.5))
  init = jax.jit(lambda r: cell.init(r, example(W), method=forward))
  params = init(jax.random.key(0))['params']
  state = cell.apply({'params': params}, B, method='initial_state')
  written = jax.tree.map(jnp.ones_like, state.written)
  keys = functools.partial(cell.pure(W).keys, params, written)
  whole, some = keys((None, None)), keys((None, jax.random.key(0)))
  same = jax.tree.map(lambda a, b: np.array_equal(a, b), whole, some)
  assert jax.tree.all(same) is not drops


def test_what_is_read_in_parallel_takes_no_remat():
  with pytest.raises(ValueError, match='remat'):
    tables(feedback().clone(remat='full'))
  assert tables(staircase().clone(remat='full')) == 1


@pytest.mark.parametrize('C', [2, 4])
def test_what_is_kept_of_a_chunk_changes_memory_alone(C):
  """`Sum` names no values, so 'sublayers' needs as little as 'full'."""
  block = example(64)

  def gradient(policy):
    cell = Sum(config=config(), count=0, tokens=C, remat=policy)

    def loss(weight, x):
      given = Block(x, block.mask)
      params = {'params': {'weight': weight}}
      return jnp.sum(jnp.sin(cell.apply(params, given, method=forward)[1]))

    gradient = jax.jit(jax.grad(loss, (0, 1))).lower(0.5, block.x).compile()
    memory = gradient.memory_analysis().temp_size_in_bytes
    return memory, jax.tree.leaves(gradient(0.5, block.x))

  policies = None, 'none', 'dots', 'sublayers', 'full'
  memory, found = zip(*map(gradient, policies), strict=True)
  for leaves in found[1:]:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      leaves,
      found[0],
    )
  assert memory[0] == memory[3] == memory[4] < memory[1]


@pytest.mark.parametrize('make', [feedback, staircase])
def test_meliad_has_no_such_model(make):
  cell = make()
  settings = dataclasses.replace(cell.config, compat_meliad=True)
  with pytest.raises(ValueError, match='compat_meliad'):
    cell.clone(config=settings).init(
      jax.random.key(0), example(), method=forward
    )


@pytest.mark.parametrize(
  'names, mib',
  [
    (['arch/feedback'], 12),
    (['arch/feedback', 'BACKWARD_SPAN = 8'], 8),
    (['arch/staircase', 'options/staircase/cached'], 15),
    (['arch/staircase', 'options/staircase/cached', 'BACKWARD_SPAN = 8'], 12),
  ],
)
def test_training_keeps_no_window_a_token(names, mib):
  """With spans of 32 and 8; a plain scan needs 140 MiB for one memory."""
  changes = {'D_MODEL': 128, 'HEAD_DIM': 32, 'MLP_DIM': 512, 'WINDOW': 64}
  changes |= {'NUM_HEADS': 4, 'LAYERS': 1, 'SEGMENT': 512}
  gin.parse(
    ['size/test', 'task/code', *(n for n in names if '/' in n)],
    [
      *(f'{name} = {value}' for name, value in changes.items()),
      *(n for n in names if '=' in n),
    ],
  )
  cell = gin.build(Experiment)().model(257).cell
  gin.check_read()
  assert cell.span == (8 if 'BACKWARD_SPAN = 8' in names else type(cell).span)
  assert gradient_bytes(cell) < mib * 2**20
