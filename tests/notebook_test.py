"""The notebooks are sound, hold the outputs of a run, and run top to bottom."""

import ast
import functools
from pathlib import Path
import re

from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
import nbformat
import pytest

import meliad_rec
from meliad_rec.planning import environment
from tests import quick_xla

FOLDER = Path(__file__).parents[1] / 'colab'
NAMES = sorted(path.stem for path in FOLDER.glob('*.ipynb'))
every = pytest.mark.parametrize('name', NAMES)


@functools.cache
def notebook(name):
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def code_cells(name):
  return [cell for cell in notebook(name).cells if cell.cell_type == 'code']


def python(cell):
  """Returns the source of a cell without commands and magics of IPython."""
  if cell.source.startswith('%%writefile'):
    return cell.source.partition('\n')[2]
  return TransformerManager().transform_cell(cell.source)


def test_there_are_five():
  assert NAMES == [
    'on_a_pod',
    'quickstart',
    'state_tracking',
    'what_does_it_remember',
    'your_own_recurrence',
  ]


@every
def test_a_notebook_is_valid_and_holds_the_outputs_of_one_run(name):
  nbformat.validate(notebook(name))
  cells = code_cells(name)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  outputs = [one for cell in cells for one in cell.outputs]
  assert any('image/png' in one.get('data', {}) for one in outputs)
  for one in outputs:
    assert one.output_type != 'error'
    shown = one.get('text', '') + one.get('data', {}).get('text/plain', '')
    assert not re.search(
      r'Traceback|Warning|(^|[\s\'"])/(?!tmp/)\w+/\w', shown
    ), shown
  size = (FOLDER / f'{name}.ipynb').stat().st_size
  assert size < 1.5e6


@every
def test_notebooks_begin_alike_and_import_public_names_only(name):
  first = code_cells(name)[0].source
  assert first == code_cells('quickstart')[0].source
  for cell in code_cells(name):
    for node in ast.walk(ast.parse(python(cell))):
      match node:
        case ast.Import():
          ours = [a.name for a in node.names if a.name.startswith('meliad_rec')]
          assert set(ours) <= {'meliad_rec'}
        case ast.ImportFrom() if node.module.startswith('meliad_rec'):
          assert node.module == 'meliad_rec'
          assert {a.name for a in node.names} <= set(meliad_rec.__all__)


# What is made smaller, so that a test takes seconds: steps, and what is read.
SMALLER = {
  'quickstart': {
    'STEPS = 120': 'STEPS = 4',
    'stop_at=60': 'stop_at=2',
    'EVAL_EVERY = 60': 'EVAL_EVERY = 2',
    'EVAL_TOKENS = 2048': 'EVAL_TOKENS = 64',
    'WARMUP_STEPS = 20': 'WARMUP_STEPS = 2',
    'SAMPLE = 100': 'SAMPLE = 8',
    'tokens=200': 'tokens=8',
    '.read_text()': '.read_text()[:2000]',
  },
  'state_tracking': {
    'LSTM_STEPS, OTHER_STEPS = 4000, 1500': 'LSTM_STEPS, OTHER_STEPS = 4, 4',
    'LONG = 200': 'LONG = 60',
    'WARMUP_STEPS = 50': 'WARMUP_STEPS = 2',
    'range(60)': 'range(3)',
    'range(200)': 'range(10)',
  },
  'what_does_it_remember': {
    'RECALL_STEPS = 800': 'RECALL_STEPS = 4',
    'WARMUP_STEPS = 50': 'WARMUP_STEPS = 2',
    'CODE_STEPS = 300': 'CODE_STEPS = 102',
    'for text in texts:': 'for text in texts[:2]:',
    '6_000': '1_000',
    'after=60_000': 'after=1_000',
    'range(100)': 'range(20)',
    'many[:8]': 'many[:2]',
  },
  'your_own_recurrence': {
    'STEPS = 600': 'STEPS = 4',
    '[:8000]': '[:1000]',
    'tokens=150': 'tokens=8',
  },
  'on_a_pod': {
    'size/small': 'size/tiny',
    "'data:4', 'fsdp:4', 'data:2,model:2'": "'data:4'",
  },
}
TOLD = {
  'quickstart': ['step 2/2', 'step 4/4'],
  'state_tracking': ['right; the most common heading'],
  'what_does_it_remember': ['names are right', 'B with the state of A'],
  'your_own_recurrence': ['Outputs differ if a document is read in parts'],
  'on_a_pod': ['MFU', 'gcloud compute tpus', 'step 4/4'],
}


def test_notebooks_run_in_one_folder_keep_their_runs_apart():
  folders = [
    found
    for name in NAMES
    for found in {
      folder
      for cell in code_cells(name)
      for folder in re.findall(r"""['=](runs/[\w/]+)""", cell.source)
    }
  ]
  assert len(folders) >= len(NAMES) and len(folders) == len(set(folders))


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name != 'quickstart'))
    for name in NAMES
  ],
)
def test_a_notebook_runs_and_each_cell_runs_again(name, tmp_path, monkeypatch):
  if name == 'on_a_pod' and not environment.installed():
    pytest.skip('needs libtpu')
  # The kernel has one device, as most machines.
  monkeypatch.setenv('XLA_FLAGS', ' '.join(quick_xla.FLAGS))
  # The notebook finds the checkout above it, as in colab/.
  (tmp_path / 'launch').symlink_to(FOLDER.parent / 'launch')
  small = nbformat.from_dict(notebook(name))
  text = ''.join(cell.source for cell in small.cells)
  for old, new in SMALLER[name].items():
    assert old in text, old
    for cell in small.cells:
      cell.source = cell.source.replace(old, new)
  twice = [cell for cell in small.cells for _ in range(2)]
  small.cells = [nbformat.from_dict(dict(cell)) for cell in twice]
  for number, cell in enumerate(small.cells):
    cell.id = f'cell-{number}'
  client = NotebookClient(
    small,
    timeout=600,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute()
  told = ''.join(
    output.get('text', '')
    for cell in small.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  )
  for words in TOLD[name]:
    assert words in told
