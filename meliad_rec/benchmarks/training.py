"""Measures time, memory and FLOP of training steps.

The steps are those that the trainer runs. Programs are timed in turn.
"""

from collections.abc import Callable
import dataclasses
import time

import jax
import numpy as np

from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.data.batch import Batch
from meliad_rec.distributed import partition
from meliad_rec.metrics import losses
from meliad_rec.metrics.flops import forward_flops
from meliad_rec.models.model import Model
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram


@dataclasses.dataclass(frozen=True)
class StepCost:
  """Cost of one model's training step.

  Attributes:
    times: times of a step.
    ratio: this time divided by the baseline's; see Times.ratio.
    tokens: tokens per step.
    flops: FLOP of a step's matrix products, taken as 3 times the FLOP of the
      forward pass.
    temporary_bytes: bytes of temporary memory, according to the compiler.
    compile_seconds: time of tracing and compiling.
    parameters: number of parameters.
    closed_flops: FLOP of a step from a closed formula; None means that there is
      no formula.
  """

  times: Times
  ratio: float
  tokens: int
  flops: int
  temporary_bytes: int
  compile_seconds: float
  parameters: int
  closed_flops: int | None = None

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the baseline's row, for the headings of ratios.
    """
    seconds, closed = self.times.median, self.closed_flops
    return {
      'step ms': f'{seconds * 1e3:.1f}',
      'spread': f'{self.times.spread:.0%}',
      f'/ {baseline}': f'{self.ratio:.3f}',
      'cpu ms': f'{self.times.cpu_median * 1e3:.0f}',
      'tokens/s': f'{self.tokens / seconds:.0f}',
      'temp MiB': f'{self.temporary_bytes / 2**20:.1f}',
      'compile s': f'{self.compile_seconds:.1f}',
      'GFLOP': f'{self.flops / 1e9:.2f}',
      'closed': '-' if closed is None else f'{closed / 1e9:.2f}',
      'params M': f'{self.parameters / 1e6:.2f}',
    }


def measure(
  programs: dict[str, TrainProgram], baseline: str, rounds: int
) -> dict[str, StepCost]:
  """Returns {name: cost of a training step of the program}.

  Args:
    programs: {name: program}.
    baseline: name of the program that the others are compared with.
    rounds: number of times that each step is timed.
  """
  compile_seconds = {name: _compile(p) for name, p in programs.items()}
  times = round_robin({n: stepper(p) for n, p in programs.items()}, rounds)
  return {
    name: StepCost(
      times=times[name],
      ratio=times[name].ratio(times[baseline]),
      tokens=p.rows * p.segment,
      flops=3
      * forward_flops(
        p.forward, p.shapes.params, p.shapes.carry, p.batch_shapes(p.rows)
      ),
      temporary_bytes=p.train_step.memory_analysis().temp_size_in_bytes,
      compile_seconds=compile_seconds[name],
      parameters=sum(a.size for a in jax.tree.leaves(p.shapes.params)),
    )
    for name, p in programs.items()
  }


def program(model: Model, rows: int, segment: int) -> TrainProgram:
  """Returns a training program with Adafactor, on one device.

  Args:
    model: the model.
    rows: batch size.
    segment: tokens per row and step.
  """
  return TrainProgram(
    model=model,
    optimizer=optimizer.chain(optimizer.adafactor, schedules.rsqrt(1000)),
    objective=losses.objective,
    mesh=partition.make_mesh(devices=jax.devices()[:1]),
    rows=rows,
    segment=segment,
  )


def _compile(p: TrainProgram) -> float:
  began = time.perf_counter()
  _ = p.train_step
  return time.perf_counter() - began


def stepper(p: TrainProgram) -> Callable[[], None]:
  """Returns a function; each call runs the next training step to its end.

  Every step reads the same batch of random tokens.
  """
  shape = p.rows, p.segment
  vocab = p.model.vocab
  tokens_BT = np.random.default_rng(0).integers(1, vocab, shape, np.int32)
  batch = Batch(
    tokens_BT=tokens_BT,
    targets_BT=np.roll(tokens_BT, -1, 1),
    mask_BT=np.ones(shape, bool),
    scored_BT=np.ones(shape, bool),
    start_B=np.zeros(p.rows, bool),
    document_B=np.zeros(p.rows, np.int32),
    offset_B=np.zeros(p.rows, np.int32),
  )
  batch = p.put(batch, p.rows)
  state = p.create(seed=0)

  def step():
    nonlocal state
    state, sums = p.train_step(state, batch)
    jax.block_until_ready(sums)

  return step
