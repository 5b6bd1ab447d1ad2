"""Targets of attention: recalled passages, sources, tokens, and layers."""

import numbers

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.explore.shown import check_run
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import colors_of
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import labels_of_runs
from meliad_rec.explore.shown import named
from meliad_rec.explore.shown import Runs
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import size_and_cost
from meliad_rec.report.console import dots
from meliad_rec.report.console import symbols
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun

_NEIGHBORS = 4  # Recalled keys of a head that a figure shows.


def recalled(
  run: TrainedRun,
  text: Text,
  token: int,
  layer: int | None = None,
  context: int = 24,
) -> Shown:
  """Shows the passages that a Memorizing Transformer recalls for a token.

  Args:
    run: run of a Memorizing Transformer.
    text: a document.
    token: index of the token that is predicted; a negative one counts from the
      end.
    layer: index of the memorizing layer; None means the highest.
    context: number of tokens to show on each side of a recalled one, which is
      in brackets.

  Returns:
    'weight' [head, neighbor], 'place', the index of the recalled token, and
    'passage', the text around it. If fewer keys are found, the others have
    weight 0, place -1 and no passage. A key of what comes before the text, such
    as the start of a document at -1, has a negative place and no passage too,
    but a weight above 0. 'share' [head] is the share of recalled keys in the
    result of attention, if the layer has it; the rest is the window's.

  Raises:
    ValueError: the layer recalls no keys, there is no such token, nothing can
      be recalled for it yet, or `context` is no whole number of at least 0.
  """
  import xarray as xr

  check_run(run)
  check_count('context', context, 0)
  names = 'recall_weight', 'recall_back', 'recall_share'
  found = run.pictures(text, names, layer)
  if 'recall_weight' not in found:
    known = run.layers_with(names)
    raise ValueError(
      f'Layer {layer} of {run.name} recalls no keys. Choose one of its '
      f'memorizing layers: {", ".join(map(str, known))}.'
      if known
      else f'{run.name} recalls no keys. Choose a run of arch/memorizing.'
    )
  weight = found['recall_weight']
  T = weight.sizes['token']
  if not (isinstance(token, numbers.Integral) and -T <= token < T):
    raise ValueError(
      f'token must be a whole number from {-T} to {T - 1}, because the text '
      f'has {T} tokens, got {token!r}.'
    )
  token = token % T
  highest = {'layer': -1} if 'layer' in weight.dims else {}
  found = {name: a.isel(highest) for name, a in found.items()}
  weight_HN, back_HN = (
    found[name].isel(token=token).values
    for name in ('recall_weight', 'recall_back')
  )
  if not weight_HN.any():
    first = np.flatnonzero(found['recall_weight'].any(['head', 'neighbor']))
    raise ValueError(
      f'Nothing can be recalled for token {token} yet, because only tokens of '
      'earlier blocks, beyond the window, are in memory. '
      + (
        f'Choose one from {first[0]} on.'
        if len(first)
        else 'Give a longer text.'
      )
    )
  # A token is predicted where the one before it is read, and a label where its
  # own token is read.
  read_at = token if run.labels else token - 1
  place_HN = np.where(weight_HN > 0, read_at - back_HN, -1)
  texts = weight['text'].values

  def around(i):
    after = texts[i + 1 : i + context + 1]
    return ''.join([*texts[max(i - context, 0) : i], f'[{texts[i]}]', *after])

  passages = [[around(i) if i >= 0 else '' for i in row] for row in place_HN]
  dims = 'head', 'neighbor'
  data = xr.Dataset(
    {
      'weight': (dims, weight_HN),
      'place': (dims, place_HN),
      'passage': (dims, np.array(passages, object)),
    },
    attrs={
      'run': run.name,
      'token': texts[token],
      'before': ''.join(texts[:token][-60:]),
    },
  )
  if 'recall_share' in found:
    data['share'] = 'head', found['recall_share'].isel(token=token).values
  return Shown(data, _draw_recalled(data, read_at))


def _draw_recalled(data, read_at: int):
  weight_HN, place_HN = data['weight'].values, data['place'].values
  H, N = weight_HN.shape
  shown = [
    (h, n)
    for h in range(H)
    for n in range(min(N, _NEIGHBORS))
    if weight_HN[h, n] > 0
  ]
  figure = new_figure(11, 1.1 + 0.32 * len(shown))
  axes = figure.subplots()
  values = [weight_HN[h, n] for h, n in shown]
  colors = [COLORS[h % 6] for h, _ in shown]
  axes.barh(range(len(shown)), values, color=colors, alpha=0.35)
  for i, (h, n) in enumerate(shown):
    passage = dots(str(data['passage'].values[h, n]).replace('\n', '\u23ce'))
    label = f'head {h}, {read_at - place_HN[h, n]:,} back: {passage}'
    axes.text(0.005, i, plain(label), va='center', family='monospace', size=8)
  axes.set_xlim(0, 1)
  axes.set_yticks([])
  axes.invert_yaxis()
  axes.set_xlabel('weight among the recalled keys')
  before = dots(data.attrs['before'].replace('\n', '\u23ce'))
  title = f'{data.attrs["run"]}: {before}[{symbols(data.attrs["token"])}]'
  if N > _NEIGHBORS:
    title += f'\nthe first {_NEIGHBORS} of {N} recalled keys of each head'
  if 'share' in data:
    shares = enumerate(data['share'].values)
    title += '\nshare of recalled keys in attention: ' + ', '.join(
      f'head {h} {share:.0%}' for h, share in shares
    )
  axes.set_title(plain(title), size=9, loc='left')
  return figure


def memory_sources(run: TrainedRun) -> Shown:
  """Shows which layers a Feedback Transformer's memory draws from.

  Returns:
    'weight' [memory, layer], the learned weights of equation 1 of Fan et al.
    2020. Layer 0 is the embedding. There are several memories if each layer has
    its own.

  Raises:
    ValueError: the memory is not a weighted sum of layers.
  """
  check_run(run)
  import jax
  import xarray as xr

  leaves = jax.tree.leaves_with_path(run.params)
  found = {
    path[-1].key: np.asarray(jax.nn.softmax(leaf), np.float64)
    for path, leaf in leaves
    if str(path[-1].key).startswith('mix')
  }
  if not found:
    raise ValueError(
      f'{run.name} has no weighted memory. Choose a run of arch/feedback.'
    )
  L = max(map(len, found.values()))
  padded = [np.pad(w, (0, L - len(w))) for w in found.values()]
  data = xr.Dataset(
    {'weight': (('memory', 'layer'), np.array(padded))},
    {'memory': list(found)},
  )
  figure = new_figure(6, 3)
  axes = figure.subplots()
  colors = colors_of(len(found))
  for i, (name, w) in enumerate(zip(found, padded, strict=True)):
    place = np.arange(L) + 0.8 * (i + 0.5) / len(found) - 0.4
    axes.bar(place, w, 0.8 / len(found), color=colors[i], label=name)
    count = len(found[name])
    label = None if i else 'as at first'
    axes.plot(place[:count], [1 / count] * count, 'k:', lw=1, label=label)
  axes.set_xticks(range(L), ['embedding', *range(1, L)])
  axes.set_xlabel('layer')
  axes.set_ylabel('weight in the memory')
  axes.legend(fontsize='small')
  axes.set_title(plain(f'{run.name} ({size_and_cost(run)})'), size=10)
  return Shown(data, figure)


def attention_map(runs: Runs, text: Text) -> Shown:
  """Shows how far back each layer attends in each pass or step.

  In a Staircase, the passes differ in the chunks that they attend to.

  Args:
    runs: one run, or {name: run} of several.
    text: a document.

  Returns:
    'weight' [row, back], the mean weight over tokens and heads. A row is a
    layer of a run, or a step or pass of a layer, counted from 1; 'name' says
    which. 'back' 0 is the nearest key that a token may see. Beyond the window
    of a row, the weight is NaN.

  Raises:
    ValueError: a run has no attention, or cannot read the text.
  """
  import xarray as xr

  rows = {}
  for name, run in named(runs).items():
    found = run.pictures(text, ('token_to_token',))
    if 'token_to_token' not in found:
      raise ValueError(
        f'{name} has no attention to tokens. Choose another run.'
      )
    before = f'{name}: ' if len(named(runs)) > 1 else ''
    for place, weight in _mean_weights(found['token_to_token']).items():
      rows[before + place] = weight
  W = max(map(len, rows.values()))
  pad = lambda a: np.pad(
    a.astype(float), (0, W - len(a)), constant_values=np.nan
  )
  data = xr.Dataset(
    {'weight': (('row', 'back'), np.array(list(map(pad, rows.values()))))},
    {'name': ('row', list(rows)), 'back': np.arange(W)},
  )
  figure = new_figure(9, 1.2 + 0.3 * len(rows))
  axes = figure.subplots()
  extent = (-0.5, W - 0.5, len(rows) - 0.5, -0.5)
  heat_map(axes, data['weight'].values, 'mean weight', extent)
  axes.set_yticks(range(len(rows)), [*map(plain, rows)])
  axes.set_xlabel('tokens back (0: the nearest that a token may see)')
  axes.set_title(plain('\n'.join(labels_of_runs(runs).values())), size=10)
  return Shown(data, figure)


def source_map(
  run: TrainedRun, source: str, text: Text, layer: int | None = None
) -> Shown:
  """Shows which tokens of a source a decoder attends to.

  Args:
    run: run of a model with an encoder.
    source: a source, one line.
    text: a target, such as run.translate([source])[0].
    layer: index of a layer of the decoder; None means the mean over all.

  Returns:
    'weight' [source, token], the mean weight over heads where the token is
    predicted. 'source_text' has the tokens of the source, and its end.

  Raises:
    ValueError: the model has no encoder, or no such layer.
  """
  import xarray as xr

  check_run(run)
  if run.sharded.model.encoder is None:
    raise ValueError(
      f'{run.name} has no encoder, so there is no source to attend to. Choose '
      'a run that translates, or use attention_map.'
    )
  weights = run.with_source(source).attention(text, layer)['token_to_source']
  others = [dim for dim in weights.dims if dim not in ('token', 'source')]
  ids_S = run.source_ids(source)
  mean = weights.mean(others).isel(source=slice(len(ids_S)))
  spelled = run.vocabulary.token_bytes(ids_S)
  texts = [piece.decode('utf-8', 'replace') for piece in spelled]
  data = xr.Dataset(
    {
      'weight': mean.transpose('source', 'token'),
      'source_text': ('source', np.array(texts, object)),
    }
  )
  S, T = len(texts), mean.sizes['token']
  figure = new_figure(max(5, 2.5 + 0.28 * T), 1.5 + 0.22 * S)
  axes = figure.subplots()
  heat_map(axes, data['weight'].values, 'mean weight of the heads')
  written = [plain(symbols(text)) for text in mean['text'].values]
  axes.set_xticks(range(T), written, family='monospace', size=8, rotation=90)
  read = [*(plain(symbols(text)) for text in texts[:-1]), '(end)']
  axes.set_yticks(range(S), read, family='monospace', size=8)
  axes.set_xlabel('token to predict')
  axes.set_ylabel('source')
  return Shown(data, figure)


def _mean_weights(weights) -> dict[str, np.ndarray]:
  """Returns {'layer 0, step 1': mean weights [back]} of attention to tokens.

  They are NaN beyond the furthest key that any token sees.
  """
  seen = weights.max(['token', 'head']) > 0
  reverse = {'back': slice(None, None, -1)}
  seen = seen.isel(reverse).cumsum('back').isel(reverse) > 0
  a = weights.mean(['token', 'head']).where(seen)
  dims = [d for d in a.dims if d != 'back']
  values = a.transpose(*dims, 'back').values
  # Steps and passes have no coordinates, and are counted from 1.
  coords = [
    a[d].values if d in a.coords else 1 + np.arange(a.sizes[d]) for d in dims
  ]
  return {
    ', '.join(f'{dims[i]} {coords[i][k]}' for i, k in enumerate(at)): values[at]
    for at in np.ndindex(*values.shape[:-1])
  }
