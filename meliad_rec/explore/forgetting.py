"""Losses that show how far back a model remembers."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.observer import Request
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import new_figure
from meliad_rec.explore.shown import Shown
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

Runs = TrainedRun | Mapping[str, TrainedRun]


def by_position(runs: Runs, text: Text, bins: int = 24) -> Shown:
  """Shows the loss by the position in the document, with and without state.

  Args:
    runs: one run, or {name: run} with one vocabulary.
    text: a long document.
    bins: number of parts of the text, whose lengths grow.

  Returns:
    'bits' [curve, part], the mean loss in bits per token. A recurrent run has
    three curves: its own, one with the state cleared at each segment, and one
    with the state cleared at each block. Coordinates of a part are 'first' and
    'last', the positions of its first token and after its last.

  Raises:
    ValueError: a run cannot read the text.
  """
  import xarray as xr

  curves = {}
  for name, run in _named(runs).items():
    curves[name] = run.predictions(text, 1)
    if run.sharded.model.cell.is_recurrent:
      for every, what in (
        (run.sharded.segment, 'segment'),
        (run.block, 'block'),
      ):
        found = run.predictions(text, 1, clear_every=every)
        curves[f'{name}, cleared each {what} ({every})'] = found
  T = next(iter(curves.values())).sizes['token']
  edges = np.unique(np.geomspace(16, max(T, 17), bins).astype(int))
  edges = np.concatenate([[0], edges[edges < T], [T]])
  bits = [
    np.add.reduceat(found['nats'].values.astype(np.float64), edges[:-1])
    / np.diff(edges)
    / np.log(2)
    for found in curves.values()
  ]
  data = xr.Dataset(
    {'bits': (('curve', 'part'), np.array(bits))},
    {
      'curve': list(curves),
      'first': ('part', edges[:-1]),
      'last': ('part', edges[1:]),
    },
  )
  figure = new_figure(8, 4.5)
  axes = figure.subplots()
  middles = np.sqrt(np.maximum(edges[:-1], 8) * edges[1:])
  for i, (name, values) in enumerate(zip(curves, bits, strict=True)):
    axes.plot(middles, values, 'o-', ms=3, color=COLORS[i % 6], label=name)
  axes.set_xscale('log')
  axes.set_xlabel('position in the document (tokens)')
  axes.set_ylabel('loss (bits per token)')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def by_distance(runs: Runs, text: str) -> Shown:
  """Shows the loss of names by the distance back to their previous use.

  This is recall against distance: a model that remembers a name predicts it
  well wherever it was used before.

  Args:
    runs: one run, or {name: run}. A recurrent run has a second curve, with the
      state cleared at each block.
    text: a document, such as one of the task recall.

  Returns:
    'bits' [curve, bin], the mean loss in bits per name, and 'count' [bin], the
    number of names. Coordinates of a bin are 'low' and 'high', the distances in
    tokens, from `low` to below `high`; 0 stands for first uses.

  Raises:
    ValueError: a run cannot read the text, or it holds no name.
  """
  import xarray as xr

  curves, bins = {}, []
  for name, run in _named(runs).items():
    plain = TokenLosses.of(run.documents([text]), run.vocabulary)
    names = Names.of(plain)
    bins = [b for b in names.bins() if len(b[2])]
    clears = {name: None}
    if run.sharded.model.cell.is_recurrent:
      clears[f'{name}, state cleared'] = run.block
    for label, every in clears.items():
      nats_T = run.predictions(text, 1, clear_every=every)['nats'].values
      nats = names.nats(dataclasses.replace(plain, nats=nats_T))
      curves[label] = [nats[at].mean() / np.log(2) for _, _, at in bins]
  if not bins:
    raise ValueError(
      'The text holds no name of three letters or more. Give a longer text.'
    )
  data = xr.Dataset(
    {
      'bits': (('curve', 'bin'), np.array(list(curves.values()))),
      'count': ('bin', [len(at) for _, _, at in bins]),
    },
    {
      'curve': list(curves),
      'low': ('bin', [low for low, _, _ in bins]),
      'high': ('bin', [high for _, high, _ in bins]),
    },
  )
  figure = new_figure(8, 4.5)
  axes = figure.subplots()
  for i, (name, values) in enumerate(curves.items()):
    axes.plot(range(len(bins)), values, 'o-', color=COLORS[i % 6], label=name)
  spans = [f'{low:,}-{high - 1:,}' for low, high, _ in bins]
  labels = ['first' if span.startswith('0-') else span for span in spans]
  axes.set_xticks(range(len(bins)), labels, rotation=60)
  axes.set_xlabel('tokens back to the previous use of a name')
  axes.set_ylabel('loss (bits per name)')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def forgetting(
  run: TrainedRun, text: Text, tokens: int = 512, samples: int = 16
) -> Shown:
  """Shows the cost of clearing the state once, by the tokens read since.

  Args:
    run: a recurrent run.
    text: a document.
    tokens: number of tokens to read after the state was cleared.
    samples: number of places, spread evenly over the text, at which the state
      is cleared, each time starting from the state that the text led to.

  Returns:
    'cost' [place, token], the rise of the loss in nats; the coordinate 'at' of
    a place is the number of tokens before it.

  Raises:
    ValueError: the text is too short, or the run is not recurrent.
  """
  import xarray as xr

  observer, ids_T = run.observer, run.encode(text)
  places = _places(run, ids_T, tokens, samples)
  request, state, at, costs = Request(top=1), observer.start(), 0, []
  for place in places:
    _, state = observer.read(ids_T, Request(), state, at, place)
    at, end = place, place + tokens
    own, _ = observer.read(ids_T, request, state, place, end)
    bare, _ = observer.read(ids_T, request, observer.clear(state), place, end)
    costs.append(bare.tokens['nats'] - own.tokens['nats'])
  data = xr.Dataset(
    {'cost': (('place', 'token'), np.array(costs))}, {'at': ('place', places)}
  )
  figure = new_figure(8, 4)
  axes = figure.subplots()
  edges = np.unique(np.geomspace(1, tokens, 24).astype(int))
  edges = np.concatenate([[0], edges])
  pairs = list(zip(edges[:-1], edges[1:], strict=True))
  cost = data['cost'].values / np.log(2)
  by_place = np.array([cost[:, a:b].mean(1) for a, b in pairs])
  middles = [(a + b + 1) / 2 for a, b in pairs]
  mean, error = by_place.mean(1), by_place.std(1) / np.sqrt(len(places))
  axes.plot(middles, mean, 'o-', ms=3, color=COLORS[0])
  axes.fill_between(
    middles, mean - error, mean + error, color=COLORS[0], alpha=0.2
  )
  axes.axhline(0, color='black', lw=0.8)
  axes.set_xscale('log')
  axes.set_xlabel('tokens read since the state was cleared')
  axes.set_ylabel('rise of the loss (bits per token)')
  axes.set_title(
    f'{run.workdir.name}: mean of {len(places)} places, and its standard error'
  )
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def state_gradients(
  run: TrainedRun, text: Text, back: int = 8, samples: int = 8
) -> Shown:
  """Shows how much the loss of a block depends on states of k blocks ago.

  Args:
    run: a recurrent run.
    text: a document.
    back: largest k.
    samples: number of blocks, spread evenly over the text.

  Returns:
    'gradient' [place, back], the L2 norm of the gradient of the block's loss,
    in nats, with respect to the state k blocks before its start, k = 0 to
    `back`, times the L2 norm of this state. 'at' is the number of tokens before
    the first of these states.

  Raises:
    ValueError: the text is too short, or the run is not recurrent.
  """
  import xarray as xr

  observer, ids_T = run.observer, run.encode(text)
  W = observer.block
  places = _places(run, ids_T, (back + 1) * W, samples)
  state, at, norms = observer.start(), 0, []
  for place in places:
    _, state = observer.read(ids_T, Request(), state, at, place)
    at = place
    norms.append(observer.state_gradients(ids_T, state, place, back))
  data = xr.Dataset(
    {'gradient': (('place', 'back'), np.array(norms)[:, ::-1])},
    {'at': ('place', places), 'back': np.arange(back + 1)},
  )
  figure = new_figure(7, 4)
  axes = figure.subplots()
  values = data['gradient'].values
  axes.plot(values.T, color=COLORS[5], alpha=0.5, lw=0.8)
  axes.plot(values.mean(0), 'o-', color=COLORS[0], label='mean')
  axes.set_yscale('log')
  axes.set_xlabel(f'blocks of {W} tokens back')
  axes.set_ylabel('gradient of the loss x size of the state\n(nats per block)')
  axes.legend()
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def _named(runs: Runs) -> Mapping[str, TrainedRun]:
  return runs if isinstance(runs, Mapping) else {runs.workdir.name: runs}


def _places(run, ids_T, after: int, samples: int) -> np.ndarray:
  """Returns block borders, spread evenly over a text.

  Args:
    run: a recurrent run.
    ids_T: ids of the tokens of the text.
    after: number of tokens that must follow each border.
    samples: maximum number of borders.

  Raises:
    ValueError: the text is too short, or the run is not recurrent.
  """
  W, span, cell = run.block, len(ids_T) - after, run.sharded.model.cell
  if not cell.is_recurrent or span < W:
    raise ValueError(
      f'A recurrent run and a text of at least {after + W} tokens are needed, '
      f'got a {type(cell).__name__} and {len(ids_T)} tokens. Choose another '
      'run, or a longer text.'
    )
  return np.unique(np.linspace(W, span, samples).astype(int) // W * W)
