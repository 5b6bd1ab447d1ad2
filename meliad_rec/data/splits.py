"""Splits of documents that come in none: by a hash of their names."""

from collections.abc import Collection
import hashlib

from absl import logging

from meliad_rec.data.documents import SPLITS


def split_of(name: str) -> str:
  """5 % go to validation and 5 % to test; the name alone decides."""
  return {0: 'validation', 1: 'test'}.get(_number(name) % 20, 'train')


def hashed(names: Collection[str], place: str, remedy: str) -> dict[str, str]:
  """The split of each name, in the order given; each split has one at least.

  So a document stays in its split when others come or go, but where there are
  so few that a split would have none: it then takes one of the largest.

  Args:
    names: of the documents, all different.
    place: where they are, for messages.
    remedy: what to do where there are too few, for messages.

  Raises:
    ValueError: fewer than three names.
  """
  if len(names) < 3:
    raise ValueError(
      f'{place} holds {len(names)} documents, too few to split by name; '
      f'{remedy}.'
    )
  found = {name: split_of(name) for name in names}
  of = lambda split: [name for name in found if found[name] == split]
  for split in SPLITS:
    if not of(split):
      found[min(max(map(of, SPLITS), key=len), key=_number)] = split
  logging.info(
    '%s comes in no splits: of %d documents, %d go to validation and %d to '
    'test, by a hash of their names.',
    place,
    len(names),
    len(of('validation')),
    len(of('test')),
  )
  return found


def _number(name: str) -> int:
  return int(hashlib.sha256(name.encode()).hexdigest(), 16)
