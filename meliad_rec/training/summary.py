"""Summary of a run before it starts: parameters, memory and data."""

import math

import jax

from meliad_rec.data.documents import Documents
from meliad_rec.distributed.partition import path_string
from meliad_rec.training.experiment import Experiment


def show(experiment: Experiment) -> None:
  """Prints a table of the parameters, the memory of a step, and the data."""
  program = experiment.program
  print(parameter_table(program.shapes.params))
  print(memory(program))
  for split in ('train', 'validation'):
    documents = experiment.data.documents(split)
    print(f'{split}: {_count(documents)}, {_amount(documents)}')
  tokens = experiment.batch * experiment.segment
  print(
    f'{experiment.steps:,} steps of {experiment.batch} x {experiment.segment} '
    f'= {tokens:,} tokens'
  )


def sentence(experiment: Experiment) -> str:
  """Returns one line about the run."""
  params = jax.tree.leaves(experiment.program.shapes.params)
  train = experiment.data.documents('train')
  kinds = sorted({d.device_kind for d in experiment.program.mesh.devices.flat})
  return (
    f'{sum(math.prod(leaf.shape) for leaf in params):,} parameters on '
    f'{experiment.program.mesh.size} x {", ".join(kinds)}; {_count(train)} of '
    f'{len(train.tokens):,} tokens; {experiment.steps:,} steps of '
    f'{experiment.batch} x {experiment.segment} tokens.'
  )


def _count(documents: Documents) -> str:
  empty = int((documents.lengths == 0).sum())
  left_out = f' ({empty:,} empty left out)' if empty else ''
  return f'{len(documents) - empty:,} documents{left_out}'


def _amount(documents: Documents) -> str:
  tokens = f'{len(documents.tokens):,} tokens'
  if documents.labels is not None:
    return f'{tokens}, {(documents.labels != 0).sum():,} scored'
  return (
    f'{tokens}, {documents.bytes_.sum():,} bytes, '
    f'{documents.words.sum():,} words'
  )


def parameter_table(params) -> str:
  """Returns a table of every parameter: path, shape, count and sharding."""
  rows, total, embedding = [], 0, 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name, count = path_string(path), math.prod(leaf.shape)
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


def memory(program) -> str:
  """Returns the memory of the train step per device, from the compiler."""
  stats = program.train_step.memory_analysis()
  mib = lambda size: f'{size / 2**20:,.1f} MiB'
  return (
    f'memory per device, by the compiler: {mib(stats.argument_size_in_bytes)} '
    f'state and batch, {mib(stats.temp_size_in_bytes)} temporary'
  )
