"""Slices of TPUs by name, and facts about their chips.

'v5e:16x16' is 256 chips of v5e, and 'v5p:4x4x4' is 64 chips of v5p. Programs
can be compiled for the devices of a slice, but these devices hold no arrays. A
device, in the sense of JAX, is a whole chip, or half of a v7x chip.
"""

import dataclasses
import math
import re

import jax
from jax.experimental import topologies

from meliad_rec.metrics import flops
from meliad_rec.planning import environment

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Facts about a generation of TPUs.

  hbm, bandwidth and peak_flops are those of one device.

  Attributes:
    name: name of the generation, such as 'v5e'.
    kind: `device_kind` in JAX.
    axes: number of axes of a slice.
    hbm: bytes of memory (HBM) that a program may use, from the compiler's error
      message.
    bandwidth: bytes per second of the memory, from the manufacturer.
    clock: cycles per second: the manufacturer's peak FLOP/s divided by the FLOP
      that the matrix units do in a cycle.
    link: bytes per second from a chip to a neighbor, in one direction (Austin
      et al. 2025, How to Scale Your Model, part 2).
    libtpu: libtpu's name for the generation.
    config: value of libtpu's chip_config_name, which determines the devices per
      chip. None means libtpu's default.
    per_chip: number of devices per chip.
  """

  name: str
  kind: str
  axes: int
  hbm: float
  bandwidth: float
  clock: float
  link: float
  libtpu: str
  config: str | None = None
  per_chip: int = 1

  @property
  def peak_flops(self) -> float:
    """Peak FLOP/s of a device in dense bfloat16 products."""
    return flops.PEAK_FLOPS[self.kind]


_ALL = (
  Chip(
    name='v4',
    kind='TPU v4',
    axes=3,
    hbm=30.75 * GIB,
    bandwidth=1228e9,
    clock=1.05e9,
    link=45e9,
    libtpu='v4',
    config='megacore',
  ),
  Chip(
    name='v5e',
    kind='TPU v5 lite',
    axes=2,
    hbm=15.75 * GIB,
    bandwidth=819e9,
    clock=1.5e9,
    link=45e9,
    libtpu='v5e',
  ),
  Chip(
    name='v5p',
    kind='TPU v5',
    axes=3,
    hbm=95.74 * GIB,
    bandwidth=2765e9,
    clock=1.75e9,
    link=90e9,
    libtpu='v5p',
  ),
  Chip(
    name='v6e',
    kind='TPU v6 lite',
    axes=2,
    hbm=31.25 * GIB,
    bandwidth=1640e9,
    clock=1.75e9,
    link=90e9,
    libtpu='v6e',
  ),
  Chip(
    name='v7x',
    kind='TPU7x',
    axes=3,
    hbm=94.75 * GIB,
    bandwidth=3690e9,
    clock=2.2e9,
    link=90e9,
    libtpu='tpu7x',
    per_chip=2,
  ),
)
CHIPS = {chip.name: chip for chip in _ALL}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Connected chips of one generation.

  Attributes:
    chip: facts about the generation.
    shape: number of chips along each axis.
  """

  chip: Chip
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    """Name of the slice, such as 'v5e:16x16', which `parse` reads."""
    return f'{self.chip.name}:{"x".join(map(str, self.shape))}'

  @property
  def devices(self) -> int:
    """Number of devices, as JAX counts them."""
    return math.prod(self.shape) * self.chip.per_chip


def parse(name: str) -> Slice:
  """Returns the slice with this name, such as 'v5e:16x16'.

  Raises:
    ValueError: there is no such slice.
  """
  found = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', name.strip())
  chip = CHIPS.get(found[1]) if found else None
  shape = tuple(map(int, found[2].split('x'))) if found else ()
  if chip is None or not all(shape):
    raise ValueError(
      f'{name!r} is not a slice of TPUs. Give GENERATION:SHAPE, such as '
      f'v5e:16x16 or v5p:4x4x4, with one of {", ".join(CHIPS)}.'
    )
  if chip.axes == 2 and math.prod(shape) > 256:
    raise ValueError(
      f'{name!r} has {math.prod(shape)} chips, but a slice of {chip.name} has '
      f'at most 256. Give {chip.name}:16x16 or a smaller one.'
    )
  if len(shape) != chip.axes:
    example = 'x'.join(['4'] * chip.axes)
    raise ValueError(
      f'{name!r} has {len(shape)} axes, but slices of {chip.name} have '
      f'{chip.axes}. Give one such as {chip.name}:{example}.'
    )
  return Slice(chip, shape)


def devices(name: str) -> list[jax.Device]:
  """Returns the devices of a slice, for which programs can be compiled.

  A host has 2 x 2 chips, or fewer in a narrower slice. For v5e:2x4 and v6e:2x4,
  these are the two hosts that xpk (gke.sh) requests; as a queued resource
  (tpu.sh), such a slice is a single host of 8 chips.

  Args:
    name: name of the slice, such as 'v5e:16x16' or 'v5p:4x4x4'.

  Raises:
    ValueError: there is no such slice, libtpu does not support it, or libtpu is
      not installed.
  """
  found = parse(name)
  environment.ensure()
  config = {'chip_config_name': found.chip.config} if found.chip.config else {}
  host = [min(size, 2) for size in found.shape[:2]] + [1]
  shape = 'x'.join(map(str, found.shape))
  try:
    return topologies.get_topology_desc(
      f'{found.chip.libtpu}:{shape}',
      platform='tpu',
      chips_per_host_bounds=tuple(host),
      **config,
    ).devices
  except jax.errors.JaxRuntimeError as error:
    todo = 'Give one whose first two axes are even or 1.'
    if all(size == 1 or size % 2 == 0 for size in found.shape[:2]):
      first, *_ = str(error).strip().splitlines() or ['unknown']
      todo = f'Its error begins: {first}'
    raise ValueError(
      f'libtpu does not support the slice {name!r}. {todo}'
    ) from None
