"""The recurrent state along a document: its change, rank, use and gates."""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
import itertools
import re
from typing import Any

import numpy as np

from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import colors_of
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import labels_of_runs
from meliad_rec.explore.shown import named
from meliad_rec.explore.shown import Runs
from meliad_rec.explore.shown import Shown
from meliad_rec.report import journal
from meliad_rec.report.plot import in_legend
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.checks import check_layer
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

# Curves: {name in the arrays: (label, color)}.
_CURVES = {
  'similarity': ('cosine to the state before', COLORS[0]),
  'alike': ('mean cosine between {}s', COLORS[2]),
  'keep': ('gate: weight of the old state', COLORS[4]),
  'change': ('change (share of its size)', COLORS[1]),
}
_START = COLORS[3]
_ROWS = 200  # Rows of a map that can be told apart.


def state_map(
  run: TrainedRun,
  texts: Text | Sequence[Text],
  layer: int | None = None,
  every: int | None = None,
  part: str | None = None,
) -> Shown:
  """Shows how the recurrent state changes while the model reads.

  Args:
    run: a recurrent run.
    texts: a document, or several, each of which is read from a new state.
    layer: index of a recurrent layer; a negative one counts from the highest.
      None means the highest, or the whole state if it has no layers.
    every: number of tokens between two states; None means one block.
    part: name of a part of run.states whose rows are shown as slots. None means
      'slots' if there are any. Otherwise, it means the first part of
      floating-point numbers; or, of parts that are numbered like it, such as
      the passes of a Staircase, the last.

  Returns:
    For each border of two blocks, or every so many tokens, but not for the
    start of a document, along the axis border. The tokens after the last border
    of a document are left out, because a state is known after a whole block
    only.
    'change' [border, slot], the size of the difference from the state before,
    divided by the size of the state; 'similarity', the cosine of all slots and
    those before; 'alike', the mean cosine of two slots; 'effective_rank' of the
    slots, from 1 to their number (Roy and Vetterli
    2007); where the model has them, 'keep', the mean of the gates, and 'use'
    [border, slot], the share of attention that tokens of the block gave to a
    slot; and 'document', the index of the document. The coordinate 'tokens' is
    the number of tokens of the document before the border, and 'read' the same
    number plus all shown tokens of earlier documents. The attribute 'part'
    names the part, 'layer' the index of its layer, if it has layers, and 'rows'
    says what its rows are, such as 'slot', 'token'
    or 'head, place'; a map of more than 200 shows means of several neighboring
    rows. If training logged gates, a panel shows what they kept; see
    `gates_in_training`.

  Raises:
    ValueError: the run is not recurrent or has no such layer or part, or cannot
      read a text.
  """
  import xarray as xr

  check_run(run)
  one = isinstance(texts, str) or getattr(texts, 'ndim', 0) == 1
  one |= not isinstance(texts, Iterable)  # Refused below.
  texts = [texts] if one else list(texts)
  run.check_texts(texts)
  measured = []
  for number, text in enumerate(texts):
    found = _measure(run, text, layer, every, part)
    count = found.sizes['border']
    found['document'] = 'border', np.full(count, number)
    before = measured[-1]['read'][-1] if measured else 0
    found['read'] = found['tokens'] + before
    measured.append(found)
  data = xr.concat(measured, 'border') if len(measured) > 1 else measured[0]
  return Shown(data, _draw(run, data, _logged(run)))


def gates_in_training(runs: Runs) -> Shown:
  """Shows how much of the old state gates kept in the course of training.

  Args:
    runs: one run, or {name: run} of several.

  Returns:
    'keep' [run, step], the weight of the old state, the mean over all gates of
    the model and the steps since the last; and 'spread', its standard deviation
    over the elements of a gate. They are NaN at steps that a run did not log.

  Raises:
    ValueError: the training of a run logged no gates.
  """
  import xarray as xr

  found = {name: _logged(run) for name, run in named(runs).items()}
  for name, data in found.items():
    if not data.sizes['step']:
      raise ValueError(
        f'The folder of {name} has no {journal.NAME} with gates. Choose a run '
        'of a model with gates, such as arch/block_recurrent.'
      )
  data = xr.concat(list(found.values()), 'run', join='outer')
  data = data.assign_coords(run=list(found))
  figure = new_figure(8, 3.5)
  axes = figure.subplots()
  labels = labels_of_runs(runs)
  _draw_gates(axes, {labels[name]: data for name, data in found.items()})
  return Shown(data, figure)


def _logged(run):
  """Returns 'keep' and 'spread' [step] of gates, as training logged them."""
  import xarray as xr

  records = {}
  if (run.workdir / journal.NAME).is_file():
    for record in journal.read(journal.path(run.workdir)):
      if 'gate' in record and record['split'] == 'train':
        records[record['step']] = record
  steps = sorted(records)
  arrays = {}
  for name, key in ('keep', 'gate'), ('spread', 'gate_spread'):
    logged = [records[step].get(key, np.nan) for step in steps]
    arrays[name] = 'step', np.array(logged, float)
  return xr.Dataset(arrays, {'step': np.array(steps, int)})


def _draw_gates(axes, found):
  """Draws {label: what _logged returned} with a band of the spread."""
  for (label, data), color in zip(
    found.items(), colors_of(len(found)), strict=True
  ):
    steps, keep, spread = data['step'], data['keep'], data['spread']
    axes.plot(steps, keep, color=color, label=in_legend(label))
    band = keep - spread, keep + spread
    axes.fill_between(steps, *band, color=color, alpha=0.15, lw=0)
  axes.set_xlabel('step of training')
  axes.set_ylabel('gate: weight of the old state\n(± standard deviation)')
  axes.grid(alpha=0.3)
  axes.legend(fontsize='small')


def slots_of(
  states, layer: int | None, part: str | None = None
) -> tuple[np.ndarray, str, int | None]:
  """Returns the states of a layer as vectors [borders, S, D], and its place.

  The place is the name of the part, and the index of the layer, from 0; None if
  the part is not divided into layers.

  Args:
    states: result of TrainedRun.states.
    layer: index of the layer, see `state_map`.
    part: name of a part; None chooses one, see `state_map`.

  Raises:
    ValueError: there is no such layer or part, or `layer` is no integer.
  """
  check_layer(layer)
  kinds = [n for n, a in states.data_vars.items() if a.dtype.kind == 'f']
  if not kinds:
    raise ValueError(
      'The state has no part of floating-point numbers. Choose another run.'
    )
  slots = [name for name in kinds if name.split('/')[-1] == 'slots']
  unnumbered = lambda name: re.sub(r'\d+', '', name)
  series = [n for n in kinds if unnumbered(n) == unnumbered(kinds[0])]
  name = part or (slots or series)[-1]
  if name not in kinds:
    raise ValueError(
      f'The state has no part {name!r} of floating-point numbers. Choose one '
      f'of {", ".join(kinds)}.'
    )
  a = states[name]
  if 'layer' not in a.dims and layer is not None:
    raise ValueError(
      f'The part {name!r} of the state is not divided into layers. Leave layer '
      'out.'
    )
  if 'layer' in a.dims:
    known = a['layer'].values.tolist()
    if layer is not None and -len(known) <= layer < 0:
      layer = known[layer]
    if layer is not None and layer not in known:
      raise ValueError(
        f'Layer {layer} has no recurrent state. Choose one of {known}.'
      )
    layer = known[-1] if layer is None else layer
    a = a.sel(layer=layer)
  values = a.values
  return values.reshape(len(values), -1, values.shape[-1]), name, layer


def _measure(run, text, layer, every, part):
  import xarray as xr

  states = run.states(text, every)
  s_NSD, name, layer = slots_of(states, layer, part)
  if len(s_NSD) < 2:
    raise ValueError(
      f'A text has {len(run.encode(text)):,} tokens, but its state is taken '
      f'every {every or run.block:,}. Give a longer text, or a smaller every.'
    )
  compared = [_compared(*pair) for pair in itertools.pairwise(s_NSD)]
  change, similarity, alike = map(np.stack, zip(*compared, strict=True))
  data: dict[str, Any] = {
    'change': (('border', 'slot'), change),
    'similarity': ('border', similarity),
    'alike': ('border', alike),
    'effective_rank': ('border', effective_rank(s_NSD[1:])),
  }
  tokens = states['tokens'].values[1:]
  coords = {'tokens': ('border', tokens)}
  between = functools.partial(_between, run, text, layer)
  used = between(tokens, 'token_to_state', ('token', 'slot'))
  if used is not None and used.shape[1] == s_NSD.shape[1]:
    data['use'] = ('border', 'slot'), used
  kept = between(tokens // run.block, 'state_keep', ('block',))
  if kept is None:  # An LSTM has gates at each token, not at each block.
    kept = between(tokens, 'token_keep', ('token',))
  if kept is not None:
    data['keep'] = 'border', kept
  dims = [d for d in states[name].dims if d not in ('border', 'layer')]
  rows = ', '.join(re.sub(r'^pass_\d+_', '', dim) for dim in dims[:-1])
  attrs = {'part': name, 'rows': rows}
  attrs |= {} if layer is None else {'layer': layer}
  return xr.Dataset(data, coords, attrs)


def _compared(before_SD, after_SD) -> tuple[np.ndarray, ...]:
  """Returns the change, similarity and likeness of slots; see `state_map`."""
  S = len(after_SD)
  size_S = np.linalg.norm(after_SD, axis=-1) + 1e-9
  change_S = np.linalg.norm(after_SD - before_SD, axis=-1) / size_S
  product = (after_SD * before_SD).sum()
  for a_SD in after_SD, before_SD:
    product = product / (np.linalg.norm(a_SD) + 1e-9)
  # The sum of the cosines of all pairs.
  together = ((after_SD / size_S[:, None]).sum(0) ** 2).sum()
  return change_S, product, (together - S) / max(S * (S - 1), 1)


def effective_rank(s_NSD: np.ndarray) -> np.ndarray:
  """Returns the effective rank of N matrices, from 1 to min(S, D).

  It is the exponential of the entropy of the singular values, scaled to sum to
  1 (Roy and Vetterli 2007).
  """
  S, D = s_NSD.shape[1:]
  if S > D:  # Much faster, and a product of float64 is accurate enough.
    squares = np.array([_squares(s_SD) for s_SD in s_NSD])
    values = np.sqrt(squares)
  else:
    values = np.linalg.svd(s_NSD, compute_uv=False)
  p = values / (values.sum(1, keepdims=True) + 1e-12)
  return np.exp(-(p * np.log(p + 1e-12)).sum(1))


def _squares(s_SD: np.ndarray) -> np.ndarray:
  """Returns the squares of the singular values, 0 where only rounding is."""
  s_SD = np.asarray(s_SD, np.float64)
  squares_D = np.linalg.eigvalsh(s_SD.T @ s_SD)
  least = len(squares_D) * np.finfo(np.float64).eps * squares_D[-1]
  return np.where(squares_D > least, squares_D, 0)


def _between(run, text, layer, ends, name, axes):
  """Returns the mean of a picture between the last border and each border.

  Args:
    run, text, layer: as in `state_map`.
    ends: number of tokens or blocks before each border after the first.
    name: name of the picture.
    axes: axes to keep; the first is 'token' or 'block', as in `ends`.

  Returns:
    None if the model has no such picture.
  """
  found = _means(run, text, layer, name, axes)
  if found is None:
    return None
  starts = np.concatenate([[0], ends[:-1]])
  sums = np.add.reduceat(found[: ends[-1]], starts, 0)
  return (sums.T / (ends - starts)).T


def _means(run, text, layer, name, axes):
  """Returns a picture of the highest layer, averaged over all other axes.

  Returns None if the model has no such picture.
  """
  if not run.layers_with((name,)):  # Do not read the text in vain.
    return None
  found = run.pictures(text, (name,), layer)
  if not found:
    return None
  a = found[name]
  a = a.isel(layer=-1) if 'layer' in a.dims else a
  return a.mean([d for d in a.dims if d not in axes]).values


def _draw(run, data, logged):
  S = data.sizes['slot']
  # The first border of a document, after the initial state, is far from others.
  after_first = np.flatnonzero(np.diff(data['document'].values) == 0) + 1
  maps = [name for name in ('change', 'use') if name in data and S > 1]
  has_log = 'keep' in data and logged.sizes['step'] > 0
  count = len(maps) + 1 + has_log
  figure = new_figure(11, 0.4 + 2.4 * count)
  panels = list(figure.subplots(count, squeeze=False)[:, 0])
  read = data['read'].values
  rows = data.attrs['rows']
  row = rows if rows in ('slot', 'token') else 'row'
  each = -(-S // _ROWS)  # Rows in a mean.
  labels = {
    'change': f'change of a {row}\n(share of its size)',
    'use': 'attention of tokens\n(share)',
  }
  for axes, name in zip(panels, maps, strict=False):
    parts = np.array_split(data[name].values, -(-S // each), 1)
    values = np.stack([part.mean(1) for part in parts])
    extent = (0, read[-1], S - 0.5, -0.5)
    limits = (None, None)
    if name == 'change' and len(after_first):
      limits = 0, values[:, after_first].max()
    heat_map(axes, values, labels[name], extent, limits=limits)
    means = f'\n(means of {each} rows)' if each > 1 else ''
    axes.set_ylabel(rows + means)
    axes.yaxis.get_major_locator().set_params(integer=True)
  axes = panels[len(maps)]
  hidden = 'change' if S > 1 else 'alike'
  for name, (label, color) in _CURVES.items():
    if name in data and name != hidden:
      values = np.reshape(data[name].values, len(read))
      axes.plot(read, values, color=color, label=label.format(row))
  axes.set_ylabel('cosine, weight or share')
  axes.grid(alpha=0.3)
  axes.set_xlim(0, read[-1])
  if S > 1:
    other = axes.twinx()
    other.plot(read, data['effective_rank'], color='black', ls=':', lw=1)
    other.set_ylabel('effective rank (dotted)')
  ends = np.flatnonzero(np.diff(data['document'].values))
  for panel in panels[: len(maps) + 1]:
    panel.set_xlabel(
      'tokens read (whole blocks of each document)'
      if len(ends)
      else 'tokens read'
    )
    for i, start in enumerate([0, *read[ends]]):
      label = None if i else 'start of a document'
      panel.axvline(start, color=_START, lw=2.5, clip_on=False, label=label)
  axes.legend(
    fontsize='small', loc='lower left', bbox_to_anchor=(0, 1), ncols=4
  )
  if has_log:
    _draw_gates(panels[-1], {run.name: logged})
    panels[-1].set_ylabel('gates in training\n(± standard deviation)')
  of = f' of layer {data.attrs["layer"]}' if 'layer' in data.attrs else ''
  figure.suptitle(plain(f'state of {run.name}: {data.attrs["part"]}{of}'))
  return figure
