"""The flags that configure a run: --gin_file, --gin_param and --mesh."""

from collections.abc import Iterable
from collections.abc import Mapping
import math

from absl import flags

from meliad_rec.config.files import nearest

AXES = ('data', 'fsdp', 'model')


def define_flags() -> None:
  """Defines --gin_file and --gin_param, each repeatable; twice is harmless."""
  if 'gin_file' in flags.FLAGS:
    return
  flags.DEFINE_multi_string(
    'gin_file',
    [],
    'A gin file, repeatable: one of arch/, size/ and task/ each, any options/,'
    ' or a path.',
  )
  flags.DEFINE_multi_string(
    'gin_param', [], "A single binding 'NAME = value', repeatable; it wins."
  )


def refuse(names: Iterable[str], why: str) -> None:
  """Raises ValueError if any of these flags is given; `why` goes on from it."""
  given = [f'--{name}' for name in names if flags.FLAGS[name].present]
  if given:
    raise ValueError(f'{", ".join(given)} {why}; leave it out.')


def define_mesh_flag() -> None:
  """Defines --mesh; twice is harmless."""
  if 'mesh' not in flags.FLAGS:
    flags.DEFINE_string(
      'mesh',
      None,
      'Axes of the mesh, such as data:64,model:4; default: what the '
      'configuration says, or data alone.',
    )


def given_mesh() -> tuple[str, ...]:
  """The bindings of the flag; none without it."""
  text = flags.FLAGS.mesh
  return () if text is None else mesh_bindings(parse_mesh(text))


def parse_mesh(text: str) -> dict[str, int]:
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


def check_mesh(devices: int, slice_name: str) -> None:
  """Raises ValueError where the flag's mesh is of another number of devices."""
  if flags.FLAGS.mesh is None:
    return
  sizes = parse_mesh(flags.FLAGS.mesh)
  product = math.prod(sizes.values())
  # Of data, if it is not named, what the others leave.
  if devices % product or ('data' in sizes and devices != product):
    raise ValueError(
      f'--mesh={mesh_text(sizes)} is of {product} devices, and {slice_name} '
      f'has {devices}; give axes whose product that is.'
    )


def mesh_bindings(sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Values of --gin_param that make the trainer's mesh of these axes.

  Of data, if it is not named, what the others leave.
  """
  sizes = {'data': None, 'fsdp': 1, 'model': 1, **sizes}
  make = 'meliad_rec.distributed.partition.make_mesh'
  return (
    f'meliad_rec.training.experiment.Experiment.mesh = @{make}',
    *(f'{make}.{name} = {size}' for name, size in sizes.items()),
  )


def mesh_text(sizes: Mapping[str, int]) -> str:
  """'data:64,model:4': sizes as `parse` reads them, without axes of one."""
  shown = {name: size for name, size in sizes.items() if size != 1}
  return ','.join(f'{n}:{s}' for n, s in shown.items()) or 'data:1'
