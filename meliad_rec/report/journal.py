"""The journal of a run, metrics.jsonl: one JSON record per line.

The records are in the order of writing. A record has `step`, `split`, `time`
and metrics by name; or `step` and `text`, which is an object of texts by name.
JSON has no NaN and no infinities: they are written as the strings "NaN",
"Infinity" and "-Infinity", and read back as floats.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any

from etils import epath

from meliad_rec.storage.output_file import Appender
from meliad_rec.storage.output_file import replacing
from meliad_rec.storage.workdir import place

NAME = 'metrics.jsonl'
OLD = f'{NAME}.old'
# Prefix of the pseudo-split that holds the error of a trivial predictor, such
# as always the most likely label.
TRIVIAL = 'trivial/'


def path(workdir: str | os.PathLike) -> pathlib.Path | epath.Path:
  """Returns the path of a run's journal, on a disk or in a bucket.

  Raises:
    ValueError: the folder of the run has no such file.
  """
  found = place(workdir) / NAME
  if not found.is_file():
    raise ValueError(
      f'{found}, which holds the metrics of a run, does not exist. Give the '
      'folder of a run that has written some.'
    )
  return found


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the records of a journal, without an incomplete last line.

  Args:
    path: path of the journal.

  Raises:
    ValueError: a complete line is not a JSON object with a step.
  """
  records = []
  for number, line in enumerate(_whole_lines(path), 1):
    try:
      record = json.loads(line)
      int(record['step'])
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'Line {number} of {path} is not a JSON object with a step. Repair '
        'or remove that line.'
      ) from error
    records.append({k: from_json(v) for k, v in record.items()})
  return records


def metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the metrics of a record by name; a record of texts has none."""
  if 'split' not in record:
    return {}
  others = 'step', 'split', 'time', 'text'
  return {k: v for k, v in record.items() if k not in others}


def check(workdir: str | os.PathLike) -> None:
  """Raises ValueError if the journal of a run is damaged; it may be missing."""
  if (found := place(workdir) / NAME).is_file():
    read(found)


def truncate(path: str | os.PathLike, step: int) -> int:
  """Drops the records of all steps after `step`, atomically.

  Args:
    path: path of the journal, which may be missing.
    step: the last step whose records are kept. 0 drops all records, including
      those of step 0. These may belong to a run whose checkpoints were lost, so
      they are appended to the file OLD beside the journal.

  Returns:
    The number of records that were dropped.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return 0
  records, end = read(path), path.read_bytes()[-1:]
  kept = [r for r in records if step > 0 and r['step'] <= step]
  if records and step == 0:
    with path.with_name(OLD).open('a', encoding='utf-8') as file:
      file.writelines(map(_line, records))
  if len(kept) == len(records) and end in (b'', b'\n'):
    return 0  # The time of the last change shows what is newer.
  # Also drops an incomplete last line, which the next record would extend.
  with replacing(path) as new, new.open('w', encoding='utf-8') as file:
    file.writelines(map(_line, kept))
    file.flush()
    os.fsync(file.fileno())
  return len(records) - len(kept)


class Journal:
  """A journal that is open for appending.

  Args:
    path: path of the journal; the first record creates it if needed.
  """

  def __init__(self, path: pathlib.Path):
    self._file = Appender(path)

  def append(self, record: Mapping[str, Any]) -> None:
    """Writes one record at once: {name: number, string, or dict of texts}."""
    self._file.append(_line(record).encode())

  def flush(self) -> None:
    """Tries again to write records that could not be written."""
    self._file.append(b'')

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _whole_lines(path):
  text = epath.Path(path).read_bytes().decode('utf-8', 'replace')
  return text.split('\n')[:-1]


def _line(record):
  clean = {k: to_json(v) for k, v in record.items()}
  return json.dumps(clean, allow_nan=False, ensure_ascii=False) + '\n'


def to_json(value: Any) -> Any:
  """Returns a value as JSON can hold it; see the module."""
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'
  return value


def from_json(value: Any) -> Any:
  """Returns the value of which `to_json` made this one."""
  return float(value) if value in _NOT_FINITE else value


_NOT_FINITE = ('NaN', 'Infinity', '-Infinity')
