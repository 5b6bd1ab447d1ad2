"""Summary of a run before it starts: parameters, memory and data."""

import math
import os
import sys

import jax

from meliad_rec.data.documents import Documents
from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.report.console import counted
from meliad_rec.training import agents
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.program import TrainProgram

_ADVICE = (
  'Lower BATCH or SEGMENT, or choose a smaller size or a mesh of more devices.'
)


def show(experiment: Experiment) -> None:
  """Prints a table of the parameters, the memory of a step, and the data."""
  program = experiment.program
  print(parameter_table(program.shapes.params))
  if experiment.env is not None:
    print(agents.description(experiment))
  else:
    for split in ('train', 'validation'):
      documents = experiment.data.documents(split)
      print(f'{split}: {_count(documents)}, {_amount(documents)}')
  print(
    f'{experiment.steps:,} steps of {_sizes(program)} = {program.places:,} '
    'tokens'
  )
  print(memory(program))  # Last, because the compiler may refuse the step.


def sentence(experiment: Experiment) -> str:
  """Returns one sentence: parameters, devices, training data and steps."""
  if experiment.env is not None:
    read = agents.description(experiment)
  else:
    train = experiment.data.documents('train')
    read = f'{_count(train)} of {len(train.tokens):,} tokens'
  kinds = sorted({d.device_kind for d in experiment.program.mesh.devices.flat})
  return (
    f'{experiment.parameters:,} parameters on '
    f'{experiment.program.mesh.size} x {", ".join(kinds)}; {read}; '
    f'{experiment.steps:,} steps of {_sizes(experiment.program)} tokens.'
  )


def _sizes(program: TrainProgram) -> str:
  """Returns ROWS x SEGMENT of a training step; AGENTS first, if several."""
  agents = program.places // (program.rows * program.segment)
  sizes = program.rows, program.segment
  return ' x '.join(map(str, (agents, *sizes) if agents > 1 else sizes))


def _count(documents: Documents) -> str:
  empty = int((documents.lengths == 0).sum())
  left_out = f' ({empty:,} empty left out)' if empty else ''
  return f'{counted(len(documents) - empty, "document")}{left_out}'


def _amount(documents: Documents) -> str:
  tokens = f'{len(documents.tokens):,} tokens'
  if documents.labels is not None:
    return f'{tokens}, {(documents.labels != 0).sum():,} scored'
  return (
    f'{tokens}, {documents.bytes_.sum():,} bytes, '
    f'{documents.words.sum():,} words'
  )


def parameter_table(params) -> str:
  """Returns a table of every parameter: path, shape, count and sharding.

  The last line has the total counts, with and without the embedding.

  Args:
    params: tree of jax.ShapeDtypeStruct with shardings.
  """
  rows, total, embedding = [], 0, 0
  for name, leaf in leaves_by_path(params).items():
    count = math.prod(leaf.shape)
    total += count
    embedding += count if name.startswith('embed/embedding') else 0
    spec = tuple(leaf.sharding.spec)
    rows.append((name, str(leaf.shape), f'{count:,}', str(spec)))
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  lines = [
    f'{name:<{widths[0]}}  {shape:<{widths[1]}}  {count:>{widths[2]}}  {spec}'
    for name, shape, count, spec in rows
  ]
  lines.append(
    f'{total:,} parameters, {total - embedding:,} without the embedding'
  )
  return '\n'.join(lines)


def step_bytes(program: TrainProgram) -> tuple[int, int]:
  """Returns how much memory a training step needs, as the compiler says.

  Returns:
    (bytes of state and batch, bytes of temporary values), both per device.
  """
  stats = program.train_step.memory_analysis()
  return stats.argument_size_in_bytes, stats.temp_size_in_bytes


def memory(program: TrainProgram) -> str:
  """Returns a line that says how much memory a training step needs."""
  state, temporary = map(_mib, step_bytes(program))
  return (
    f'memory per device, by the compiler: {state} state and batch, '
    f'{temporary} temporary'
  )


def shortage(program: TrainProgram) -> str | None:
  """Returns a message if a training step does not fit in memory, else None."""
  needed = sum(step_bytes(program))
  here = [
    d
    for d in program.mesh.devices.flat
    if d.process_index == jax.process_index()
  ]
  limit = memory_limit(here[0], len(here))
  if needed <= limit:
    return None
  return (
    f'A step needs {_mib(needed)} per device, but a device has {_mib(limit)}. '
    f'{_ADVICE}'
  )


def refused(error: jax.errors.JaxRuntimeError) -> str | None:
  """Returns a message if a compiler found too little memory, else None.

  XLA for TPUs does not compile a step that does not fit.
  """
  first = str(error).partition('\n')[0].rstrip('.')
  if not first.startswith('RESOURCE_EXHAUSTED'):
    return None
  return f'A step needs more memory than a device has ({first}). {_ADVICE}'


def memory_limit(device: jax.Device, sharing: int) -> int:
  """Returns the bytes that one device may use.

  Args:
    device: a device of this host.
    sharing: number of devices of this host. CPU devices share the memory of the
      host equally; for others, the number is not used.
  """
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit', sys.maxsize)
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // sharing


def _mib(size: int) -> str:
  return f'{size / 2**20:,.1f} MiB'
