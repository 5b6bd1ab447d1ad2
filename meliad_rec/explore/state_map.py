"""The recurrent state along a document: its change, rank, use and gates."""

from collections.abc import Sequence
import functools
from typing import Any

import numpy as np

from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import Shown
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

_CURVES, _START = (COLORS[0], COLORS[2], COLORS[4]), COLORS[3]


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
      'slots' if there are any, or the first part of floating-point numbers.

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
    names the part. If training logged the mean of the gates, the attributes
    'gate_steps' and 'gate' hold it, at these steps.

  Raises:
    ValueError: the run is not recurrent or has no such layer or part, or cannot
      read a text.
  """
  import xarray as xr

  check_run(run)
  one = isinstance(texts, str) or getattr(texts, 'ndim', 0) == 1
  texts = [texts] if one else list(texts)
  if not texts:
    raise ValueError('There is no text to read. Give at least one.')
  measured = []
  for number, text in enumerate(texts):
    found = _measure(run, text, layer, every, part)
    count = found.sizes['border']
    found['document'] = 'border', np.full(count, number)
    before = measured[-1]['read'][-1] if measured else 0
    found['read'] = found['tokens'] + before
    measured.append(found)
  data = xr.concat(measured, 'border') if len(measured) > 1 else measured[0]
  if 'keep' in data and (run.workdir / journal.NAME).is_file():
    records = journal.read(journal.path(run.workdir))
    logged = [r for r in records if 'gate' in r and r['split'] == 'train']
    if logged:
      data.attrs['gate_steps'] = [r['step'] for r in logged]
      data.attrs['gate'] = [r['gate'] for r in logged]
  return Shown(data, _draw(run, data))


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
    ValueError: there is no such layer or part.
  """
  kinds = [n for n, a in states.data_vars.items() if a.dtype.kind == 'f']
  if not kinds:
    raise ValueError(
      'The state has no part of floating-point numbers. Choose another run.'
    )
  slots = [name for name in kinds if name.split('/')[-1] == 'slots']
  name = part or (slots[-1] if slots else kinds[0])
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
  before, after = s_NSD[:-1], s_NSD[1:]
  if not len(after):
    raise ValueError(
      f'The text is shorter than a block of {every or run.block} tokens, after '
      'which the state changes. Give a longer text.'
    )
  size = lambda a, axes: np.sqrt((a**2).sum(axes)) + 1e-9
  unit = after / size(after, -1)[..., None]
  S = after.shape[1]
  together = (unit.sum(1) ** 2).sum(1)  # The sum of the cosines of all pairs.
  change = np.sqrt(((after - before) ** 2).sum(-1)) / size(after, -1)
  data: dict[str, Any] = {
    'change': (('border', 'slot'), change),
    'similarity': (
      'border',
      (after * before).sum((1, 2)) / size(after, (1, 2)) / size(before, (1, 2)),
    ),
    'alike': ('border', (together - S) / max(S * (S - 1), 1)),
    'effective_rank': ('border', effective_rank(after)),
  }
  tokens = states['tokens'].values[1:]
  coords = {'tokens': ('border', tokens)}
  between = functools.partial(_between, run, text, layer)
  used = between(tokens, 'token_to_state', ('token', 'slot'))
  if used is not None and used.shape[1] == S:
    data['use'] = ('border', 'slot'), used
  kept = between(tokens // run.block, 'state_keep', ('block',))
  if kept is None:  # An LSTM has gates at each token, not at each block.
    kept = between(tokens, 'token_keep', ('token',))
  if kept is not None:
    data['keep'] = 'border', kept
  return xr.Dataset(data, coords, {'part': name})


def effective_rank(s_NSD: np.ndarray) -> np.ndarray:
  """Returns the effective rank of N matrices, from 1 to min(S, D).

  It is the exponential of the entropy of the singular values, scaled to sum to
  1 (Roy and Vetterli 2007).
  """
  values = np.linalg.svd(s_NSD, compute_uv=False)
  p = values / (values.sum(1, keepdims=True) + 1e-12)
  return np.exp(-(p * np.log(p + 1e-12)).sum(1))


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


def _draw(run, data):
  S = data.sizes['slot']
  # The first border of a document, after the initial state, is far from others.
  after_first = np.flatnonzero(np.diff(data['document'].values) == 0) + 1
  maps = [name for name in ('change', 'use') if name in data and S > 1]
  rows = len(maps) + 1 + ('gate' in data.attrs)
  figure = new_figure(11, 0.4 + 2.4 * rows)
  panels = list(figure.subplots(rows, squeeze=False)[:, 0])
  read = data['read'].values
  labels = {
    'change': 'change of a slot\n(share of its size)',
    'use': 'attention of tokens\n(share)',
  }
  for axes, name in zip(panels, maps, strict=False):
    values = data[name].values
    extent = (0, read[-1], S - 0.5, -0.5)
    limits = (None, None)
    if name == 'change' and len(after_first):
      limits = 0, values[after_first].max()
    heat_map(axes, values.T, labels[name], extent, limits=limits)
    axes.set_ylabel('slot' if data.attrs['part'] == 'slots' else 'row')
    axes.yaxis.get_major_locator().set_params(integer=True)
  axes = panels[len(maps)]
  curves = {
    'similarity': 'cosine to the state before',
    'alike': 'cosine of two slots',
    'keep': 'gate: weight of the old state',
    'change': 'change (share of its size)',
  }
  del curves['change' if S > 1 else 'alike']
  for name, color in zip(curves, _CURVES, strict=True):
    if name in data:
      values = np.reshape(data[name].values, len(read))
      axes.plot(read, values, color=color, label=curves[name])
  axes.set_ylabel('cosine, weight')
  axes.grid(alpha=0.3)
  axes.set_xlim(0, read[-1])
  if S > 1:
    other = axes.twinx()
    other.plot(read, data['effective_rank'], color='black', ls=':', lw=1)
    other.set_ylabel('effective rank (dotted)')
  ends = np.flatnonzero(np.diff(data['document'].values))
  for panel in panels[: len(maps) + 1]:
    panel.set_xlabel(
      'tokens of whole blocks, one document after another'
      if len(ends)
      else 'tokens read'
    )
    for i, start in enumerate([0, *read[ends]]):
      label = None if i else 'start of a document'
      panel.axvline(start, color=_START, lw=2.5, clip_on=False, label=label)
  axes.legend(
    fontsize='small', loc='lower left', bbox_to_anchor=(0, 1), ncols=4
  )
  if 'gate' in data.attrs:
    plot.draw(panels[-1], {run.name: run.workdir}, 'gate')
  figure.suptitle(plain(f'state of {run.name}: {data.attrs["part"]}'))
  return figure
