"""Slices of TPUs by name, and what is known of their chips.

'v5e:16x16' is 256 chips of v5e, 'v5p:4x4x4' 64 of v5p. The devices of a slice
can be compiled for, and hold nothing. A device is what JAX calls so: a chip,
or half of a v7x.
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
  """One device of a generation.

  Attributes:
    name: of the generation; 'v5e'.
    kind: its `device_kind`.
    axes: of a slice.
    hbm: bytes that a program may use, as the compiler says when one needs more.
    bandwidth: of the HBM, bytes per second; the maker's.
    clock: cycles per second: the maker's peak FLOP/s by what the matrix units
      do in a cycle.
    link: bytes per second one way to a neighbour; Austin et al. 2025, How to
      Scale Your Model, part 2.
    libtpu: what libtpu calls the generation.
    config: what libtpu must be told, for a device to be a chip.
    per_chip: devices of a chip.
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
    """Dense bfloat16 FLOP/s."""
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
  """Chips of one generation, side by side.

  Attributes:
    chip: of which each is, or, of a v7x, each half.
    shape: chips along each axis.
  """

  chip: Chip
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    """As `parse` reads it."""
    return f'{self.chip.name}:{"x".join(map(str, self.shape))}'

  @property
  def devices(self) -> int:
    """Their number, as JAX counts."""
    return math.prod(self.shape) * self.chip.per_chip


def parse(name: str) -> Slice:
  """The slice of that name.

  Raises:
    ValueError: it names none.
  """
  found = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', name.strip())
  chip = CHIPS.get(found[1]) if found else None
  shape = tuple(map(int, found[2].split('x'))) if found else ()
  if chip is None or not all(shape):
    raise ValueError(
      f'{name!r} names no slice of TPUs; give GENERATION:SHAPE, such as '
      f'v5e:16x16 or v5p:4x4x4, with one of {", ".join(CHIPS)}.'
    )
  if len(shape) != chip.axes:
    example = 'x'.join(['4'] * chip.axes)
    raise ValueError(
      f'{name!r} has {len(shape)} axes, and slices of {chip.name} have '
      f'{chip.axes}; give one such as {chip.name}:{example}.'
    )
  return Slice(chip, shape)


def devices(name: str) -> list[jax.Device]:
  """The devices of a slice, to compile for.

  Args:
    name: 'v5e:16x16', 'v5p:4x4x4'.

  Raises:
    ValueError: the name is none, no such slice exists, or libtpu is missing.
  """
  found = parse(name)
  environment.ensure()
  config = {'chip_config_name': found.chip.config} if found.chip.config else {}
  # A host has 2 x 2 chips; of a slice that is narrower, those it has.
  host = [min(size, 2) for size in found.shape[:2]] + [1]
  shape = 'x'.join(map(str, found.shape))
  try:
    return topologies.get_topology_desc(
      f'{found.chip.libtpu}:{shape}',
      platform='tpu',
      chips_per_host_bounds=tuple(host),
      **config,
    ).devices
  except jax.errors.JaxRuntimeError:
    raise ValueError(
      f'libtpu knows no slice {name!r}; give one whose first two axes are even '
      'or 1.'
    ) from None
