"""A page of HTML about one text: its tokens, the recurrent state, figures.

The page is one file. It opens without a network, in any browser of 2023 or
later. The values at tokens are columns of small integers, which are compressed
in the file; losses are rounded to 1 / STEPS bits.
"""

import base64
from collections.abc import Callable
import gzip
import html
import importlib.resources
import io
import json
import os
from pathlib import Path
import string
from typing import Any

import numpy as np

from meliad_rec.explore.forgetting import by_distance
from meliad_rec.explore.forgetting import by_position
from meliad_rec.explore.forgetting import forgetting
from meliad_rec.explore.forgetting import state_gradients
from meliad_rec.explore.gain import gain
from meliad_rec.explore.gain import previous_use
from meliad_rec.explore.lens import lens
from meliad_rec.explore.recalled import attention_map
from meliad_rec.explore.recalled import memory_sources
from meliad_rec.explore.recalled import recalled
from meliad_rec.explore.shown import check_vocabularies
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.shown import speed
from meliad_rec.explore.state_map import slots_of
from meliad_rec.explore.state_map import state_map
from meliad_rec.runs.folder import check_is_of_text
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import output_file

LIMIT = 10 * 10**6  # Bytes of a page.
STEPS = 16  # Parts of a bit to which losses are rounded.
_PAGE = 4_000  # Tokens shown at once.
_STATES = 600_000  # Numbers of states kept, over all block borders.
_PART = 4_000  # Tokens read for figures that need arrays of attention.


def write_page(
  run: TrainedRun,
  text: str,
  out: str | os.PathLike[str],
  *,
  name: str = 'text',
  baseline: TrainedRun | None = None,
  top: int | None = None,
  on_progress: Callable[[str], None] = lambda what: None,
) -> None:
  """Writes a page about what a run does with a text.

  Args:
    run: a run of text without an encoder.
    text: a document.
    out: path of the HTML file, which is written whole or not at all.
    name: name of the text.
    baseline: run to compare with; see `gain`. None compares a recurrent run
      with the same run whose state is cleared before every block.
    top: number of likely tokens to show at each token; None means 5, or all of
      a vocabulary that has fewer. A page that would take more than LIMIT shows
      fewer, and then only the beginning of the text.
    on_progress: called with the name of each part before it is made, and with
      the reason if it is left out.

  Raises:
    ValueError: the run cannot read the text, its losses are NaN, the baseline
      has another vocabulary, `top` is below 1 or above the number of tokens in
      the vocabulary, or the page cannot be written.
  """
  check_is_of_text(run.labels)
  if run.sharded.model.encoder is not None:
    raise ValueError(
      'A page shows a model of one text, and this one has an encoder. Use '
      'explore.source_map and run.with_source in Python.'
    )
  if baseline is not None:
    check_vocabularies({'run': run, 'baseline': baseline})
  on_progress('predictions')
  found = run.predictions(text, top)
  if np.isnan(found['nats']).any():
    raise ValueError(
      f'The losses of {run.workdir}, step {run.step:,}, are NaN: its training '
      'diverged. Choose an earlier step with --step.'
    )
  figures: dict[str, str] = {}
  summary = {
    'run': f'{run.workdir}, step {run.step:,}',
    'parameters': _size(run),
    'text': f'{name}, {found.sizes["token"]:,} tokens, '
    f'{len(text.encode()):,} bytes',
    'loss': _bits(found['nats'], text),
  }
  top_words: list[dict] = []

  def draw(title: str, make: Callable[[], Shown]) -> None:
    try:
      figures[title] = _png(make())
    except ValueError as error:  # The model or text may have none of this kind.
      on_progress(f'  left out: {error}')

  recurrent = run.sharded.model.cell.is_recurrent
  if recurrent or baseline is not None:
    on_progress('gain')
    shown = gain(run, text, baseline)
    found['gain'] = shown.data['gain']
    title = 'How much the state lowers the loss, and where most'
    label = f'loss, state cleared every {run.block:,} tokens'
    if baseline is not None:
      title = "How much lower the loss is than the baseline's, and where most"
      label = f'loss of {baseline.workdir}, step {baseline.step:,}'
      summary['parameters of the baseline'] = _size(baseline)
    draw(title, lambda: shown)
    top_words = shown.data.attrs['top']
    summary[label] = _bits(shown.data['baseline_nats'], text)
  states, columns = None, {}
  if recurrent:
    on_progress('states')
    try:
      states, columns = _state_columns(run, text)
    except ValueError as error:  # They may be too large.
      on_progress(f'  left out: {error}')
  for title, make in _figures(run, text, recurrent, baseline).items():
    on_progress(title)
    draw(title, make)
  page = _fitted(
    lambda bytes_, found, note: _fill(
      name,
      columns | _token_columns(bytes_, found),
      states,
      found,
      summary | note,
      figures,
      top_words,
    ),
    # The vocabulary may spell the text differently, such as with other spaces.
    b''.join(run.vocabulary.token_bytes(found['id'].values)),
    found,
    on_progress,
  )
  try:
    output_file.write(Path(out), page)
  except OSError as error:
    raise ValueError(
      f'{out} cannot be written ({error.strerror}). Give another path.'
    ) from None


def _figures(
  run: TrainedRun, text: str, recurrent: bool, baseline: TrainedRun | None
) -> dict[str, Callable[[], Shown]]:
  """Returns {title: function that draws it} of the figures of a page."""
  part = run.encode(text)[:_PART]
  runs = {run.name: run}
  if baseline is not None:
    runs[f'{baseline.name} (baseline)'] = baseline
  with_state = {
    n: r for n, r in runs.items() if r.sharded.model.cell.is_recurrent
  }
  figures = {
    'The state along the text: its change, its use by tokens, and gates': (
      lambda: state_map(run, text, every=_every(run, text, 400))
    ),
    'The cost of clearing the state once': lambda: forgetting(
      with_state, text, 256
    ),
    'The gradient of a loss with respect to older states': (
      lambda: state_gradients(with_state, text)
    ),
  }
  if not recurrent:
    figures = {}
  return figures | {
    'The loss by the position in the text': lambda: by_position(runs, text),
    'The loss of names by the distance to their previous use': (
      lambda: by_distance(runs, text)
    ),
    'How far back layers attend, in the first part of the text': (
      lambda: attention_map(runs, part)
    ),
    'The most likely tokens after each step in depth or pass': (
      lambda: lens(run, part)
    ),
    'The layers of which the memory is made': lambda: memory_sources(run),
    'What is recalled at the end of the first part of the text': (
      lambda: recalled(run, part, -1)
    ),
  }


def _every(run: TrainedRun, text: str, states: int) -> int:
  """Returns the number of tokens between about `states` states of a text."""
  blocks = len(run.encode(text)) // run.block
  return run.block * max(1, round(blocks / states))


def _fitted(render, bytes_: bytes, found, on_progress) -> bytes:
  """Returns the page, which shows less of a text too long for LIMIT.

  Args:
    render: function from the bytes of a text, its predictions and a note for
      the table to the page.
    bytes_: the bytes of the whole text, as its tokens spell it.
    found: its predictions.
    on_progress: called with what the page shows, if this is not all.
  """
  T, K = found.sizes['token'], found.sizes['choice']
  whole, note = T, {}
  ends = np.append(found['byte'].values, len(bytes_))
  while len(page := render(bytes_, found, note)) > LIMIT and T > 1:
    if K > 1:
      K = max(K // 2, min(K - 1, 4))  # Halved, and from 4 on one by one.
    else:
      T = max(1, int(T * min(0.9, 0.95 * LIMIT / len(page))))
    bytes_ = bytes_[: ends[T]]
    found = found.isel(token=slice(T), choice=slice(K))
    part = f'all {T:,}' if whole == T else f'the first {T:,} of {whole:,}'
    note = {
      'shown': f'{part} tokens, and {K} of the most likely at each, so that '
      f'the page takes at most {LIMIT / 1e6:.0f} MB'
    }
  if note:
    on_progress(f'The page shows {note["shown"]}.')
  return page


def _size(run: TrainedRun) -> str:
  """Returns the number of parameters, and the speed of training if known."""
  trained = speed(run) and f', trained at {speed(run)}'
  return f'{run.parameters:,}{trained}'


def _bits(nats, text: str) -> str:
  bits = float(nats.sum()) / np.log(2)
  return f'{bits / len(text.encode()):.4f} bits per byte'


def _rounded(bits: np.ndarray, dtype) -> np.ndarray:
  """Returns losses as integers, in 1 / STEPS bits; the largest are clipped."""
  limits = np.iinfo(dtype)
  return np.clip(np.round(bits * STEPS), limits.min, limits.max).astype(dtype)


def _token_columns(text: bytes, found) -> dict[str, np.ndarray]:
  """Returns the columns of the page, arrays with one row for each token."""
  bytes_ = np.append(found['byte'].values, len(text))
  _, at = np.unique(found['top_ids'].values, return_inverse=True)
  smallest = np.min_scalar_type(at.max())
  columns = {
    'text': np.frombuffer(text, np.uint8),
    'length': np.diff(bytes_).astype(np.uint16),
    'nats': _rounded(found['nats'].values / np.log(2), np.uint16),
    'rank': np.minimum(found['rank'].values, 255).astype(np.uint8),
    'top': at.reshape(found['top_ids'].shape).astype(smallest),
    # The limit of 8 bits is a probability that is shown as 0.0 %.
    'top_nats': _rounded(found['top_nats'].values / np.log(2), np.uint8),
  }
  if 'gain' in found:
    columns['gain'] = _rounded(found['gain'].values, np.int16)
  return columns


def _state_columns(run, text) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns a description of states at some block borders, and their columns.

  Vectors of more than 128 elements or 64 slots are thinned out.
  """
  states = run.states(text, _every(run, text, 200))
  part = states[slots_of(states, None)[1]]
  layers: list[int | None] = [None]
  if 'layer' in part.dims:
    layers = part['layer'].values.tolist()
  whole = [slots_of(states, layer)[0] for layer in layers]
  N, S, D = whole[0].shape
  thin = lambda count, most: slice(None, None, -(-count // most))
  parts = [a_NSD[:, thin(S, 64), thin(D, 128)] for a_NSD in whole]
  borders = thin(N, max(_STATES // sum(a[0].size for a in parts), 2))
  s_NLSD = np.stack([a[borders] for a in parts], 1).astype(np.float64)
  tokens = states['tokens'].values[borders]
  deviation = s_NLSD - s_NLSD.mean(0)
  deviation /= deviation.std(0) + 1e-9
  largest = np.abs(s_NLSD).max() + 1e-9
  rounded = lambda a: np.clip(np.round(127 * a), -127, 127).astype(np.int8)
  columns = {
    'deviation': rounded(deviation / 3),
    'value': rounded(s_NLSD / largest),
  }
  description = {
    'shape': list(s_NLSD.shape),
    'whole': [len(run.encode(text)) // run.block + 1, S, D],
    'largest': float(largest),
    'tokens': tokens.tolist(),
    'layers': ['state' if n is None else f'layer {n}' for n in layers],
  }
  return description, columns


def _fill(name, columns, states, found, summary, figures, top_words) -> bytes:
  """Returns the page as UTF-8 bytes."""
  unique = np.unique(found['top_ids'].values, return_index=True)[1]
  facts = {
    'tokens': found.sizes['token'],
    'choices': found.sizes['choice'],
    'page': _PAGE,
    'steps': STEPS,
    'vocabulary': found['top_text'].values.ravel()[unique].tolist(),
    'states': states,
    'columns': {key: _packed(a) for key, a in columns.items()},
  }
  rows = ''.join(
    f'<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>'
    for k, v in summary.items()
  )
  drawn = ''.join(
    f'<figure><img src="data:image/png;base64,{png}" '
    f'alt="{html.escape(title)}"><figcaption>{html.escape(title)}</figcaption>'
    '</figure>'
    for title, png in figures.items()
  )
  if top_words:
    drawn = _top_words(top_words) + drawn
  template = importlib.resources.files(__package__) / 'page.html'
  page = string.Template(template.read_text(encoding='utf-8')).substitute(
    title=html.escape(f'What the model does with {name}'),
    about='Made by meliad_rec. Losses are in bits.',
    summary=f'<table>{rows}</table>',
    figures=f'<h2>Figures</h2>{drawn}' if drawn else '',
    # No text of the document can end the element that holds the facts.
    json=json.dumps(facts).replace('<', '\\u003c'),
  )
  return page.encode(errors='replace')  # Names of files may be no UTF-8.


def _top_words(top: list[dict]) -> str:
  """Returns a table of the words that gain most, as HTML."""
  rows = ''.join(
    '<tr><td class="number">{gain:.1f}</td><td><code>{name}</code></td>'
    '<td>{back}</td><td><code>{before}<b>{word}</b></code></td></tr>'.format(
      gain=word['gain'],
      name=html.escape(word['name']),
      back=previous_use(word),
      before=html.escape(word['before'][-60:]),
      word=html.escape(word['word']),
    )
    for word in top
  )
  reach = ''
  if any(word['in_window'] is not None for word in top):
    reach = (
      ' The attention of one layer does not reach a use beyond the window.'
    )
  return (
    '<p>The words that gain most: the gain in bits, the name in it with the '
    'largest gain, the previous use of this name, and the word in its context.'
    f'{reach}</p>'
    '<div class="wide" tabindex="0" role="region" aria-label="Words"><table>'
    '<tr><th>gain</th><th>name</th><th>previous use</th><th>word</th></tr>'
    f'{rows}</table></div>'
  )


def _packed(a: np.ndarray) -> dict[str, str]:
  data = base64.b64encode(gzip.compress(a.tobytes(), 9, mtime=0)).decode()
  return {'dtype': str(a.dtype), 'data': data}


def _png(shown: Shown) -> str:
  """Returns the figure as a PNG in base64."""
  buffer = io.BytesIO()
  shown.figure.savefig(buffer, format='png', dpi=80)
  return base64.b64encode(buffer.getvalue()).decode()
