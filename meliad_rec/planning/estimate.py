"""How long a step takes, by what the compiler says of its program.

Cycles that it prices run one after another. Kernels of Pallas, which it does
not price, take what they themselves say at the chip's peak. An exchange takes
what its bytes need on the links between neighbours (Austin et al. 2025, How to
Scale Your Model, part 3). None of it was measured on a TPU.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from meliad_rec.planning import hlo
from meliad_rec.planning import hlo as groups
from meliad_rec.planning.topology import Chip
from meliad_rec.planning.topology import Slice

HOP = 1e-6  # Seconds that the least exchange takes to each neighbour.
# How often an exchange among n sends (n - 1) / n of its array.
_SENT = {'all-reduce': 2}


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Of one step, on each device.

  Attributes:
    compute: what the compiler prices.
    kernels: of Pallas.
    exchange: between devices.
  """

  compute: float
  kernels: float
  exchange: float

  @property
  def most(self) -> float:
    """Where no exchange happens beside compute."""
    return self.compute + self.kernels + self.exchange

  @property
  def least(self) -> float:
    """Where all of it does."""
    return max(self.compute + self.kernels, self.exchange)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Like collectives of a step.

  Attributes:
    op: 'all-reduce'.
    axes: of the mesh, along which devices exchange; 'data+model'.
    count: how often, in a step.
    size: bytes of all arrays together, on each device.
    seconds: in a step.
  """

  op: str
  axes: str
  count: int
  size: int
  seconds: float


def exchanges(
  program: hlo.Program, mesh: jax.sharding.Mesh, where: Slice
) -> list[Exchange]:
  """The collectives of a step, those that take longest first.

  Args:
    program: of the step.
    mesh: it was compiled for, of devices of the slice.
    where: the slice.

  Raises:
    ValueError: the program says in an unknown way who exchanges with whom.
  """
  counts, sizes, seconds = Counter(), Counter(), Counter()
  devices = list(mesh.devices.flat)
  for one, count in program.collectives.items():
    found = groups.groups(one.line, len(devices))
    members = [devices[i] for i in found[0]]
    key = one.op, '+'.join(groups.axes(found, dict(mesh.shape)))
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
  """What one exchange takes.

  All-to-all is bound by the links across the middle of the longest axis, all
  others by those of each device.

  Args:
    op: the collective.
    size: bytes of the whole array on each device.
    members: devices that exchange with one another.
    where: the slice that they belong to.
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
  # Halves of a chip reach each other without a link, and share the others.
  links = max(sum(ways for _, ways in along), 1)
  sharing = where.chip.per_chip
  if op in ('all-to-all', 'ragged-all-to-all') and along:
    sent = size * max(_crossing(*one) for one in along)
  else:
    sent = size / links
    if op not in ('collective-permute', 'collective-broadcast'):
      sent *= _SENT.get(op, 1) * (len(members) - 1) / len(members)
    # Halves that exchange with one another send the half each.
    sharing *= len(set(coords)) / len(members)
  return max(sent * sharing / where.chip.link, HOP * sum(extents - 1) / links)


def _crossing(extent: int, ways: int) -> float:
  """What the middle link of an axis carries in an all-to-all, in arrays.

  Every device of one half sends to all of the other half, over one link where
  the axis is a line, and two where it is a ring.
  """
  return (extent // 2) * (extent - extent // 2) / extent / ways


def wraps(where: Slice, size: int) -> bool:
  """Whether an axis of that many chips is a ring."""
  if where.chip.axes == 2:
    return size == 16
  return all(side % 4 == 0 for side in where.shape)


def seconds(
  program: hlo.Program, exchanged: Sequence[Exchange], chip: Chip
) -> Seconds:
  """What a step takes.

  Args:
    program: of the step.
    exchanged: its collectives.
    chip: on which it runs.
  """
  kernels = sum(
    count * max(one.flops / chip.peak_flops, (one.size or 0) / chip.bandwidth)
    for one, count in program.kernels.items()
    if one.flops is not None
  )
  return Seconds(
    compute=program.cycles / chip.clock,
    kernels=kernels,
    exchange=sum(one.seconds for one in exchanged),
  )
