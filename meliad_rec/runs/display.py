"""Descriptions of a trained run: as text, as HTML and as a model card."""

import base64
from collections import Counter
from collections.abc import Mapping
import html
import os
from pathlib import Path
import tempfile

from etils import epath

from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.stack import Stack
from meliad_rec.metrics import metrics
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.report import journal
from meliad_rec.report import plot

# The first of these metrics that the run has written is drawn.
_CURVES = 'loss_nats_per_token', 'error'
_QUALITY = (
  *('bits_per_byte', 'loss_nats_per_token', 'word_perplexity'),
  *('accuracy', 'error'),
)

# Example code in a model card: how to use the model.
_EVALUATION = "run.evaluate('some text')['bits_per_byte']"
_GENERATION = f"""print(run.generate('Once upon a time', tokens=200)[0])
{_EVALUATION}"""
_TRANSLATION = "print(run.translate(['a source'])[0])"
_CLASSIFICATION = """run.params
# `meliad-rec evaluate --workdir=FOLDER --split=test` measures its accuracy."""


def describe(model: Model) -> str:
  """Returns a model's layers in words, such as '11 WindowLayer, width 512'.

  A layer that is repeated in depth is counted as often as it is applied.
  """
  parts = [
    f'{count} {name}' if count > 1 else name
    for name, count in _layers(model.cell).items()
  ]
  head = '' if model.head is None else f', {type(model.head).__name__}'
  if model.encoder is not None:
    parts.append(f'encoder {type(model.encoder).__name__}')
  return f'{", ".join(parts)}{head}, width {model.d_model}'


def _layers(cell: Cell) -> Counter[str]:
  match cell:
    case Stack():
      return sum(map(_layers, cell.cells), Counter())
    case Repeat():
      inner = _layers(cell.cell)
      return Counter({name: cell.count * n for name, n in inner.items()})
    case _:
      return Counter([type(cell).__name__])


def as_text(title: str, rows: Mapping[str, str]) -> str:
  """Returns a title and an indented table of names and values."""
  width = max(map(len, rows))
  return '\n'.join([title, *(f'  {k:<{width}}  {v}' for k, v in rows.items())])


def as_html(title: str, rows: Mapping[str, str], workdir: os.PathLike) -> str:
  """Returns HTML: a table, and the curves of the run if it has any.

  Args:
    title: text above the table.
    rows: {name: value} of the table.
    workdir: folder of the run; see `_curve`.
  """
  lines = [f'<b>{html.escape(title)}</b>', '<table>']
  lines += [
    f'<tr><th style="text-align:left">{html.escape(name)}</th>'
    f'<td style="text-align:left">{html.escape(value)}</td></tr>'
    for name, value in rows.items()
  ]
  lines.append('</table>')
  if png := _curve(workdir):
    data = base64.b64encode(png).decode()
    lines.append(f'<img alt="metrics" src="data:image/png;base64,{data}">')
  return '\n'.join(lines)


def as_card(
  title: str, rows: Mapping[str, str], labels: bool, model: Model
) -> str:
  """Returns a model card for the hub of Hugging Face, in Markdown.

  Args:
    title: title of the card.
    rows: {name: value} of the card's table.
    labels: whether the model predicts labels instead of text.
    model: the model.
  """
  task, use = 'text-generation', _GENERATION
  if labels:
    task, use = 'text-classification', _CLASSIFICATION
  elif model.encoder is not None:
    task, use = 'translation', _TRANSLATION
  elif model.cell.needs_whole_document:  # It cannot generate.
    task, use = '', _EVALUATION
  tag = f'pipeline_tag: {task}\n' if task else ''
  escaped = {name: value.replace('|', r'\|') for name, value in rows.items()}
  table = '\n'.join(f'| {name} | {value} |' for name, value in escaped.items())
  return f"""---
library_name: meliad_rec
{tag}tags:
- jax
- flax
- recurrent
---

# {title}

A recurrent transformer for long documents, trained with meliad_rec.

| | |
|---|---|
{table}

## Use

```python
import meliad_rec

run = meliad_rec.load_run('FOLDER')  # this folder; needs meliad_rec[export]
{use}
```

`meliad-rec train --init_from=FOLDER` begins a new run with these parameters.
`config.gin` has all settings of the training, including the paths of its data,
and `run.json` the folder in which it was started.

## Data, license and limits

To be written by the author of the model.
"""


def quality(workdir: Path | epath.Path, step: int) -> dict[str, str]:
  """Returns the most important validation metrics of a step.

  Returns:
    {'validation NAME': value with its unit, as text}. It is empty if the step
    was not evaluated or has no readable metrics.
  """
  for record in reversed(_records(workdir)):
    if record['step'] == step and record.get('split') == 'validation':
      return {
        f'validation {name}': f'{record[name]:.5g} {metrics.unit(name)}'.strip()
        for name in _QUALITY
        if name in record
      }
  return {}


def _records(workdir) -> list[dict]:
  try:
    return journal.read(journal.path(workdir))
  except (ValueError, OSError):  # There are none yet, or they are damaged.
    return []


def _curve(workdir: os.PathLike) -> bytes | None:
  """Returns a PNG of a run's loss curves, in training and validation.

  If the run has no loss, the PNG shows the share of wrong predictions (the
  metric 'error'). Returns None if the run has neither metric.
  """
  records = _records(workdir)
  for metric in _CURVES:
    if any(metric in record for record in records):
      with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'curve.png')
        name = Path(workdir).absolute().name
        plot.compare({name: workdir}, path, metric)
        return path.read_bytes()
  return None
