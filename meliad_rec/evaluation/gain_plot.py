"""Picture of how many bits one model gains over another on the same tokens."""

import itertools
from pathlib import Path

import numpy as np

from meliad_rec.evaluation.name_distance import bin_label
from meliad_rec.evaluation.name_distance import byte_offsets
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.console import dots

# Characters of the page of text, and their size: readable at half of it.
_ROWS, _COLUMNS, _SIZE = 24, 60, 13
_FEWEST = 12  # Rows of the panel for a shorter page.
# Bytes that are not UTF-8 stay single.
_ERRORS = 'surrogateescape'
_METRIC = 'bits_per_byte'
_LIMIT = 4.0  # Bits per character at which colors are strongest.
# Colors of the two models, and of gains where that model is better. Color-blind
# readers can tell them apart. The page of `meliad-rec explore` has them, too.
_A, _B = '#D55E00', '#0072B2'
# Light enough for black letters.
_SHADES = '#EAA270', '#FFFFFF', '#6AB0D8'


def plot_gain(a: TokenLosses, b: TokenLosses, out: str | Path) -> None:
  """Draws how many bits model B gains over model A, in three panels.

  The first panel shows the training curves of the runs whose folders still
  exist and hold bits per byte. The second shows the gain at names, by the
  distance back to their previous use. The third shows the page of text on which
  B gains most. The color of a character there is the gain at its token.
  Each model has one color, which gains where it is the better one have, too.

  Args:
    a, b: losses of models A and B on the same tokens.
    out: path of the PNG, which is written completely or not at all.
  """
  figure = plot.new_figure(13, 9)
  grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.6])
  _draw_curves(figure.add_subplot(grid[0, 0]), a, b)
  draw_distances(figure.add_subplot(grid[1, 0]), a, b)
  draw_page(figure, figure.add_subplot(grid[:, 1]), a, b)
  described = [
    f'{letter} {Path(x.about.get("run", "?")).name}: {x.bits_per_byte:.4f}'
    for letter, x in zip('AB', (a, b), strict=True)
  ]
  figure.suptitle(plot.plain(f'{", ".join(described)} bits/byte'))
  plot.save(figure, out)


def _draw_curves(axes, *losses):
  runs, colors = {}, {}
  for letter, color, x in zip('AB', (_A, _B), losses, strict=True):
    folder = Path(x.about.get('run', '?'))
    if (folder / journal.NAME).is_file():
      records = journal.read(journal.path(folder))
      if any(_METRIC in record for record in records):
        runs[f'{letter} {folder.name}'] = folder
        colors[f'{letter} {folder.name}'] = color
  if runs:
    plot.draw(axes, runs, _METRIC, colors=colors)
    axes.set_title('training')
  else:
    axes.set_axis_off()


def draw_distances(axes, a: TokenLosses, b: TokenLosses) -> None:
  """Draws the gain of B over A at names, by distance to their previous use."""
  names, labels, gains = Names.of(a), [], []
  gain = (names.nats(a) - names.nats(b)) / np.log(2)
  for low, high, inside in names.bins():
    if len(inside):
      labels.append(bin_label(low, high))
      gains.append(gain[inside].mean())
  colors = [_B if gained > 0 else _A for gained in gains]
  axes.bar(labels, gains, color=colors)
  axes.tick_params(axis='x', rotation=60)
  axes.axhline(0, color='black', linewidth=0.8)
  axes.set_xlabel('tokens back to the previous use of a name')
  axes.set_ylabel('gain (bits per name)')


def draw_page(figure, axes, a: TokenLosses, b: TokenLosses) -> None:
  """Draws the page of text on which B gains most over A, colored by gain."""
  from matplotlib.colors import LinearSegmentedColormap

  gain = (a.nats - b.nats).astype(np.float64) / np.log(2)
  name, rows = _best_page(a, gain)
  width = max(map(len, rows))
  color = np.full((max(len(rows), _FEWEST), max(width, _COLUMNS // 2)), np.nan)
  for y, row in enumerate(rows):
    for x, (character, bits) in enumerate(row):
      color[y, x] = bits
      style = {'family': 'monospace', 'size': _SIZE}
      axes.text(x, y, character, ha='center', va='center', **style)
  image = axes.imshow(
    color,
    cmap=LinearSegmentedColormap.from_list('gain', _SHADES),
    vmin=-_LIMIT,
    vmax=_LIMIT,
    aspect='auto',
  )
  axes.set_axis_off()
  axes.set_title(plot.plain(f'the page where B gains most: {name}'))
  where = {'location': 'bottom', 'shrink': 0.5, 'aspect': 40, 'pad': 0.01}
  figure.colorbar(image, ax=axes, label='gain (bits per token)', **where)


def _best_page(losses: TokenLosses, gain):
  """Returns the page with the highest total gain.

  Args:
    losses: text and tokens of the documents.
    gain: gain at each token in bits.

  Returns:
    The string 'document:byte', which names the document and the offset of the
    page in it; and a list of rows, each a list of pairs (character, gain at its
    token).
  """
  best, place = -np.inf, (0, 0, 0)
  total = np.concatenate([[0], np.cumsum(gain)])
  bounds = losses.bytes_[losses.starts]
  for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
    text = losses.text[begin:end].tobytes().decode('utf-8', _ERRORS)
    starts = begin + byte_offsets(text)[_page_starts(text)]
    pages = np.diff(total[np.searchsorted(losses.bytes_, starts)])
    if pages.max(initial=-np.inf) > best:
      first = starts[pages.argmax()]
      best, place = pages.max(), (document, first - begin, end)
  document, first, end = place
  at = bounds[document] + first
  rows = [[]]
  # A character belongs to the token that holds its first byte.
  for character in losses.text[at:end].tobytes().decode('utf-8', _ERRORS):
    token = np.searchsorted(losses.bytes_, at, 'right') - 1
    at += len(character.encode('utf-8', _ERRORS))
    if character == '\n' or len(rows[-1]) == _COLUMNS:
      if len(rows) == _ROWS:
        break
      rows.append([])
    if character != '\n':
      rows[-1].append((dots(character), gain[min(token, len(gain) - 1)]))
  return f'{losses.names[document]}:{first}', rows


def _page_starts(text: str) -> list[int]:
  """Returns the index of the first character of each page, and the end."""
  rows, at = [], 0
  for line in text.split('\n'):
    rows += range(at, at + max(len(line), 1), _COLUMNS)
    at += len(line) + 1
  return [*(row for row in rows[::_ROWS] if row < len(text)), len(text)]
