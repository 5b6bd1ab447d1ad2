"""Checks of a model against its data."""

import numpy as np
import pytest

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.models import pooling
from meliad_rec.models.cell import Cell
from meliad_rec.models.checks import check_can_generate
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import Model


class Blocks(Cell):
  """Cell that reads whole blocks."""

  block: int | None = 4

  @property
  def block_length(self):
    return self.block


class Whole(Blocks):
  """Cell that reads whole documents."""

  @property
  def needs_whole_document(self):
    return True


def model(head=None, cell=None):
  return Model(9, cell or Blocks(), 6, head=head)


def documents(labels=(0, 0, 3), middle=None, count=2):
  """Returns documents; labels None: without labels."""
  made = []
  for name in 'ab':
    ids = np.arange(1, 3 * count + 1)
    given = None
    if labels is not None:
      given = np.zeros(len(ids), int)
      given[-len(labels) :] = labels
    made.append(Document(name, ids, 1, 1, given, middle))
  return Documents.collect(made, Bytes())


TEXT, LABELS, PAIRS = documents(None), documents(), documents(middle=1)
EVERY = documents((1, 2, 3))


@pytest.mark.parametrize(
  ('head', 'data', 'setting'),
  [
    (None, EVERY, None),
    (Classifier(3), LABELS, None),
    (Classifier(4, pooling.Slots()), LABELS, None),
    (Classifier(3, None), EVERY, None),
    (Matcher(3), PAIRS, None),
    (None, PAIRS, 'head = @heads.Matcher'),
    (Classifier(3), TEXT, 'remove model.Model.head'),
    (Matcher(3), LABELS, 'head = @heads.Classifier'),
    (Classifier(3), PAIRS, 'head = @heads.Matcher'),
    (Classifier(2), LABELS, 'CLASSES'),
    (Classifier(2, None), EVERY, 'CLASSES'),
    (Classifier(3, pooling.Slots()), EVERY, 'POOL'),
  ],
)
def test_labels_fit_the_head_or_the_setting_is_named(head, data, setting):
  check = lambda: check_data_compatible(model(head), data, 8, 'SEGMENT')
  if setting is None:
    check()
  else:
    with pytest.raises(ValueError, match=setting):
      check()


def test_an_empty_document_hides_no_label_from_slots():
  empty = Document('', np.zeros(0, int), 0, 0, np.zeros(0, int))
  ids, last = np.array([4, 5]), np.array([0, 1])
  b = Document('b', ids, 2, 1, last)

  def check(labels):
    a = Document('a', ids, 2, 1, labels)
    data = Documents.collect([empty, a, empty, b], Bytes())
    head = Classifier(3, pooling.Slots())
    check_data_compatible(model(head), data, 8, 'SEGMENT')

  check(last)
  with pytest.raises(ValueError, match='POOL'):
    check(last[::-1])


@pytest.mark.parametrize(
  ('head', 'data', 'segment', 'block'),
  [(None, TEXT, 6, 4), (Matcher(3), PAIRS, 12, 8)],
)
def test_a_segment_is_whole_blocks(head, data, segment, block):
  with pytest.raises(ValueError, match=f'--segment .* {block}.* {segment}'):
    check_data_compatible(model(head), data, segment, '--segment')


@pytest.mark.parametrize(
  ('head', 'data', 'block', 'needed'),
  [
    # 6 tokens, and of pairs 1 and 5.
    (None, TEXT, None, 6),
    (None, TEXT, 4, 8),
    (Matcher(3), PAIRS, None, 10),
    (Matcher(3), PAIRS, 2, 12),
  ],
)
def test_a_segment_holds_the_longest_document(head, data, block, needed):
  one = model(head, Whole(block=block))
  check_data_compatible(one, data, needed, 'SEGMENT')
  less = needed - (block or 1) * one.sequences
  with pytest.raises(ValueError, match=f'FIRST_SEGMENT .* {needed}.* {less}'):
    check_data_compatible(one, data, less, 'FIRST_SEGMENT')
  # What reads block by block needs no such thing.
  check_data_compatible(
    model(head, Blocks(block=block)), data, less, 'FIRST_SEGMENT'
  )


@pytest.mark.parametrize(
  ('one', 'name'),
  [(model(Classifier(3)), 'Classifier'), (model(cell=Whole()), 'Whole')],
)
def test_models_that_cannot_generate(one, name):
  check_can_generate(model())
  with pytest.raises(ValueError, match=f'{name}.* SAMPLE'):
    check_can_generate(one)
