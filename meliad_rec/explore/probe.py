"""Linear probes of the recurrent state (Alain and Bengio 2017), and ablations.

A probe shows that something can be read from the state, not that the model uses
it. `ablate` therefore removes from the state what a linear probe can read
(Belrose et al. 2023), and compares the rise of the loss with that for classes
of other texts, which the state does not hold.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.explore.shown import block_multiple
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import label_curves
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.explore.shown import with_units
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.checks import check_arrays
from meliad_rec.runs.checks import check_layer
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Probe(Shown):
  """Result of `probe`: how well it does, and the states that were read.

  Attributes:
    states: [N, D], the states that `data` is about, where D is the number of
      elements of all floating-point parts of the state, in their order.
    layer: index of the layer whose state was read; None means all layers.
    penalty: the argument of `probe`.
    parameters: sha256 of the parameters of the run; None if unknown.
  """

  states: np.ndarray = dataclasses.field(repr=False)
  layer: int | None
  penalty: float = 0.01
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
    layer: index of a recurrent layer; a negative one counts from the highest;
      None reads the state of all layers.
    every: number of tokens between two states; None means one block.
    penalty: weight of the squared coefficients of the regression, relative to
      the variance of the state.

  Returns:
    For each state, 'target' and 'predicted' class, 'document', 'tokens' read
    and 'distance'; and in attributes 'accuracy' and 'most_common', the share of
    the most common class.

  Raises:
    ValueError: there are fewer than five texts, numbers of targets or distances
      and tokens differ, a text is empty or shorter than a block, `penalty` is
      not above 0, or the layer has no recurrent state or is no integer.
  """
  import xarray as xr

  check_run(run)
  check_arrays('texts', texts)
  check_arrays('targets', targets)
  if distances is not None:
    check_arrays('distances', distances)
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
  if not 0 < penalty < np.inf:
    raise ValueError(
      f'penalty must be a number above 0, got {penalty}. Without one, the '
      'regression has no single solution.'
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
  data['distance'].attrs['long_name'] = label
  figure = new_figure(7, 4)
  _draw_accuracy(figure.subplots(), data)
  where = 'all layers' if layer is None else f'layer {layer}'
  figure.suptitle(plain(f'{run.name} ({size_and_cost(run)}): state of {where}'))
  return Probe(data, figure, x, layer, penalty, run.identity['parameters'])


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
  count, values_T = len(run.encode(text)), np.asarray(values_T)
  if values_T.shape != (count,):
    raise ValueError(
      f'Text {number} has {count} tokens, but {what} of shape '
      f'{values_T.shape}. Give one for each token.'
    )
  return values_T


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


class Eraser(NamedTuple):
  """A projection of states that leaves nothing of the classes to linear probes.

  Attributes:
    mean_D: mean of the states, which stays as it is.
    read_KD: what is read from the difference of a state from the mean.
    write_DK: directions in which what was read is subtracted.
  """

  mean_D: np.ndarray
  read_KD: np.ndarray
  write_DK: np.ndarray

  def __call__(self, x_D):
    return x_D - self.write_DK @ (self.read_KD @ (x_D - self.mean_D))


def erasers(x_ND, labelings, penalty: float) -> list[Eraser]:
  """Returns a projection for each labeling (Belrose et al. 2023, theorem 4.3).

  After it, the states that are given have the same mean for all classes, so
  that no linear probe can tell these apart, and are changed as little as that
  allows, where a change counts relative to the variance of its direction.

  Args:
    x_ND: states.
    labelings: arrays of the classes of the states, [N].
    penalty: added to the variance of each direction, relative to the mean
      variance, since states may be fewer than their elements.
  """
  mean_D = x_ND.mean(0, dtype=np.float64)
  u_NR, size_R, axis_RD = np.linalg.svd(x_ND - mean_D, full_matrices=False)
  R = np.count_nonzero(size_R > 1e-6 * size_R[0])
  u_NR, size_R, axis_RD = u_NR[:, :R], size_R[:R], axis_RD[:R]
  spread_R = np.sqrt(size_R**2 + penalty * (size_R**2).sum() / x_ND.shape[1])
  found = []
  for labels_N in labelings:
    classes, y_N = np.unique(labels_N, return_inverse=True)
    is_class_NC = np.eye(len(classes))[y_N]
    covariance_CR = (is_class_NC - is_class_NC.mean(0)).T @ (u_NR * size_R)
    basis_KR = subspace(covariance_CR / spread_R)
    write_DK = ((basis_KR * spread_R) @ axis_RD).T
    found.append(Eraser(mean_D, (basis_KR / spread_R) @ axis_RD, write_DK))
  return found


def of_other_texts(y_N, document_N, rng) -> np.ndarray:
  """Returns the classes of the states, exchanged between texts at random.

  Args:
    y_N: classes of the states, in the order of texts.
    document_N: the number of the text of each state.
    rng: random generator of NumPy.
  """
  texts = [y_N[document_N == number] for number in np.unique(document_N)]
  drawn = rng.permutation(len(texts))
  return np.concatenate(
    [np.resize(texts[i], len(y)) for i, y in zip(drawn, texts, strict=True)]
  )


def subspace(directions) -> np.ndarray:
  """Returns orthonormal vectors [rank, D] that span directions [classes, D]."""
  _, sizes, basis = np.linalg.svd(directions, full_matrices=False)
  # Directions of K classes span K - 1 dimensions; the last size is rounding.
  return basis[sizes > 1e-9 * sizes[0]]


def _draw_accuracy(axes, data) -> None:
  far = data['distance'].values
  right = (data['target'] == data['predicted']).values
  edges = np.unique(np.quantile(far, np.linspace(0, 1, 13)))
  last = max(len(edges) - 2, 0)
  bin_N = np.clip(np.searchsorted(edges, far, 'right') - 1, 0, last)
  for_bins = [bin_N == i for i in range(last + 1)]
  means = [right[at].mean() for at in for_bins if at.any()]
  places = [far[at].mean() for at in for_bins if at.any()]
  axes.plot(places, means, 'o-', color=COLORS[0], label='probe')
  label, common = 'the most common class', data.attrs['most_common']
  axes.axhline(common, color='black', ls=':', label=label)
  axes.set_ylim(0, 1.02)
  far_label = data['distance'].attrs['long_name']
  label_curves(axes, far_label, 'share of states\nread correctly')


def ablate(
  run: TrainedRun,
  found: Probe,
  texts: Sequence[Text],
  labels: Sequence[np.ndarray] | None = None,
  tokens: int | None = None,
  shuffled: int = 8,
  seed: int = 0,
  multiple_of: int | None = None,
) -> Shown:
  """Removes what a probe reads from the state, and shows what that costs.

  The state at the middle of each text is changed so that linear probes cannot
  tell the classes apart (`erasers`), and then the model reads on. The same is
  done for classes of other texts. Only if the rise of the loss is greater than
  for these does it show that the model uses what the probe reads. The figure
  also has the accuracy of the probe.

  Args:
    run: the run of the probe.
    found: result of `probe`.
    texts: documents.
    labels: labels of the tokens of each text, if the model predicts labels.
    tokens: number of tokens to read afterward; None means `multiple_of`.
    shuffled: number of times that the texts of the probe exchange their
      classes at random.
    seed: seed of these draws.
    multiple_of: the middle of a text is rounded down to a multiple of it, which
      is a multiple of `run.block`; None means `run.block`.

  Returns:
    For kind 'probe', 'shuffled 0' and so on: 'rise' [text, kind], the rise of
    the loss in nats per token, NaN if all labels of these tokens are 0; and
    'change' [text, kind], the norm of the change of the state divided by that
    of its difference from the mean state.

  Raises:
    ValueError: there is no text, one is too short, the probe is of another run,
      labels are missing or not expected, `tokens` is below 1, `shuffled` below
      0, `multiple_of` is no multiple of a block, or texts begin with another
      state (see `with_state`).
  """
  import xarray as xr

  check_run(run)
  run.check_state_unmodified('ablate')
  if not isinstance(found, Probe):
    raise ValueError(
      f'found must be what explore.probe returned, got {type(found).__name__}.'
    )
  if found.parameters not in (None, run.identity['parameters']):
    raise ValueError(
      f'The probe is of another run, or another step, than {run.name} at step '
      f'{run.step}. Make a probe of this run.'
    )
  run.check_texts(texts)
  check_count('shuffled', shuffled, 0)
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
  W = block_multiple(run, multiple_of)
  tokens = tokens or W
  rng = np.random.default_rng(seed)
  y_N, document_N = (found.data[each].values for each in ('target', 'document'))
  kinds = {'probe': y_N} | {
    f'shuffled {i}': of_other_texts(y_N, document_N, rng)
    for i in range(shuffled)
  }
  removed = erasers(found.states, kinds.values(), found.penalty)
  rises, changes = [], []
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
    changed, sizes = zip(
      *(_without(state, found.layer, each) for each in removed), strict=True
    )
    rises.append([loss(one) - own for one in changed])
    changes.append(sizes)
  axes = 'text', 'kind'
  data = xr.Dataset(
    {'rise': (axes, np.array(rises)), 'change': (axes, np.array(changes))},
    {'kind': list(kinds)},
  )
  rank, D = removed[0].read_KD.shape
  with_units(data, rise='nats per token')
  title = f'{run.name}: {rank} of {D} directions of the state removed'
  return Shown(data, _draw_ablations(found.data, data, title))


def _draw_ablations(read, data, title: str):
  figure = new_figure(6.5, 7.5)
  top, *panels = figure.subplots(3)
  _draw_accuracy(top, read)
  panels[0].set_xticks([])
  kinds = list(data['kind'].values)
  colors = [COLORS[1 if kind == 'probe' else 5] for kind in kinds]
  labels = {
    'rise': 'rise of the loss\n(nats per token)',
    'change': 'change of the state\n(share of its norm)',
  }
  for axes, (name, label) in zip(panels, labels.items(), strict=True):
    means, counts = data[name].mean('text').values, data[name].count('text')
    errors = data[name].std('text', ddof=1) / np.sqrt(counts)
    axes.bar(range(len(means)), means, yerr=errors.values, color=colors)
    axes.set_ylabel(label)
    axes.grid(axis='y', alpha=0.3)
  figure.suptitle(plain(title))
  panels[1].set_xticks(range(len(kinds)), kinds, rotation=60)
  return figure


def _views(states, layer: int | None) -> list:
  """Returns the floating-point parts of states, in which one may write.

  Args:
    states: result of TrainedRun.states, or one border of it.
    layer: index of a layer, to whose parts to restrict them; a negative one
      counts from the highest; None means all.

  Raises:
    ValueError: the layer has no recurrent state.
  """
  parts = [a for a in states.data_vars.values() if a.dtype.kind == 'f']
  if layer is None:
    return parts
  of_layers = [a for a in parts if 'layer' in a.dims]
  known = sorted(set().union(*(a['layer'].values for a in of_layers)))
  if -len(known) <= layer < 0:
    layer = known[layer]
  views = [a.sel(layer=layer) for a in of_layers if layer in a['layer'].values]
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


def _without(state, layer: int | None, erase: Eraser) -> tuple:
  """Returns a changed state, at one border, and the size of the change.

  The size is relative to the difference of the state from the mean.

  Args:
    state: one border of the result of TrainedRun.states.
    layer: layer of `erase`; None means that it is of the whole state.
    erase: what to remove.
  """
  changed = state.copy(deep=True)
  views = _views(changed, layer)
  flat = np.concatenate([a.values.ravel() for a in views]).astype(np.float64)
  erased, at = erase(flat), 0
  for a in views:
    a.values[...] = erased[at : at + a.size].reshape(a.shape)
    at += a.size
  norm = np.linalg.norm
  return changed, norm(erased - flat) / max(norm(flat - erase.mean_D), 1e-30)
