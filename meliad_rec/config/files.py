"""Where gin files lie, how they are named, and which of them go together.

One naming rule: exactly one file of each of arch/, size/ and task/, any number
of options/, then single bindings. A file of experiments/ may include them all.
"""

import difflib
from pathlib import Path

from meliad_rec.config.values import ConfigError

KINDS = ('arch', 'size', 'task')
_ORDER = 'experiments', *KINDS, 'options'


def root() -> Path:
  """The folder of the shipped gin files.

  It lies inside the package where that was installed from a wheel, and beside
  the package in a checkout or an editable install.
  """
  package = Path(__file__).resolve().parents[1]
  inside = package / 'gin'
  return inside if inside.is_dir() else package.parent / 'gin'


def nearest(name: str, names) -> str:
  """' (nearest is X)', or nothing where no name is near."""
  close = difflib.get_close_matches(name, sorted(set(names)), 1)
  return f' (nearest is {close[0]})' if close else ''


def names(kind: str) -> list[str]:
  """Names of the shipped files of one folder, without the ending."""
  return sorted(path.stem for path in (root() / kind).glob('*.gin'))


def find(name: str, where: str) -> Path:
  """The file that a --gin_file or an include names.

  Args:
    name: 'arch/X.gin', 'gin/arch/X.gin' or 'arch/X' for a shipped file, or the
      path of a file of one's own, absolute or from the working directory. A
      file of one's own wins only if no shipped one has the name.
    where: the place that names it, for the message.

  Raises:
    ConfigError: there is no such file.
  """
  short = name.removeprefix('gin/').removesuffix('.gin')
  inside = (root() / f'{short}.gin').resolve()
  if inside.is_relative_to(root().resolve()) and inside.is_file():
    return inside
  for own in (Path(name).expanduser(), Path(f'{name}.gin').expanduser()):
    if own.is_file():
      return own.resolve()
  shipped = [
    path.relative_to(root()).with_suffix('').as_posix()
    for path in root().rglob('*.gin')
  ]
  raise ConfigError(
    f'{where} names the gin file {name!r}, which is neither among the shipped'
    f' ones in {root()} nor a path from {Path.cwd()}{nearest(short, shipped)}.'
  )


def is_shipped(path: Path) -> bool:
  return path.is_relative_to(root().resolve())


def is_optional(path: Path) -> bool:
  """Whether what a shipped file sets may go unread.

  An architecture need not have all that a size or a task sets, nor a depth all
  kinds of layers of its architecture, and options replace parts of the recipe
  that defaults.gin describes.
  """
  return kind(path) in ('arch', 'size', 'task') or path.name == 'defaults.gin'


def label(path: Path) -> str:
  """How messages call a file: shipped ones by their name inside gin/."""
  if is_shipped(path):
    return path.relative_to(root().resolve()).as_posix()
  if path.is_relative_to(Path.cwd()):
    return path.relative_to(Path.cwd()).as_posix()
  return str(path)


def kind(path: Path) -> str:
  """The folder that holds the file: 'arch', 'size', 'options', ..."""
  return path.parent.name


def in_order(names: list[str]) -> list[str]:
  """Names by the kinds of their files, in whatever order they are given.

  A task corrects what an architecture sets, an option what any of them or an
  experiment does. A file of no kind, one's own, corrects them all; but where no
  other has an architecture, it has, and options correct it.

  Raises:
    ConfigError: there is no such file.
  """
  kinds = {name: kind(find(name, f'--gin_file={name}')) for name in names}
  rank = {one: place for place, one in enumerate(_ORDER)}
  corrects = not {'experiments', *KINDS}.isdisjoint(kinds.values())
  own = len(rank) if corrects else -1
  return sorted(names, key=lambda name: rank.get(kinds[name], own))


def check_kinds(chains: list[tuple[Path, ...]], kinds=KINDS) -> None:
  """Exactly one file of each kind is there.

  A file that another of its kind includes is a part of that one. A file of
  one's own that comes without any of the three, such as the saved
  configuration of a run, is complete by itself.

  Args:
    chains: each file read, after the files that include it, outermost first.
    kinds: the folders of which exactly one file is needed.

  Raises:
    ConfigError: a kind is missing or there twice.
  """
  chosen = {one: {} for one in KINDS}
  for *outer, path in chains:
    if kind(path) in KINDS and kind(path) not in map(kind, outer):
      chosen[kind(path)][path] = label(path)
  for one, files in chosen.items():
    if len(files) > 1:
      raise ConfigError(
        f'{" and ".join(files.values())} are {len(files)} files of {one}/, and'
        ' a run takes exactly one: leave out the others.'
      )
  own = any(not is_shipped(path) for *_, path in chains)
  if own and not any(chosen.values()):
    return
  for one in kinds:
    if not chosen[one]:
      raise ConfigError(
        f'No file of {one}/ was given, and a run takes exactly one: add'
        f' --gin_file={one}/NAME, where NAME is one of'
        f' {", ".join(names(one)) or "(none is shipped)"}, or a file of your'
        f' own in a folder called {one}.'
      )
