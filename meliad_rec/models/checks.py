"""Checks that a model fits its documents, or that it can generate text."""

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.models.model import Model


def check_data_compatible(
  model: Model, documents: Documents, segment: int, setting: str
) -> None:
  """Raises ValueError if a model cannot read these documents.

  Args:
    model: the model.
    documents: all documents that the model will read.
    segment: number of tokens of each row that the model reads at once.
    setting: name of the setting that gives `segment`, such as SEGMENT.
  """
  if documents.have_sources != (model.encoder is not None):
    remedy = 'Choose a task of pairs, or remove model.Model.encoder.'
    if documents.have_sources:
      remedy = 'Add --gin_file=options/encoder/transformer.'
    raise ValueError(
      f'These documents {"have" if documents.have_sources else "have no"} '
      f'sources, but the model has {"an" if model.encoder else "no"} encoder '
      f'to read them. {remedy}'
    )
  if model.head is not None:
    _check_labels(model.head, documents)
  elif documents.first_lengths is not None and not documents.have_sources:
    raise ValueError(
      'These documents are pairs of sequences, but the model has no head for '
      'pairs. Set model.Model.head = @heads.Matcher().'
    )
  block = (model.cell.block_length or 1) * model.sequences
  if segment % block:
    unit = 'one block'
    if model.sequences > 1:
      unit = 'one block for each sequence of a pair'
    raise ValueError(
      f'{setting} must be a multiple of {block} tokens ({unit}), got {segment}.'
    )
  needed = least_segment(model, documents)
  if segment < needed:
    raise ValueError(
      f'{type(model.cell).__name__} reads a whole document at once, so '
      f'{setting} must be at least {needed} tokens, enough for the longest '
      f'document, got {segment}.'
    )


def least_segment(model: Model, documents: Documents) -> int:
  """Returns the least number of tokens of a segment that a model can read.

  It is 1 block, or the longest document if the model reads whole documents.
  """
  block = (model.cell.block_length or 1) * model.sequences
  if not model.cell.needs_whole_document:
    return block
  longest = documents.sequence_lengths.max(initial=0)
  return -(-longest * model.sequences // block) * block


def check_can_generate(model: Model) -> None:
  """Raises ValueError if a model cannot generate text."""
  if model.encoder is not None:
    raise ValueError(
      'The model has an encoder, and writes only the targets of sources. Set '
      'SAMPLE = 0 for training, or use meliad-rec translate.'
    )
  if model.head is not None:
    raise ValueError(
      f'The model has a {type(model.head).__name__}, which predicts labels, '
      'and cannot generate text. Set SAMPLE = 0 for training, or measure its '
      'accuracy with meliad-rec evaluate.'
    )
  if model.cell.needs_whole_document:
    raise ValueError(
      f'{type(model.cell).__name__} reads a whole document at once and cannot '
      'generate text. Set SAMPLE = 0. Or train a model that reads blocks: set '
      'BLOCK to a number of tokens, and use neither options/chunks/balanced '
      'nor options/chunks/count_5.'
    )


def _check_labels(head, documents):
  name = type(head).__name__
  if documents.labels is None:
    raise ValueError(
      f'The model has a {name}, which predicts labels, but these documents '
      'have no labels. Choose a task with labels, or remove model.Model.head.'
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
      f'{type(head.pool).__name__} pools only at the end of a segment, but '
      'some of these documents have labels before their last token. Set POOL, '
      'for example with --gin_file=options/pool/mean.'
    )
