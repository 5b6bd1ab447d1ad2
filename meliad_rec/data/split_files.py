"""Files of splits, which a pattern such as 'data/{split}.en' names.

{split} means train, validation (or valid, val or dev) and test. Other
files that match are splits too, such as test_2016 in data/test_2016.en.
"""

from collections.abc import Sequence
import glob
import lzma
from pathlib import Path
import re
import sys
import tarfile
import zipfile
import zlib

from meliad_rec.data.documents import SPLITS
from meliad_rec.storage.workdir import expand_home

# Raised by an archive that is damaged, encrypted or packed in an unknown way.
ARCHIVE_ERRORS = (
  *(OSError, EOFError, RuntimeError, tarfile.TarError),
  *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
# What {split} means in a path.
_NAMES = {'validation': ('validation', 'valid', 'val', 'dev')}


def check_pattern(name: str, path: str, flag: str) -> str:
  """Returns a pattern of files; ValueError if it lacks {split}."""
  path = expand_home(path)
  if path.count('{split}') != 1:
    raise ValueError(
      f"{name} must contain '{{split}}' once, got {path!r}. Set {flag}."
    )
  return path


def files_of_splits(
  patterns: Sequence[str], fetch: str | None, flags: str
) -> dict[str, tuple[Path, ...]]:
  """Returns {split: its files}; see the module for their names.

  Args:
    patterns: patterns of the files. A split has a file of each, and all have
      the same name in place of {split}.
    fetch: how to get the files, for the error message.
    flags: flags that set the patterns, for the error message.

  Raises:
    ValueError: there are no files, one of a split is missing, or two names
      mean one split.
  """
  found = [_matching(pattern) for pattern in patterns]
  if not any(found):
    raise ValueError(
      f'There is no file {Path(patterns[0]).absolute()}, where {{split}} is '
      'train, validation (or valid, val, dev) or test. '
      f'{f"{fetch} Or set" if fetch else "Set"} {flags}.'
    )
  splits, others = {}, set.intersection(*found)
  for split in SPLITS:
    names = _NAMES.get(split, (split,))
    others.difference_update(names)
    there = [name for name in names if any(name in each for each in found)]
    if len(there) > 1:
      raise ValueError(
        f'Files of {" and ".join(there)} would both be the split {split}, such '
        f'as {_path(patterns[0], there[0])}. Rename or remove the files of one '
        'name.'
      )
    for name in there:
      splits[split] = name
      for pattern in patterns:
        if not _path(pattern, name).is_file():
          raise ValueError(
            f'There is no file {_path(pattern, name)}, but another of the '
            f'split {split}. Add it, or set {flags}.'
          )
  splits |= {name: name for name in sorted(others)}
  return {
    split: tuple(_path(pattern, name) for pattern in patterns)
    for split, name in splits.items()
  }


def _path(pattern: str, name: str) -> Path:
  return Path(pattern.replace('{split}', name))


def _matching(pattern: str) -> set[str]:
  """Returns what stands for {split} in the files that match a pattern."""
  parts = pattern.split('{split}')
  first, *others = map(re.escape, parts)
  # A name that occurs twice is the same in both places.
  name = re.compile(f'{first}(.*)' + r'\1'.join(others), re.DOTALL)
  matches = map(name.fullmatch, glob.glob('*'.join(map(glob.escape, parts))))
  return {match[1] for match in matches if match}


def read_text(path: str | Path, advice: str = 'Convert it to UTF-8.') -> str:
  """Returns the text of a file, or of stdin if the path is '-'.

  Args:
    path: the file.
    advice: what to do if it is not UTF-8, for the error message.

  Raises:
    ValueError: the file cannot be read, or is not UTF-8.
  """
  try:
    # Not as text, which has the encoding and the newlines of the system.
    if path == '-':
      return sys.stdin.buffer.read().decode()
    return Path(path).read_bytes().decode()
  except OSError as error:
    raise ValueError(
      f'{_name(path)} cannot be read ({error.strerror}). Give the path of a '
      'text file.'
    ) from None
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{_name(path)} is not UTF-8 (byte {error.start}). {advice}'
    ) from None


def read_lines(path: str | Path) -> list[str]:
  """Returns the lines of a file without white space at their ends.

  A byte order mark at the beginning of the file is left out.

  Args:
    path: the file; '-' for stdin.

  Raises:
    ValueError: the file is empty, or see `read_text`.
  """
  lines = read_text(path).removeprefix('\ufeff').split('\n')
  if lines == ['']:
    raise ValueError(
      f'{_name(path)} is empty. Give a file with one text per line.'
    )
  return [line.strip() for line in (lines if lines[-1] else lines[:-1])]


def _name(path: str | Path) -> str:
  return 'The text on stdin' if path == '-' else f'{path}'
