"""A recurrence in depth whose rows halt in steps that are forced.

A gate that answers the same to whatever it is asked halts all rows at once;
one that reads the first number of a state, each where that number says.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.archs.encode import Encode
from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.cell import Block
from meliad_rec.cell import Cell
from meliad_rec.cell import run
from meliad_rec.cores.core_config import CoreConfig
from meliad_rec.cores.core_layer import CoreLayer
from meliad_rec.cores.universal import Universal

NEVER = 'never'  # In place of a loop: all steps, and nothing halts.
_FAR = 10.0  # Where GELU changes nothing.


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes, and the rows.

  Attributes:
    rows: of a batch.
    tokens: of a row.
    d_model: width; 4 heads, and an MLP and a gate of twice that.
    loops: of cores/universal.py, by name; or NEVER.
    depths: (steps in which rows find that they halt, in turn; most steps).
    chunk: tokens of a chunk; None: there is one.
    causal: whether tokens see none behind them, and halt each by itself. Else
      steps are at most the tokens of a chunk, and one.
    trains: whether gradients are computed too.
    transition: whether halting is asked of the states before and behind a
      step, or of those before it alone, which saves the step that halts.
    epoch: rows of an epoch, to reckon its time; None: it is not shown.
  """

  rows: int
  tokens: int
  d_model: int
  loops: tuple[str, ...]
  depths: tuple[tuple[tuple[int, ...], int], ...]
  chunk: int | None = None
  causal: bool = False
  trains: bool = True
  transition: bool = True
  epoch: int | None = None


def cell(setting: Setting, loop: str, most: int) -> Cell:
  """GUT over the sequence, or GUTLB in chunks of it."""
  D = setting.d_model
  config = CoreConfig(D, 4, D // 4, 2 * D, setting.causal)
  layer = CoreLayer(config, setting.chunk is not None, gated=True)
  if loop == NEVER:
    how = {'loop': 'fixed', 'halt': None}
  else:
    how = {'loop' if setting.trains else 'inference': loop}
  core = Universal(
    layer, most, together=True, transition=setting.transition, **how
  )
  if setting.chunk is None:
    return Encode(core)
  return LatentBottleneck(
    config, core, slots=setting.chunk, chunk=setting.chunk, remat='full'
  )


def forced(params, rows: int, steps: tuple[int, ...]):
  """Parameters, and what is read first: rows halt in such a step, from 1.

  Where all halt at once the gate answers the same to whatever it is asked.
  Where not, it reads the first number of a state, which stays about what it is.
  """
  # The threshold is passed in the middle of the step.
  p_N = 1 - 0.001 ** (1 / (np.array(steps) - 0.5))
  logit_N = np.log(p_N / (1 - p_N))
  gate = jax.tree.map(np.zeros_like, params['core']['gate'])
  if len(steps) == 1:
    gate['last']['bias'][:] = logit_N
    return params | {'core': params['core'] | {'gate': gate}}, 0.0
  gate['hidden']['kernel'][0, 0] = gate['last']['kernel'][0] = 1
  gate['last']['bias'][:] = -_FAR
  first_B = np.resize(logit_N + _FAR, rows).astype(np.float32)
  params = params | {'core': params['core'] | {'gate': gate}}
  return params, first_B[:, None]


def compiled(setting: Setting, loop: str, steps: tuple[int, ...], most: int):
  """A program, and its arguments; its first result is steps taken by rows."""
  made, D = cell(setting, loop, most), setting.d_model
  shape = setting.rows, setting.tokens
  x_BTD = jax.random.normal(jax.random.key(1), (*shape, D))
  block = Block(x_BTD, jnp.ones(shape, bool))

  def forward(cell, block):
    return run(cell, cell.initial_state(setting.rows), block)[1]

  params = made.init(jax.random.key(0), block, method=forward)['params']
  first_B1 = 0.0
  if loop != NEVER:
    params, first_B1 = forced(params, setting.rows, steps)
  block = block.replace(x=x_BTD.at[..., 0].set(first_B1))
  rngs = {'dropout': jax.random.key(2)} if setting.trains else {}

  def loss(params, block):
    y_BTD, sown = made.apply(
      {'params': params}, block, rngs=rngs, method=forward, mutable='pictures'
    )
    # Where nothing halts, nothing is sown.
    (depth,) = jax.tree.leaves(sown) or [jnp.full(setting.rows, float(most))]
    return jnp.mean(y_BTD**2), depth

  def step(params, block):
    if not setting.trains:
      value, depth = loss(params, block)
      return depth, value
    (_, depth), gradients = jax.value_and_grad(loss, has_aux=True)(
      params, block
    )
    return depth, gradients

  return jax.jit(step).lower(params, block).compile(), (params, block)
