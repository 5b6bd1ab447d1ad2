"""Finds gin files by name, and checks that they can be combined.

A run takes exactly one file from each of arch/, size/ and task/, any number
from options/, and single bindings. A file of experiments/ may include all the
files that a run takes, and a file of scale/ makes such a run smaller. A file
that is given beside an experiment replaces the file of its kind that the
experiment includes. Files of options/, experiments/ and scale/ are grouped in
folders, as in 'options/position/rope'.
"""

import difflib
import functools
import os
from pathlib import Path

from meliad_rec.config.values import ConfigError

KINDS = ('arch', 'size', 'task')
DEFAULTS = 'defaults.gin'
# First line of the configuration that a run saves.
HEADER = '# The complete configuration of a run, including defaults.\n'
# Files that may include files of all kinds, in the order of reading.
_WHOLE = 'experiments', 'scale'
_ORDER = *_WHOLE, *KINDS, 'options'


@functools.cache
def root() -> Path:
  """Returns the absolute path of the folder of the shipped gin files.

  The folder is inside the package if the package was installed from a wheel. It
  is beside the package in a checkout or an editable install.
  """
  package = Path(__file__).resolve().parents[1]
  inside = package / 'gin'
  return inside if inside.is_dir() else package.parent / 'gin'


def nearest(name: str, names) -> str:
  """Returns ' (nearest is X)', where X is the most similar one of `names`.

  Returns '' if none is similar. A longer name counts as similar if it begins
  with `name` or with something very similar to `name`.
  """
  by_lower = {one.lower(): one for one in sorted(names, reverse=True)}
  given = name.lower()

  def likeness(one):
    matcher = difflib.SequenceMatcher(None, b=given)
    matcher.set_seq1(one)
    whole = matcher.ratio()
    matcher.set_seq1(one[: len(given)])
    start = matcher.ratio()
    close = [whole if whole >= 0.6 else 0]
    close += [start] if start > 0.85 and len(given) > 2 else []
    return max(close), whole, one

  likely, _, best = max(map(likeness, by_lower), default=(0, 0, ''))
  return f' (nearest is {by_lower[best]})' if likely else ''


def names(kind: str = '') -> list[str]:
  """Returns the names of the shipped files in a folder.

  Names are relative to the folder and without '.gin', such as 'position/rope'
  for the folder 'options'.

  Args:
    kind: a folder inside gin/, such as 'options'; '' for gin/ itself.
  """
  folder = root() / kind
  return sorted(
    path.relative_to(folder).with_suffix('').as_posix()
    for path in folder.rglob('*.gin')
  )


def find(name: str, where: str) -> Path:
  """Returns the file that a --gin_file or an include statement names.

  Args:
    name: 'arch/X.gin', 'gin/arch/X.gin' or 'arch/X' for a shipped file, or the
      path of another file, absolute or relative to the working directory, with
      or without '.gin'. A shipped file takes precedence, unless the path
      begins with './' or '../'.
    where: the flag, or the file and line, that names it; for messages.

  Raises:
    ConfigError: there is no such file.
  """
  short = name.removeprefix('gin/').removesuffix('.gin')
  inside = (root() / f'{short}.gin').resolve()
  is_path = name.startswith(('./', '../'))
  if not is_path and is_shipped(inside) and inside.is_file():
    return inside
  home = Path(os.path.expanduser(name))  # Unknown users remain as they are.
  for own in (home, Path(f'{home}.gin')):
    if own.is_file():
      return own.resolve()
  shipped = names()
  ends = [one for one in shipped if one.endswith(f'/{short}')]
  similar = nearest(short, shipped)
  if ends:
    similar = f' (perhaps {" or ".join(ends)})'
  folder, _, _ = short.rpartition('/')
  inside = [one for one in shipped if one.startswith(f'{folder}/')]
  rest = [one.removeprefix(f'{folder}/').partition('/') for one in inside]
  there = ', '.join(dict.fromkeys(first + slash for first, slash, _ in rest))
  is_short = 0 < len(inside) <= 20
  listed = f' Shipped in {folder}/: {there}.' if is_short else ''
  raise ConfigError(
    f'{where}: there is no gin file {name!r}, neither among the shipped files'
    f'{similar} nor at {home.absolute()}.{listed} Correct the path, or list the'
    ' files with `meliad-rec settings`.'
  )


def is_shipped(path: Path) -> bool:
  return path.is_relative_to(root())


def is_saved(path: Path) -> bool:
  """Returns whether a file is the saved configuration of a run."""
  with path.open('rb') as file:
    return file.read(len(HEADER)) == HEADER.encode()


def has_replaceable_parts(path: Path) -> bool:
  """Returns whether what is read after a file may replace parts of it.

  It may if the file is a shipped experiment or the saved configuration of a
  run.
  """
  of_experiment = is_shipped(path) and kind(path) == 'experiments'
  return of_experiment or is_saved(path)


def is_optional(chain: tuple[Path, ...]) -> bool:
  """Returns whether the bindings of a file may stay unread.

  Bindings of these shipped files may: arch/, size/ and task/, since an
  architecture need not use every setting, nor a small model every kind of
  layer; defaults.gin, since options may replace parts of the recipe; scale/ and
  what it includes, since all rows of a table share a file.

  Args:
    chain: the files that include the file, outermost first, then the file.
  """
  is_scale = 'scale' in map(kind, chain)
  return is_shipped(chain[-1]) and (
    is_scale or kind(chain[-1]) in (*KINDS, DEFAULTS)
  )


def label(path: Path) -> str:
  """Returns the path of a file as messages show it.

  The path is relative to gin/ for a shipped file, relative to the working
  directory for another file in that directory, and otherwise absolute.
  """
  if is_shipped(path):
    return path.relative_to(root()).as_posix()
  if path.is_relative_to(Path.cwd()):
    return path.relative_to(Path.cwd()).as_posix()
  return str(path)


def kind(path: Path) -> str:
  """Returns the kind of a file, such as 'arch', 'size', 'task' or 'options'.

  The kind of a shipped file is the name of the outermost folder inside gin/.
  The kind of a user's own file is the name of the folder that holds it. If that
  folder is a group inside options/ or experiments/, such as options/position,
  it is the name of the outer folder. The saved configuration of a run is of no
  kind, ''.
  """
  if is_shipped(path):
    return path.relative_to(root()).parts[0]
  if is_saved(path):
    return ''
  folder, around = path.parent.name, path.parent.parent.name
  grouped = around in ('options', 'experiments') and folder not in _ORDER
  return around if grouped else folder


def in_order(names: list[str]) -> list[str]:
  """Returns names in the order in which their files are read.

  Later files override earlier ones. The order of kinds is: experiments, scale,
  arch, size, task, options. A file of none of these kinds, such as a user's
  own, is read last. There is one exception: if all other files are options, it
  is read first, because it then takes the place of an experiment.

  Args:
    names: names or paths of gin files; see `find`.

  Raises:
    ConfigError: a file does not exist.
  """
  kinds = {name: kind(find(name, f'--gin_file={name}')) for name in names}
  rank = {one: place for place, one in enumerate(_ORDER)}
  overrides = not {'experiments', *KINDS}.isdisjoint(kinds.values())
  own = len(rank) if overrides else -1
  return sorted(names, key=lambda name: rank.get(kinds[name], own))


def check_kinds(chains: list[tuple[Path, ...]], kinds=KINDS) -> None:
  """Checks that exactly one file of each kind was read, and one experiment.

  A file does not count if another file of its kind includes it. A file that an
  experiment or a scale includes counts only among the files that it includes,
  since files read later replace it. All kinds may be absent if a user's own
  file was read. That file may be complete, such as the saved configuration of a
  run.

  Args:
    chains: a tuple for each file read: the files that include it, outermost
      first, then the file itself.
    kinds: the kinds that are needed. Of the others in KINDS, there may be no
      file, but not more than one.

  Raises:
    ConfigError: there is more than one file of a kind, or none of a kind that
      is needed, or more than one experiment.
  """
  given = dict.fromkeys(path for path, *inner in chains if not inner)
  several = [label(path) for path in given if kind(path) == 'experiments']
  if len(several) > 1:
    raise ConfigError(
      f'{" and ".join(several)} are {len(several)} experiments, but a run takes'
      ' one. Remove the others.'
    )
  chosen = {}
  for *outer, path in chains:
    whole = next((one for one in outer if kind(one) in _WHOLE), None)
    if kind(path) in KINDS and kind(path) not in map(kind, outer):
      chosen.setdefault((kind(path), whole), {})[path] = label(path)
  for (one, _), files in chosen.items():
    if len(files) > 1:
      raise ConfigError(
        f'{" and ".join(files.values())} are {len(files)} files of {one}/, but'
        ' a run takes exactly one. Remove the others.'
      )
  own = any(not is_shipped(path) for *_, path in chains)
  if own and not chosen:
    return
  for one in kinds:
    if one not in {of_kind for of_kind, _ in chosen}:
      raise ConfigError(
        f'No file of {one}/ was given, but a run takes exactly one. Add'
        f' --gin_file={one}/NAME, where NAME is one of'
        f' {", ".join(names(one)) or "(none is shipped)"}, or a file of your'
        f' own in a folder called {one}.'
      )
