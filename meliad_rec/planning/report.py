"""Formats a plan: a table with a column per slice, and advice on memory."""

from collections import Counter
from collections.abc import Sequence
import math

from meliad_rec.config import config_flags
from meliad_rec.planning import estimate
from meliad_rec.planning import measure
from meliad_rec.planning import topology
from meliad_rec.planning.estimate import Exchange
from meliad_rec.planning.estimate import TimeShare
from meliad_rec.planning.question import Answer

SOURCE = 'Estimates from the compiler and its output; nothing ran on a TPU.'
GIB = topology.GIB


def table(answers: Sequence[Answer]) -> str:
  """Returns a table with a line per figure and a column per answer.

  Lines about collectives and notes follow the table. Figures that are not known
  are 'n/a'.
  """
  columns = [column(answer) for answer in answers]
  rows = [[name, *(c[name] for c in columns)] for name in columns[0]]
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  lines = [
    '  '.join(f'{c:<{w}}' for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  for answer in answers:
    below = [*exchange_lines(answer)]
    if answer.missing:
      below.append(f'n/a: {answer.missing}')
    below += [f'note: {note}' for note in answer.notes]
    lines += [f'{answer.topology}: {line}' for line in below]
  return '\n'.join([SOURCE, '', *lines])


def column(answer: Answer) -> dict[str, str]:
  """Returns {name of a figure: text} for one slice."""
  sizes = measure.Sizes(**answer.sizes)
  gib = lambda size: 'n/a' if size is None else f'{size / GIB:.2f}'
  compiled = answer.compiled or {}
  held, products = sizes.held, sizes.flops
  figures = {
    '': answer.topology,
    'mesh': config_flags.mesh_text(sizes.mesh),
    'devices, hosts': f'{sizes.devices}, {sizes.hosts or "n/a"}',
    'parameters': f'{sizes.parameters:,}',
    'tokens per step': f'{sizes.batch} x {sizes.segment} = {sizes.tokens:,}',
    'GiB per device: parameters': gib(held['parameters']),
    '  optimizer': gib(held['optimizer']),
    '  carry': gib(held['carry']),
    '  average of parameters': gib(held['average']),
    '  batch': gib(held['batch']),
    '  all of these, padded': gib(compiled.get('arguments')),
    '  activations, temporaries': gib(compiled.get('temporary')),
    '  program': gib(compiled.get('code')),
    '  total': f'{gib(answer.needed)} of {gib(answer.hbm)}{_verdict(answer)}',
    'TFLOP per step': 'n/a' if products is None else f'{products / 1e12:,.2f}',
  }
  return figures | _times(answer)


def rates(answer: Answer) -> dict[str, float | None] | None:
  """Returns {name of a figure: number} for the speed of a run.

  The figures are times of a step in seconds, the MFU (model FLOP utilization),
  tokens per second, and hours of the whole run. The MFU is None if the FLOP of
  a step are not known. Returns None if the times are not known.
  """
  parts = parts_of(answer)
  if parts is None:
    return None
  step, sizes = estimate.seconds(parts), measure.Sizes(**answer.sizes)
  peak = sizes.devices * topology.parse(answer.topology).chip.peak_flops
  return {
    'step': step.upper,
    'estimated by XLA': step.compute,
    'Pallas kernels': step.kernels,
    'collectives': step.exchange,
    'step if these overlap': step.lower,
    'MFU': sizes.flops and sizes.flops / (peak * step.upper),
    'tokens/s': sizes.tokens / step.upper,
    'hours': sizes.steps * step.upper / 3600,
  }


def _times(answer: Answer) -> dict[str, str]:
  found = rates(answer) or {}
  ms = lambda name: f'{1e3 * found[name]:,.1f}' if found else 'n/a'

  def text(name, form):
    return 'n/a' if found.get(name) is None else format(found[name], form)

  return {
    'ms per step': ms('step'),
    '  estimated by XLA': ms('estimated by XLA'),
    '  Pallas kernels': ms('Pallas kernels'),
    '  collectives': ms('collectives'),
    '  step if these overlap': ms('step if these overlap'),
    'MFU': text('MFU', '.0%'),
    'tokens/s': text('tokens/s', ',.0f'),
    f'hours for {answer.sizes["steps"]:,} steps': text('hours', ',.1f'),
  }


def parts_of(answer: Answer) -> list[TimeShare] | None:
  """Returns the time of a step by kind and place, or None if not known."""
  found = answer.compiled and answer.compiled['parts']
  return [TimeShare(**fields) for fields in found] if found else None


def breakdown(answers: Sequence[Answer], by: str) -> str:
  """Returns tables, as text, of where the time of a step goes.

  Lines are in the order of their times, the longest first; the last one adds up
  those with less than a thousandth of the time.

  Args:
    answers: answers for one or more slices; each gets a table.
    by: field of TimeShare by which times are summed: 'kind' or 'place'.
  """
  lines = []
  for answer in answers:
    parts, times = parts_of(answer), Counter()
    for part in parts or ():
      times[getattr(part, by)] += part.seconds
    clock = topology.parse(answer.topology).chip.clock
    lines += ['', f'{answer.topology}: time of a step by {by}']
    lines += [] if parts else ['n/a']
    lines += [
      f'{1e3 * time:9.2f} ms {clock * time / 1e6:8.2f} M cycles '
      f'{time / times.total():6.1%}  {name}'
      for name, time in estimate.largest_first(times).items()
    ]
  return '\n'.join(lines)


def exchange_lines(answer: Answer) -> list[str]:
  """Returns a line of text for each estimate.Exchange of a step."""
  listed = answer.compiled and answer.compiled['exchanges']
  return [
    f'{one.count} x {one.op} over {one.axes}, {one.size / 2**20:,.1f} MiB per '
    f'device in total, {1e3 * one.seconds:,.1f} ms'
    for one in (Exchange(**fields) for fields in listed or ())
  ]


def _verdict(answer: Answer) -> str:
  match answer.fits:
    case None:
      return ''
    case True:
      return f' ({answer.needed / answer.hbm:.0%})'
    case False:
      return ': does not fit'


def advice(answer: Answer) -> str | None:
  """Returns a message, unless the step fits in memory.

  If the step does not fit, the message says what to change: recompute
  activations, shard the parameters more, or use a smaller batch or a larger
  slice. If it is not known whether the step fits, the message says why. Returns
  None if the step fits.
  """
  name = answer.topology
  if answer.needed is None:
    return f'{name}: whether a step fits is not known: {answer.missing}.'
  if answer.fits:
    return None
  sizes = measure.Sizes(**answer.sizes)
  mesh, batch = sizes.mesh, sizes.batch // sizes.agents
  data, shards = mesh['data'], mesh['data'] * mesh['fsdp']
  changes = [answer.remat] if answer.remat else []
  if data > 1:
    # About half of the way to sharding parameters over all of these devices.
    half = math.isqrt(shards * mesh['fsdp'] - 1) + 1
    fsdp = next(n for n in range(half, shards + 1) if shards % n == 0)
    axes = {'data': shards // fsdp, 'fsdp': fsdp, 'model': mesh['model']}
    changes.append(f'--mesh={config_flags.mesh_text(axes)}')
  if batch % (2 * shards) == 0:
    changes.append(f"--gin_param='BATCH = {batch // 2}'")
  changes.append('a larger slice')
  return (
    f'{name}: a step needs {answer.needed / GIB:.2f} GiB per device, of '
    f'{answer.hbm / GIB:.2f} GiB. Try {" or ".join(changes)}.'
  )
