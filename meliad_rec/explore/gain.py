"""Gain by the recurrent state at each token of a text.

Hutchins et al. 2022, section 4.6, look at the tokens that gain most, and ask
whether what they repeat is within the window of attention.
"""

import dataclasses

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.evaluation import gain_plot
from meliad_rec.evaluation.compare import word_starts
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.explore.shown import smooth
from meliad_rec.explore.shown import with_units
from meliad_rec.report.console import dots
from meliad_rec.report.plot import in_legend
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.trained_run import TrainedRun

_BEFORE = 90  # Bytes of text before a word.
_LISTED = 8  # Words listed in the figure.
_SPACE = b' \t\n\r\f\v'


def gain(
  run: TrainedRun,
  text: str,
  baseline: TrainedRun | None = None,
  top: int = 4,
  *,
  clear_every: int | None = None,
) -> Shown:
  """Shows at which tokens the recurrent state helps.

  Args:
    run: a recurrent run, or any run if there is a baseline.
    text: a document.
    baseline: another run with the same vocabulary, to compare with. None
      compares with the same run, whose state is cleared again and again.
    top: number of words that gain most to list.
    clear_every: number of tokens after which the state is cleared if there is
      no baseline, a multiple of `run.block`. None: one block, the length of
      which depends on the model.

  Returns:
    'nats' and 'baseline_nats' [token], the losses of the run and of the
    baseline, and 'gain', baseline_nats - nats in bits: positive where the run
    predicts better. `data.attrs['top']` lists the words that gain most, not
    counting the whitespace before them: the 'word', the text 'before' it, its
    first 'byte' and 'token', its number of 'tokens', its 'gain' in bits, and
    the 'name' in it that gains most, '' if it holds none; see name_distance.
    'back' is the number of tokens back to the previous use of this name, 0 at
    its first use and -1 without a name. 'in_window' is whether that use is
    within the window of attention, None if the run has none. 'listed' [token]
    is the rank of the word in this list that a token is of, from 1, or 0; and
    'back' [token] the same as in the list for the name that a token is of, if
    any, not only for names in the list.

  Raises:
    ValueError: the vocabularies differ, the run cannot read the text or
      predicts labels, or it is not recurrent and there is no baseline.
  """
  check_count('top', top, 0)
  check_run(run)
  documents = run.documents([text], ['text'])
  if baseline is None:
    if not run.sharded.model.cell.is_recurrent:
      raise ValueError(
        'The model has no recurrent state to clear, so there is nothing to '
        'compare with. Choose a recurrent run, or give a baseline.'
      )
    every = run.block if clear_every is None else clear_every
    other = run.predictions(text, 1, clear_every=every)
    against = f'state cleared every {every:,} tokens'
  else:
    if clear_every is not None:
      raise ValueError(
        'With a baseline, no state is cleared. Give clear_every or baseline.'
      )
    check_vocabularies({'run': run, 'baseline': baseline})
    other = baseline.predictions(text, 1)
    against = baseline.name
  data = run.predictions(text, 1)[['nats']]
  data['baseline_nats'] = other['nats']
  data['gain'] = (data['baseline_nats'] - data['nats']) / np.log(2)
  with_units(data, gain='bits')
  losses = TokenLosses.of(documents, run.vocabulary)
  a = dataclasses.replace(losses, nats=data['baseline_nats'].values)
  b = dataclasses.replace(losses, nats=data['nats'].values)
  data.attrs['top'] = _top_words(a, b, run.window, top)
  ranks = np.zeros(data.sizes['token'], int)
  for rank, word in enumerate(data.attrs['top'], 1):
    ranks[word['token'] :][: word['tokens']] = rank
  data['listed'] = 'token', ranks
  names, back = Names.of(b), np.full(data.sizes['token'], -1)
  spans = zip(names.first, names.end, names.distance, strict=True)
  for first, end, distance in spans:
    back[first:end] = distance
  data['back'] = 'token', back
  listed = data.attrs['top'][:_LISTED]
  lines = 0.22 * len(listed) + 0.3
  figure = new_figure(13, 6.5 + lines)
  grid = figure.add_gridspec(
    3, 2, width_ratios=[1, 1.6], height_ratios=[3.25, 3.25, lines]
  )
  _draw_losses(figure.add_subplot(grid[0, 0]), a, b, (against, run.name))
  gain_plot.draw_distances(figure.add_subplot(grid[1, 0]), a, b)
  page = figure.add_subplot(grid[:2, 1])
  gain_plot.draw_page(figure, page, a, b)
  page.set_title('the part that gains most')
  _draw_words(figure.add_subplot(grid[2, :]), listed)
  total = [x.nats.mean() / np.log(2) for x in (a, b)]
  title = f'{run.name} ({size_and_cost(run)}): {total[1]:.3f} bits/token'
  if baseline is not None:
    against += f' ({size_and_cost(baseline)})'
  figure.suptitle(plain(f'{title}, {against}: {total[0]:.3f}'))
  return Shown(data, figure)


def _draw_losses(axes, a, b, names):
  colors = COLORS[1], COLORS[0]
  for losses, name, color in zip((a, b), names, colors, strict=True):
    means, middles = smooth(losses.nats / np.log(2), 40)
    axes.plot(middles, means, color=color, label=in_legend(name))
  label_curves(axes, 'token of the text', 'loss (bits per token)')


def _draw_words(axes, words: list[dict]) -> None:
  """Writes a line about each word."""
  axes.set_axis_off()
  axes.set_ylim(len(words) + 0.5, -0.5)
  style = {'family': 'monospace', 'size': 9, 'va': 'center'}
  for row, word in enumerate(words):
    facts = f'{word["gain"]:+6.1f} bits, {previous_use(word)}'
    shown = dots(f'{word["before"][-50:]:>50}[{word["word"]}]')
    axes.text(0, row, plain(f'{facts:52}{shown[:90]}'), **style)


def previous_use(word: dict) -> str:
  """Returns in words how far back the name in a word was used before."""
  if word['back'] < 1:
    return 'no name' if word['back'] < 0 else 'first use'
  where = {None: '', True: ', within the window', False: ', beyond the window'}
  return f'{word["back"]:,} tokens back{where[word["in_window"]]}'


def _top_words(a, b, window: int | None, top: int) -> list[dict]:
  """Returns facts about the words at which B gains most over A."""
  text, starts = b.text.tobytes(), np.append(word_starts(b), len(b.tokens))
  bounds, words = b.bytes_[starts].tolist(), []
  for low, high, end in zip(bounds, bounds[1:], starts[1:], strict=False):
    low = high - len(text[low:high].lstrip(_SPACE))
    if low < high:  # There is more than whitespace.
      first = np.searchsorted(b.bytes_, low, 'right') - 1
      words.append((low, high, first, end))
  words_N4 = np.array(words, np.int64).reshape(-1, 4)
  bits = (a.nats - b.nats).astype(np.float64) / np.log(2)
  total = np.concatenate([[0], np.cumsum(bits)])
  gained_N = total[words_N4[:, 3]] - total[words_N4[:, 2]]
  names = Names.of(b)
  of_names = names.nats(a) - names.nats(b)
  found = []
  for i in np.argsort(-gained_N, kind='stable')[:top]:
    low, high, first, end = words_N4[i].tolist()
    inside = np.flatnonzero((names.first >= first) & (names.first < end))
    name, distance = '', -1
    if len(inside):
      best = inside[of_names[inside].argmax()]
      span = b.bytes_[names.first[best]], b.bytes_[names.end[best]]
      name, distance = _decoded(text, *span), int(names.distance[best])
    found.append(
      {
        'word': _decoded(text, low, high),
        'before': _decoded(text, max(low - _BEFORE, 0), low),
        'byte': low,
        'token': first,
        'tokens': end - first,
        'gain': float(gained_N[i]),
        'name': name.strip(),
        'back': distance,
        'in_window': window and 0 < distance <= window,
      }
    )
  return found


def _decoded(text: bytes, low: int, high: int) -> str:
  return text[low:high].decode(errors='replace')
