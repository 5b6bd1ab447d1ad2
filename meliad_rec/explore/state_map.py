"""The recurrent state along a document: its change, rank, use and gates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import Shown
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.trained_run import TrainedRun


def state_map(
  run: TrainedRun,
  texts: str | Sequence[str],
  layer: int | None = None,
  every: int | None = None,
) -> Shown:
  """Shows how the recurrent state changes while the model reads.

  Args:
    run: a recurrent run.
    texts: a document, or several, each of which is read from a new state.
    layer: index of the recurrent layer; None means the highest.
    every: number of tokens between two states; None means one block.

  Returns:
    Along the axis border, of all borders but those before a document:
    'change' [border, slot], the size of the difference from the state before,
    divided by the size of the state; 'similarity', the cosine of all slots and
    those before; 'alike', the mean cosine of two slots; 'effective_rank' of the
    slots, from 1 to their number (Roy and Vetterli
    2007); where the model has them, 'keep', the mean of the gates, and 'use'
    [border, slot], the share of attention that tokens of the block gave to a
    slot; and 'document', the index of the document.

  Raises:
    ValueError: the run is not recurrent, or cannot read a text.
  """
  import xarray as xr

  texts = [texts] if isinstance(texts, str) else list(texts)
  if not texts:
    raise ValueError('There is no text to read. Give at least one.')
  parts = []
  for number, text in enumerate(texts):
    part = _measure(run, text, layer, every)
    count = part.sizes['border']
    part['document'] = 'border', np.full(count, number)
    part['read'] = part['tokens'] + (parts[-1]['read'][-1] if parts else 0)
    parts.append(part)
  data = xr.concat(parts, 'border') if len(parts) > 1 else parts[0]
  return Shown(data, _draw(run, data))


def slots_of(states, layer: int | None) -> tuple[np.ndarray, str]:
  """Returns the states of a layer as vectors [borders, S, D], and their name.

  Args:
    states: result of TrainedRun.states.
    layer: index of the layer; None means the highest.
  """
  kinds = [n for n, a in states.data_vars.items() if a.dtype.kind == 'f']
  name = 'slots' if 'slots' in kinds else kinds[-1]
  a = states[name]
  if 'layer' in a.dims:
    known = a['layer'].values.tolist()
    if layer is not None and layer not in known:
      raise ValueError(
        f'Layer {layer} has no recurrent state. Choose one of {known}.'
      )
    a = a.sel(layer=known[-1] if layer is None else layer)
  values = a.values
  return values.reshape(len(values), -1, values.shape[-1]), name


def _measure(run, text, layer, every):
  import xarray as xr

  states = run.states(text, every)
  s_NSD, name = slots_of(states, layer)
  before, after = s_NSD[:-1], s_NSD[1:]
  if not len(after):
    raise ValueError(
      f'The text is shorter than a block of {every or run.block} tokens, after '
      'which the state changes. Give a longer text.'
    )
  size = lambda a, axes: np.sqrt((a**2).sum(axes)) + 1e-9
  unit = after / size(after, -1)[..., None]
  S = after.shape[1]
  together = np.einsum('nsd,ntd->n', unit, unit)
  data: dict[str, Any] = {
    'change': (('border', 'slot'), size(after - before, -1) / size(after, -1)),
    'similarity': (
      'border',
      (after * before).sum((1, 2)) / size(after, (1, 2)) / size(before, (1, 2)),
    ),
    'alike': ('border', (together - S) / max(S * (S - 1), 1)),
    'effective_rank': ('border', effective_rank(after)),
  }
  tokens = states['tokens'].values[1:]
  coords = {'tokens': ('border', tokens)}
  if (used := _use(run, text, layer, tokens)) is not None:
    data['use'] = ('border', 'slot'), used
  if (kept := _keep(run, text, layer, tokens // run.block)) is not None:
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


def _use(run, text, layer, tokens):
  """Returns the attention to slots of the tokens before each border."""
  by_token = _means(run, text, layer, 'token_to_state', ('token', 'slot'))
  if by_token is None:
    return None
  starts = np.concatenate([[0], tokens[:-1]])
  sums = np.add.reduceat(by_token[: tokens[-1]], starts, 0)
  return sums / (tokens - starts)[:, None]


def _keep(run, text, layer, blocks):
  """Returns the mean gate in the block before each border."""
  by_block = _means(run, text, layer, 'state_keep', ('block',))
  return None if by_block is None else by_block[blocks - 1]


def _means(run, text, layer, name, axes):
  """Returns a picture of the highest layer, averaged over all other axes.

  Returns None if the model has no such picture.
  """
  found = run.pictures(text, (name,), layer)
  if not found:
    return None
  a = found[name]
  a = a.isel(layer=-1) if 'layer' in a.dims else a
  return a.mean([d for d in a.dims if d not in axes]).values


def _draw(run, data):
  maps = [name for name in ('change', 'use') if name in data]
  curves = (run.workdir / journal.NAME).is_file() and 'keep' in data
  rows = len(maps) + 1 + bool(curves)
  figure = new_figure(11, 2.4 * rows)
  panels = list(figure.subplots(rows, squeeze=False)[:, 0])
  read = data['read'].values
  labels = {
    'change': 'change of a slot\n(share of its size)',
    'use': 'attention of tokens\n(share)',
  }
  for axes, name in zip(panels, maps, strict=False):
    values = data[name].values.T
    extent = (0, read[-1], len(values) - 0.5, -0.5)
    heat_map(axes, values, labels[name], extent)
    axes.set_ylabel('slot')
    axes.yaxis.get_major_locator().set_params(integer=True)
  axes = panels[len(maps)]
  for color, (name, label) in zip(
    COLORS,
    (
      ('similarity', 'cosine to the state before'),
      ('alike', 'cosine of two slots'),
      ('keep', 'gate: weight of the old state'),
    ),
    strict=False,
  ):
    if name in data and (name != 'alike' or data.sizes['slot'] > 1):
      axes.plot(read, data[name], color=color, label=label)
  axes.set_ylabel('cosine, weight')
  other = axes.twinx()
  other.plot(read, data['effective_rank'], color='black', ls=':', lw=1)
  other.set_ylabel('effective rank (dotted)')
  axes.legend(fontsize='small', loc='lower right')
  axes.grid(alpha=0.3)
  axes.set_xlim(0, read[-1])
  starts = np.flatnonzero(np.diff(data['document'].values))
  for panel in panels[: len(maps) + 1]:
    panel.set_xlabel('tokens read')
    for start in starts:
      panel.axvline(read[start], color=COLORS[1], lw=1.5)
  if curves:
    plot.draw(panels[-1], {run.name: run.workdir}, 'gate')
  figure.suptitle(f'state of {run.name}: {data.attrs["part"]}')
  return figure
