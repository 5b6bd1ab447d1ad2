"""A plan in words: a column for each slice."""

from collections.abc import Sequence

from meliad_rec import mesh_flag
from meliad_rec.planning import measure
from meliad_rec.planning import topology
from meliad_rec.planning.estimate import Exchange
from meliad_rec.planning.estimate import Seconds
from meliad_rec.planning.question import Answer

HEAD = 'Estimates of the compiler and for its program: nothing ran on a TPU.'
GIB = topology.GIB


def table(answers: Sequence[Answer]) -> str:
  """A line for each figure; n/a where it is not known, and below it why."""
  columns = [column(answer) for answer in answers]
  rows = [[name, *(c[name] for c in columns)] for name in columns[0]]
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  lines = [
    '  '.join(f'{c:<{w}}' for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  for answer in answers:
    told = [*exchange_lines(answer)]
    if answer.missing:
      told.append(f'n/a: {answer.missing}')
    told += [f'note: {note}' for note in answer.notes]
    lines += [f'{answer.topology}: {line}' for line in told]
  return '\n'.join([HEAD, '', *lines])


def column(answer: Answer) -> dict[str, str]:
  """Names of figures and what they are."""
  sizes = measure.Sizes(**answer.sizes)
  gib = lambda size: 'n/a' if size is None else f'{size / GIB:.2f}'
  compiled = answer.compiled or {}
  held, products = sizes.held, sizes.flops
  found = {
    '': answer.topology,
    'mesh': mesh_flag.flag(sizes.mesh),
    'devices, hosts': f'{sizes.devices}, {sizes.hosts or "n/a"}',
    'parameters': f'{sizes.parameters:,}',
    'tokens a step': f'{sizes.batch} x {sizes.segment} = {sizes.tokens:,}',
    'GiB a device: parameters': gib(held['parameters']),
    '  optimizer': gib(held['optimizer']),
    '  carry': gib(held['carry']),
    '  average of parameters': gib(held['average']),
    '  batch': gib(held['batch']),
    '  these as laid out': gib(compiled.get('arguments')),
    '  activations, temporaries': gib(compiled.get('temporary')),
    '  program': gib(compiled.get('code')),
    '  in all': f'{gib(answer.needed)} of {gib(answer.hbm)}{_verdict(answer)}',
    'TFLOP a step': 'n/a' if products is None else f'{products / 1e12:,.2f}',
  }
  return found | _times(answer)


def rates(answer: Answer) -> dict[str, float | None] | None:
  """What follows from the time of a step; None: it is not known."""
  found = answer.compiled and answer.compiled['seconds']
  if not found:
    return None
  step, sizes = Seconds(**found), measure.Sizes(**answer.sizes)
  peak = sizes.devices * topology.parse(answer.topology).chip.peak_flops
  return {
    'step': step.most,
    'priced by XLA': step.compute,
    'Pallas kernels': step.kernels,
    'collectives': step.exchange,
    'step if these overlap': step.least,
    'MFU': sizes.flops and sizes.flops / (peak * step.most),
    'tokens/s': sizes.tokens / step.most,
    'hours': sizes.steps * step.most / 3600,
  }


def _times(answer: Answer) -> dict[str, str]:
  found = rates(answer) or {}
  ms = lambda name: f'{1e3 * found[name]:,.1f}' if found else 'n/a'

  def of(name, form):
    return 'n/a' if found.get(name) is None else format(found[name], form)

  return {
    'ms a step': ms('step'),
    '  priced by XLA': ms('priced by XLA'),
    '  Pallas kernels': ms('Pallas kernels'),
    '  collectives': ms('collectives'),
    '  a step if these overlap': ms('step if these overlap'),
    'MFU': of('MFU', '.0%'),
    'tokens/s': of('tokens/s', ',.0f'),
    f'hours for {answer.sizes["steps"]:,} steps': of('hours', ',.1f'),
  }


def exchange_lines(answer: Answer) -> list[str]:
  """A line for each kind of collective."""
  listed = answer.compiled and answer.compiled['exchanges']
  return [
    f'{one.count} x {one.op} over {one.axes}, {one.size / 2**20:,.1f} MiB a '
    f'device in all, {1e3 * one.seconds:,.1f} ms'
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
