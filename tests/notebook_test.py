"""The notebook is clean, and runs top to bottom."""

import ast
from pathlib import Path

from nbclient import NotebookClient
import nbformat
import pytest

from tests import quick_xla

PATH = Path(__file__).parents[1] / 'colab' / 'quickstart.ipynb'


def cells(kind):
  notebook = nbformat.read(PATH, as_version=4)
  return [cell for cell in notebook.cells if cell.cell_type == kind]


def test_the_notebook_is_valid_and_holds_no_outputs():
  nbformat.validate(nbformat.read(PATH, as_version=4))
  for cell in cells('code'):
    assert cell.outputs == []
    assert cell.execution_count is None


def test_every_cell_is_python():
  for cell in cells('code'):
    ast.parse(cell.source)


# What is made smaller, so that the test takes seconds: steps, and what is read.
SMALLER = {
  'STEPS = 120': 'STEPS = 4',
  'steps=60': 'steps=2',
  'EVAL_EVERY = 60': 'EVAL_EVERY = 2',
  'EVAL_TOKENS = 2048': 'EVAL_TOKENS = 64',
  'WARMUP_STEPS = 20': 'WARMUP_STEPS = 2',
  'SAMPLE = 100': 'SAMPLE = 8',
  'tokens=200': 'tokens=8',
  '.read_text()': '.read_text()[:2000]',
}


@pytest.mark.slow
def test_the_notebook_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
  # The kernel has one device, as most machines.
  monkeypatch.setenv('XLA_FLAGS', ' '.join(quick_xla.FLAGS))
  notebook = nbformat.read(PATH, as_version=4)
  text = ''.join(cell.source for cell in notebook.cells)
  for old, new in SMALLER.items():
    assert text.count(old) == 1, old
    for cell in notebook.cells:
      cell.source = cell.source.replace(old, new)
  # A cell that is run again must be harmless, so every cell runs twice.
  twice = [cell for cell in notebook.cells for _ in range(2)]
  notebook.cells = [nbformat.from_dict(dict(cell)) for cell in twice]
  for number, cell in enumerate(notebook.cells):
    cell.id = f'cell-{number}'
  client = NotebookClient(
    notebook,
    timeout=600,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute()
  told = ''.join(
    output.get('text', '')
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  )
  assert 'step 2/2' in told
  assert 'step 4/4' in told
