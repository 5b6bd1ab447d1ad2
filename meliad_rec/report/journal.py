"""metrics.jsonl: one JSON object a line, in the order of writing.

Each line has `step`, `split` and figures by name, or `step` and `text`, an
object of texts by name. JSON has no NaN and no infinities: they are written
as the strings "NaN", "Infinity" and "-Infinity", and read back as floats.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any

from etils import epath

from meliad_rec.storage.workdir import place

NAME = 'metrics.jsonl'
# What a trivial answer reaches is written like a split, called so and its name.
TRIVIAL = 'trivial/'


def path(workdir: str | os.PathLike) -> pathlib.Path | epath.Path:
  """The journal of a run, on a disk or in a bucket.

  Raises:
    ValueError: the folder has none.
  """
  found = place(workdir) / NAME
  if not found.is_file():
    raise ValueError(
      f'{found} is not there, and it holds the figures of a run; give the '
      'folder of a run that has written some.'
    )
  return found


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The records of a journal; one that a killed run left torn is left out.

  Raises:
    ValueError: a whole line is not a JSON object with a step.
  """
  records = []
  for number, line in enumerate(_whole_lines(path), 1):
    try:
      record = json.loads(line)
      int(record['step'])
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'Line {number} of {path} is not a JSON object with a step; repair '
        'or remove that line.'
      ) from error
    records.append({k: _to_float(v) for k, v in record.items()})
  return records


def truncate(path: str | os.PathLike, step: int) -> int:
  """Drops records of later steps, atomically; returns how many.

  Args:
    path: a journal; it need not be there.
    step: the last to keep. 0: a run from the start, which keeps none.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return 0
  records = read(path)
  kept = [r for r in records if step > 0 and r['step'] <= step]
  # A torn last line goes too, or the next record would be glued to it.
  fresh = path.with_name(path.name + '.tmp')
  with fresh.open('w', encoding='utf-8') as file:
    file.writelines(map(_line, kept))
    file.flush()
    os.fsync(file.fileno())
  os.replace(fresh, path)
  return len(records) - len(kept)


class Journal:
  """A journal open for appending; each record is on disk when it returns."""

  def __init__(self, path: str | os.PathLike):
    self._file = open(path, 'a', encoding='utf-8')  # noqa: SIM115

  def append(self, record: Mapping[str, Any]) -> None:
    """Writes one record; values are numbers, strings, or objects of them."""
    self._file.write(_line(record))
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _whole_lines(path):
  text = epath.Path(path).read_bytes().decode('utf-8', 'replace')
  return text.split('\n')[:-1]


def _line(record):
  clean = {k: _from_float(v) for k, v in record.items()}
  return json.dumps(clean, allow_nan=False, ensure_ascii=False) + '\n'


def _from_float(value):
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'
  return value


def _to_float(value):
  return float(value) if value in _NOT_FINITE else value


_NOT_FINITE = ('NaN', 'Infinity', '-Infinity')
