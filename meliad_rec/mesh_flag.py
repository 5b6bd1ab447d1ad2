"""The flag --mesh, as the bindings of a configuration that mean the same."""

from collections.abc import Mapping
import math

from absl import flags

from meliad_rec.config.files import nearest

AXES = ('data', 'fsdp', 'model')


def define_flags() -> None:
  """Defines --mesh; twice is harmless."""
  if 'mesh' not in flags.FLAGS:
    flags.DEFINE_string(
      'mesh',
      None,
      'Axes of the mesh, such as data:64,model:4; default: what the '
      'configuration says, or data alone.',
    )


def given() -> tuple[str, ...]:
  """The bindings of the flag; none without it."""
  text = flags.FLAGS.mesh
  return () if text is None else bindings(parse(text))


def parse(text: str) -> dict[str, int]:
  """Sizes of the axes that 'data:64,model:4' names.

  Raises:
    ValueError: it names others, or one twice, or no sizes.
  """
  found = {}
  for part in text.split(','):
    name, _, size = part.strip().partition(':')
    if (
      name not in AXES or name in found or not size.isdecimal() or not int(size)
    ):
      raise ValueError(
        f'--mesh={text} has the part {part!r}{nearest(name, AXES)}; give sizes '
        f'of some of {", ".join(AXES)}, such as data:64,model:4.'
      )
    found[name] = int(size)
  return found


def check(devices: int, slice_name: str) -> None:
  """Raises ValueError where the flag's mesh is of another number of devices."""
  if flags.FLAGS.mesh is None:
    return
  sizes = parse(flags.FLAGS.mesh)
  product = math.prod(sizes.values())
  # Of data, if it is not named, what the others leave.
  if devices % product or ('data' in sizes and devices != product):
    raise ValueError(
      f'--mesh={flag(sizes)} is of {product} devices, and {slice_name} has '
      f'{devices}; give axes whose product that is.'
    )


def bindings(sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Values of --gin_param that make the trainer's mesh of these axes.

  Of data, if it is not named, what the others leave.
  """
  sizes = {'data': None, 'fsdp': 1, 'model': 1, **sizes}
  make = 'meliad_rec.partition.make_mesh'
  return (
    f'meliad_rec.experiment.Experiment.mesh = @{make}',
    *(f'{make}.{name} = {size}' for name, size in sizes.items()),
  )


def flag(sizes: Mapping[str, int]) -> str:
  """'data:64,model:4': sizes as `parse` reads them, without axes of one."""
  shown = {name: size for name, size in sizes.items() if size != 1}
  return ','.join(f'{n}:{s}' for n, s in shown.items()) or 'data:1'
