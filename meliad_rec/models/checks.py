"""Checks of a model against its data, before anything is read."""

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.models.model import Model


def check_data_compatible(
  model: Model, documents: Documents, segment: int, setting: str
) -> None:
  """Raises ValueError if a model cannot read documents.

  Args:
    model: the model.
    documents: all documents that it will read.
    segment: tokens of a row that it reads at once.
    setting: name of the setting of the segment, such as SEGMENT.
  """
  if model.head is not None:
    _check_labels(model.head, documents)
  elif documents.first_lengths is not None:
    raise ValueError(
      'These documents are pairs of sequences, but the model has no head for '
      'pairs. Set model.Model.head = @heads.Matcher().'
    )
  block = (model.cell.block_length or 1) * model.sequences
  if segment % block:
    pair = ' (half of it for each sequence of a pair)'
    raise ValueError(
      f'{setting} must be a multiple of {block}, the block of this model'
      f'{pair if model.sequences > 1 else ""}, got {segment}.'
    )
  if not model.cell.needs_whole_document:
    return
  longest = documents.sequence_lengths.max(initial=0)
  needed = -(-longest * model.sequences // block) * block
  if segment < needed:
    raise ValueError(
      f'{type(model.cell).__name__} reads a whole document at once. {setting} '
      f'must be at least {needed}, for the longest document, got {segment}.'
    )


def check_can_generate(model: Model) -> None:
  """Raises ValueError if a model cannot generate text."""
  if model.head is not None:
    raise ValueError(
      f'The model has a {type(model.head).__name__} for labels and cannot '
      'generate text. Set SAMPLE = 0, and evaluate it with --split.'
    )
  if model.cell.needs_whole_document:
    raise ValueError(
      f'{type(model.cell).__name__} reads a whole document at once and cannot '
      'generate text. Set SAMPLE = 0, or BLOCK to a number of tokens.'
    )


def _check_labels(head, documents):
  name = type(head).__name__
  if documents.labels is None:
    raise ValueError(
      f'The model has a {name} for labels, but these documents have none. '
      'Choose a task with labels, or remove model.Model.head.'
    )
  pairs = documents.first_lengths is not None
  if pairs != (head.sequences == 2):
    needed, given = 'pairs of sequences', 'single sequences'
    if pairs:
      needed, given = given, needed
    raise ValueError(
      f'{name} needs {needed}, but these documents are {given}. Set '
      f'model.Model.head = @heads.{"Matcher" if pairs else "Classifier"}().'
    )
  highest = documents.labels.max(initial=0)
  if highest > head.classes:
    raise ValueError(
      f'classes must be at least {highest}, the highest label of these '
      f'documents, got {head.classes}. Set CLASSES.'
    )
  if head.pool is None or not head.pool.at_end:
    return
  ends = documents.starts[1:][documents.lengths > 0] - 1
  if np.delete(documents.labels, ends).any():
    raise ValueError(
      f'{type(head.pool).__name__} pools after a segment, but some of these '
      'documents have labels before their last token. Set POOL to another '
      'class of pooling.py.'
    )
