"""What the trainer's own step needs on a slice, by its compiler."""

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
  """What a step is, without a compiler.

  Attributes:
    mesh: sizes of its axes.
    hosts: machines of the slice; None: not known without libtpu.
    batch, segment, steps: of the experiment.
    parameters: their number.
    flops: of a step's matrix products, 3 times those of its forward pass; what
      remat computes again counts once; None: a loop's length is not known.
    held: bytes on each device of parameters, optimizer, carry, average and
      batch.
    depth: turns, at most, of loops that end by what they compute, all of which
      count; None: there are none, or it is not known.
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

  @property
  def devices(self) -> int:
    return math.prod(self.mesh.values())

  @property
  def tokens(self) -> int:
    """Of a step."""
    return self.batch * self.segment


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says.

  Attributes:
    arguments: bytes on each device of state and batch, as they are laid out.
    temporary: bytes of activations and all else that comes and goes.
    code: bytes of the program.
    needed: bytes of all three.
    compile_seconds: tracing included.
    exchanges: of a step; None: the text is not known.
    seconds: of a step; None: the text is not known.
    notes: what the figures leave out.
  """

  arguments: int
  temporary: int
  code: int
  needed: int
  compile_seconds: float
  exchanges: list[estimate.Exchange] | None
  seconds: estimate.Seconds | None
  notes: tuple[str, ...]


def sizes(experiment: Experiment) -> Sizes:
  """What can be said before compiling; `experiment.mesh` makes its mesh."""
  program = experiment.program
  state, mesh = program.shapes, program.mesh
  batch = program.batch_shapes(program.rows)
  trace = jax.make_jaxpr(program.forward)(state.params, state.carry, batch)
  turns = flops.loops(trace.jaxpr)
  forward = flops.count(trace.jaxpr, turns=None)
  known = mesh.devices.flat[0].platform == 'tpu'
  return Sizes(
    mesh=dict(mesh.shape),
    hosts=len({d.process_index for d in mesh.devices.flat}) if known else None,
    batch=experiment.batch,
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
  )


class TooLarge(ValueError):
  """A step needs more memory than a device has.

  Attributes:
    needed: bytes.
  """

  def __init__(self, needed: int):
    super().__init__(f'A step needs {needed / GIB:.1f} GiB on each device.')
    self.needed = needed


def compiled(
  program: TrainProgram, where: Slice, depth: int | None
) -> Compiled:
  """Compiles the step of a program whose mesh is of the slice's devices.

  Args:
    program, where: the program, and the slice.
    depth: of its Sizes.

  Raises:
    TooLarge: the step needs more memory than there is.
  """
  began = time.perf_counter()
  try:
    step = program.train_step
  except jax.errors.JaxRuntimeError as error:
    needed = _needed(str(error))
    if needed is None:
      raise
    # What is told is rounded, and may be no more than there is.
    raise TooLarge(max(needed, int(where.chip.hbm) + 1)) from None
  took = time.perf_counter() - began
  stats = step.memory_analysis()
  notes, exchanges, seconds = [], None, None
  try:
    read = hlo.read(step.as_text(), depth)
    exchanges = estimate.exchanges(read, program.mesh, where)
    if jax.config.jax_exec_time_optimization_effort < 0:
      notes.append('compiled with little care, so times are n/a')
    else:
      seconds = estimate.seconds(read, exchanges, where.chip)
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
    seconds=seconds,
    notes=tuple(notes),
  )


def _held(tree) -> int:
  """Bytes of a tree on each device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _needed(message: str) -> int | None:
  """Bytes that an error of the compiler names; None: it is of another kind."""
  found = re.search(r'hbm.*?(?:\(|Used )([\d.]+)([KMGT])', message, re.I)
  if found is None or 'RESOURCE_EXHAUSTED' not in message:
    return None
  return int(float(found[1]) * 2 ** (10 * ' KMGT'.index(found[2])))


def _left_out(program: hlo.Program) -> list[str]:
  """What the time of a step does not count."""
  notes = []
  kernels = sum(program.kernels.values())
  silent = sum(n for one, n in program.kernels.items() if one.flops is None)
  if kernels:
    notes.append(
      f'{kernels} calls of Pallas kernels count as what they say they take at '
      f'the peak of the chip, {silent} of them, which do not say, as nothing'
    )
  if program.endless:
    notes.append(
      f'{program.endless} loops end by what they compute and count as one turn'
    )
  if program.unpriced:
    kinds = ', '.join(f'{n} {op}' for op, n in program.unpriced.most_common(4))
    notes.append(f'the compiler gives no cycles to {kinds}')
  return notes
