"""Splits of documents that come in none: by a hash of their names."""

from collections.abc import Collection
import hashlib

from absl import logging


def hashed(names: Collection[str], place: str, remedy: str) -> dict[str, str]:
  """The split of each name, in the order given.

  One name in twenty goes to validation and one to test, at least one each; the
  names alone decide.

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
  part = max(1, len(names) // 20)
  mixed = sorted(
    names, key=lambda name: hashlib.sha256(name.encode()).hexdigest()
  )
  split_of = dict.fromkeys(names, 'train')
  split_of.update(dict.fromkeys(mixed[:part], 'validation'))
  split_of.update(dict.fromkeys(mixed[part : 2 * part], 'test'))
  logging.info(
    '%s comes in no splits: of %d documents, %d each go to validation and '
    'test, by a hash of their names.',
    place,
    len(names),
    part,
  )
  return split_of
