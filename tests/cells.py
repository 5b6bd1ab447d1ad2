"""Runs a cell by itself: example inputs, random parameters, comparisons."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests import architectures as tiny


def example(tokens: int = tiny.T, lengths=None) -> Block:
  """Returns random inputs of rows with these lengths.

  Without lengths, row 1 lacks the last three tokens, and row 2 a middle one.
  """
  ends = [tokens, tokens - 3, tokens] if lengths is None else lengths
  mask_BT = np.arange(tokens) < np.array(ends)[:, None]
  if lengths is None:
    mask_BT[2, tokens // 2] = False
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(*mask_BT.shape, tiny.D)).astype(np.float32)
  return Block(x_BTD, mask_BT)


def part(block, start, end) -> Block:
  """The tokens from start to end."""
  return jax.tree.map(lambda a: a[:, start:end], block)


def forward(cell, block):
  """Returns the state after the first segment of a document, and outputs."""
  return run(cell, cell.initial_state(len(block.mask)), block)


def shapes(cell, block: Block | None = None):
  """Returns the shapes of the parameters; nothing is computed."""
  init = functools.partial(cell.init, method=forward)
  return jax.eval_shape(init, jax.random.key(0), block or example())['params']


def initial(cell, block: Block | None = None):
  """Returns the initial parameters of a cell."""
  init = jax.jit(functools.partial(cell.init, method=forward))
  params = init(jax.random.key(0), block or example())['params']
  return jax.tree.map(np.asarray, params)


def parameters(cell, block: Block | None = None):
  """Returns random parameters: scales around 1, the others not 0.

  Drawing them is faster than initializing the cell.
  """
  rng = np.random.default_rng(1)

  def draw(path, a):
    x = rng.normal(size=a.shape).astype(np.float32)
    match path[-1].key:
      case 'kernel':
        return x / math.prod(a.shape[:-1]) ** 0.5
      case 'scale':
        return 1 + x / 5
      case _:
        return x / 5

  return jax.tree_util.tree_map_with_path(draw, shapes(cell, block))


def apply(cell, params, block, **options):
  """The state and the outputs, compiled."""
  call = functools.partial(cell.apply, method=forward, **options)
  return jax.jit(call)({'params': params}, block)


def outcome(run, params, block, compiled=True):
  """Returns state and outputs of run(params, block), and gradients of a loss.

  The loss depends on both. Outputs at padding are 0. `run` may be a cell.
  """
  if hasattr(run, 'apply'):
    cell = run
    run = lambda p, block: cell.apply({'params': p}, block, method=forward)

  def loss(params, x_BTD):
    state, y_BTD = run(params, block.replace(x=x_BTD))
    results = state, jnp.where(block.mask[..., None], y_BTD, 0)
    return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(results)), results

  grad = jax.grad(loss, (0, 1), has_aux=True)
  gradients, results = (jax.jit(grad) if compiled else grad)(params, block.x)
  return results, gradients


def assert_close(found, expected, by=2e-5, least=1):
  """Compares leaf by leaf, to a share of the largest number or of `least`."""

  def close(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= by * max(np.abs(b).max(), least)

  jax.tree.map(close, found, expected)


def draw(*shape, seed: int = 0):
  """Normal numbers, float32."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
