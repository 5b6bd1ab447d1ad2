"""Compiles a training step for a slice, and estimates its memory and time.

Nothing is run; the estimates are read from the compiled program.
"""

from collections.abc import Mapping
import dataclasses
import math
import re
import time

import jax

from meliad_rec.metrics import flops
from meliad_rec.planning import estimate
from meliad_rec.planning import hlo
from meliad_rec.planning.topology import GIB
from meliad_rec.planning.topology import Slice
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.program import TrainProgram


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a training step that are known without a compiler.

  Attributes:
    mesh: sizes of the mesh axes, by name.
    hosts: number of machines of the slice. None means that it is not known,
      because libtpu is missing.
    batch, segment, steps: rows per step, of all agents; tokens per row and
      step; and number of steps.
    parameters: number of parameters.
    flops: FLOP of a step's matrix products, 3 times the forward pass's;
      recomputation by remat does not count. None means that the length of a
      loop is not known.
    held: {name: bytes on each device}. The names are 'parameters', 'optimizer'
      (its state), 'carry' (state of the model between two steps), 'average' (of
      the parameters) and 'batch'.
    depth: largest of the data-dependent loops' maximum numbers of iterations;
      `flops` counts each loop with its own maximum. None means that there are
      no such loops, or that the maximum of one is not known.
    agents: number of agents.
  """

  mesh: Mapping[str, int]
  hosts: int | None
  batch: int
  segment: int
  steps: int
  parameters: int
  flops: float | None
  held: Mapping[str, int]
  depth: int | None = None
  agents: int = 1

  @property
  def devices(self) -> int:
    return math.prod(self.mesh.values())

  @property
  def tokens(self) -> int:
    """Tokens per step."""
    return self.batch * self.segment


@dataclasses.dataclass(frozen=True)
class Compiled:
  """Results of compiling a training step.

  Attributes:
    arguments: bytes on each device of the training state and the batch, with
      the compiler's padding.
    temporary: bytes on each device of activations and other temporary arrays.
    code: bytes of the program on each device.
    needed: sum of `arguments`, `temporary` and `code`.
    compile_seconds: time of tracing and compiling.
    exchanges: collectives of a step, from estimate.exchanges. None means that
      the program cannot be read.
    parts: parts of the time of a step, from estimate.time_shares. None means
      that the program cannot be read, or was compiled with little optimization.
    notes: remarks on what the figures leave out.
  """

  arguments: int
  temporary: int
  code: int
  needed: int
  compile_seconds: float
  exchanges: list[estimate.Exchange] | None
  parts: list[estimate.TimeShare] | None
  notes: tuple[str, ...]


def sizes(experiment: Experiment) -> Sizes:
  """Returns the sizes of an experiment's training step."""
  program = experiment.program
  state, mesh = program.shapes, program.mesh
  batch = program.batch_shapes(program.rows)
  trace = flops.trace(program.forward, state.params, state.carry, batch)
  turns = flops.loops(trace)
  forward = flops.count(trace, turns=None)
  known = mesh.devices.flat[0].platform == 'tpu'
  return Sizes(
    mesh=dict(mesh.shape),
    hosts=len({d.process_index for d in mesh.devices.flat}) if known else None,
    batch=program.places // program.segment,
    segment=experiment.segment,
    steps=experiment.steps,
    parameters=sum(a.size for a in jax.tree.leaves(state.params)),
    flops=None if None in turns else 3 * forward,
    held={
      'parameters': _held(state.params),
      'optimizer': _held(state.opt_state),
      'carry': _held(state.carry),
      'average': _held(state.ema),
      'batch': _held(batch),
    },
    depth=None if None in turns else max(turns, default=None),
    agents=getattr(program.objective, 'agents', 1),
  )


class TooLarge(ValueError):
  """Error of a step that needs more memory than a device has.

  Attributes:
    needed: bytes that the step needs on each device.
  """

  def __init__(self, needed: int):
    super().__init__(f'A step needs {needed / GIB:.1f} GiB on each device.')
    self.needed = needed


def compiled(
  program: TrainProgram, where: Slice, depth: int | None
) -> Compiled:
  """Compiles a training step for a slice, and returns the results.

  Args:
    program: the training program, on a mesh of the slice's devices.
    where: the slice.
    depth: see Sizes.depth.

  Raises:
    TooLarge: the step needs more memory than a device has.
  """
  began = time.perf_counter()
  try:
    step = program.train_step
  except jax.errors.JaxRuntimeError as error:
    needed = _needed(str(error))
    if needed is None:
      raise
    # The number is rounded, and may be no more than what the device has.
    raise TooLarge(max(needed, int(where.chip.hbm) + 1)) from None
  took = time.perf_counter() - began
  stats = step.memory_analysis()
  notes, exchanges, parts = [], None, None
  try:
    read = hlo.read(step.as_text(), depth)
    exchanges = estimate.exchanges(read, program.mesh, where)
    if jax.config.jax_optimization_level == 'O0':
      notes.append('compiled with little optimization, so times are n/a')
    else:
      parts = estimate.time_shares(read, exchanges, where.chip)
      notes += _left_out(read)
  except ValueError as error:
    notes.append(f'times and collectives are n/a: {error}')
  return Compiled(
    arguments=stats.argument_size_in_bytes,
    temporary=stats.peak_memory_in_bytes - stats.argument_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
    needed=stats.peak_memory_in_bytes + stats.generated_code_size_in_bytes,
    compile_seconds=took,
    exchanges=exchanges,
    parts=parts,
    notes=tuple(notes),
  )


def _held(tree) -> int:
  """Returns the bytes that a pytree of sharded arrays has on each device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _needed(message: str) -> int | None:
  """Returns the bytes that a step needs on a device, from an error's message.

  Returns None if the message is not of an out-of-memory error.
  """
  found = re.search(r'hbm.*?(?:\(|Used )([\d.]+)([KMGT])', message, re.I)
  if found is None or 'RESOURCE_EXHAUSTED' not in message:
    return None
  return int(float(found[1]) * 2 ** (10 * ' KMGT'.index(found[2])))


def _left_out(program: hlo.Program) -> list[str]:
  """Returns notes on what the time of a step leaves out."""
  notes = []
  kernels = sum(program.kernels.values())
  silent = sum(n for one, n in program.kernels.items() if one.flops is None)
  if kernels:
    notes.append(
      f'{kernels} calls of Pallas kernels count as running at the peak of the '
      f'chip; {silent} of them declare no cost and count as 0'
    )
  if program.endless:
    notes.append(
      f'{program.endless} loops of unknown length count as one iteration'
    )
  if program.unpriced:
    kinds = ', '.join(f'{n} {op}' for op, n in program.unpriced.most_common(4))
    notes.append(f'the compiler estimates no cycles for {kinds}')
  return notes
