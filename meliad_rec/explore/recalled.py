"""Targets of attention: recalled passages, sources, tokens, and layers."""

import numpy as np

from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import named
from meliad_rec.explore.shown import Runs
from meliad_rec.explore.shown import Shown
from meliad_rec.report.console import dots
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.observed_run import Text
from meliad_rec.runs.trained_run import TrainedRun


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
    context: number of tokens to show on each side of a recalled one.

  Returns:
    'weight' [head, neighbor], 'place', the index of the recalled token, and
    'passage', the text around it.

  Raises:
    ValueError: no layer recalls keys, or there is no such token.
  """
  import xarray as xr

  found = run.attention(text, layer=layer)
  if 'recall_weight' not in found:
    raise ValueError(
      f'{run.name} recalls no keys. Choose a run of arch/memorizing.'
    )
  weight, back = found['recall_weight'], found['recall_back']
  if not -weight.sizes['token'] <= token < weight.sizes['token']:
    raise ValueError(
      f'token must be below {weight.sizes["token"]}, the number of tokens, got '
      f'{token}.'
    )
  at = {'token': token} | ({'layer': -1} if 'layer' in weight.dims else {})
  weight_HN, back_HN = weight.isel(at).values, back.isel(at).values
  # The token is predicted where the one before it is read.
  token = token % weight.sizes['token']
  place_HN = token - 1 - back_HN
  texts = weight['text'].values
  around = lambda i: ''.join(texts[max(i - context, 0) : i + context + 1])
  passages = [[around(i) for i in row] for row in place_HN]
  dims = 'head', 'neighbor'
  data = xr.Dataset(
    {
      'weight': (dims, weight_HN),
      'place': (dims, place_HN),
      'passage': (dims, np.array(passages, object)),
    },
    attrs={'token': texts[token], 'before': ''.join(texts[:token][-60:])},
  )
  H, N = weight_HN.shape
  shown = [(h, n) for h in range(H) for n in range(min(N, 4))]
  figure = new_figure(11, 0.6 + 0.32 * len(shown))
  axes = figure.subplots()
  values = [weight_HN[h, n] for h, n in shown]
  axes.barh(range(len(shown)), values, color=[COLORS[h % 6] for h, _ in shown])
  for i, (h, n) in enumerate(shown):
    label = f'head {h}, {back_HN[h, n]:,} back: {dots(passages[h][n])}'
    axes.text(0.005, i, label, va='center', family='monospace', size=7)
  axes.set_xlim(0, 1)
  axes.set_yticks([])
  axes.invert_yaxis()
  axes.set_xlabel('weight among the recalled keys')
  before = dots(data.attrs['before'])
  axes.set_title(f'{before}[{dots(texts[token])}]', size=9, loc='left')
  return Shown(data, figure)


def memory_sources(run: TrainedRun) -> Shown:
  """Shows which layers a Feedback Transformer's memory draws from.

  Returns:
    'weight' [memory, layer], the learned weights of equation 1 of Fan et al.
    2020. Layer 0 is the embedding. There are several memories if each layer has
    its own.

  Raises:
    ValueError: the memory is not a weighted sum of layers.
  """
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
  for i, (name, w) in enumerate(zip(found, padded, strict=True)):
    place = np.arange(L) + 0.8 * (i + 0.5) / len(found) - 0.4
    axes.bar(place, w, 0.8 / len(found), color=COLORS[i % 6], label=name)
  axes.axhline(1 / L, color='black', ls=':', lw=1, label='as at first')
  axes.set_xticks(range(L), ['embedding', *range(1, L)])
  axes.set_xlabel('layer')
  axes.set_ylabel('weight in the memory')
  axes.legend(fontsize='small')
  return Shown(data, figure)


def attention_map(runs: Runs, text: Text) -> Shown:
  """Shows how far back each layer attends in each pass or step.

  In a Staircase, the passes differ in the chunks that they attend to.

  Args:
    runs: one run, or {name: run} of several.
    text: a document.

  Returns:
    'weight' [row, back], the mean weight over tokens and heads. A row is a
    layer of a run, or a step or pass of a layer; 'name' says which. Beyond the
    window of a row, the weight is NaN.

  Raises:
    ValueError: a run has no attention, or cannot read the text.
  """
  import xarray as xr

  rows = {}
  for name, run in named(runs).items():
    found = run.attention(text)
    if 'token_to_token' not in found:
      raise ValueError(f'{name} has no attention to tokens. Leave it out.')
    before = f'{name}: ' if len(named(runs)) > 1 else ''
    for place, weight in _mean_weights(found['token_to_token']).items():
      rows[before + place] = weight
  W = max(map(len, rows.values()))
  pad = lambda a: np.pad(
    a.astype(float), (0, W - len(a)), constant_values=np.nan
  )
  data = xr.Dataset(
    {'weight': (('row', 'back'), np.array(list(map(pad, rows.values()))))},
    {'name': ('row', list(rows))},
  )
  figure = new_figure(9, 1.2 + 0.3 * len(rows))
  axes = figure.subplots()
  extent = (0.5, W + 0.5, len(rows) - 0.5, -0.5)
  heat_map(axes, data['weight'].values, 'mean weight', extent)
  axes.set_yticks(range(len(rows)), list(rows))
  axes.set_xlabel('tokens back, from the nearest visible one')
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
  written = list(map(dots, mean['text'].values))
  axes.set_xticks(range(T), written, family='monospace', size=8, rotation=90)
  read = [*map(dots, texts[:-1]), '(end)']
  axes.set_yticks(range(S), read, family='monospace', size=8)
  axes.set_xlabel('token to predict')
  axes.set_ylabel('source')
  return Shown(data, figure)


def _mean_weights(weights) -> dict[str, np.ndarray]:
  """Returns {'layer 0, step 1': mean weights [back]} of attention to tokens."""
  a = weights.mean(['token', 'head'])
  dims = [d for d in a.dims if d != 'back']
  values = a.transpose(*dims, 'back').values
  coords = [
    a[d].values if d in a.coords else np.arange(a.sizes[d]) for d in dims
  ]
  return {
    ', '.join(f'{dims[i]} {coords[i][k]}' for i, k in enumerate(at)): values[at]
    for at in np.ndindex(*values.shape[:-1])
  }
