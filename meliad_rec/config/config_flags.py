"""The flags that configure a run: --gin_file, --gin_param and --mesh."""

from collections.abc import Iterable
from collections.abc import Mapping
import math

from absl import flags

from meliad_rec.config.files import nearest

AXES = ('data', 'fsdp', 'model')


def define_flags() -> None:
  """Defines --gin_file and --gin_param, unless they are defined already."""
  if 'gin_file' in flags.FLAGS:
    return
  flags.DEFINE_multi_string(
    'gin_file',
    [],
    'Gin file, repeatable: one of experiments/, or one each of arch/, size/ '
    'and task/; any number of options/; scale/ for a small experiment; or the '
    'path of another file.',
  )
  flags.DEFINE_multi_string(
    'gin_param',
    [],
    "One setting 'NAME = value', repeatable; overrides the files.",
  )


def check_no_arguments(argv: list[str]) -> None:
  """Raises ValueError if a command was given words that are not flags."""
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is not a flag. Write --flag=value.')


def refuse(names: Iterable[str], why: str) -> None:
  """Raises ValueError if any of the named flags is given.

  Args:
    names: names of flags.
    why: end of the message that begins with the flags given, such as 'cannot be
      combined with --greedy'.
  """
  given = [f'--{name}' for name in names if flags.FLAGS[name].present]
  if given:
    listed = ' and '.join(filter(None, [', '.join(given[:-1]), given[-1]]))
    raise ValueError(f'{listed} {why}. Remove {listed}.')


def define_mesh_flag() -> None:
  """Defines --mesh, unless it is defined already."""
  if 'mesh' not in flags.FLAGS:
    flags.DEFINE_string(
      'mesh',
      None,
      'Axes of the device mesh and their sizes, such as data:64,model:4; '
      'default: as in the configuration, or data only.',
    )


def given_mesh() -> tuple[str, ...]:
  """Returns --gin_param values equivalent to --mesh; () if it is not given."""
  text = flags.FLAGS.mesh
  return () if text is None else mesh_bindings(parse_mesh(text))


def parse_mesh(text: str) -> dict[str, int]:
  """Returns {axis: size} from a text such as 'data:64,model:4'.

  Raises:
    ValueError: an axis is unknown or repeated, or has no size above 0.
  """
  found = {}
  for part in text.split(','):
    name, _, size = part.strip().partition(':')
    if (
      name not in AXES or name in found or not size.isdecimal() or not int(size)
    ):
      near = '' if name in AXES else nearest(name, AXES)
      raise ValueError(
        f'--mesh={text} contains {part!r}{near}. Give AXIS:SIZE for each of '
        f'{", ".join(AXES)} at most once, with sizes of at least 1, such as '
        'data:64,model:4.'
      )
    found[name] = int(size)
  return found


def check_mesh(devices: int, slice_name: str) -> None:
  """Checks that --mesh, if it is given, fits a slice of TPUs.

  The product of the mesh's sizes must be the number of devices. If the axis
  data is absent, it is enough that the product divides that number.

  Args:
    devices: number of devices of the slice.
    slice_name: name of the slice, for the message.

  Raises:
    ValueError: the mesh does not fit, or is not a valid mesh.
  """
  if flags.FLAGS.mesh is None:
    return
  sizes = parse_mesh(flags.FLAGS.mesh)
  product = math.prod(sizes.values())
  # If data is not named, it takes the remaining devices.
  if devices % product or ('data' in sizes and devices != product):
    raise ValueError(
      f'--mesh={mesh_text(sizes)} takes {product} devices, but {slice_name} '
      f'has {devices}. Give sizes whose product is {devices}.'
    )


def mesh_bindings(sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the --gin_param values that set the mesh of the experiment.

  Args:
    sizes: {axis: size}. If the axis data is absent, its size is the number of
      devices divided by the other sizes. If another axis is absent, its size is
      1.
  """
  sizes = {'data': None, 'fsdp': 1, 'model': 1, **sizes}
  make = 'meliad_rec.distributed.partition.make_mesh'
  return (
    f'meliad_rec.training.experiment.Experiment.mesh = @{make}',
    *(f'{make}.{name} = {size}' for name, size in sizes.items()),
  )


def mesh_text(sizes: Mapping[str, int]) -> str:
  """Returns a mesh as text, such as 'data:64,model:4'.

  Axes of size 1 are left out. If all axes have size 1, the text is 'data:1'.
  """
  shown = {name: size for name, size in sizes.items() if size != 1}
  return ','.join(f'{n}:{s}' for n, s in shown.items()) or 'data:1'
