"""States of one text put into another, and questions to a state."""

import copy

import numpy as np
import pytest

from meliad_rec import explore
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Words
from meliad_rec.explore.swap import with_answers
from tests import observed
from tests.data.vocabulary_test import EXACT
from tests.data.vocabulary_test import SENTENCES
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close
from tests.explored import OTHER
from tests.explored import TEXT
from tests.explored import W
from tests.pieces import train


@pytest.mark.slow
def test_swap_changes_nothing_between_equal_beginnings(tmp_path):
  run, at = block_recurrent(), 4 * W
  shown = explore.swap(run, TEXT[:at], TEXT, after_b=at)
  check(shown, tmp_path)
  nats, _ = run.nats(TEXT)
  close(shown.data['own'], nats[at:])
  close(shown.data['swapped'], nats[at:])
  assert np.abs(shown.data['cleared'] - nats[at:]).max() > 1e-3
  ids = run.encode
  other = explore.swap(run, ids(OTHER), ids(TEXT), after_b=at).data
  check(explore.swap(run, OTHER, '$^$' * W), tmp_path)
  with pytest.raises(ValueError, match='tokens must be'):
    explore.swap(run, OTHER, TEXT, tokens=0)
  assert np.abs(other['swapped'] - nats[at:]).max() > 1e-3


@pytest.mark.parametrize('place', ['after_a', 'after_b'])
@pytest.mark.parametrize('value', [8.0, -8, 0])
def test_places_are_counts_of_tokens(place, value):
  with pytest.raises(ValueError, match=f'{place} must be a whole number.*1'):
    explore.swap(block_recurrent(), TEXT, TEXT, **{place: value})


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda r: explore.swap(r, 'cat', TEXT), '0 of the 3 tokens of text a'),
    (lambda r: explore.swap(r, TEXT, 'cat'), '0 of the 3 tokens of text b'),
    (
      lambda r: explore.swap(r, TEXT, TEXT[:64], after_b=64),
      f'64 of the 64 tokens of text b .* from {W}, a block, to 63',
    ),
    (lambda r: explore.swap(r, None, TEXT), 'must be a string'),
    (lambda r: explore.ask(r, None, 'What?', ['cat']), 'must be a string'),
    (lambda r: explore.ask(r, 'cat', 'What?', ['cat']), 'Of the 3 tokens'),
    (lambda r: explore.ask(r, TEXT, 'What?', []), 'There is no answer'),
    (lambda r: explore.ask(r, TEXT, 'What?', 5), 'answers must be a list'),
  ],
)
def test_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(block_recurrent())


@pytest.mark.slow
def test_runs_are_compared_at_the_same_places():
  runs = {'recurrent': block_recurrent(), 'lstm': observed.run('lstm')}
  assert [run.block for run in runs.values()] == [W, 2]
  text = TEXT[:60]  # Half of it is no multiple of W.
  shown = explore.compare(explore.swap, runs, text, text)
  places = {'after_a': 7 * W, 'after_b': 3 * W}
  assert shown.data.attrs == dict.fromkeys(runs, places)
  alone = explore.swap(runs['lstm'], text, text, 7 * W, 3 * W)
  found = shown.data.sel(run='lstm')
  np.testing.assert_array_equal(found['swapped'], alone.data['swapped'])
  asked = explore.compare(explore.ask, runs, text, 'What?', ['cat'], 6 * W + 2)
  nats, _ = runs['lstm'].nats(text[: 6 * W] + 'What?cat')
  close(asked.data['with_state'].sel(run='lstm'), nats[-3:].sum())
  with pytest.raises(ValueError, match=f'a multiple of {W} tokens'):
    explore.swap(runs['recurrent'], text, text, multiple_of=W + 1)


def test_ask(tmp_path):
  run, at = block_recurrent(), 5 * W
  question, answers = 'What?', ['$\\[$', 'argparse']
  shown = explore.ask(run, OTHER, question, answers, after=at + 3)
  check(shown, tmp_path)
  for answer, nats in zip(answers, shown.data['with_state'], strict=True):
    whole, _ = run.nats(OTHER[:at] + question + answer)
    close(nats, whole[at + len(question) :].sum())
  border = run.states(OTHER[:at], at).isel(border=0)
  cleared = run.with_state(border, OTHER[:at])
  nats = cleared.predictions(question + answers[0], 1)['nats'].values
  close(shown.data['cleared'][0], nats[len(question) :].sum())
  assert abs(shown.data['cleared'] - shown.data['with_state']).min() > 1e-4
  alone, _ = run.nats(question + answers[0])
  close(shown.data['fresh'][0], alone[len(question) :].sum())
  for wrong, message in ('cat', 'list of strings'), (['cat', ''], 'is empty'):
    with pytest.raises(ValueError, match=message):
      explore.ask(run, OTHER, question, wrong)


@pytest.mark.parametrize('question', [None, 'What\ud800?'])
def test_a_wrong_question_is_refused_before_anything_is_read(question):
  run = copy.copy(block_recurrent())
  run.states = None  # A call would be a TypeError.
  with pytest.raises(ValueError, match='The question (must be|has a lone)'):
    explore.ask(run, OTHER, question, ['cat'])


@pytest.mark.parametrize('prefix', [True, False])
def test_answers_are_spelled_as_in_a_text(tmp_path, prefix):
  """Joined to the end of the question, if the vocabulary does so."""
  path = tmp_path / 'any.model'
  path.write_bytes(train(SENTENCES, 300, **EXACT, add_dummy_prefix=prefix))
  vocabulary, question = SentencePiece(path), 'plain '
  texts, first = with_answers(vocabulary, question, ['words', 'café'])
  spelled = [vocabulary.decode(ids) for ids in texts]
  assert spelled == ['plain words', 'plain café']
  np.testing.assert_array_equal(texts[0], vocabulary.encode(spelled[0]))
  assert vocabulary.decode(texts[0][:first]) == 'plain'


def test_words_of_answers_are_words():
  texts, first = with_answers(Words('abc'), 'a b', ['c', 'a'])
  assert [ids.tolist() for ids in texts] == [[1, 2, 3], [1, 2, 1]]
  assert first == 2
