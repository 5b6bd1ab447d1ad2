"""Pairs of texts, a source and its target: translation and summarization.

A source and a target are one line each. Both end with the token of a newline,
which ends what a model writes.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
import json
from pathlib import Path
from typing import Protocol

from absl import logging
import numpy as np

from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.jsonl import JSON_ERRORS
from meliad_rec.data.jsonl import numbered_lines
from meliad_rec.data.split_files import check_pattern
from meliad_rec.data.split_files import files_of_splits
from meliad_rec.data.split_files import read_lines
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.report.console import counted


class PairReader(Protocol):
  """The interface of a source of pairs.

  Attributes:
    description: one line that describes the pairs in logs.
    splits: names of the splits.
  """

  description: str
  splits: tuple[str, ...]

  def pairs(self, split: str) -> Iterator[tuple[str, str, str]]:
    """Yields (name, source, target) of each pair in a fixed order."""

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name, source and target as two lines), for a vocabulary."""


@dataclasses.dataclass(frozen=True)
class Lines:
  """Pairs of lines of two files for each split.

  Attributes:
    source: pattern of the files of sources, such as 'data/{split}.en', in which
      {split} means train, validation (or valid, val or dev) and test.
      Other files that match are splits too, such as test_2016 in
      data/test_2016.en, if both files exist.
    target: pattern of the files of targets.
    fetch: how to get the files, for the error message.

  Raises:
    ValueError: there are no files, they cannot be read, one of a split is
      missing, two names mean one split, or two files of a split have
      different numbers of lines. Raised on first use.
  """

  source: str
  target: str
  fetch: str | None = None

  def __post_init__(self):
    for name, flag in ('source', 'path'), ('target', 'target'):
      flag = f'--{flag} (in gin: {name.upper()})'
      path = check_pattern(name, getattr(self, name), flag)
      object.__setattr__(self, name, path)

  @property
  def description(self) -> str:
    names = Path(self.source).name, Path(self.target).name
    return f'pairs: {" and ".join(names)}'

  @functools.cached_property
  def files(self) -> dict[str, tuple[Path, ...]]:
    """The files of sources and of targets of each split."""
    flags = '--path (in gin: SOURCE) and --target (in gin: TARGET)'
    return files_of_splits((self.source, self.target), self.fetch, flags)

  @property
  def splits(self) -> tuple[str, ...]:
    return (*self.files,)

  def pairs(self, split: str) -> Iterator[tuple[str, str, str]]:
    source, target = self.files[split]
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
      raise ValueError(
        f'{source} has {len(sources)} lines, but {target} has {len(targets)}. '
        'Line n of one must be the target of line n of the other.'
      )
    for number, pair in enumerate(zip(sources, targets, strict=True), 1):
      yield f'{split}:{number}', *pair

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    return ((name, f'{s}\n{t}\n') for name, s, t in self.pairs(split))


@dataclasses.dataclass(frozen=True)
class JsonPairs:
  """Pairs of two fields of JSON objects, one per line.

  A field is a string or a list of strings. The strings of a source are joined
  with spaces. Of the targets in a list, such as several summaries, only the
  first is used.

  Attributes:
    path: pattern such as 'data/{split}.jsonl'; {split} is as in Lines.
    source: name of the field of the source.
    target: name of the field of the target.
    fetch: how to get the files, for the error message.

  Raises:
    ValueError: there are no files, they cannot be read, or a line is not an
      object with both fields. Raised on first use.
  """

  path: str
  source: str
  target: str
  fetch: str | None = None

  def __post_init__(self):
    path = check_pattern('path', self.path, '--path (in gin: JSONL)')
    object.__setattr__(self, 'path', path)

  @property
  def description(self) -> str:
    return f'pairs: {Path(self.path).name}, {self.source} and {self.target}'

  @functools.cached_property
  def files(self) -> dict[str, tuple[Path, ...]]:
    """The file of each split."""
    return files_of_splits((self.path,), self.fetch, '--path (in gin: JSONL)')

  @property
  def splits(self) -> tuple[str, ...]:
    return (*self.files,)

  def pairs(self, split: str) -> Iterator[tuple[str, str, str]]:
    (path,) = self.files[split]
    for number, line in numbered_lines(path):
      try:
        fields = json.loads(line)
        sources, targets = (
          [*given] if isinstance(given, list) else [given]
          for given in (fields[self.source], fields[self.target])
        )
        pair = ' '.join(sources), targets[0]
        one_line = [' '.join(text.split()) for text in pair]
        ''.join(one_line).encode()  # A line may have half an emoji.
      except JSON_ERRORS:
        raise ValueError(
          f'{path}:{number} is not a JSON object with texts in '
          f'{self.source!r} and {self.target!r}. Correct it, or name '
          'other fields.'
        ) from None
      yield f'{split}:{number}', one_line[0], one_line[1]

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    return ((name, f'{s}\n{t}\n') for name, s, t in self.pairs(split))


class Pairs:
  """A dataset of pairs; tokenizes a split when it is first used.

  Attributes:
    source: the source of the pairs.
    vocabulary: the vocabulary of both sequences.
    max_tokens: pairs of train are left out if their target has more tokens than
      this, with the one that ends it, or their source more than
      `max_source_tokens`. None leaves out none.
    max_source_tokens: None: as many as `max_tokens`.
    max_ratio: pairs of train are left out if one of their sequences has more
      than `max_ratio` times as many tokens as the other, without those that end
      them. None leaves out none.
    source_words: words of a source that are read, from its beginning; the rest
      is cut off. None: all.

  Raises:
    ValueError: the source cannot be read, or a newline is not one token of the
      vocabulary.
  """

  def __init__(
    self,
    source: PairReader,
    vocabulary: Vocabulary,
    max_tokens: int | None = None,
    source_words: int | None = None,
    max_source_tokens: int | None = None,
    max_ratio: float | None = None,
  ):
    for name, value in (
      ('max_tokens', max_tokens),
      ('max_source_tokens', max_source_tokens),
      ('source_words', source_words),
      ('max_ratio', max_ratio),
    ):
      if value is not None and value < 1:
        raise ValueError(
          f'{name} must be None or at least 1, got {value}. Set {name.upper()}.'
        )
    self.source, self.vocabulary = source, vocabulary
    self.max_tokens, self.source_words = max_tokens, source_words
    self._max_source_tokens = max_source_tokens or max_tokens
    self.max_ratio = max_ratio
    self._documents: dict[str, Documents] = {}

  @property
  def description(self) -> str:
    return self.source.description

  @property
  def splits(self) -> tuple[str, ...]:
    return self.source.splits

  def documents(self, split: str) -> Documents:
    """Returns all pairs of a split, tokenizing them on the first call.

    Raises:
      ValueError: there is no such split, or the source cannot be read.
    """
    check_split(split, self.splits, self.source.description)
    if split not in self._documents:
      found = self._read(split)
      if split == 'train':
        found = self._kept(found)
      self._documents[split] = Documents.collect(found, self.vocabulary)
    return self._documents[split]

  def _read(self, split: str) -> Iterator[Document]:
    first = first_words(self.source_words)
    for name, source, target in self.source.pairs(split):
      yield pair(name, first(source), target, self.vocabulary)

  def _kept(self, documents: Iterator[Document]) -> Iterator[Document]:
    """Yields the pairs that max_tokens and max_ratio do not leave out."""
    left_out = 0
    for document in documents:
      source = document.first_length or 0
      target = len(document.tokens) - source
      short, long = sorted([source - 1, target - 1])
      too_long = self.max_tokens is not None and (
        source > self._max_source_tokens or target > self.max_tokens
      )
      unlike = self.max_ratio is not None and long > self.max_ratio * short
      if too_long or unlike:
        left_out += 1
      else:
        yield document
    if left_out:
      logging.info(
        'MAX_TOKENS and MAX_RATIO leave out %s of train.',
        counted(left_out, 'pair'),
      )


def first_words(count: int | None) -> Callable[[str], str]:
  """Returns a function that cuts a text after `count` words; None: nowhere."""
  if count is None:
    return lambda text: text
  return lambda text: ' '.join(text.split()[:count])


def pair(
  name: str, source: str, target: str, vocabulary: Vocabulary
) -> Document:
  """Returns a source and its target as a tokenized document."""
  first = line_ids(source, vocabulary)
  return Document(
    name,
    np.concatenate([first, line_ids(target, vocabulary)]),
    len(target.encode()) + 1,
    count_words(target),
    first_length=len(first),
  )


def line_ids(line: str, vocabulary: Vocabulary) -> np.ndarray:
  """Returns the ids of a line and of the newline that ends it."""
  return np.append(vocabulary.encode(line), end_of_line(vocabulary))


def end_of_line(vocabulary: Vocabulary) -> int:
  """Returns the id of a newline; ValueError if that is not a single token."""
  ids = vocabulary.encode('\n')
  if len(ids) != 1:
    raise ValueError(
      'A newline ends a source and a target, but it is not one token of the '
      f'vocabulary; it is {len(ids)}. Make a vocabulary with meliad-rec '
      "train_vocab, or set VOCABULARY = 'bytes'."
    )
  return int(ids[0])
