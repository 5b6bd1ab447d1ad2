"""A plan in words: a column for each slice.

What a step may take: --budget fits,hbm=14GiB,forbid=all-to-all.
"""

from collections.abc import Sequence
import dataclasses
import re

from meliad_rec.config import config_flags
from meliad_rec.planning import hlo
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
    'mesh': config_flags.mesh_text(sizes.mesh),
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


_UNITS = {'MiB': 2**20, 'GiB': 2**30, 'MB': 10**6, 'GB': 10**9}


@dataclasses.dataclass(frozen=True)
class Budget:
  """Limits of a step.

  Attributes:
    hbm: bytes on each device; None: what the chip has.
    forbid: collectives that it must not have.
  """

  hbm: float | None = None
  forbid: tuple[str, ...] = ()

  def breaches(self, answer: Answer) -> list[str]:
    """A sentence for each limit that is broken."""
    name, told = answer.topology, []
    most = answer.hbm if self.hbm is None else min(self.hbm, answer.hbm)
    if answer.needed is not None and answer.needed > most:
      told.append(
        f'{name}: a step needs {answer.needed / 2**30:.2f} GiB on each device, '
        f'and may take {most / 2**30:.2f} GiB.'
      )
    return told + [
      f'{name}: a step has {one["count"]} {one["op"]} over {one["axes"]}, and '
      'none is allowed.'
      for one in _exchanges(answer) or ()
      if one['op'] in self.forbid
    ]

  def unknown(self, answer: Answer) -> list[str]:
    """A sentence for each limit of which it is not known if it is kept."""
    name = answer.topology
    if answer.needed is None:
      return [f'{name}: whether it fits is n/a: {answer.missing}.']
    if self.forbid and answer.compiled and _exchanges(answer) is None:
      return [f'{name}: its collectives are n/a.']
    return []


def _exchanges(answer: Answer) -> list[dict] | None:
  return answer.compiled and answer.compiled['exchanges']


def parse(text: str) -> Budget:
  """The budget that a flag describes; `forbid` may come several times.

  `fits` asks for no more than what the chip has, which every step needs.

  Raises:
    ValueError: a limit of another name, or a value that it cannot have.
  """
  hbm, forbid = None, []
  for part in text.split(','):
    name, _, value = part.strip().partition('=')
    amount = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMG]i?B)', value)
    match name:
      case 'fits' if not value:
        pass
      case 'hbm' if amount and amount[2] in _UNITS:
        hbm = float(amount[1]) * _UNITS[amount[2]]
      case 'forbid' if value in hlo.COLLECTIVES:
        forbid.append(value)
      case _:
        raise ValueError(
          f'--budget has the part {part!r}; give fits, hbm=14GiB, or another '
          f'of {", ".join(_UNITS)}, or forbid= and one of '
          f'{", ".join(hlo.COLLECTIVES)}.'
        )
  return Budget(hbm, tuple(forbid))
