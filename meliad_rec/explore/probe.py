"""Linear probes of the recurrent state (Alain and Bengio 2017), and ablations.

A probe shows that something can be read from the state, not that the model uses
it. `ablate` therefore removes from the state the directions in which classes
differ, and compares the rise of the loss with that for random directions.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import Shown
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.observed_run import check_layer
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Probe(Shown):
  """Result of `probe`: how well it does, and the directions of the classes.

  Attributes:
    directions: [classes, D], the mean state of each class minus the mean over
      all states, where D is the number of elements of all floating-point parts
      of the state, in their order. Without its part along these directions, the
      state has the same mean for all classes, so that no linear probe can tell
      them apart (Belrose et al. 2023).
    layer: index of the layer whose state was read; None means all layers.
    parameters: sha256 of the parameters of the run; None if unknown.
  """

  directions: np.ndarray
  layer: int | None
  parameters: str | None = None


def probe(
  run: TrainedRun,
  texts: Sequence[Text],
  targets: Sequence[np.ndarray],
  distances: Sequence[np.ndarray] | None = None,
  layer: int | None = None,
  every: int | None = None,
  penalty: float = 0.01,
) -> Probe:
  """Tries to read something from the state by a ridge regression.

  Each text is predicted by a regression on the other texts (in five groups).

  Args:
    run: a recurrent run.
    texts: documents, at least five.
    targets: for each text, an array with one class for each token: what the
      state should hold after this token, such as the place of an agent. A model
      that predicts the next token has not read the last token before a border
      of blocks, so its state is compared with the target of the one before.
    distances: for each text, an array with one number for each token, such as
      the number of tokens since a name was given. The accuracy is shown by this
      number; None shows it by the position in the text.
    layer: index of a recurrent layer; None reads the state of all layers.
    every: number of tokens between two states; None means one block.
    penalty: weight of the squared coefficients of the regression, relative to
      the variance of the state.

  Returns:
    For each state, 'target' and 'predicted' class, 'document', 'tokens' read
    and 'distance'; and in attributes 'accuracy' and 'most_common', the share of
    the most common class.

  Raises:
    ValueError: there are fewer than five texts, numbers of targets or distances
      and tokens differ, a text is empty or shorter than a block, or the layer
      has no recurrent state or is no integer.
  """
  import xarray as xr

  check_run(run)
  if len(texts) < _FOLDS or len(texts) != len(targets):
    raise ValueError(
      f'A probe needs at least {_FOLDS} texts with their targets, got '
      f'{len(texts)} texts and targets of {len(targets)}.'
    )
  if distances is not None and len(distances) != len(texts):
    raise ValueError(
      f'A probe needs distances of each text, got {len(texts)} texts and '
      f'distances of {len(distances)}.'
    )
  run.check_texts(texts)
  check_layer(layer)
  each = [
    _examples(run, number, text, target, layer, every)
    for number, (text, target) in enumerate(zip(texts, targets, strict=True))
  ]
  x, y, document, read, _ = map(np.concatenate, zip(*each, strict=True))
  far, label = read, 'tokens read'
  if distances is not None:
    far = []
    for number, (one, text) in enumerate(zip(each, texts, strict=True)):
      of_text = _for_tokens(run, number, text, distances[number], 'distances')
      far.append(of_text[one.newest_N])
    far, label = np.concatenate(far), 'distance (tokens)'
  classes, y = np.unique(y, return_inverse=True)
  predicted = cross_validated(x, y, document % _FOLDS, penalty)
  directions = class_directions(x, y)
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
  figure = _draw_accuracy(data, label)
  return Probe(data, figure, directions, layer, run.identity['parameters'])


class _Examples(NamedTuple):
  """States after some tokens of one text, and the classes they should hold.

  Attributes:
    s_ND: the states.
    target_N: their classes.
    document_N: number of the text, the same for all of them.
    tokens_N: number of tokens before each state.
    newest_N: index of the last token that the model has read then.
  """

  s_ND: np.ndarray
  target_N: np.ndarray
  document_N: np.ndarray
  tokens_N: np.ndarray
  newest_N: np.ndarray


def _examples(run, number, text, target_T, layer, every) -> _Examples:
  states = run.states(text, every)
  # To predict the next token, a model reads tokens one place later.
  newest_N = states['tokens'].values - (1 if run.labels else 2)
  states, newest_N = states.isel(border=newest_N >= 0), newest_N[newest_N >= 0]
  tokens_N = states['tokens'].values
  if not len(tokens_N):
    raise ValueError(
      f'Text {number} has {len(run.encode(text))} tokens, but a state is read '
      f'after every {every or run.block}. Give longer texts.'
    )
  targets = _for_tokens(run, number, text, target_T, 'targets')
  return _Examples(
    _vectors(states, layer),
    targets[newest_N],
    np.full(len(tokens_N), number),
    tokens_N,
    newest_N,
  )


def _for_tokens(run, number, text, values_T, what: str) -> np.ndarray:
  """Returns an array of one value for each token; ValueError if it is not."""
  count = len(run.encode(text))
  if len(values_T) != count:
    raise ValueError(
      f'Text {number} has {count} tokens, but {len(values_T)} {what}. Give '
      'one for each token.'
    )
  return np.asarray(values_T)


def cross_validated(x_ND, y_N, fold_N, penalty: float) -> np.ndarray:
  """Returns the class of each state, predicted from states of other folds."""
  predicted_N = np.zeros_like(y_N)
  for fold in range(_FOLDS):
    out = fold_N == fold
    is_class = np.eye(y_N.max() + 1)[y_N[~out]]
    weights, center = ridge(x_ND[~out], is_class, penalty)
    scores = (x_ND[out] - center) @ weights.T + is_class.mean(0)
    predicted_N[out] = scores.argmax(1)
  return predicted_N


def ridge(x_ND, y_NC, penalty: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns the weights [C, D] of a ridge regression, and the mean of x.

  The regression predicts the mean of y, plus the weights times the difference
  of x from its mean.
  """
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


def class_directions(x_ND, y_N) -> np.ndarray:
  """Returns, for each class, its mean state minus the mean of all states.

  The result is [classes, D] float64.
  """
  x_ND = x_ND - x_ND.mean(0, dtype=np.float64)
  return np.stack([x_ND[y_N == c].mean(0) for c in range(y_N.max() + 1)])


def subspace(directions) -> np.ndarray:
  """Returns orthonormal vectors [rank, D] that span directions [classes, D]."""
  _, sizes, basis = np.linalg.svd(directions, full_matrices=False)
  # Directions of K classes span K - 1 dimensions; the last size is rounding.
  return basis[sizes > 1e-9 * sizes[0]]


def _draw_accuracy(data, label):
  figure = new_figure(7, 4)
  axes = figure.subplots()
  far = data['distance'].values
  right = (data['target'] == data['predicted']).values
  edges = np.unique(np.quantile(far, np.linspace(0, 1, 13)))
  last = max(len(edges) - 2, 0)
  bin_N = np.clip(np.searchsorted(edges, far, 'right') - 1, 0, last)
  for_bins = [bin_N == i for i in range(last + 1)]
  means = [right[at].mean() for at in for_bins if at.any()]
  places = [far[at].mean() for at in for_bins if at.any()]
  axes.plot(places, means, 'o-', color=COLORS[0], label='probe')
  common = data.attrs['most_common']
  axes.axhline(common, color='black', ls=':', label='the most common class')
  axes.set_ylim(0, 1.02)
  label_curves(axes, label, 'share of states read correctly')
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
  """Removes what a probe reads from the state, and shows what that costs.

  The state at the middle of each text loses its part along the directions, and
  then the model reads on. If the rise of the loss is no greater than for random
  directions, the model does not use what the probe reads.

  Args:
    run: the run of the probe.
    found: result of `probe`.
    texts: documents.
    labels: labels of the tokens of each text, if the model predicts labels.
    tokens: number of tokens to read afterward; None means one block.
    random: number of random subspaces of the same dimension to compare with.
    seed: seed of these draws.

  Returns:
    'rise' [text, kind], the rise of the loss in nats per token, for kind
    'probe' and 'random 0' and so on; NaN if all labels of these tokens are 0.

  Raises:
    ValueError: there is no text, one is too short, the probe is of another run,
      labels are missing or not expected, `tokens` is below 1 or `random` below
      0.
  """
  import xarray as xr

  check_run(run)
  if found.parameters not in (None, run.identity['parameters']):
    raise ValueError(
      f'The probe is of another run, or another step, than {run.name} at step '
      f'{run.step}. Make a probe of this run.'
    )
  run.check_texts(texts)
  check_count('random', random, 0)
  if tokens is not None:
    check_count('tokens', tokens, 1)
  if labels is not None and len(labels) != len(texts):
    raise ValueError(
      f'Labels of each text are needed, got {len(texts)} texts and labels of '
      f'{len(labels)}.'
    )
  given = [None] * len(texts) if labels is None else list(map(np.array, labels))
  for text, labels_T in zip(texts, given, strict=True):
    run.check_readable(text, labels_T)
  W = run.block
  tokens = tokens or W
  rng = np.random.default_rng(seed)
  basis = subspace(found.directions)
  rank, D = basis.shape
  bases = {'probe': basis} | {
    f'random {i}': np.linalg.qr(rng.normal(size=(D, rank)))[0].T
    for i in range(random)
  }
  rises = []
  for number, (text, labels_T) in enumerate(zip(texts, given, strict=True)):
    ids_T = run.encode(text)
    at = len(ids_T) // 2 // W * W
    rest = ids_T[at : at + tokens]
    if not at or not len(rest):
      raise ValueError(
        f'Text {number} has {len(ids_T)} tokens, but at least {2 * W} are '
        'needed. Give longer texts.'
      )
    if labels_T is not None:
      labels_T = labels_T[at : at + tokens]
    states = run.states(ids_T[:at], at)
    state = states.isel(border=-1)
    loss = lambda state, before=ids_T[:at], rest=rest, labels=labels_T: float(
      run.with_state(state, before)
      .predictions(rest, 1, labels=labels)['nats']
      .mean()
    )
    own = loss(state)
    changed = [_without(state, found.layer, b) for b in bases.values()]
    rises.append([loss(one) - own for one in changed])
  data = xr.Dataset(
    {'rise': (('text', 'kind'), np.array(rises))}, {'kind': list(bases)}
  )
  title = f'{rank} of {D} directions of the state removed'
  return Shown(data, _draw_rises(data, title))


def _draw_rises(data, title: str):
  figure = new_figure(6, 3.5)
  axes = figure.subplots()
  kinds = list(data['kind'].values)
  means = data['rise'].mean('text').values
  counts = data['rise'].count('text')
  errors = data['rise'].std('text', ddof=1) / np.sqrt(counts)
  colors = [COLORS[1 if kind == 'probe' else 5] for kind in kinds]
  axes.bar(range(len(means)), means, yerr=errors.values, color=colors)
  axes.set_xticks(range(len(means)), kinds, rotation=60)
  axes.set_ylabel('rise of the loss\n(nats per token)')
  axes.set_title(title, size=10)
  axes.grid(axis='y', alpha=0.3)
  return figure


def _views(states, layer: int | None) -> list:
  """Returns the floating-point parts of states, in which one may write.

  Args:
    states: result of TrainedRun.states, or one border of it.
    layer: index of a layer, to whose parts to restrict them; None means all.

  Raises:
    ValueError: the layer has no recurrent state.
  """
  views = []
  for a in states.data_vars.values():
    if a.dtype.kind != 'f':
      continue
    if layer is None:
      views.append(a)
    elif 'layer' in a.dims and layer in a['layer'].values:
      views.append(a.sel(layer=layer))
  if not views:
    raise ValueError(
      f'Layer {layer} has no recurrent state of its own. Choose another, or '
      'None for all.'
    )
  return views


def _vectors(states, layer: int | None) -> np.ndarray:
  """Returns the state at each border as a vector, [borders, D]."""
  parts = _views(states, layer)
  return np.concatenate([a.values.reshape(len(a), -1) for a in parts], 1)


def _without(state, layer: int | None, basis: np.ndarray):
  """Returns a state, at one border, without its part along some directions.

  Args:
    state: one border of the result of TrainedRun.states.
    layer: layer of the directions; None means that they are of the whole state.
    basis: orthonormal directions [directions, D].
  """
  changed = state.copy(deep=True)
  views = _views(changed, layer)
  flat = np.concatenate([a.values.ravel() for a in views]).astype(np.float64)
  flat -= basis.T @ (basis @ flat)
  at = 0
  for a in views:
    a.values[...] = flat[at : at + a.size].reshape(a.shape)
    at += a.size
  return changed
