"""Result of a function of this folder: arrays, and a figure of them."""

from collections.abc import Mapping
import csv
import dataclasses
import io
import os
from pathlib import Path
import statistics
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import output_file

if TYPE_CHECKING:
  from matplotlib.figure import Figure
  import pandas as pd
  import xarray as xr

# Colors that the color-blind can tell apart (Okabe and Ito 2008).
COLORS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9']
_LUMINANCE = np.array([0.299, 0.587, 0.114])  # Weights of red, green and blue.

# One run, or {name: run} of several to compare.
Runs = TrainedRun | Mapping[str, TrainedRun]


@dataclasses.dataclass(frozen=True)
class Shown:
  """Arrays and their figure.

  In a notebook, the figure is displayed.

  Attributes:
    data: the arrays, with named axes; each function says which. The attribute
      'units' of an array is its unit; numbers without one are counts, ranks,
      shares, or places in tokens.
    figure: a matplotlib figure, which shows some of them.
  """

  data: 'xr.Dataset'
  figure: 'Figure'

  def table(self) -> 'pd.DataFrame':
    """Returns a table, with one row for each element of the largest array."""
    return self.data.to_dataframe().reset_index()

  def to_csv(self, path: str | os.PathLike[str]) -> None:
    """Writes the table to a CSV file, whole or not at all.

    What is in `data.attrs`, such as the list of words of `gain`, is left out.

    Args:
      path: path of the file; it is compressed if it ends in .gz, .bz2, .xz,
        .zst or .zip.

    Raises:
      ValueError: the file cannot be written.
    """
    check_path(path)
    output_file.check(path)
    path, table, compression = Path(path), self.table(), 'infer'
    if path.suffix == '.zip':
      compression = {'method': 'zip', 'archive_name': path.stem}
    with output_file.replacing(path) as new:
      # All texts are quoted, since some hold carriage returns.
      table.to_csv(
        new,
        index=False,
        compression=compression,
        quoting=csv.QUOTE_NONNUMERIC,
      )

  def save(self, path: str | os.PathLike[str], dpi: int = 120) -> None:
    """Writes the figure to a file, whole or not at all.

    Args:
      path: path of the file; its suffix, such as .png or .svg, is the format,
        and PNG if it has none.
      dpi: resolution of the picture.

    Raises:
      ValueError: the file cannot be written, its suffix is no format of
        pictures, or `dpi` is below 1.
    """
    check_path(path)
    check_count('dpi', dpi, 1)
    output_file.check(path)
    known = self.figure.canvas.get_supported_filetypes()
    suffix = Path(path).suffix[1:].lower()
    if suffix and suffix not in known:
      raise ValueError(
        f'The suffix of {os.fspath(path)} is no format of pictures. End the '
        f'name in one of .{", .".join(sorted(known))}.'
      )
    plot.save(self.figure, path, dpi)

  def _repr_png_(self) -> bytes:
    """Returns the figure as a PNG, which notebooks display."""
    buffer = io.BytesIO()
    self.figure.savefig(buffer, format='png', dpi=90)
    return buffer.getvalue()


def with_units(data: 'xr.Dataset', **units: str) -> 'xr.Dataset':
  """Returns the Dataset, with the unit of each named array as an attribute."""
  for name, unit in units.items():
    data[name].attrs['units'] = unit
  return data


def check_path(path: str | os.PathLike[str]) -> None:
  """Raises ValueError unless an argument is the path of a file."""
  if not isinstance(path, str | os.PathLike):
    raise ValueError(
      f'path must be the path of a file, got {type(path).__name__}.'
    )


def colors_of(count: int) -> list:
  """Returns `count` different colors, for the color-blind, too.

  Beyond the six of COLORS, they differ in lightness.
  """
  if count <= len(COLORS):
    return COLORS[:count]
  from matplotlib import colormaps

  # The lightest are hard to see on white.
  return list(colormaps['viridis'](np.linspace(0, 0.9, count)))


def named(runs: Runs) -> Mapping[str, TrainedRun]:
  """Returns {name: run}; a single run has the name of its folder.

  Raises:
    ValueError: there is no run, or something else than runs.
  """
  known = runs if isinstance(runs, Mapping) else {'': runs}
  if not known:
    raise ValueError('There is no run to show. Give at least one.')
  for run in known.values():
    if not isinstance(run, TrainedRun):
      raise ValueError(
        'A run that meliad_rec.load_run opened is needed, or {name: run} where '
        f'several can be compared, got a {type(run).__name__}.'
      )
  return runs if isinstance(runs, Mapping) else {runs.name: runs}


def labels_of_runs(runs: Runs) -> dict[str, str]:
  """Returns {name of a run: its name, size and cost}."""
  return {n: f'{n} ({size_and_cost(run)})' for n, run in named(runs).items()}


def check_run(run: TrainedRun) -> None:
  """Raises ValueError if this is something else than a single run."""
  if not isinstance(run, TrainedRun):
    raise ValueError(
      'A run that meliad_rec.load_run opened is needed, got a '
      f'{type(run).__name__}. explore.compare shows several runs.'
    )


def check_vocabularies(runs: Runs) -> None:
  """Raises ValueError if runs have different vocabularies."""
  if len({run.vocabulary.identity for run in named(runs).values()}) > 1:
    raise ValueError(
      'The runs have different vocabularies, so their tokens cannot be '
      'compared. Choose runs with one vocabulary.'
    )


def block_multiple(run: TrainedRun, given: int | None) -> int:
  """Returns the number of tokens at multiples of which a state is taken.

  Args:
    run: the run.
    given: this number, or None for the length of a block.

  Raises:
    ValueError: it is no positive multiple of the length of a block.
  """
  if given is None:
    return run.block
  check_count('multiple_of', given, 1)
  if given % run.block:
    raise ValueError(
      f'multiple_of must be a multiple of {run.block} tokens, the length of a '
      f'block of {run.name}, got {given}.'
    )
  return given


def size_and_cost(run: TrainedRun) -> str:
  """Returns '0.97 M parameters, 3,850 tokens/s', or without `speed`."""
  size = f'{_three_digits(run.parameters / 1e6)} M parameters'
  return ', '.join(filter(None, (size, speed(run))))


def speed(run: TrainedRun) -> str:
  """Returns the median speed of training, such as '3,850 tokens/s'.

  The time of a step says less, because steps of runs differ in their numbers of
  tokens. Returns '' if the folder of the run has no metrics.
  """
  if (run.workdir / journal.NAME).is_file():
    records = journal.read(journal.path(run.workdir))
    name = 'tokens_per_second'
    speeds = [r[name] for r in records if name in r]
    if speeds:
      return f'{_three_digits(statistics.median(speeds))} tokens/s'
  return ''


def _three_digits(x: float) -> str:
  return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def heat_map(axes, values_YX, label: str, extent=None, limits=(None, None)):
  """Draws an array as colors, with a bar that shows their values.

  Args:
    axes: axes of matplotlib.
    values_YX: the array; row 0 is at the top.
    label: what the colors are, with its unit.
    extent: (left, right, bottom, top) of the array in data coordinates.
    limits: values of the first and the last color; None: the array's.
  """
  image = axes.imshow(
    np.asarray(values_YX, np.float64),
    aspect='auto',
    interpolation='nearest',
    cmap='cividis',
    extent=extent,
    vmin=limits[0],
    vmax=limits[1],
  )
  axes.figure.colorbar(image, ax=axes, label=label, pad=0.01)
  return image


def letters_on(image, values: np.ndarray) -> np.ndarray:
  """Returns the colors of letters, white or black, readable on a heat map.

  Args:
    image: what `heat_map` returned.
    values: values of the cells on which the letters are.
  """
  colors = np.asarray(image.cmap(image.norm(values)))
  # A cell without a value is transparent, so it looks white.
  shades = colors[..., :3] @ _LUMINANCE + 1 - colors[..., 3]
  return np.where(shades < 0.5, 'white', 'black')


def label_curves(axes, x: str, y: str) -> None:
  """Gives curves the labels of their axes, a grid, and a legend above them."""
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    above = {'loc': 'lower left', 'bbox_to_anchor': (0, 1)}
    axes.legend(fontsize='small', ncols=2, **above)


def smooth(values_T: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the means of at most `count` equal parts, and their middles."""
  parts = np.array_split(np.asarray(values_T, np.float64), count)
  sizes = np.array([len(part) for part in parts])
  ends = np.cumsum(sizes)
  means = np.array([part.mean() if len(part) else np.nan for part in parts])
  return means[sizes > 0], (ends - sizes / 2)[sizes > 0]
