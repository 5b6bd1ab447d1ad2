"""The notebook is clean, and runs top to bottom."""

import ast
from pathlib import Path

from nbclient import NotebookClient
import nbformat
import pytest

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


@pytest.mark.slow
def test_the_notebook_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
  # The kernel takes one device, as a person's machine has, and optimises.
  monkeypatch.delenv('XLA_FLAGS')
  notebook = nbformat.read(PATH, as_version=4)
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
  assert 'step 60/60' in told
  assert 'step 120/120' in told
