"""Plots of the metrics that runs have written to metrics.jsonl."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.metrics import metrics
from meliad_rec.report import journal
from meliad_rec.storage import output_file

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PathLike = str | os.PathLike

_WIDTH = 7  # Inches.


def plot(workdir: PathLike, metric: str = 'loss_nats_per_token') -> str:
  """Draws a metric of a run into METRIC.png in the run's folder; see `compare`.

  Args:
    workdir: folder of the run, on a disk.
    metric: name of the metric.

  Returns:
    The path of the PNG.

  Raises:
    ValueError: the run has no metrics.jsonl, or no such metric in it.
  """
  workdir = pathlib.Path(workdir)
  out = workdir / f'{metric}.png'
  compare({workdir.resolve().name: workdir}, out, metric)
  return str(out)


def compare(
  runs: Mapping[str, PathLike],
  out: PathLike,
  *names: str,
  split: str | None = None,
) -> None:
  """Draws the curves of several runs, one panel for each metric.

  Each run has a color. Training is a thin line. Every other split is a thick
  line with a mark at each evaluation. The error of a trivial predictor, such as
  one that always predicts the most likely label, is a dashed or dotted line.

  Args:
    runs: {name in the legend: folder of the run}.
    out: path of the PNG, which is written whole or not at all.
    *names: names of the metrics.
    split: split to draw; None draws all.

  Raises:
    ValueError: a run has no metrics.jsonl, or lacks one of the metrics, also on
      the split.
  """
  figure = new_figure(_WIDTH, 4 * len(names))
  panels = figure.subplots(len(names), squeeze=False)[:, 0]
  for axes, name in zip(panels, names, strict=True):
    draw(axes, runs, name, split)
  save(figure, out)


def lines(
  panels: Mapping[str, Mapping[str, Sequence[tuple[float, Sequence[float]]]]],
  out: PathLike,
  metric: str,
) -> None:
  """Draws a metric over numbers, such as the size of the test sequences.

  Args:
    panels: {what the number is, in words: {name in the legend: [(number, values
      of all seeds)]}}. A curve is their mean, and a band reaches one standard
      deviation below and above it. A name that ends in '(published)' is dashed,
      in the color of the curve before.
    out: path of the PNG, which is written whole or not at all.
    metric: name of the metric.
  """
  figure = new_figure(_WIDTH, 4 * len(panels))
  every = figure.subplots(len(panels), squeeze=False)[:, 0]
  for axes, (number, curves) in zip(every, panels.items(), strict=True):
    _draw_lines(axes, curves)
    axes.set_xlabel(plain(number))
    axes.set_ylabel(metrics.label(metric))
  save(figure, out)


def _draw_lines(axes, curves):
  published = {name for name in curves if name.endswith('(published)')}
  colors = iter(_colors(len(curves) - len(published)))
  color = None
  for name, points in curves.items():
    numbers, values = zip(*points, strict=True)
    with np.errstate(invalid='ignore'):  # If a run diverged.
      means, spreads = np.array([(np.mean(v), np.std(v)) for v in values]).T
    style = {'ls': '--', 'alpha': 0.6}
    if name not in published:
      color, style = next(colors), {'marker': 'o'}
    axes.plot(numbers, means, color=color, label=in_legend(name), **style)
    band = means - spreads, means + spreads
    axes.fill_between(numbers, *band, color=color, alpha=0.15, lw=0)
  ticks = sorted({number for each in curves.values() for number, _ in each})
  if ticks[-1] >= 8 * ticks[0] > 0:
    axes.set_xscale('log', base=2)
    # The labels of close numbers would overlap.
    ticks = [b for a, b in itertools.pairwise([0, *ticks]) if b > 1.2 * a]
  labels = [f'{n:g}' if n < 1e5 else f'{n / 1e6:,.4g} M' for n in ticks]
  axes.set_xticks(ticks, labels)
  axes.minorticks_off()
  axes.grid(alpha=0.3)
  axes.legend(fontsize='small')


def cost(
  points: Mapping[str, tuple[float, float, int]], out: PathLike, metric: str
) -> None:
  """Draws a metric over the time of a training step, as circles.

  Their area is proportional to the number of parameters. Ju et al. 2021,
  figure 3.

  Args:
    points: {name: (seconds of a step, value, number of parameters)}.
    out: path of the PNG, which is written whole or not at all.
    metric: name of the metric.
  """
  figure = new_figure(_WIDTH, 4)
  axes = figure.subplots()
  most = max(size for *_, size in points.values())
  for name, (seconds, value, size) in points.items():
    ms = 1000 * seconds
    axes.scatter(ms, value, s=400 * size / most, alpha=0.5)
    axes.annotate(
      plain(f'{name} ({size:,})'),
      (ms, value),
      fontsize='x-small',
      textcoords='offset points',
      xytext=(6, 6),
    )
  axes.margins(0.15)
  axes.set_xlabel('time of a training step, ms')
  axes.set_ylabel(metrics.label(metric))
  axes.set_title('area and number: parameters', fontsize='small')
  axes.grid(alpha=0.3)
  save(figure, out)


def plain(text: str) -> str:
  """Returns a text that matplotlib draws with each `$` as it is.

  Otherwise, matplotlib takes what is between two of them for a formula. All
  text of documents, answers, tokens and names goes through this function.
  """
  return text.replace('$', '\\$')


def in_legend(text: str) -> str:
  """Returns a text for a legend as `plain` does, with a space before a `_`.

  Matplotlib leaves labels that begin with `_` out of legends.
  """
  return plain(f' {text}' if text.startswith('_') else text)


def _colors(count: int) -> list:
  """Returns `count` different colors; beyond matplotlib's 10, of a rainbow."""
  if count <= 10:
    return [f'C{i}' for i in range(count)]
  from matplotlib import colormaps

  return list(colormaps['turbo'](np.linspace(0, 1, count)))


def new_figure(width: float, height: float) -> 'Figure':
  """Returns an empty figure; width and height are in inches."""
  # A Figure without pyplot draws with Agg and needs no display.
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout='constrained')


def save(figure: 'Figure', path: PathLike, dpi: int = 120) -> None:
  """Writes a figure to a file, whole or not at all.

  Args:
    figure: figure of matplotlib.
    path: path of the file; its suffix, such as .png or .svg, is the format.
    dpi: resolution of the picture.
  """
  suffix = pathlib.Path(path).suffix
  with output_file.replacing(path) as new:
    figure.savefig(new, format=suffix[1:] or 'png', dpi=dpi)


def draw(
  axes,
  runs: Mapping[str, PathLike],
  metric: str,
  only: str | None = None,
  colors: Mapping[str, str] | None = None,
) -> None:
  """Draws the curves of a metric of several runs into axes of matplotlib.

  Args:
    axes: the axes, which also get labels, a grid and a legend.
    runs: {name in the legend: folder of the run}.
    metric: name of the metric.
    only: split to draw; None draws all.
    colors: {name in the legend: color of the run}; None chooses them.

  Raises:
    ValueError: a run has no metrics.jsonl, or no such metric in it or on the
      split.
  """
  if colors is None:
    colors = dict(zip(runs, _colors(len(runs)), strict=True))
  for name, workdir in runs.items():
    dashes = itertools.cycle(['--', ':', '-.'])
    curves = _curves(workdir, metric)
    if only is not None and only not in curves:
      raise ValueError(
        f'{journal.path(workdir)} has no {metric} on {only}, but on '
        f'{", ".join(curves)}. Choose one of these, or no split.'
      )
    for split, points in curves.items():
      if only not in (None, split):
        continue
      steps, values = zip(*sorted(points), strict=True)
      color, label = colors[name], in_legend(f'{name}, {split}')
      if split.startswith(journal.TRIVIAL):
        axes.axhline(values[-1], c=color, ls=next(dashes), label=label)
        continue
      training = split == 'train'
      axes.plot(
        steps,
        values,
        color=color,
        alpha=0.5 if training else 1,
        linewidth=1 if training else 2,
        # A line of a single point would not be seen.
        marker=None if training and len(steps) > 1 else 'o',
        markersize=4,
        label=label,
      )
  axes.set_xlabel('training steps')
  axes.set_ylabel(metrics.label(metric))
  axes.grid(alpha=0.3)
  axes.legend()


def _curves(workdir, metric):
  """Returns {split: [(step, value), ...]} of a metric of one run."""
  path = journal.path(workdir)
  curves, names = {}, set()
  for record in journal.read(path):
    found = journal.metrics_of(record)
    names.update(found)
    if metric in found:
      point = record['step'], found[metric]
      curves.setdefault(record['split'], []).append(point)
  if not curves:
    listed = ', '.join(sorted(names)) or 'none yet'
    raise ValueError(
      f'{path} has no {metric}. Choose one of its metrics: {listed}.'
    )
  return curves
