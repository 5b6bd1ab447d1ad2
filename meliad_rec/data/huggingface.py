"""Documents from a Hugging Face dataset, in local files or on the Hub."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import glob
import itertools
import os
from pathlib import Path
import re

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.splits import split_by_name
from meliad_rec.data.splits import split_of
from meliad_rec.storage.workdir import expand_home

# Kinds of files, by suffix, and the builders of `datasets` that read them.
_BUILDERS = {
  '.parquet': 'parquet',
  '.arrow': 'arrow',
  '.csv': 'csv',
  '.json': 'json',
  '.jsonl': 'json',
}
# Words in the paths of files by which `datasets` knows the splits of a folder.
_WORDS = {
  **dict.fromkeys(('train', 'training'), 'train'),
  **dict.fromkeys(('validation', 'valid', 'val', 'dev'), 'validation'),
  **dict.fromkeys(('test', 'testing', 'eval', 'evaluation'), 'test'),
}


@dataclasses.dataclass(frozen=True)
class HuggingFace:
  """Rows of a Hugging Face dataset in their order, one document each.

  The splits train, validation and test are the splits of the dataset with these
  names, unless `splits_from` gives other names. If the dataset has only train,
  a hash of the row's number decides the split of a row: about 5 % of rows go to
  validation and 5 % to test. All files of a pattern are train.

  With `stream`, the documents may differ when the dataset is read again. A
  run resumes only with the documents with which it began, so it may then be
  unable to resume. A run that reads a token store written from the stream can
  always resume.

  Attributes:
    path: a folder that `save_to_disk` wrote; a file or pattern of Parquet,
      Arrow, CSV or JSON lines; a folder of such files; or the name of a
      dataset on the Hub.
    field: name of the column that holds the text, a string.
    subset: name of a configuration of the dataset. None if the dataset has only
      one.
    splits_from: {split: its name in the dataset}, where a split is train,
      validation or test. None means that the names are the same.
    stream: whether to read rows as they are downloaded, without a copy on the
      disk.
    limit: maximum number of rows to read of each of train, validation and test.
      None: all.

  Raises:
    ValueError: the dataset, a split or the column does not exist or cannot be
      read, the names of files of a pattern name several splits, or the package
      `datasets` is not installed. Raised on first use.
  """

  path: str
  field: str = 'text'
  subset: str | None = None
  splits_from: Mapping[str, str] | None = None
  stream: bool = False
  limit: int | None = None

  def __post_init__(self):
    object.__setattr__(self, 'path', expand_home(self.path))

  @property
  def description(self) -> str:
    name = Path(self.path).name if Path(self.path).exists() else self.path
    subset = f', subset {self.subset}' if self.subset else ''
    return f'hf: {name}{subset}, field {self.field}'

  @functools.cached_property
  def splits(self) -> tuple[str, ...]:
    if self._hashed:
      return SPLITS
    return tuple(split for split in SPLITS if split in self._name_of)

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the first `limit` rows of a split.

    A name such as 'dev:7' consists of the split's name in the dataset and the
    number of the row there, counted from 0. If a hash divides the rows of train
    over all splits, all names begin with 'train:'.
    """
    name = self._name_of.get(split, 'train')
    part = self._parts[name]
    columns = part.column_names or ()
    if columns and self.field not in columns:
      raise ValueError(
        f'{self.path} has no column {self.field!r}. Set --field (in gin: '
        f'FIELD) to one of {", ".join(columns)}.'
      )
    if columns:
      part = part.select_columns([self.field])
    rows = ((f'{name}:{i}', row) for i, row in enumerate(part))
    if self._hashed:
      rows = (row for row in rows if self._split_of(row[0]) == split)
    rows = _with_readable_errors(rows, self.path)
    for number, row in itertools.islice(rows, self.limit):
      yield number, self._text(number, row)

  def _text(self, number: str, row: Mapping) -> str:
    text = row.get(self.field)
    if not isinstance(text, str):
      raise ValueError(
        f'Row {number} of {self.path} has no text in {self.field!r}. Set '
        '--field (in gin: FIELD) to a column of strings.'
      )
    return text

  @functools.cached_property
  def _parts(self) -> Mapping[str, Iterable[Mapping]]:
    """{name of a split in the dataset: its rows}."""
    try:
      import datasets
      import huggingface_hub
    except ImportError:
      raise ValueError(
        f'{self.path} needs the package datasets. Install meliad_rec[hf].'
      ) from None
    # Errors are reported in one sentence below.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)
    path = Path(self.path)
    marks = path / 'state.json', path / 'dataset_dict.json'
    is_saved = any(mark.exists() for mark in marks)
    for name, value in ('subset', self.subset), ('stream', self.stream):
      if is_saved and value:
        raise ValueError(
          f'{self.path} was written by save_to_disk, so {name} cannot choose '
          f'what is read of it, got {value!r}. Leave out --{name} (in gin: '
          f'sources.HuggingFace.{name}).'
        )
    if self.stream:
      logging.info(
        '%s: a stream may give other documents when it is read again. A run '
        'then cannot resume. Write a store with meliad-rec tokenize to avoid '
        'this.',
        self.path,
      )
    builder = _BUILDERS.get(path.suffix)
    if builder:
      _check_one_split(self.path)
    # The package and what it builds on raise errors of many classes.
    try:
      if is_saved:
        found = datasets.load_from_disk(self.path)
      else:
        found = datasets.load_dataset(
          builder or self.path,
          self.subset,
          data_files=self.path if builder else None,
          streaming=self.stream,
        )
    except Exception as error:
      raise _unreadable(self.path, error) from None
    return found if isinstance(found, Mapping) else {'train': found}

  @functools.cached_property
  def _name_of(self) -> Mapping[str, str]:
    """{split: its name in the dataset}."""
    if self.splits_from is None:
      if not {*SPLITS} & {*self._parts}:
        raise ValueError(
          f'{self.path} has none of the splits {", ".join(SPLITS)}, but '
          f'{", ".join(self._parts)}. Set '
          '--splits_from=train=NAME,validation=NAME (in gin: '
          'sources.HuggingFace.splits_from).'
        )
      if others := [name for name in self._parts if name not in SPLITS]:
        logging.info(
          '%s: the splits %s are not read. To read them, name all splits with '
          '--splits_from=train=NAME,validation=NAME (in gin: '
          'sources.HuggingFace.splits_from).',
          self.path,
          ', '.join(others),
        )
      return {split: split for split in SPLITS if split in self._parts}
    for split, name in self.splits_from.items():
      for part, known in (split, SPLITS), (name, self._parts):
        if part not in known:
          raise ValueError(
            f'splits_from of {self.path} has {split}={name}, but {part} is not '
            f'one of {", ".join(known)}. Set --splits_from (in gin: '
            'sources.HuggingFace.splits_from).'
          )
    return self.splits_from

  @functools.cached_property
  def _hashed(self) -> bool:
    """Whether a hash distributes the rows of train over all splits."""
    return self.splits_from is None and [*self._parts] == ['train']

  @functools.cached_property
  def _split_of(self) -> Callable[[str], str]:
    if self.stream:
      return split_of
    names = [f'train:{i}' for i in range(len(self._parts['train']))]
    return split_by_name(
      names,
      self.path,
      'Name its splits with --splits_from (in gin: '
      'sources.HuggingFace.splits_from).',
    ).get


def _check_one_split(pattern: str) -> None:
  """Raises ValueError if files that match have names of several splits."""
  split_in = {}
  paths = sorted(glob.glob(pattern, recursive=True))
  for path in paths:
    inside = os.path.relpath(path, os.path.commonpath(paths))
    for word in re.findall('[a-z]+', inside.lower()):
      if word in _WORDS:
        split_in[path] = _WORDS[word]
  if len({*split_in.values()}) > 1:
    first, *others = split_in
    other = next(each for each in others if split_in[each] != split_in[first])
    raise ValueError(
      f'{pattern} matches files of several splits, such as {first} and '
      f'{other}, and would mix them. Give their folder, or a pattern of one '
      'split.'
    )


def _with_readable_errors(rows: Iterator, path: str) -> Iterator:
  """Yields the same rows; turns any error into a ValueError that names path."""
  try:
    yield from rows
  except Exception as error:
    raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> ValueError:
  first = str(error).strip().partition('\n')[0] or type(error).__name__
  return ValueError(
    f'The dataset {path} cannot be read ({first.rstrip(".")}). Give --path (in '
    'gin: DATASET) a local file or folder, or the name of a dataset on the Hub.'
  )
