"""Results of any function of this folder for several runs, side by side."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
import math
import re

import numpy as np

from meliad_rec.config.values import parameters
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import letters_on
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.trained_run import TrainedRun

_DPI = 100
_WIDEST = 16  # Inches of pictures that are side by side.
_TITLE = 0.4  # Inches of the name above a picture.


def compare(
  function: Callable[..., Shown],
  runs: Mapping[str, TrainedRun],
  *args,
  **options,
) -> Shown:
  """Calls a function of meliad_rec.explore for each of several runs.

    compare(meliad_rec.explore.state_map, {'a': run_a, 'b': run_b}, text)

  Args:
    function: function whose first parameter is one run, such as `swap`.
    runs: {name: run}, with one vocabulary.
    *args: further arguments of the function. A mapping holds the argument of
      each run by its name, such as {'a': probe_a, 'b': probe_b} of `ablate`.
    **options: its keyword arguments, likewise. `multiple_of`, which `swap`,
      `ask` and `ablate` have, is by default the least common multiple of the
      blocks of all runs, so that all are compared at the same places.

  Returns:
    The arrays of the function with a first axis 'run'; where runs have axes of
    different lengths, the shorter are filled with NaN. Coordinates that differ,
    such as the tokens before a border, have this axis, too. `data.attrs` holds
    {name of a run: its attributes}. The pictures are side by side, or above
    each other if they are wide, with the number of parameters and the training
    speed of each run above. Curves and colors of the same quantity have the
    same scale.

  Raises:
    ValueError: `runs` is not such a mapping, the vocabularies differ, another
      mapping has other names than `runs`, or the function refuses a run.
  """
  import xarray as xr

  if not callable(function):
    raise ValueError(
      'compare takes a function, such as meliad_rec.explore.state_map, got '
      f'{function!r}.'
    )
  if not isinstance(runs, Mapping):
    raise ValueError(
      f'compare takes runs as {{name: run}}, got a {type(runs).__name__}.'
    )
  check_vocabularies(runs)
  if 'multiple_of' in (parameters(function) or {}):
    common = math.lcm(*(run.block for run in runs.values()))
    options = {'multiple_of': common} | options
  shown = {}
  for name, run in runs.items():
    own_args = [_of_run(value, name, runs) for value in args]
    own = {key: _of_run(value, name, runs) for key, value in options.items()}
    shown[name] = function(run, *own_args, **own)
  parts = [_indexed(one.data) for one in shown.values()]
  own = [name for name in parts[0].coords if _differs(name, parts)]
  data = xr.concat(
    [part.reset_coords(own) for part in parts],
    xr.Variable('run', list(runs)),
    coords='minimal',
    compat='override',
    join='outer',
    combine_attrs='drop',
  )
  data = data.set_coords(own)
  data.attrs = {name: one.data.attrs for name, one in shown.items()}
  for name, one in shown.items():
    _rename(one.figure, runs[name], name)
  _share_scales([one.figure for one in shown.values()])
  pictures = [_drawn(one.figure) for one in shown.values()]
  heights, widths = np.array([a.shape[:2] for a in pictures]).T / _DPI
  if widths.sum() <= _WIDEST:
    figure = new_figure(widths.sum(), heights.max() + _TITLE)
    panels = figure.subplots(1, len(runs), width_ratios=widths, squeeze=False)
  else:
    figure = new_figure(widths.max(), (heights + _TITLE).sum())
    panels = figure.subplots(len(runs), height_ratios=heights, squeeze=False)
  for axes, picture, (name, run) in zip(
    panels.flat, pictures, runs.items(), strict=True
  ):
    axes.imshow(picture)
    axes.set_anchor('N')
    axes.set_axis_off()
    axes.set_title(plain(f'{name}: {size_and_cost(run)}'))
  return Shown(data, figure)


def _of_run(value, name: str, runs):
  """Returns an argument of a function for one run; see `compare`."""
  if not isinstance(value, Mapping):
    return value
  if value.keys() != runs.keys():
    raise ValueError(
      'A mapping given to compare holds an argument for each of the runs '
      f'{", ".join(runs)}, but this one is for {", ".join(map(str, value))}.'
    )
  return value[name]


def _indexed(data):
  """Returns a Dataset in which each axis has an index, by which to align."""
  missing = [name for name in data.dims if name not in data.coords]
  return data.assign_coords({n: np.arange(data.sizes[n]) for n in missing})


def _differs(name, parts) -> bool:
  """Returns whether a coordinate that is no index differs among Datasets."""
  first = parts[0][name].variable
  return name not in first.dims and not all(
    name in part.coords and first.equals(part[name].variable) for part in parts
  )


def _rename(figure, run, name):
  """Gives a run in titles and legends its name, without its size and cost."""
  cost = re.escape(f' ({size_and_cost(run)})')
  known = re.escape(plain(run.name))
  own = re.compile(rf'(?<!\w){known}(?!\w)({cost})?')
  renamed = lambda text: own.sub(lambda _: plain(name), text)
  if figure.get_suptitle():
    figure.suptitle(renamed(figure.get_suptitle()))
  for axes in figure.axes:
    if axes.get_legend() is not None:
      for text in axes.get_legend().get_texts():
        text.set_text(renamed(text.get_text()))


def _share_scales(figures):
  """Gives panels of one quantity the same range of values, or the same colors.

  Panels show one quantity if their labels are equal. Of several such panels in
  a figure, those in the same place are compared.
  """
  panels_of = collections.defaultdict(list)
  for figure in figures:
    seen: dict[tuple, int] = collections.Counter()
    for axes in figure.axes:
      labels = _labels(axes)
      panels_of[labels, seen[labels]].append(axes)
      seen[labels] += 1
  for panels in panels_of.values():
    if not any(axes.images for axes in panels):
      # Horizontal bars are listed downwards, and their values are along x.
      way = 'x' if all(axes.yaxis_inverted() for axes in panels) else 'y'
      limits_N2 = np.array([getattr(a, f'get_{way}lim')() for a in panels])
      if (limits_N2[:, 0] < limits_N2[:, 1]).all():
        for axes in panels:
          axes.set(**{f'{way}lim': (limits_N2.min(), limits_N2.max())})
    elif all(axes.images for axes in panels):
      images = [axes.images[0] for axes in panels]
      limits_N2 = np.array([image.get_clim() for image in images], np.float64)
      for image in images:
        image.set_clim(limits_N2[:, 0].min(), limits_N2[:, 1].max())
        _recolor_texts(image)


def _labels(axes) -> tuple[str, ...]:
  """Returns the labels of a panel, and of the bar of its colors."""
  labels = axes.get_xlabel(), axes.get_ylabel()
  if axes.images and axes.images[0].colorbar:
    bar = axes.images[0].colorbar.ax
    labels += bar.get_xlabel(), bar.get_ylabel()
  return labels


def _recolor_texts(image):
  """Makes letters on the cells of a heat map white or black, to be readable."""
  values_YX = image.get_array()
  left, right, bottom, top = image.get_extent()
  Y, X = values_YX.shape[:2]
  for text in image.axes.texts:
    x, y = text.get_position()
    column = int((x - left) / (right - left) * X)
    row = int((y - top) / (bottom - top) * Y)
    if 0 <= column < X and 0 <= row < Y:
      text.set_color(str(letters_on(image, values_YX[row, column])))


def _drawn(figure) -> np.ndarray:
  """Returns the picture of a figure, [height, width, 4]."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  figure.set_dpi(_DPI)
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())
