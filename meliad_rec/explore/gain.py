"""Gain by the recurrent state at each token of a text.

Hutchins et al. 2022, section 4.6, look at the tokens that gain most, and ask
whether what they repeat is within the window of attention.
"""

import dataclasses

import numpy as np

from meliad_rec.evaluation import gain_plot
from meliad_rec.evaluation.compare import word_starts
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.explore.shown import smooth
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.trained_run import TrainedRun

_BEFORE = 90  # Bytes of text before a word.


def gain(
  run: TrainedRun,
  text: str,
  baseline: TrainedRun | None = None,
  top: int = 4,
) -> Shown:
  """Shows at which tokens the recurrent state helps.

  Args:
    run: a recurrent run.
    text: a document.
    baseline: another run with the same vocabulary, to compare with. None
      compares with the same run, whose state is cleared before every block.
    top: number of words that gain most to list.

  Returns:
    'nats' and 'baseline_nats' [token], the losses of the run and of the
    baseline, and 'gain', baseline_nats - nats in bits: positive where the run
    predicts better. `data.attrs['top']` lists
    the words that gain most: the 'word', the text 'before' it, its first
    'byte', its 'gain' in bits, 'back', the number of tokens back to its
    previous use (0 if there is none), and 'in_window', whether that use is
    within the window of attention.

  Raises:
    ValueError: the vocabularies differ, or the run cannot read the text.
  """
  if baseline is None:
    other = run.predictions(text, 1, clear_every=run.block)
  else:
    check_vocabularies({'run': run, 'baseline': baseline})
    other = baseline.predictions(text, 1)
  data = run.predictions(text, 1)[['nats']]
  data['baseline_nats'] = other['nats']
  data['gain'] = (data['baseline_nats'] - data['nats']) / np.log(2)
  data['gain'].attrs['units'] = 'bits'
  losses = TokenLosses.of(run.documents([text], ['text']), run.vocabulary)
  a = dataclasses.replace(losses, nats=data['baseline_nats'].values)
  b = dataclasses.replace(losses, nats=data['nats'].values)
  data.attrs['top'] = _top_words(a, b, run.window, top)
  figure = new_figure(13, 6.5)
  grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.6])
  against = 'state cleared' if baseline is None else baseline.name
  names = against, run.name
  _draw_losses(figure.add_subplot(grid[0, 0]), a, b, names)
  gain_plot.draw_distances(figure.add_subplot(grid[1, 0]), a, b)
  page = figure.add_subplot(grid[:, 1])
  gain_plot.draw_page(figure, page, a, b)
  page.set_title('the part that gains most')
  total = [x.nats.mean() / np.log(2) for x in (a, b)]
  title = f'{run.name} ({size_and_cost(run)}): {total[1]:.3f} bits/token'
  if baseline is not None:
    against += f' ({size_and_cost(baseline)})'
  figure.suptitle(f'{title}, {against}: {total[0]:.3f}')
  return Shown(data, figure)


def _draw_losses(axes, a, b, names):
  colors = COLORS[1], COLORS[0]
  for losses, name, color in zip((a, b), names, colors, strict=True):
    means, middles = smooth(losses.nats / np.log(2), 40)
    axes.plot(middles, means, color=color, label=name)
  axes.set_xlabel('token of the text')
  axes.set_ylabel('loss (bits per token)')
  axes.legend()
  axes.grid(alpha=0.3)


def _top_words(a, b, window: int | None, top: int) -> list[dict]:
  """Returns facts about the words at which B gains most over A."""
  firsts = word_starts(b)
  gained = np.add.reduceat((a.nats - b.nats).astype(np.float64), firsts)
  names = Names.of(b)
  found = []
  for i in np.argsort(-gained, kind='stable')[:top]:
    first = firsts[i]
    end = firsts[i + 1] if i + 1 < len(firsts) else len(b.tokens)
    low, high = b.bytes_[first], b.bytes_[end]
    show = lambda i, k: b.text[i:k].tobytes().decode(errors='replace')
    inside = (names.first >= first) & (names.first < end)
    back = int(names.distance[inside].max(initial=0))
    found.append(
      {
        'word': show(low, high),
        'before': show(max(low - _BEFORE, 0), low),
        'byte': int(low),
        'gain': float(gained[i] / np.log(2)),
        'back': back,
        'in_window': bool(window and 0 < back <= window),
      }
    )
  return found
