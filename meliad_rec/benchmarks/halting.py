"""Compares recurrences in depth that end early with ones that do not.

  meliad-rec bench halting [--setting=inference]

GUT is the Gated Universal Transformer, and GUTLB the Temporal Latent Bottleneck
with a GUT in each chunk. All steps here are steps in depth. Each row of the
table is a loop over steps (see Setting.loops) that is made to halt in a given
step (see `forced`). The settings are:

- exit: GUT over whole sequences, forward and backward.
- global: as `exit`, but the halting gate reads only the state before a step.
- chunks: GUTLB, forward and backward.
- inference: GUT over whole sequences, only forward. The rows of a batch halt in
  different steps.
- depth: as `exit`, with several maximum numbers of steps, with and without
  halting. The table also shows the time of an epoch of ListOps.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.universal import Universal
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run

NEVER = 'never'  # In place of a loop: all steps run, without halting.
# Options of Universal for each loop.
_OPTIONS = {
  'while': {},
  'no early exit': {'early_exit': False},
  'compacted': {'inference': 'compacted'},
  NEVER: {'halt': None},
}
_FAR = 10.0  # GELU is the identity around this value.


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes, and the loops and depths to compare.

  Attributes:
    rows: batch size.
    tokens: tokens per row of the batch.
    d_model: width of the model, with 4 heads and an MLP of width 2 d_model.
    loops: names of loops. 'while' ends when all rows have halted. 'no early
      exit' runs all steps, though rows that have halted keep their states.
      'compacted' ends as 'while' does, and also drops halted rows from the
      batch; only for settings that do not train. NEVER has no halting.
    depths: pairs (steps in which rows halt, maximum number of steps). For the
      first element, see `forced`.
    chunk: tokens per chunk; None means that a row is one chunk.
    causal: whether attention is causal and each token halts on its own. If
      False, a chunk of n tokens takes at most n + 1 steps.
    trains: whether gradients are computed too.
    transition: whether the halting gate reads the states before and after a
      step. If False, it reads only the state before the step, so the step in
      which the last rows halt is not computed.
    epoch: number of rows (sequences) in an epoch, from which the time of an
      epoch is computed. None means that this time is not shown.
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
  """Returns a GUT over whole rows, or a GUTLB if the setting has chunks.

  Args:
    setting: sizes and choices.
    loop: one of Setting.loops.
    most: maximum number of steps.
  """
  D = setting.d_model
  config = EncoderConfig(
    d_model=D,
    num_heads=4,
    head_dim=D // 4,
    mlp_dim=2 * D,
    causal=setting.causal,
  )
  layer = EncoderLayer(config, setting.chunk is not None, gated=True)
  encoder = Universal(
    layer,
    most,
    global_halt=True,
    transition=setting.transition,
    **_OPTIONS[loop],
  )
  if setting.chunk is None:
    return Encoder(encoder)
  return LatentBottleneck(
    config, encoder, slots=setting.chunk, chunk=setting.chunk, remat='full'
  )


def forced(params, rows: int, steps: tuple[int, ...]):
  """Returns parameters and inputs that make rows halt in given steps.

  If all rows halt in the same step, the gate returns a constant. Otherwise, it
  reads feature 0 of the state, which stays almost constant over the steps.

  Args:
    params: parameters of the cell.
    rows: batch size.
    steps: steps in which rows halt, counted from 1: row i halts in
      steps[i % len(steps)]. A row whose step exceeds the maximum never halts.

  Returns:
    The parameters, and the value of feature 0 in all input vectors. This is 0
    if all rows halt in the same step, and otherwise float32 [rows, 1].
  """
  # The remainder falls below 0.001 halfway between two steps.
  p_N = 1 - 0.001 ** (1 / (np.array(steps) - 0.5))
  logit_N = np.log(p_N / (1 - p_N))
  gate = jax.tree.map(np.zeros_like, params['encoder']['gate'])
  if len(steps) == 1:
    gate['last']['bias'][:] = logit_N
    return params | {'encoder': params['encoder'] | {'gate': gate}}, 0.0
  gate['hidden']['kernel'][0, 0] = gate['last']['kernel'][0] = 1
  gate['last']['bias'][:] = -_FAR
  first_B = np.resize(logit_N + _FAR, rows).astype(np.float32)
  params = params | {'encoder': params['encoder'] | {'gate': gate}}
  return params, first_B[:, None]


def compiled(setting: Setting, loop: str, steps: tuple[int, ...], most: int):
  """Returns a compiled program and a tuple of its arguments.

  The first result of the program is the depth of each row or, in causal
  settings, of each token; see HaltingCost. The second is the loss or, if the
  setting trains, the gradients of the parameters.

  Args:
    setting: sizes and choices.
    loop: one of Setting.loops.
    steps: steps in which rows halt; see `forced`.
    most: maximum number of steps.

  Raises:
    ValueError: the loop is 'compacted', but the setting trains.
  """
  if loop == 'compacted' and setting.trains:
    raise ValueError(
      "The loop 'compacted' is not used in training. Set trains=False, or "
      "choose 'while'."
    )
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
      {'params': params}, block, rngs=rngs, method=forward, mutable='depths'
    )
    # Without halting, nothing is sown.
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
  'exit': Setting(16, 64, 128, ('no early exit', 'while'), DEPTHS),
  'global': Setting(
    *(16, 64, 128, ('no early exit', 'while'), DEPTHS),
    transition=False,
  ),
  # Causal, because otherwise chunks of 4 tokens take at most 5 steps.
  'chunks': Setting(
    *(16, 64, 128, ('no early exit', 'while'), (((3,), 20), ((21,), 20))),
    chunk=4,
    causal=True,
  ),
  'inference': Setting(
    16,
    64,
    128,
    ('no early exit', 'while', 'compacted'),
    (((2, 3, 4, 6, 9, 13, 17, 20), 20),),
    trains=False,
  ),
  # 32 expressions of at most 100 tokens, plus START and END; 79,500 per epoch.
  'depth': Setting(
    32,
    102,
    128,
    (NEVER, 'while'),
    tuple(((5,), most) for most in (10, 20, 30, 40)),
    epoch=79_500,
  ),
}
BASELINE = 'first'


@dataclasses.dataclass(frozen=True)
class HaltingCost:
  """Cost of a loop with a forced halting step.

  Attributes:
    times: times of a call of the program.
    ratio: this time divided by the first row's of the table; see Times.ratio.
    depth: largest number of steps that changed a row or token. The step in
      which a row halts does not count.
    temporary_bytes: bytes of temporary memory, according to the compiler.
    epoch_seconds: time of an epoch, estimated from the time of a call; None
      means that it is not shown.
  """

  times: Times
  ratio: float
  depth: float
  temporary_bytes: int
  epoch_seconds: float | None

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the table's first row, for the heading of ratios.
    """
    found = {
      'ms': f'{self.times.median * 1e3:.0f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'depth': f'{self.depth:.0f}',
      'temp MiB': f'{self.temporary_bytes / 2**20:.1f}',
    }
    if self.epoch_seconds is not None:
      found['epoch min'] = f'{self.epoch_seconds / 60:.1f}'
    return found


def measure(setting: Setting, rounds: int) -> dict[str, HaltingCost]:
  """Returns {name of the row in the table: cost}.

  There is a row for each of Setting.loops with each of Setting.depths.

  Args:
    setting: sizes and choices.
    rounds: number of times that each program is timed.
  """
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
    name: HaltingCost(
      times=times[name],
      ratio=times[name].ratio(first),
      depth=float(jnp.max(program(*arguments)[0])),
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
