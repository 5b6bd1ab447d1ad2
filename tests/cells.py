"""A cell by itself: what it reads, how it runs, its parameters moved apart."""

import jax
import numpy as np

from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests import architectures as tiny


def example(tokens: int = tiny.T) -> Block:
  """Random inputs; the last three of row 1 are padding."""
  rng = np.random.default_rng(0)
  mask_BT = np.ones((tiny.B, tokens), bool)
  mask_BT[1, tokens - 3 :] = False
  x_BTD = rng.normal(size=(tiny.B, tokens, tiny.D)).astype(np.float32)
  return Block(x_BTD, mask_BT)


def forward(cell, block):
  """The state behind a document that begins with a segment, and outputs."""
  return run(cell, cell.initial_state(len(block.mask)), block)


def parameters(cell, block: Block):
  """Those it begins with, norms, gates and mixes moved away from 0 and 1."""
  init = jax.jit(lambda rng: cell.init(rng, block, method=forward))
  rng = np.random.default_rng(1)
  moved = lambda a: np.asarray(a) + rng.normal(size=a.shape) * 0.2
  return jax.tree.map(moved, init(jax.random.key(0))['params'])


def assert_close(a, b):
  """To 2e-5 of the largest number, or of 1."""
  assert np.abs(a - b).max() <= 2e-5 * max(np.abs(b).max(), 1)
