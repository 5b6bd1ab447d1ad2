"""How many bits the recurrent state saves for each word of a text."""

import numpy as np
import pytest

from meliad_rec import explore
from meliad_rec.explore import page
from tests import observed
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close
from tests.explored import TEXT
from tests.explored import W


def test_gain(tmp_path):
  run = block_recurrent()
  shown = explore.gain(run, TEXT, top=3)
  check(shown, tmp_path)
  nats, _ = run.nats(TEXT)
  cleared = run.predictions(TEXT, clear_every=W)['nats'].values
  close(shown.data['gain'], (cleared - nats) / np.log(2))
  top = shown.data.attrs['top']
  assert len(top) == 3
  assert top[0]['gain'] >= top[1]['gain']
  for word in top:
    at = word['byte']
    assert TEXT[at : at + len(word['word'])] == word['word'].strip()
    close(word['gain'], shown.data['gain'][at : at + len(word['word'])].sum())
    name = TEXT.index(word['name'], at)
    before = TEXT.rfind(word['name'], 0, name)
    assert word['back'] == (0 if before < 0 else name - before)
    assert word['in_window'] == (0 < word['back'] <= W)
  listed = shown.data['listed'].values
  for rank, word in enumerate(top, 1):
    first = TEXT.index(word['word'], word['byte'])
    assert (listed[first : first + len(word['word'])] == rank).all()
  units = {name: a.attrs.get('units') for name, a in shown.data.items()}
  assert units == {
    'nats': 'nats',
    'baseline_nats': 'nats',
    'gain': 'bits',
    'listed': None,
    'back': None,
  }
  back = shown.data['back'].values
  for name in 'import', 'argparse', 'parser':
    first = TEXT.index(name)
    assert (back[first : first + len(name)] == 0).all()
  last = TEXT.rindex('argparse')
  before = last - TEXT.rindex('argparse', 0, last)
  assert (back[last : last + len('argparse')] == before).all()
  assert back[TEXT.index(' ')] == -1
  other = explore.gain(run, TEXT, baseline=observed.run('lstm'))
  close(other.data['baseline_nats'], observed.run('lstm').nats(TEXT)[0])
  rarely = explore.gain(run, TEXT, top=0, clear_every=2 * W)
  cleared = run.predictions(TEXT, clear_every=2 * W)['nats'].values
  close(rarely.data['baseline_nats'], cleared)
  assert rarely.data.attrs['top'] == []
  assert 'cleared every 16 tokens' in rarely.figure.get_suptitle()


def test_words_without_a_name_are_not_first_uses(tmp_path):
  text = 'cat = 1\n\n  cat + 22 $\\[$\n'
  shown = explore.gain(block_recurrent(), text, top=9)
  check(shown, tmp_path)
  backs = {w['byte']: (w['word'], w['back']) for w in shown.data.attrs['top']}
  assert backs == {
    0: ('cat', 0),
    4: ('=', -1),
    6: ('1', -1),
    11: ('cat', 11),
    15: ('+', -1),
    17: ('22', -1),
    20: ('$\\[$', -1),
  }


def test_without_a_window_nothing_is_said_about_one():
  run = observed.run('lstm')
  assert run.window is None
  windows = {}
  for name, one in ('lstm', run), ('window', block_recurrent()):
    top = explore.gain(one, 'cat = 1\n\n  cat + 22\n', top=9).data.attrs['top']
    windows[name] = {word['in_window'] for word in top}
    assert ('window' in page._top_words(top)) == (name == 'window')
  assert windows == {'lstm': {None}, 'window': {False}}


def test_gain_needs_something_to_compare_with():
  window, lstm = observed.run('window'), observed.run('lstm')
  with pytest.raises(ValueError, match='no recurrent state to clear'):
    explore.gain(window, TEXT)
  explore.gain(window, TEXT, baseline=lstm)
  with pytest.raises(ValueError, match='top must be'):
    explore.gain(lstm, TEXT, top=-1)
  with pytest.raises(ValueError, match='clear_every or baseline'):
    explore.gain(lstm, TEXT, window, clear_every=W)


def test_gain_needs_a_model_of_text():
  with pytest.raises(ValueError, match='cannot generate or score text'):
    explore.gain(block_recurrent(labels=True), TEXT)
