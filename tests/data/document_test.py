"""A document: its ids are those of a vocabulary, and its words are counted."""

import numpy as np
import pytest

from meliad_rec.data.documents import check_ids
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import Bytes


def test_ids_that_need_it_take_four_bytes():
  assert token_dtype(2**16) == np.uint16
  assert token_dtype(2**16 + 1) == np.uint32


def test_words_are_what_is_between_whitespace():
  assert count_words(' two\r\n wörds\t') == 2 and count_words(' ') == 0


@pytest.mark.parametrize('wrong', [0, -1, 300, 70_000])
def test_ids_of_no_token_are_refused(wrong):
  document = lambda *ids: Document('a', np.array(ids, np.int64), 1, 1)
  check_ids(document(), Bytes())
  check_ids(document(1, Bytes().size - 1), Bytes())
  with pytest.raises(ValueError, match="'a' holds an id outside 1 to 25"):
    check_ids(document(1, wrong, 2), Bytes())
