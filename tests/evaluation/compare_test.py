"""Comparison finds the gains where the test put them."""

import dataclasses
import json

from matplotlib.colors import to_hex
import numpy as np
import pytest

from meliad_rec.evaluation import gain_plot
from meliad_rec.evaluation.compare import compare
from meliad_rec.evaluation.compare import place_bins
from meliad_rec.evaluation.compare import word_starts
from meliad_rec.evaluation.token_losses import TokenLosses


def make(texts, seed=0) -> TokenLosses:
  data = [text.encode() for text in texts]
  text = np.frombuffer(b''.join(data), np.uint8)
  nats = np.random.default_rng(seed).uniform(1, 2, len(text))
  return TokenLosses(
    tokens=text.astype(np.int32) + 3,
    nats=nats.astype(np.float32),
    starts=np.cumsum([0, *map(len, data)]),
    bytes_=np.arange(len(text) + 1),
    text=text,
    names=[f'doc{i}' for i in range(len(texts))],
    about={'run': 'r', 'step': 1},
  )


def changed(losses, at, by):
  nats = losses.nats.copy()
  nats[at] += by
  return dataclasses.replace(losses, nats=nats)


TEXTS = ['once upon\na time', ' a name\x1b[2J was Ada']


def test_the_token_that_gained_most_is_shown_in_context():
  a = make(TEXTS)
  at = ''.join(TEXTS).index('Ada')
  b = changed(changed(a, at, -0.7), 2, 0.4)
  gained, lost = compare(a, b, 3, 'token').split('Where B')[1:]
  bits = (a.nats[at] / np.log(2), b.nats[at] / np.log(2))
  gain = f'{bits[0]:.2f} >  {bits[1]:.2f} first use  doc1:{at - 16}'
  assert gain in gained
  assert 'was [A]da' in gained
  assert gained.count('doc') == 2  # The heading, and one place.
  assert 'doc0:2  on[c]e upon\u23cea time' in lost
  assert ' < ' in lost and ' > ' not in lost


def test_the_distance_to_the_previous_use_is_shown():
  text = 'Grace saw Ada (Grace)'
  a = make([text])
  b = changed(changed(a, slice(14, 21), -0.2), 11, -0.3)
  gained = compare(a, b, 1, 'word').split('Where B')[1]
  assert f'{text.rindex("Grace")}  doc0:13  Grace saw Ada[ (Grace)]' in gained
  gained = compare(a, b, 9, 'token').split('Where B')[1]
  assert ' first use  doc0:11  ' in gained
  assert ' -  doc0:20  ' in gained


def test_as_many_places_of_each_document_are_shown():
  a = make(['Ada Ada Ada', 'Bob', 'Eve Eve'])
  b = changed(a, [0, 4, 8, 14, 18], np.float32([-3, -2, -4, -0.2, -0.4]))
  gained = compare(a, b, 2, 'word', by_document=True).split('Where B')[1]
  places = [each for each in gained.split() if each.startswith('doc')]
  assert places[1:] == ['doc0:7', 'doc0:0', 'doc2:3', 'doc2:0']


def test_texts_and_names_cannot_control_the_terminal():
  a = dataclasses.replace(
    make(TEXTS),
    names=['doc\x1b]0;x\x07', 'doc\x9b2J'],
    about={'run': '\x1b[2J', 'step': 1},
  )
  report = compare(a, changed(a, slice(None), -0.7), 30, 'token')
  assert 'name\u00b7[2J was' in report
  assert 'A \ufffd[2J:1' in report
  assert 'doc\ufffd2J:' in report
  assert not set(report) & {'\x1b', '\x07', '\x9b'}


def test_words_are_summed():
  a = make(TEXTS)
  assert [
    ''.join(TEXTS)[i:j]
    for i, j in zip(word_starts(a), [*word_starts(a)[1:], None], strict=True)
  ] == ['once', ' upon', '\na', ' time', ' a', ' name\x1b[2J', ' was', ' Ada']
  b = changed(a, slice(4, 9), -0.2)
  gained = compare(a, b, 1, 'word').split('Where B')[1]
  total = a.nats[4:9].sum() / np.log(2)
  assert f'{total:.2f} >' in gained
  assert 'doc0:4  once[ upon]\u23cea time' in gained


def test_the_spread_of_gains_is_shown():
  """0, 1, ..., 100 hundredths of a bit, in some order."""
  a, at = make(['x' * 101]), np.random.default_rng(0).permutation(101)
  lines = compare(
    a, changed(a, at, -np.arange(101) / 100 * np.log(2)), 1, 'token'
  )
  (gains,) = (each for each in lines.splitlines() if 'gains at most' in each)
  found = [float(each) for each in gains.split()[4:-1]]
  assert found == [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]


def test_gain_by_place():
  a = make(['x' * 200, 'y' * 70])
  places = [(low, high, len(i)) for low, high, i in place_bins(a)]
  assert places == [(0, 64, 128), (64, 128, 70), (128, 256, 72)]
  b = changed(a, slice(128, 200), -np.log(2))
  lines = compare(a, b, 1, 'token').splitlines()
  gains = {line.split()[0]: line.split()[-1] for line in lines if '-' in line}
  assert gains['0-63'] == gains['64-127'] == '0.0000'
  assert gains['128-255'] == '1.0000'


def test_mistakes():
  a = make(TEXTS)
  with pytest.raises(ValueError, match='different tokens'):
    compare(a, make(['other']), 1, 'token')
  with pytest.raises(ValueError, match="unit .*'line'"):
    compare(a, a, 1, 'line')


def test_the_page_that_gains_most_is_drawn(tmp_path, drawn):
  texts = ['x\n' * 3000, '\u00e9' * 3000 + 'name = 1\n' + 'y\n' * 2000]
  a = make(texts)
  at = texts[1].index('name') + 3000 + 6000
  b = changed(a, slice(at, at + 4), -3.0)
  gain = (a.nats - b.nats).astype(float)
  name, rows = gain_plot._best_page(a, gain)
  assert name == f'doc1:{2 * 2 * 24 * 60}'
  shown = {c: g for row in rows for c, g in row}
  assert shown['n'] == pytest.approx(3) and shown['y'] == 0
  assert len(rows) <= gain_plot._ROWS
  assert max(map(len, rows)) <= gain_plot._COLUMNS
  gain_plot.plot_gain(a, b, tmp_path / 'gain.png')
  assert (tmp_path / 'gain.png').read_bytes().startswith(b'\x89PNG')
  (figure,) = drawn
  _, bars, page, _ = figure.axes
  # Bars of the name's four bytes; they point up where B is better.
  bits = 4 * 3 / np.log(2)
  assert [bar.get_height() for bar in bars.patches] == pytest.approx([bits])
  assert [to_hex(bar.get_facecolor()) for bar in bars.patches] == ['#0072b2']
  # Letters have 10 pixels at half of the picture's size, and do not overlap.
  (size,) = {text.get_fontsize() for text in page.texts}
  assert size * 120 / 72 / 2 > 10
  figure.draw_without_rendering()
  letter, panel = page.texts[0].get_window_extent(), page.get_window_extent()
  assert letter.width <= panel.width / np.ptp(page.get_xlim())
  assert letter.height <= panel.height / np.ptp(page.get_ylim())
  assert np.nanmax(page.images[0].get_array()) == pytest.approx(bits / 4)


@pytest.mark.parametrize('size', [1, 4])  # Bytes of a token.
def test_the_page_shows_what_it_gains(size):
  """Its lines are short, and its tokens may be long."""
  a = make(['x\n' * 200, 'y\n' * 400 + 'name' * 2, 'z\n' * 10, ''])
  starts = a.starts // size
  a = dataclasses.replace(a, starts=starts, bytes_=a.bytes_[::size])
  gain = np.zeros(starts[-1])
  gain[starts[2] - 1] = 3
  name, rows = gain_plot._best_page(a, gain)
  assert name == f'doc1:{2 * 24 * (401 // 24)}'
  assert rows[-1] == [
    (c, 3 * (i >= 8 - size)) for i, c in enumerate(2 * 'name')
  ]
  # If B gains nowhere, it loses least on the shortest page.
  name, _ = gain_plot._best_page(a, np.full(starts[-1], -1.0))
  assert name == 'doc0:384'


def test_curves_of_folders_with_one_name_are_both_drawn(tmp_path, drawn):
  """A run without the metric is left out."""
  losses, bits = [], 'bits_per_byte'
  for folder, metric in ('x', bits), ('y', bits), ('z', 'accuracy'):
    run = tmp_path / folder / 'seed0'
    run.mkdir(parents=True)
    records = [{'step': i, 'split': 'train', metric: 2.0 - i} for i in (0, 1)]
    lines = [json.dumps(record) + '\n' for record in records]
    (run / 'metrics.jsonl').write_text(''.join(lines))
    losses.append(dataclasses.replace(make(TEXTS), about={'run': str(run)}))
  a, b, without = losses
  for other, names in (
    (b, ['A seed0, train', 'B seed0, train']),
    (
      without,
      ['A seed0, train'],
    ),
  ):
    gain_plot.plot_gain(a, other, tmp_path / 'gain.png')
    curves, labels = drawn[-1].axes[0].get_legend_handles_labels()
    assert labels == names
    # Each run has the color of gains where it is the better one.
    found = [curve.get_color() for curve in curves]
    assert found == ['#D55E00', '#0072B2'][: len(names)]
