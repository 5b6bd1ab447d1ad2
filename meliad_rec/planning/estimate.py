"""Estimates the time of a step from its compiled program.

Operations are assumed to run one after another, each for the cycles that the
compiler estimates. The compiler estimates none for Pallas kernels and
collectives. A kernel declares its FLOP and bytes. It is assumed to take the
time that these need at the chip's peak FLOP/s and peak bytes per second,
whichever is longer. A collective is assumed to take the time that its bytes
need on the links between neighboring chips (Austin et al. 2025, How to Scale
Your Model, part 3). None of this was measured on a TPU.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from meliad_rec.planning import hlo
from meliad_rec.planning.topology import Chip
from meliad_rec.planning.topology import Slice

HOP = 1e-6  # Least seconds of an exchange per hop, a link between two chips.
# Number of times that an exchange among n devices sends (n - 1) / n of its
# array; 1 if it is not listed.
_SENT = {'all-reduce': 2}


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Time of one step on each device, in seconds.

  Attributes:
    compute: time of the operations for which the compiler estimates cycles.
    kernels: time of Pallas kernels.
    exchange: time of collectives.
  """

  compute: float
  kernels: float
  exchange: float

  @property
  def upper(self) -> float:
    """Seconds of a step if no collective overlaps with other operations."""
    return self.compute + self.kernels + self.exchange

  @property
  def lower(self) -> float:
    """Seconds of a step if collectives overlap as much as possible."""
    return max(self.compute + self.kernels, self.exchange)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A step's collectives that have the same kind and the same mesh axes.

  Attributes:
    op: kind of the collectives, such as 'all-reduce'.
    axes: mesh axes along which devices exchange, such as 'data+model'.
    count: number of these collectives in a step.
    size: bytes of the arrays of all these collectives together, on each device.
      The array of a reduce-scatter is its argument, and that of any other
      collective is its result.
    seconds: time of all these collectives together in a step.
  """

  op: str
  axes: str
  count: int
  size: int
  seconds: float


def exchanges(
  program: hlo.Program, mesh: jax.sharding.Mesh, where: Slice
) -> list[Exchange]:
  """Returns the collectives of a step, grouped by kind and mesh axes.

  The groups that take the most time come first.

  Args:
    program: the compiled step.
    mesh: the mesh that the step was compiled for, of devices of the slice.
    where: the slice.

  Raises:
    ValueError: the program names groups of devices in an unknown format.
  """
  counts, sizes, seconds = Counter(), Counter(), Counter()
  devices = list(mesh.devices.flat)
  for one, count in program.collectives.items():
    found = hlo.groups(one.line, len(devices))
    members = [devices[i] for i in found[0]]
    key = one.op, '+'.join(hlo.axes(found, dict(mesh.shape)))
    whole = one.size * (len(members) if one.op == 'reduce-scatter' else 1)
    counts[key] += count
    sizes[key] += count * whole
    seconds[key] += count * exchange_seconds(one.op, whole, members, where)
  return [
    Exchange(*key, counts[key], sizes[key], seconds[key])
    for key, _ in seconds.most_common()
  ]


def exchange_seconds(
  op: str, size: int, members: Sequence[jax.Device], where: Slice
) -> float:
  """Returns the seconds that one collective takes.

  An all-to-all is limited by the links across the middle of the slice's busiest
  axis. Other collectives are limited by the links of each device.

  Args:
    op: kind of the collective, such as 'all-reduce'.
    size: bytes of the collective's array on each device; see Exchange.size.
    members: devices that exchange with one another.
    where: the slice that the devices belong to.
  """
  if len(members) < 2:
    return 0.0
  coords = [tuple(device.coords) for device in members]
  extents = np.ptp(coords, axis=0) + 1
  along = [
    (int(extent), 2 if extent == side and wraps(where, side) else 1)
    for extent, side in zip(extents, where.shape, strict=False)
    if extent > 1
  ]
  # The halves of a chip need no link to each other, and share all links.
  links = max(sum(ways for _, ways in along), 1)
  sharing = where.chip.per_chip
  if op in ('all-to-all', 'ragged-all-to-all') and along:
    sent = size * max(_crossing(*one) for one in along)
  else:
    sent = size / links
    if op not in ('collective-permute', 'collective-broadcast'):
      sent *= _SENT.get(op, 1) * (len(members) - 1) / len(members)
    # If both halves of a chip take part, each sends half.
    sharing *= len(set(coords)) / len(members)
  return max(sent * sharing / where.chip.link, HOP * sum(extents - 1) / links)


def _crossing(extent: int, ways: int) -> float:
  """Returns how much an all-to-all sends over a link in the middle of an axis.

  The unit of the result is the size of the array on one device. Every device of
  one half of the axis sends to every device of the other half, over one link if
  the axis is a line and over two links if it is a ring.

  Args:
    extent: number of chips along the axis.
    ways: 1 for a line, 2 for a ring.
  """
  return (extent // 2) * (extent - extent // 2) / extent / ways


def wraps(where: Slice, size: int) -> bool:
  """Returns whether an axis of `size` chips in this slice is a ring."""
  if where.chip.axes == 2:
    return size == 16
  return all(side % 4 == 0 for side in where.shape)


@dataclasses.dataclass(frozen=True)
class TimeShare:
  """Part of a step's time: the operations of one kind and place.

  Attributes:
    kind: 'kernels', 'collectives', or a kind of other operations as in
      hlo.Label, such as 'products'.
    place: place of the operations in the model as in hlo.Label, such as
      'backward cell/mlp'. For collectives, it is their mesh axes, as in
      'over data+model'.
    seconds: time of these operations on each device.
  """

  kind: str
  place: str
  seconds: float


def time_shares(
  program: hlo.Program, exchanged: Sequence[Exchange], chip: Chip
) -> list[TimeShare]:
  """Returns the parts of a step's time, the longest first.

  Args:
    program: the compiled step.
    exchanged: collectives of the step, from `exchanges`.
    chip: the chip that the step runs on.
  """
  found = Counter()
  for label, cycles in program.work.items():
    found[label.kind, label.place] += cycles / chip.clock
  for one, count in program.kernels.items():
    if one.flops is not None:
      time = max(one.flops / chip.peak_flops, (one.size or 0) / chip.bandwidth)
      found['kernels', one.place] += count * time
  for one in exchanged:
    found['collectives', f'over {one.axes}'] += one.seconds
  return [TimeShare(*key, time) for key, time in found.most_common()]


def largest_first(times: Counter[str]) -> dict[str, float]:
  """Returns the times; the last one adds up those below 0.1% of the total."""
  large = {
    name: t for name, t in times.most_common() if t >= times.total() / 1000
  }
  small = len(times) - len(large)
  rest = {
    f'{small} others, each less than 0.1%': times.total() - sum(large.values())
  }
  return large | (rest if small else {})


def seconds(parts: Sequence[TimeShare]) -> Seconds:
  """Returns the Seconds of a step, summed over its parts."""
  found = Counter()
  for part in parts:
    found[part.kind] += part.seconds
  kernels, exchange = found.pop('kernels', 0.0), found.pop('collectives', 0.0)
  return Seconds(sum(found.values(), 0.0), kernels, exchange)
