"""Losses that show how far back a model remembers."""

import dataclasses
import math
import warnings

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.recording import Request
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import named
from meliad_rec.explore.shown import Runs
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.observed_run import Text


def by_position(runs: Runs, text: Text, bins: int = 24) -> Shown:
  """Shows the loss by the position in the document, with and without state.

  Args:
    runs: one run, or {name: run} with one vocabulary.
    text: a long document.
    bins: number of parts of the text, whose lengths grow.

  Returns:
    'bits' [curve, part], the mean loss in bits per token. A recurrent run has
    four curves: its own, and those with the state cleared at each segment, at
    each block, and once, after half of the text in whole blocks. Coordinates of
    a part are 'first', the index of its first token, and 'end', the index after
    its last token.

  Raises:
    ValueError: a run cannot read the text, vocabularies differ, or `bins` is
      below 1.
  """
  import xarray as xr

  check_count('bins', bins, 1)
  check_vocabularies(runs)
  curves, middles = {}, []
  for name, run in named(runs).items():
    curves[name] = run.predictions(text, 1)
    if run.sharded.model.cell.is_recurrent:
      for every, what in (
        (run.sharded.segment, 'segment'),
        (run.block, 'block'),
      ):
        found = run.predictions(text, 1, clear_every=every)
        curves[f'{name}, cleared each {what} ({every})'] = found
      T = curves[name].sizes['token']
      half = -(-T // (2 * run.block)) * run.block
      if half < T:
        # At least half of the text, so that no second border follows.
        found = run.predictions(text, 1, clear_every=half)
        curves[f'{name}, cleared once (at {half})'] = found
        middles.append(half)
  T = next(iter(curves.values())).sizes['token']
  edges = np.unique(np.geomspace(16, max(T, 17), bins).astype(int))
  edges = np.unique([0, *edges[edges < T], *middles, T])
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
      'end': ('part', edges[1:]),
    },
  )
  figure = new_figure(8, 4.5)
  axes = figure.subplots()
  centers = np.sqrt(np.maximum(edges[:-1], 8) * edges[1:])
  labels = _labels(runs)
  for i, (name, values) in enumerate(zip(curves, bits, strict=True)):
    label = labels.get(name, name)
    # A run's own curve may coincide with others: it is dashed, above them.
    own = {'ls': '--', 'zorder': 3} if name in labels else {}
    color = COLORS[i % 6]
    axes.plot(
      centers, values, marker='o', ms=3, color=color, label=label, **own
    )
  axes.set_xscale('log')
  axes.set_xlabel('position in the document (tokens)')
  axes.set_ylabel('loss (bits per token)')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def by_distance(runs: Runs, text: str, clear_every: int | None = None) -> Shown:
  """Shows the loss of names by the distance back to their previous use.

  This is recall against distance: a model that remembers a name predicts it
  well wherever it was used before.

  Args:
    runs: one run, or {name: run} with one vocabulary. A recurrent run has a
      second curve, with the state cleared.
    text: a document, such as one of the task recall.
    clear_every: number of tokens after which the state is cleared, a multiple
      of a block; None: before each block.

  Returns:
    'bits' [curve, bin], the mean loss in bits per name, and 'count' [bin], the
    number of names. Coordinates of a bin are 'low' and 'high', the distances in
    tokens, from `low` to below `high`; 0 means first uses.

  Raises:
    ValueError: a run cannot read the text, it holds no name, or vocabularies
      differ.
  """
  import xarray as xr

  check_vocabularies(runs)
  curves, bins = {}, []
  for name, run in named(runs).items():
    plain = TokenLosses.of(run.documents([text]), run.vocabulary)
    names = Names.of(plain)
    bins = [b for b in names.bins() if len(b[2])]
    clears = {name: None}
    if run.sharded.model.cell.is_recurrent:
      every = run.block if clear_every is None else clear_every
      clears[f'{name}, state cleared every {every}'] = every
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
  of_runs = _labels(runs)
  for i, (name, values) in enumerate(curves.items()):
    label = of_runs.get(name, name)
    axes.plot(range(len(bins)), values, 'o-', color=COLORS[i % 6], label=label)
  spans = [f'{low:,}-{high - 1:,}' for low, high, _ in bins]
  labels = ['first' if span.startswith('0-') else span for span in spans]
  axes.set_xticks(range(len(bins)), labels, rotation=60)
  axes.set_xlabel('tokens back to the previous use of a name')
  axes.set_ylabel('loss (bits per name)')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def forgetting(
  runs: Runs, text: Text, tokens: int = 512, samples: int = 16
) -> Shown:
  """Shows the cost of clearing the state once, by the tokens read since.

  Args:
    runs: one recurrent run, or {name: run} with one vocabulary. Of several, any
      without a recurrent state are left out, with a warning.
    text: a document.
    tokens: number of tokens to read after the state was cleared.
    samples: number of places, spread evenly over the text, at which the state
      is cleared, each time starting from the state that the text led to.

  Returns:
    'cost' [run, place, token], the rise of the loss in nats; the coordinate
    'at' of a place is the number of tokens before it.

  Raises:
    ValueError: the text is too short, no run is recurrent, vocabularies differ,
      or a number is below 1.
  """
  import xarray as xr

  check_count('tokens', tokens, 1)
  runs = _recurrent(runs, 'forgetting')
  places = _places(runs, text, tokens, samples)
  costs = [
    _costs(run.observer, run.encode(text), places, tokens)
    for run in named(runs).values()
  ]
  data = xr.Dataset(
    {'cost': (('run', 'place', 'token'), np.array(costs))},
    {'run': list(named(runs)), 'at': ('place', places)},
  )
  figure = new_figure(8, 4)
  axes = figure.subplots()
  edges = np.unique(np.geomspace(1, tokens, 24).astype(int))
  edges = np.concatenate([[0], edges])
  pairs = list(zip(edges[:-1], edges[1:], strict=True))
  middles = [(a + b + 1) / 2 for a, b in pairs]
  for i, (name, label) in enumerate(_labels(runs).items()):
    cost = data['cost'].sel(run=name).values / np.log(2)
    by_place = np.array([cost[:, a:b].mean(1) for a, b in pairs])
    mean, error = by_place.mean(1), by_place.std(1) / np.sqrt(len(places))
    color = COLORS[i % 6]
    axes.plot(middles, mean, 'o-', ms=3, color=color, label=label)
    axes.fill_between(
      middles, mean - error, mean + error, color=color, alpha=0.2
    )
  axes.axhline(0, color='black', lw=0.8)
  axes.set_xscale('log')
  axes.set_xlabel('tokens read since the state was cleared')
  axes.set_ylabel('rise of the loss (bits per token)')
  axes.set_title(f'mean of {len(places)} places, and its standard error')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def _costs(observer, ids_T, places, tokens: int) -> list[np.ndarray]:
  """Returns, for each place, the cost of clearing the state there."""
  request, state, at, costs = Request(top=1), observer.start(), 0, []
  for place in places:
    _, state = observer.read(ids_T, Request(), state, at, place)
    at, end = place, place + tokens
    own, _ = observer.read(ids_T, request, state, place, end)
    bare, _ = observer.read(ids_T, request, observer.clear(state), place, end)
    costs.append(bare.tokens['nats'] - own.tokens['nats'])
  return costs


def state_gradients(
  runs: Runs, text: Text, back: int = 8, samples: int = 8
) -> Shown:
  """Shows how much the loss of a block depends on states of k blocks ago.

  Args:
    runs: one recurrent run, or {name: run} with one vocabulary. Of several, any
      without a recurrent state are left out, with a warning.
    text: a document.
    back: largest k.
    samples: number of blocks, spread evenly over the text.

  Returns:
    'gradient' [run, place, back], the L2 norm of the gradient of the block's
    loss, in nats, with respect to the state k blocks before its start, k = 0 to
    `back`, times the L2 norm of this state. 'at' is the number of tokens before
    the oldest of these states, and 'block' [run] the length of a block.

  Raises:
    ValueError: the text is too short, no run is recurrent, vocabularies differ,
      `back` is below 0 or `samples` below 1, or gradients do not reach the
      states of a run, such as the stored keys of a Memorizing Transformer.
  """
  import xarray as xr

  check_count('back', back, 0)
  runs = _recurrent(runs, 'state_gradients')
  longest = max(run.block for run in named(runs).values())
  places = _places(runs, text, (back + 1) * longest, samples)
  gradients = []
  for name, run in named(runs).items():
    observer, ids_T = run.observer, run.encode(text)
    state, at, norms = observer.start(), 0, []
    for place in places:
      _, state = observer.read(ids_T, Request(), state, at, place)
      at = place
      norms.append(observer.state_gradients(ids_T, state, place, back))
    if not np.any(norms):
      raise ValueError(
        f'Gradients do not reach the states of {name}. A Memorizing '
        'Transformer, for example, stores keys and values without gradients. '
        'Leave this run out.'
      )
    gradients.append(np.array(norms)[:, ::-1])
  data = xr.Dataset(
    {'gradient': (('run', 'place', 'back'), np.array(gradients))},
    {
      'run': list(named(runs)),
      'at': ('place', places),
      'back': np.arange(back + 1),
      'block': ('run', [run.block for run in named(runs).values()]),
    },
  )
  figure = new_figure(7, 4)
  axes = figure.subplots()
  for i, (name, label) in enumerate(_labels(runs).items()):
    values = data['gradient'].sel(run=name).values
    tokens = data['back'].values * int(data['block'].sel(run=name))
    color = COLORS[i % 6]
    axes.plot(tokens, values.T, color=color, alpha=0.2, lw=0.8)
    axes.plot(
      tokens, values.mean(0), 'o-', color=color, label=f'mean of {label}'
    )
  axes.set_yscale('log')
  axes.set_xlabel('tokens from the state to the block')
  axes.set_ylabel('gradient of the loss x size of the state\n(nats per block)')
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  return Shown(data, figure)


def _labels(runs: Runs) -> dict[str, str]:
  """Returns {name of a run: its name, size and cost}."""
  return {n: f'{n} ({size_and_cost(run)})' for n, run in named(runs).items()}


def _recurrent(runs: Runs, what: str) -> Runs:
  """Returns the runs that are recurrent, for a function; warns of others."""
  check_vocabularies(runs)
  known = named(runs)
  kept = {n: r for n, r in known.items() if r.sharded.model.cell.is_recurrent}
  left = ', '.join(name for name in known if name not in kept)
  if not kept:
    raise ValueError(
      f'There is no recurrent state in {left}. Choose a run of a recurrent '
      'architecture.'
    )
  if left:
    warnings.warn(
      f'There is no recurrent state in {left}, which is left out.', stacklevel=3
    )
  for run in kept.values():
    run.check_state_unmodified(what)
  return kept


def _places(runs: Runs, text: Text, after: int, samples: int) -> np.ndarray:
  """Returns block borders of all runs, spread evenly over a text.

  Args:
    runs: recurrent runs.
    text: the text.
    after: number of tokens that must follow each border.
    samples: maximum number of borders.

  Raises:
    ValueError: the text is too short, or `samples` is below 1.
  """
  check_count('samples', samples, 1)
  known = named(runs)
  W = math.lcm(*(run.block for run in known.values()))
  T = len(next(iter(known.values())).encode(text))
  if T - after < W:
    raise ValueError(
      f'The text has {T} tokens, but at least {after + W} are needed: a block '
      f'of {W}, and {after} after it. Give a longer text.'
    )
  return np.unique(np.linspace(W, T - after, samples).astype(int) // W * W)
