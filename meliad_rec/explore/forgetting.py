"""Losses that show how far back a model remembers."""

import functools
import math
import warnings

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.evaluation.name_distance import bin_label
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.recording import Request
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import colors_of
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import labels_of_runs
from meliad_rec.explore.shown import named
from meliad_rec.explore.shown import Runs
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import with_units
from meliad_rec.report.plot import in_legend
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.observed_run import Text

# Lines and markers of a run's curves: its own first, then those with a cleared
# state.
_STYLES = {'-': 'o', '--': 's', ':': '^', '-.': 'D'}


def by_position(
  runs: Runs,
  text: Text,
  bins: int = 24,
  labels: np.ndarray | None = None,
) -> Shown:
  """Shows the loss by the position in the document, with and without state.

  Args:
    runs: one run, or {name: run} with one vocabulary.
    text: a long document.
    bins: number of parts of the text, whose lengths grow.
    labels: ids of the labels of all tokens, if the models predict labels.

  Returns:
    'bits' [curve, part], the mean loss in bits per token; NaN where all labels
    are 0, which are not scored. A recurrent run has four curves: its own, and
    those with the state cleared at each segment, at each block, and once, after
    half of the text in whole blocks. A second panel shows how far these are
    above its own. Coordinates of a part are 'first', the index of its first
    token, and 'end', the index after its last token.

  Raises:
    ValueError: a run cannot read the text, labels are missing or not expected,
      vocabularies differ, `bins` is below 1, or texts of a run begin with
      another state (see `with_state`).
  """
  import xarray as xr

  check_count('bins', bins, 1)
  check_vocabularies(runs)
  curves, looks, middles = {}, [], []
  colors = colors_of(len(named(runs)))
  for color, (name, run) in zip(colors, named(runs).items(), strict=True):
    run.check_state_unmodified('by_position')
    run.check_readable(text, labels)
    T, clears = len(run.encode(text)), {name: None}
    # Otherwise the run is cleared at each segment anyway.
    model = run.sharded.model
    if model.cell.is_recurrent and not model.clear_state:
      W, segment = run.block, run.sharded.segment
      clears[f'{name}, cleared each segment ({segment})'] = segment
      clears[f'{name}, cleared each block ({W})'] = W
      half = -(-T // (2 * W)) * W
      if half < T:
        # At least half of the text, so that no second border follows.
        clears[f'{name}, cleared once (at {half})'] = half
        middles.append(half)
    styles = _STYLES.items()
    for (style, marker), (label, every) in zip(
      styles, clears.items(), strict=False
    ):
      found = run.predictions(text, 1, clear_every=every, labels=labels)
      curves[label] = found['nats'].values.astype(np.float64)
      looks.append((name, {'color': color, 'ls': style, 'marker': marker}))
  edges = np.unique(np.geomspace(16, max(T, 17), bins).astype(int))
  edges = np.unique([0, *edges[edges < T], *middles, T])
  # Tokens with the label 0 are not scored.
  scored_T = np.ones(T) if labels is None else np.asarray(labels) != 0
  counts = np.add.reduceat(scored_T.astype(np.float64), edges[:-1])
  counts[counts == 0] = np.nan
  bits = {
    label: np.add.reduceat(np.where(scored_T, nats_T, 0), edges[:-1])
    / counts
    / np.log(2)
    for label, nats_T in curves.items()
  }
  data = xr.Dataset(
    {'bits': (('curve', 'part'), np.array(list(bits.values())))},
    {
      'curve': list(curves),
      'first': ('part', edges[:-1]),
      'end': ('part', edges[1:]),
    },
  )
  with_units(data, bits='bits per token')
  cleared = len(curves) > len(named(runs))
  figure = new_figure(8, 7 if cleared else 4.5)
  top, *rest = figure.subplots(1 + cleared, squeeze=False)[:, 0]
  centers = np.sqrt(np.maximum(edges[:-1], 8) * edges[1:])
  of_runs = labels_of_runs(runs)
  for (label, values), (name, look) in zip(bits.items(), looks, strict=True):
    top.plot(
      centers,
      values,
      ms=4,
      label=in_legend(of_runs.get(label, label)),
      **look,
    )
    if label != name:
      rest[0].plot(centers, values - bits[name], ms=4, **look)
  for axes in (top, *rest):
    axes.set_xscale('log')
  where = 'position in the document (tokens)'
  label_curves(top, where, 'loss (bits per token)')
  if rest:
    label_curves(
      rest[0], where, 'rise of the loss when cleared\n(bits per token)'
    )
  return Shown(data, figure)


def by_distance(runs: Runs, text: str, clear_every: int | None = None) -> Shown:
  """Shows how well names are predicted, by the distance to their previous use.

  This is recall against distance: a model that remembers a name predicts it
  well wherever it was used before.

  Args:
    runs: one run, or {name: run} with one vocabulary. A recurrent run has a
      second curve, with the state cleared.
    text: a document, such as one of the task recall.
    clear_every: number of tokens after which the state is cleared, a multiple
      of a block; None: before each block.

  Returns:
    'bits' [curve, bin], the mean loss in bits per name; 'right' [curve, bin],
    the share of names of which each token is the most likely one; and 'count'
    [bin], the number of names. Coordinates of a bin are 'low' and 'high', the
    distances in tokens, from `low` to below `high`; 0 means first uses.

  Raises:
    ValueError: a run cannot read the text or predicts labels, the text holds no
      name, vocabularies differ, or `clear_every` is given but no run is
      recurrent.
  """
  import xarray as xr

  check_vocabularies(runs)
  models = [run.sharded.model for run in named(runs).values()]
  if clear_every is not None and not any(m.cell.is_recurrent for m in models):
    raise ValueError(
      f'clear_every is {clear_every}, but no run has a recurrent state. Leave '
      'it out.'
    )
  bits, right, looks, bins = {}, [], [], []
  colors = colors_of(len(models))
  for color, (name, run) in zip(colors, named(runs).items(), strict=True):
    names = Names.of(TokenLosses.of(run.documents([text]), run.vocabulary))
    bins = [b for b in names.bins() if len(b[2])]
    clears = {name: None}
    if run.sharded.model.cell.is_recurrent:
      every = run.block if clear_every is None else clear_every
      clears[f'{name}, state cleared every {every}'] = every
    for style, (label, every) in zip(_STYLES, clears.items(), strict=False):
      found = run.predictions(text, 1, clear_every=every)
      nats_N = names.sums(found['nats'].values)
      right_N = names.sums(found['rank'].values > 0) == 0
      bits[label] = [nats_N[at].mean() / np.log(2) for _, _, at in bins]
      right.append([right_N[at].mean() for _, _, at in bins])
      looks.append({'color': color, 'ls': style})
  if not bins:
    raise ValueError(
      'The text holds no name of three letters or more. Give a longer text.'
    )
  data = xr.Dataset(
    {
      'bits': (('curve', 'bin'), np.array(list(bits.values()))),
      'right': (('curve', 'bin'), np.array(right)),
      'count': ('bin', [len(at) for _, _, at in bins]),
    },
    {
      'curve': list(bits),
      'low': ('bin', [low for low, _, _ in bins]),
      'high': ('bin', [high for _, high, _ in bins]),
    },
  )
  with_units(data, bits='bits per name')
  figure = new_figure(8, 7)
  top, bottom = figure.subplots(2)
  of_runs = labels_of_runs(runs)
  for i, (label, look) in enumerate(zip(bits, looks, strict=True)):
    label = in_legend(of_runs.get(label, label))
    top.plot(data['bits'].values[i], marker='o', label=label, **look)
    bottom.plot(data['right'].values[i], marker='o', **look)
  ticks = [f'{bin_label(low, high)} ({len(at):,})' for low, high, at in bins]
  for axes in (top, bottom):
    axes.set_xticks(range(len(bins)), ticks, rotation=60)
  where = 'tokens back to the previous use of a name (number of names)'
  label_curves(top, where, 'loss (bits per name)')
  label_curves(bottom, where, 'share of names predicted right')
  bottom.set_ylim(-0.02, 1.02)
  return Shown(data, figure)


def forgetting(
  runs: Runs,
  text: Text,
  tokens: int = 512,
  samples: int = 16,
  labels: np.ndarray | None = None,
) -> Shown:
  """Shows the cost of clearing the state once, by the tokens read since.

  Args:
    runs: one recurrent run, or {name: run} with one vocabulary. Of several, any
      without a recurrent state are left out, with a warning.
    text: a document.
    tokens: number of tokens to read after the state was cleared.
    samples: number of places, spread evenly over the text, at which the state
      is cleared, each time starting from the state that the text led to.
    labels: ids of the labels of all tokens, if the models predict labels.

  Returns:
    'cost' [run, place, token], the rise of the loss in nats, NaN where a label
    is 0; the coordinate 'at' of a place is the number of tokens before it.

  Raises:
    ValueError: the text is too short, no run is recurrent, labels are missing
      or not expected, vocabularies differ, or a number is below 1.
  """
  import xarray as xr

  check_count('tokens', tokens, 1)
  runs = _recurrent(runs, 'forgetting', text, labels)
  places = _places(runs, text, tokens, samples)
  costs = [
    _costs(run.observer, run.encode(text), labels, places, tokens)
    for run in named(runs).values()
  ]
  if np.isnan(costs).all():
    raise ValueError(
      'All labels of the tokens read after the state was cleared are 0, so '
      'none is scored. Give more tokens or samples, or another text.'
    )
  data = xr.Dataset(
    {'cost': (('run', 'place', 'token'), np.array(costs))},
    {'run': list(named(runs)), 'at': ('place', places)},
  )
  with_units(data, cost='nats')
  figure = new_figure(8, 4)
  axes = figure.subplots()
  edges = np.unique(np.geomspace(1, tokens, 24).astype(int))
  edges = np.concatenate([[0], edges])
  pairs = list(zip(edges[:-1], edges[1:], strict=True))
  middles = [(a + b + 1) / 2 for a, b in pairs]
  labels_of, colors = labels_of_runs(runs), colors_of(len(runs))
  for color, (name, label) in zip(colors, labels_of.items(), strict=True):
    cost = data['cost'].sel(run=name) / np.log(2)
    parts = [cost.isel(token=slice(a, b)).mean('token') for a, b in pairs]
    by_place = xr.concat(parts, 'part')
    mean = by_place.mean('place')
    error = by_place.std('place', ddof=1) / np.sqrt(by_place.count('place'))
    axes.plot(middles, mean, 'o-', ms=3, color=color, label=in_legend(label))
    axes.fill_between(
      middles, mean - error, mean + error, color=color, alpha=0.2
    )
  axes.axhline(0, color='black', lw=0.8)
  axes.set_xscale('log')
  label_curves(
    axes,
    'tokens read since the state was cleared',
    'rise of the loss (bits per token)',
  )
  figure.suptitle(f'mean of {len(places)} places, and its standard error')
  return Shown(data, figure)


def _costs(observer, ids_T, labels_T, places, tokens) -> list[np.ndarray]:
  """Returns, for each place, the cost of clearing the state there."""
  request, state, at, costs = Request(top=1), observer.start(), 0, []
  read = functools.partial(observer.read, ids_T, labels_T=labels_T)
  for place in places:
    _, state = read(Request(), state, at, place)
    at, end = place, place + tokens
    own, _ = read(request, state, place, end)
    bare, _ = read(request, observer.clear(state), place, end)
    costs.append(bare.tokens['nats'] - own.tokens['nats'])
  return costs


def state_gradients(
  runs: Runs,
  text: Text,
  back: int = 8,
  samples: int = 8,
  labels: np.ndarray | None = None,
) -> Shown:
  """Shows how much the loss of a block depends on states of k blocks ago.

  Args:
    runs: one recurrent run, or {name: run} with one vocabulary. Of several, any
      without a recurrent state are left out, with a warning, and so are those
      whose states gradients do not reach, such as the stored keys of a
      Memorizing Transformer.
    text: a document.
    back: largest k.
    samples: number of blocks, spread evenly over the text.
    labels: ids of the labels of all tokens, if the models predict labels.

  Returns:
    'gradient' [run, place, back], the L2 norm of the gradient of the block's
    loss, in nats, with respect to the state k blocks before its start, k = 0 to
    `back`, times the L2 norm of this state. 'at' is the number of tokens before
    the oldest of these states, and 'block' [run] the length of a block.

  Raises:
    ValueError: the text is too short, no run is recurrent, labels are missing
      or not expected, vocabularies differ, `back` is below 0 or `samples` below
      1, or gradients reach the states of no run.
  """
  import xarray as xr

  check_count('back', back, 0)
  runs = _recurrent(runs, 'state_gradients', text, labels)
  longest = max(run.block for run in named(runs).values())
  places = _places(runs, text, (back + 1) * longest, samples)
  gradients, unreached = {}, []
  for name, run in named(runs).items():
    observer, ids_T = run.observer, run.encode(text)
    state, at, norms = observer.start(), 0, []
    for place in places:
      _, state = observer.read(ids_T, Request(), state, at, place)
      at = place
      norms.append(observer.state_gradients(ids_T, state, place, back, labels))
    if not np.any(norms):
      if labels is not None:
        ends = places + (back + 1) * run.block
        scored_T = np.asarray(labels) != 0
        if not any(scored_T[end - run.block : end].any() for end in ends):
          raise ValueError(
            f'All labels of the blocks read by {name} are 0, so none is '
            'scored. Give more samples, or another text.'
          )
      unreached.append(name)
      continue
    gradients[name] = np.array(norms)[:, ::-1]
  if unreached:
    problem = (
      f'Gradients do not reach the states of {", ".join(unreached)}. A '
      'Memorizing Transformer, for example, stores keys and values without '
      'gradients.'
    )
    if not gradients:
      raise ValueError(f'{problem} Choose another run.')
    warnings.warn(f'{problem} Such runs are left out.', stacklevel=2)
  runs = {name: named(runs)[name] for name in gradients}
  data = xr.Dataset(
    {'gradient': (('run', 'place', 'back'), np.array([*gradients.values()]))},
    {
      'run': list(runs),
      'at': ('place', places),
      'back': np.arange(back + 1),
      'block': ('run', [run.block for run in runs.values()]),
    },
  )
  with_units(data, gradient='nats per block')
  figure = new_figure(7, 4)
  axes = figure.subplots()
  labels_of, colors = labels_of_runs(runs), colors_of(len(runs))
  for color, (name, label) in zip(colors, labels_of.items(), strict=True):
    values = data['gradient'].sel(run=name).values
    tokens = data['back'].values * int(data['block'].sel(run=name))
    axes.plot(tokens, values.T, color=color, alpha=0.2, lw=0.8)
    axes.plot(
      tokens,
      values.mean(0),
      'o-',
      color=color,
      label=plain(f'mean of {label}'),
    )
  axes.set_yscale('log')
  axes.plot([], [], color='black', alpha=0.3, lw=0.8, label='single blocks')
  label_curves(
    axes,
    'tokens from the state to the block',
    'gradient of the loss x size of the state\n(nats per block)',
  )
  return Shown(data, figure)


def _recurrent(runs: Runs, what: str, text: Text, labels) -> Runs:
  """Returns the runs that are recurrent, for a function; warns of others.

  Raises:
    ValueError: there is none, or it cannot read the text or the labels.
  """
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
    run.check_readable(text, labels)
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
