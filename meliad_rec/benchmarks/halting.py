"""What a recurrence in depth costs when it halts early, and when it cannot.

Rows are the loops of halting/ at depths that are forced: a gate whose answer
is the same for every state halts all tokens after so many steps. Settings
'exit', 'global' and 'chunks' have one core, forward and backward: GUT over a
sequence, the same where halting is asked of the states before a step alone, and
GUT in each chunk; 'inference' has rows that halt at unlike depths; and 'depth'
has a model at its greatest depths, by epochs of the ListOps task: with its
exit, without, and where it is never asked whether it halts.

A recurrence in depth whose rows halt in steps that are forced.

A gate that answers the same to whatever it is asked halts all rows at once;
one that reads the first number of a state, each where that number says.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import Encode
from meliad_rec.archs.universal import Universal
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run

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
    layer, most, global_halt=True, transition=setting.transition, **how
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


DEPTHS = ((3,), 20), ((10,), 20), ((21,), 20)
SETTINGS = {
  'exit': Setting(16, 64, 128, ('masked', 'fixed', 'cond', 'while'), DEPTHS),
  'global': Setting(
    *(16, 64, 128, ('masked', 'fixed', 'cond', 'while'), DEPTHS),
    transition=False,
  ),
  # Causal, or chunks of 4 tokens would take no more than 5 steps.
  'chunks': Setting(
    *(16, 64, 128, ('masked', 'cond', 'while'), (((3,), 20), ((21,), 20))),
    chunk=4,
    causal=True,
  ),
  'inference': Setting(
    16,
    64,
    128,
    ('masked', 'while', 'compacted'),
    (((2, 3, 4, 6, 9, 13, 17, 20), 20),),
    trains=False,
  ),
  # 32 expressions of at most 100 tokens, START and END; 79,500 an epoch.
  'depth': Setting(
    32,
    102,
    128,
    (NEVER, 'fixed', 'while'),
    tuple(((5,), most) for most in (10, 20, 30, 40)),
    epoch=79_500,
  ),
}
BASELINE = 'first'


@dataclasses.dataclass(frozen=True)
class Row:
  """What a loop costs at a depth.

  Attributes:
    times: of a call, seconds.
    ratio: of that to the first row's.
    steps: that count, of the deepest row.
    temporary_bytes: as the compiler plans them.
    epoch_seconds: reckoned from the time of a call; None: not asked.
  """

  times: Times
  ratio: float
  steps: float
  temporary_bytes: int
  epoch_seconds: float | None

  def columns(self, baseline: str) -> dict[str, str]:
    """Names and values for a table."""
    found = {
      'ms': f'{self.times.median * 1e3:.0f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'steps': f'{self.steps:.0f}',
      'temp MiB': f'{self.temporary_bytes / 2**20:.1f}',
    }
    if self.epoch_seconds is not None:
      found['epoch min'] = f'{self.epoch_seconds / 60:.1f}'
    return found


def measure(setting: Setting, rounds: int) -> dict[str, Row]:
  """A row for each loop at each depth."""
  programs = {
    f'{loop}, {_name(loop, steps, most)} of {most}': compiled(
      setting, loop, steps, most
    )
    for steps, most in setting.depths
    for loop in setting.loops
  }
  calls = {name: _caller(*call) for name, call in programs.items()}
  times = round_robin(calls, rounds)
  first = next(iter(times.values()))
  of_epoch = lambda t: (
    None if setting.epoch is None else t.median * setting.epoch / setting.rows
  )
  return {
    name: Row(
      times=times[name],
      ratio=times[name].ratio(first),
      steps=float(jnp.max(program(*arguments)[0])),
      temporary_bytes=program.memory_analysis().temp_size_in_bytes,
      epoch_seconds=of_epoch(times[name]),
    )
    for name, (program, arguments) in programs.items()
  }


def _caller(program, arguments) -> Callable[[], None]:
  return lambda: jax.block_until_ready(program(*arguments))


def _name(loop, steps, most):
  if loop == NEVER:
    return f'{most}'
  return f'{steps[0]}' if len(steps) == 1 else f'{min(steps)} to {max(steps)}'
