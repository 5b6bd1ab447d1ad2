"""Words to ids and back."""

import numpy as np
import pytest

from meliad_rec.data.vocabulary import Words

WORDS = Words(['if', 'x', '=', '10', 'é'])


def test_ids_begin_at_one_in_the_order_given():
  ids = WORDS.encode(' x = 10\n= é ')
  assert ids.tolist() == [2, 3, 4, 3, 5]
  assert ids.dtype == np.int32
  assert WORDS.size == 6
  assert WORDS.encode('').tolist() == []


@pytest.mark.parametrize('text', ['x = 10 é if', 'if', ''])
def test_what_is_encoded_is_decoded(text):
  ids = WORDS.encode(text)
  assert WORDS.decode(ids) == text
  spelled = WORDS.token_bytes(ids)
  assert len(spelled) == len(ids)
  assert b''.join(spelled) == text.encode()


def test_padding_stands_for_no_text():
  assert WORDS.decode(np.array([0, 1, 0, 2])) == 'if x'
  assert WORDS.token_bytes(np.array([0, 0])) == [b'', b'']


def test_the_identity_is_the_vocabulary():
  again = Words.named(WORDS.identity)
  assert again.words == WORDS.words
  assert again.identity == WORDS.identity
  assert Words(['x', 'if', '=', '10', 'é']).identity != WORDS.identity


@pytest.mark.parametrize(
  ('make', 'told'),
  [
    (lambda: Words(['a', 'b c']), 'are not words between spaces'),
    (lambda: Words(['a', '']), 'are not words between spaces'),
    (lambda: Words(['a', 'b', 'a']), 'occurs twice'),
    (lambda: Words.named('bytes'), "'bytes' is not one of words"),
    (lambda: WORDS.encode('x = 7'), "holds '7', and .* only if x = 10 é;"),
  ],
)
def test_mistakes(make, told):
  with pytest.raises(ValueError, match=told):
    make()
