"""Linear probes of the recurrent state, and what the model loses without them.

A probe shows that something can be read from the state, not that the model uses
it. `ablate` therefore removes the probe's directions from the state, and
compares the rise of the loss with that for random directions.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import new_figure
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.state_map import slots_of
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Probe(Shown):
  """A ridge regression from the state to classes, and how well it does.

  Attributes:
    directions: [classes, D], weights of the regression on all texts, where D is
      the size of the whole state of a layer.
    layer: index of the layer; None means the highest.
  """

  directions: np.ndarray
  layer: int | None


def probe(
  run: TrainedRun,
  texts: Sequence[Text],
  targets: Sequence[np.ndarray],
  distances: Sequence[np.ndarray] | None = None,
  layer: int | None = None,
  every: int | None = None,
  penalty: float = 1.0,
) -> Probe:
  """Tries to read something from the state by a ridge regression.

  Each text is predicted by a regression on the other texts (in five groups).

  Args:
    run: a recurrent run.
    texts: documents, at least five.
    targets: for each text, an array with one class for each token: what the
      state should hold after this token, such as the place of an agent.
    distances: for each text, an array with one number for each token, such as
      the number of tokens since a name was given. The accuracy is shown by this
      number; None shows it by the position in the text.
    layer: index of the recurrent layer; None means the highest.
    every: number of tokens between two states; None means one block.
    penalty: weight of the squared directions, relative to the variance of the
      state.

  Returns:
    Of each state, 'target' and 'predicted' class, 'document', 'tokens' read and
    'distance'; and in attributes 'accuracy' and 'most_common', the share of the
    most common class.

  Raises:
    ValueError: there are fewer than five texts, or numbers of targets and
      tokens differ.
  """
  import xarray as xr

  if len(texts) < _FOLDS or len(texts) != len(targets):
    raise ValueError(
      f'A probe needs at least {_FOLDS} texts with their targets, got '
      f'{len(texts)} texts and targets of {len(targets)}.'
    )
  x, y, document, read, far = [], [], [], [], []
  for number, (text, target) in enumerate(zip(texts, targets, strict=True)):
    states = run.states(text, every)
    s_NSD, _ = slots_of(states, layer)
    tokens = states['tokens'].values[1:]
    count = len(run.encode(text))
    if len(target) != count:
      raise ValueError(
        f'Text {number} has {count} tokens, but {len(target)} targets. Give '
        'one target for each token.'
      )
    x.append(s_NSD[1:].reshape(len(tokens), -1))
    y.append(np.asarray(target)[tokens - 1])
    document.append(np.full(len(tokens), number))
    read.append(tokens)
    by = tokens if distances is None else distances[number][tokens - 1]
    far.append(np.asarray(by))
  x, y, document, read, far = map(np.concatenate, (x, y, document, read, far))
  classes, y = np.unique(y, return_inverse=True)
  predicted = np.zeros_like(y)
  for fold in range(_FOLDS):
    out = document % _FOLDS == fold
    weights, center = ridge(x[~out], np.eye(len(classes))[y[~out]], penalty)
    predicted[out] = ((x[out] - center) @ weights.T).argmax(1)
  directions, _ = ridge(x, np.eye(len(classes))[y], penalty)
  data = xr.Dataset(
    {
      'target': ('state', classes[y]),
      'predicted': ('state', classes[predicted]),
      'document': ('state', document),
      'tokens': ('state', read),
      'distance': ('state', far),
    },
    attrs={
      'accuracy': float((y == predicted).mean()),
      'most_common': float(np.bincount(y).max() / len(y)),
    },
  )
  label = 'tokens read' if distances is None else 'distance (tokens)'
  return Probe(data, _draw(data, label), directions, layer)


def ridge(x_ND, y_NC, penalty: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns the weights [C, D] of a ridge regression, and the mean of x."""
  center = x_ND.mean(0)
  x_ND = np.asarray(x_ND - center, np.float64)
  N, D = x_ND.shape
  small = penalty * (x_ND**2).sum() / D
  y_NC = y_NC - y_NC.mean(0)
  if D <= N:
    gram = x_ND.T @ x_ND + small * np.eye(D)
    return np.linalg.solve(gram, x_ND.T @ y_NC).T, center
  gram = x_ND @ x_ND.T + small * np.eye(N)
  return (x_ND.T @ np.linalg.solve(gram, y_NC)).T, center


def _draw(data, label):
  figure = new_figure(7, 4)
  axes = figure.subplots()
  far = data['distance'].values
  right = (data['target'] == data['predicted']).values
  edges = np.unique(np.quantile(far, np.linspace(0, 1, 13)))
  bin_N = np.clip(np.searchsorted(edges, far, 'right') - 1, 0, len(edges) - 2)
  for_bins = [bin_N == i for i in range(max(len(edges) - 1, 1))]
  means = [right[at].mean() for at in for_bins if at.any()]
  places = [far[at].mean() for at in for_bins if at.any()]
  axes.plot(places, means, 'o-', color=COLORS[0], label='probe')
  common = data.attrs['most_common']
  axes.axhline(common, color='black', ls=':', label='the most common class')
  axes.set_ylim(0, 1.02)
  axes.set_xlabel(label)
  axes.set_ylabel('share of states read correctly')
  axes.legend()
  axes.grid(alpha=0.3)
  return figure


def ablate(
  run: TrainedRun,
  found: Probe,
  texts: Sequence[Text],
  labels: Sequence[np.ndarray] | None = None,
  tokens: int | None = None,
  random: int = 8,
  seed: int = 0,
) -> Shown:
  """Removes a probe's directions from the state, and shows what that costs.

  The state at the middle of each text loses its part along the directions, and
  then the model reads on. If the rise of the loss is no greater than for random
  directions, the model does not use what the probe reads.

  Args:
    run: the run of the probe.
    found: result of `probe`.
    texts: documents.
    labels: labels of the tokens of each text, if the model predicts labels.
    tokens: number of tokens to read afterward; None means one block.
    random: number of draws of as many random directions.
    seed: seed of these draws.

  Returns:
    'rise' [text, kind], the rise of the loss in nats per token, for kind
    'probe' and 'random 0' and so on.

  Raises:
    ValueError: a text is too short.
  """
  import xarray as xr

  W = run.block
  tokens = tokens or W
  rng = np.random.default_rng(seed)
  rank = np.linalg.matrix_rank(found.directions)
  basis = np.linalg.svd(found.directions, full_matrices=False)[2][:rank]
  D = basis.shape[1]
  bases = {'probe': basis} | {
    f'random {i}': np.linalg.qr(rng.normal(size=(D, rank)))[0].T
    for i in range(random)
  }
  rises = []
  for number, text in enumerate(texts):
    ids_T = run.encode(text)
    at = len(ids_T) // 2 // W * W
    rest = ids_T[at : at + tokens]
    if not at or not len(rest):
      raise ValueError(
        f'Text {number} has {len(ids_T)} tokens, but at least {2 * W} are '
        'needed. Give longer texts.'
      )
    options = {}
    if labels is not None:
      options['labels'] = np.asarray(labels[number])[at : at + tokens]
    states = run.states(ids_T[:at], at)
    state = states.isel(border=-1)
    loss = lambda state, before=ids_T[:at], rest=rest, options=options: float(
      run.with_state(state, before)
      .predictions(rest, 1, **options)['nats']
      .mean()
    )
    own = loss(state)
    changed = [_without(state, states, found.layer, b) for b in bases.values()]
    rises.append([loss(one) - own for one in changed])
  data = xr.Dataset(
    {'rise': (('text', 'kind'), np.array(rises))}, {'kind': list(bases)}
  )
  figure = new_figure(6, 3.5)
  axes = figure.subplots()
  means = data['rise'].mean('text').values
  errors = data['rise'].std('text').values / np.sqrt(len(rises))
  colors = [COLORS[1], *[COLORS[5]] * random]
  axes.bar(range(len(means)), means, yerr=errors, color=colors)
  axes.set_xticks(range(len(means)), list(bases), rotation=60)
  axes.set_ylabel('rise of the loss\n(nats per token)')
  axes.set_title(f'{rank} of {D} directions of the state removed', size=10)
  axes.grid(axis='y', alpha=0.3)
  return Shown(data, figure)


def _without(state, states, layer, basis):
  """Returns a state without its part along some directions of one layer."""
  changed = state.copy(deep=True)
  s_NSD, name = slots_of(states, layer)
  flat = s_NSD[-1].reshape(-1).astype(np.float64)
  kept = (flat - basis.T @ (basis @ flat)).astype(np.float32)
  a = changed[name]
  if 'layer' in a.dims:
    number = a['layer'].values[-1] if layer is None else layer
    at = {'layer': number}
    a.loc[at] = kept.reshape(a.loc[at].shape)
  else:
    a.values = kept.reshape(a.shape)
  return changed
