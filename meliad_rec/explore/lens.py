"""Predictions after each step in depth, or after each pass.

The outputs of every step go through the last norm and the head of the model, as
in the logit lens of nostalgebraist 2020.
"""

import contextlib

import numpy as np

from meliad_rec.archs.staircase import Staircase
from meliad_rec.config.values import check_count
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import letters_on
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import smooth
from meliad_rec.report.console import symbols
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun


def lens(
  run: TrainedRun,
  text: Text,
  tokens: int = 48,
  labels: np.ndarray | None = None,
  top: int | None = None,
) -> Shown:
  """Shows the predictions after each step of a UT or GUT, or Staircase pass.

  Args:
    run: run of such a model.
    text: a document.
    tokens: number of tokens to draw, from the end of the text.
    labels: ids of the labels of all tokens, if the model predicts labels.
    top: number of the most likely tokens to return at each place; None means 5,
      or all of a vocabulary that has fewer. The figure shows the first.

  Returns:
    What TrainedRun.lens returns, such as 'nats' [step, token] and 'top_text'
    [step, token, choice]; and, if the model halts and texts begin without a
    state from `with_state`, 'depth' [token], the number of steps it took, which
    a panel shows over the whole text. Steps or passes are counted from 1.

  Raises:
    ValueError: the model has no steps or passes, or cannot read the text, or
      `tokens` is below 1.
  """
  check_run(run)
  check_count('tokens', tokens, 1)
  data = run.lens(text, top, labels=labels)
  with contextlib.suppress(ValueError):  # It may have no depth.
    data['depth'] = run.depth(text)['steps']
  data = data.assign_coords(step=1 + np.arange(data.sizes['step']))
  is_staircase = isinstance(run.sharded.model.cell, Staircase)
  step = 'pass' if is_staircase else 'step'
  last = data.isel(token=slice(-tokens, None))
  T, L = last.sizes['token'], data.sizes['step']
  heights = [1, 1.5 + 0.3 * L, *[1] * ('depth' in data)]
  figure = new_figure(max(8, 0.28 * T), 2.2 + 0.5 * L + 1.6 * ('depth' in data))
  top, bottom, *rest = figure.subplots(len(heights), height_ratios=heights)
  means = data['nats'].mean('token') / np.log(2)
  top.plot(np.arange(1, L + 1), means, 'o-', color=COLORS[0])
  label_curves(top, step, 'bits per token')
  top.xaxis.get_major_locator().set_params(integer=True)
  extent = (-0.5, T - 0.5, L + 0.5, 0.5)
  bits = last['nats'] / np.log(2)
  image = heat_map(bottom, bits, 'loss (bits)', extent)
  colors = letters_on(image, bits.values)
  for row in range(L):
    for token in range(T):
      best = str(last['top_text'].values[row, token, 0])
      bottom.text(
        token,
        row + 1,
        plain(symbols(best)),
        ha='center',
        va='center',
        size=7,
        family='monospace',
        color=colors[row, token],
      )
  if 'depth' in last:
    depth = last['depth'].values
    bottom.step(
      np.arange(-0.5, T + 0.5),
      np.append(depth, depth[-1]) + 0.5,
      where='post',
      color=COLORS[1],
      lw=2,
      label='last step taken',
    )
    bottom.set_ylim(L + 0.65, 0.5)  # The line below the last step is seen.
    above = {'loc': 'lower right', 'bbox_to_anchor': (1, 1)}
    bottom.legend(fontsize='small', **above)
    depths, middles = smooth(data['depth'].values, 200)
    rest[0].plot(middles, depths, color=COLORS[1])
    label_curves(rest[0], 'token of the whole text', 'steps taken (mean)')
  texts = [plain(symbols(text)) for text in last['text'].values]
  bottom.set_xticks(range(T), texts, family='monospace', size=8)
  bottom.set_xlabel('token read' if run.labels else 'token to predict')
  bottom.set_ylabel(step)
  bottom.yaxis.get_major_locator().set_params(integer=True)
  what = 'label' if run.labels else 'token'
  name = plain(run.name)
  figure.suptitle(f'the most likely {what} after each {step}: {name}')
  return Shown(data, figure)
