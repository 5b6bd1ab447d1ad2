"""Splits documents into train, validation and test by a hash of their names."""

from collections.abc import Collection
import hashlib

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.report.console import counted


def split_of(name: str) -> str:
  """Returns the split of a name, chosen by a hash of the name.

  About 5 % of names are in validation, 5 % in test, and all others in train.
  """
  return {0: 'validation', 1: 'test'}.get(_hash(name) % 20, 'train')


def split_by_name(
  names: Collection[str], location: str, remedy: str
) -> dict[str, str]:
  """Returns {name: split} in the given order of names; no split is empty.

  The split of a document does not depend on the other documents, with one
  exception: a split that would be empty takes a document of the largest split.

  Args:
    names: names of the documents, all different.
    location: path of the documents, for messages.
    remedy: last sentence of the error message if there are too few names.

  Raises:
    ValueError: there are fewer than three names.
  """
  if len(names) < 3:
    raise ValueError(
      f'{location} holds {counted(len(names), "document")}, but splitting '
      f'them by name needs at least 3. {remedy}'
    )
  splits = {name: split_of(name) for name in names}
  members = lambda split: [name for name in splits if splits[name] == split]
  for split in SPLITS:
    if not members(split):
      largest = max(map(members, SPLITS), key=len)
      splits[min(largest, key=_hash)] = split
  logging.info(
    '%s is not divided into splits. By a hash of the names, %d of its %d '
    'documents go to validation and %d to test.',
    location,
    len(members('validation')),
    len(names),
    len(members('test')),
  )
  return splits


def _hash(name: str) -> int:
  # The name of a file can have any bytes.
  content = name.encode(errors='surrogateescape')
  return int(hashlib.sha256(content).hexdigest(), 16)
