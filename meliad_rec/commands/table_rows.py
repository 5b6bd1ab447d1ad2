"""The rows of a table: their gin files, scales and the settings of a sweep."""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
import re

from meliad_rec.config import files


def rows(table: str, chosen: Sequence[str] | None) -> dict[str, str]:
  """Returns {name of a row: its gin file}.

  Args:
    table: beginning of the names of shipped experiments, or a folder.
    chosen: names of the rows to take; None takes all.

  Raises:
    ValueError: there is no such table, or it lacks a chosen row.
  """
  # A folder of runs may have the name of a shipped table.
  found = {path.stem: str(path) for path in Path(table).glob('*.gin')}
  if not found:
    table = table.removeprefix('gin/').removeprefix('experiments/')
    found = {
      name.removeprefix(f'{table}_'): f'experiments/{name}'
      for name in files.names('experiments')
      if name.startswith(f'{table}_')
    }
  if not found:
    names = files.names('experiments')
    if table in names:
      raise ValueError(
        f'{table} is one row of a table. Give the beginning of its name, which '
        'all rows share, and the rest as --rows.'
      )
    raise ValueError(
      f'There is no table {table!r}{files.nearest(table, names)}: no folder of '
      'this name has gin files, and no shipped experiment begins with it. '
      '`meliad-rec settings` lists the experiments.'
    )
  for name in chosen or ():
    if name not in found:
      raise ValueError(
        f'{table} has no row {name!r}{files.nearest(name, found)}. Choose '
        f'--rows from {", ".join(found)}.'
      )
  number = lambda name: [int(n) for n in re.findall(r'\d+', name)]
  chosen = chosen or sorted(found, key=lambda name: (number(name), name))
  return {name: found[name] for name in chosen}


def scaled(rows: Mapping[str, str], name: str) -> dict[str, tuple[str, ...]]:
  """Returns {row: its gin files} of the rows that have a scale.

  Args:
    rows: rows and their files, as the function `rows` returns them.
    name: name of the scale; see `scale`.

  Raises:
    ValueError: no row has this scale.
  """
  scales = {row: scale(file, name) for row, file in rows.items()}
  found = {
    row: (rows[row], *more) for row, more in scales.items() if more is not None
  }
  if not found:
    tables = {}
    for each in files.names('scale'):
      kind, _, beginning = each.partition('/')
      table = re.match(r'[^/]*/[a-z]+\d*(_\d+)?', beginning)[0]
      tables.setdefault(kind, {})[table] = None
    listed = (f'{kind} for {", ".join(of)}' for kind, of in tables.items())
    raise ValueError(
      f'There is no --scale={name} of any chosen row, such as '
      f'{next(iter(rows))}. The scales are paper for all tables, '
      f'{", and ".join(listed)}.'
    )
  return found


def scale(file: str, name: str) -> tuple[str, ...] | None:
  """Returns the gin files that bring a row to a scale; None if it has none.

  That is the file of gin/scale/NAME whose name is the longest beginning of the
  row's name: a file table1 is for all rows of a table, and a file table1_xl for
  those rows only that begin so.

  Args:
    file: gin file of the row.
    name: name of the scale; 'paper' needs no file.
  """
  if name == 'paper':
    return ()
  row = file.removeprefix('experiments/')
  fitting = [
    each
    for each in files.names('scale')
    if f'{name}/{row}_'.startswith(f'{each}_') and each.startswith(f'{name}/')
  ]
  return (f'scale/{max(fitting, key=len)}',) if fitting else None


def settings(sweep: str | None) -> list[str]:
  """Returns the settings 'NAME = value' of --sweep; [''] without it.

  Raises:
    ValueError: it is not a name with several values, or one of them is no
      literal of Python, such as a macro or a reference of gin.
  """
  if sweep is None:
    return ['']
  name, _, values = (each.strip() for each in sweep.partition('='))
  try:
    listed = ast.literal_eval(f'({values},)' if values else '()')
    if len(listed) == 1 and isinstance(listed[0], tuple):
      [listed] = listed
  except (ValueError, SyntaxError):
    raise ValueError(
      'The values of --sweep must be numbers, strings, True, False, None or '
      f'tuples of these, got {sweep!r}.'
    ) from None
  found = list(dict.fromkeys(f'{name} = {value!r}' for value in listed))
  if not name or len(found) < 2:
    raise ValueError(
      f'--sweep needs a setting and at least two values, got {sweep!r}. Give '
      "for example --sweep='PONDER_COST = 1, 0.1'."
    )
  return found
