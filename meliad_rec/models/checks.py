"""What a model cannot do, told in one sentence before anything is read."""

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import side_lengths
from meliad_rec.models.model import Model


def check_data_compatible(
  model: Model, documents: Documents, segment: int, setting: str
) -> None:
  """Raises ValueError where a model cannot read or judge documents.

  Args:
    model: with a head or without.
    documents: all that it is to read.
    segment: places of a row that it reads at once.
    setting: what sets the segment, such as SEGMENT.
  """
  if model.head is not None:
    _check_labels(model.head, documents)
  elif documents.middles is not None:
    raise ValueError(
      'These documents are pairs of sequences, and the model has no head that '
      'judges pairs; set model.Model.head = @heads.Matcher().'
    )
  block = (model.cell.block_length or 1) * model.sequences
  if segment % block:
    of_pairs = ', half of them of each sequence of a pair,'
    raise ValueError(
      f'{setting} is {segment}; this model reads whole blocks of {block} tokens'
      f'{of_pairs if model.sequences > 1 else ""}, so give a multiple.'
    )
  if not model.cell.needs_whole_document:
    return
  longest = side_lengths(documents.middles, documents.lengths).max(initial=0)
  needed = -(-longest * model.sequences // block) * block
  if segment < needed:
    raise ValueError(
      f'{type(model.cell).__name__} reads a document at once, and the longest '
      f'of these needs a segment of {needed} places; {setting} is {segment}, '
      'so set it to as many or more.'
    )


def check_can_generate(model: Model) -> None:
  """Raises ValueError where a model cannot write text."""
  if model.head is not None:
    raise ValueError(
      f'The model has a {type(model.head).__name__} for labels, and writes no '
      'text; set SAMPLE = 0, and evaluate it with --split.'
    )
  if model.cell.needs_whole_document:
    raise ValueError(
      f'{type(model.cell).__name__} reads a document at once, and cannot write '
      'on from text; set SAMPLE = 0, or BLOCK to a number of tokens.'
    )


def _check_labels(head, documents):
  name = type(head).__name__
  if documents.labels is None:
    raise ValueError(
      f'The model has a {name} for labels, and these documents have none; take '
      'a task with labels, or leave out model.Model.head.'
    )
  pairs = documents.middles is not None
  if pairs != (head.sequences == 2):
    judges, are = ('single sequences', 'pairs') if pairs else ('pairs', 'none')
    raise ValueError(
      f'A {name} judges {judges}, and these documents are {are}; set '
      f'model.Model.head = @heads.{"Matcher" if pairs else "Classifier"}().'
    )
  highest = documents.labels.max(initial=0)
  if highest > head.classes:
    raise ValueError(
      f'The labels of these documents go up to {highest}, and the {name} has '
      f'{head.classes} classes; set CLASSES to all there are.'
    )
  if head.pool is None or not head.pool.at_end:
    return
  ends = documents.starts[1:][documents.lengths > 0] - 1
  if np.delete(documents.labels, ends).any():
    raise ValueError(
      f'{type(head.pool).__name__} are pooled behind a segment, and some of '
      'these documents have labels before their last token; set POOL to '
      'another of pooling.py.'
    )
