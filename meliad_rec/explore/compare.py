"""Results of any function of this folder for several runs, side by side."""

from collections.abc import Callable
from collections.abc import Mapping

import numpy as np

from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.trained_run import TrainedRun

_DPI = 100


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
    *args: further arguments of the function.
    **options: its keyword arguments.

  Returns:
    The arrays of the function with a first axis 'run'; where runs have axes of
    different lengths, the shorter are filled with NaN. `data.attrs` holds
    {name of a run: its attributes}. The pictures are side by side, with the
    number of parameters and the time of a training step of each run above.
    Curves are drawn to the same scale.

  Raises:
    ValueError: there is no run, the vocabularies differ, or the function
      refuses a run.
  """
  import xarray as xr

  if not runs:
    raise ValueError('There is no run to show. Give at least one.')
  check_vocabularies(runs)
  shown = {name: function(run, *args, **options) for name, run in runs.items()}
  data = xr.concat(
    [_indexed(one.data) for one in shown.values()],
    xr.Variable('run', list(runs)),
    coords='minimal',
    compat='override',
    join='outer',
    combine_attrs='drop',
  )
  data.attrs = {name: one.data.attrs for name, one in shown.items()}
  _share_limits([one.figure for one in shown.values()])
  pictures = [_drawn(one.figure) for one in shown.values()]
  height = max(len(picture) for picture in pictures)
  widths = [picture.shape[1] for picture in pictures]
  figure = new_figure(sum(widths) / _DPI, height / _DPI + 0.4)
  panels = figure.subplots(1, len(runs), width_ratios=widths, squeeze=False)[0]
  for axes, picture, (name, run) in zip(
    panels, pictures, runs.items(), strict=True
  ):
    axes.imshow(picture)
    axes.set_anchor('N')
    axes.set_axis_off()
    axes.set_title(f'{name}: {size_and_cost(run)}')
  return Shown(data, figure)


def _indexed(data):
  """Returns a Dataset in which each axis has an index, by which to align."""
  missing = [name for name in data.dims if name not in data.coords]
  return data.assign_coords({n: np.arange(data.sizes[n]) for n in missing})


def _share_limits(figures):
  """Gives the same vertical range to the same panel of curves of figures."""
  for panels in zip(*(figure.axes for figure in figures), strict=False):
    if all(axes.lines and not axes.images for axes in panels):
      limits_N2 = np.array([axes.get_ylim() for axes in panels])
      if (limits_N2[:, 0] < limits_N2[:, 1]).all():
        for axes in panels:
          axes.set_ylim(limits_N2[:, 0].min(), limits_N2[:, 1].max())


def _drawn(figure) -> np.ndarray:
  """Returns the picture of a figure, [height, width, 4]."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  figure.set_dpi(_DPI)
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())
