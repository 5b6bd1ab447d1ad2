"""The READMEs are true: the example trains, and all that they name exists."""

import math
from pathlib import Path
import re

import pytest

import meliad_rec
from meliad_rec.config import config
from meliad_rec.config import files
from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'meliad_rec'
README = (ROOT / 'README.md').read_text(encoding='utf-8')
# CHANGELOG.md names what is gone, too.
TEXTS = {
  path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
  for path in sorted(
    [ROOT / 'RESULTS.md', *ROOT.glob('README.md'), *ROOT.glob('*/**/README.md')]
  )
  if '.venv' not in path.parts
}
CODE = '\n'.join(
  path.read_text(encoding='utf-8') for path in PACKAGE.rglob('*.py')
)
every = pytest.mark.parametrize('name', TEXTS)


def block(start):
  """Returns the fenced block of the README with this start."""
  blocks = re.findall(r'```\w*\n(.*?)```', README, re.DOTALL)
  [only] = [each for each in blocks if each.startswith(start)]
  return only


def test_the_architecture_of_the_readme_trains(tmp_path, monkeypatch):
  (tmp_path / 'leaky.py').write_text(block('"""A layer'))
  (tmp_path / 'arch').mkdir()
  (tmp_path / 'arch' / 'leaky.gin').write_text(block('from __gin__'))
  ids = Bytes().encode('it was the best of times, ' * 9)
  splits = {
    split: [Document(split, ids, len(ids), 6 * 9)]
    for split in ('train', 'validation')
  }
  store.write(tmp_path / 'store', splits, Bytes(), 'test')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  run = meliad_rec.train(
    ['arch/leaky.gin', 'size/test', 'task/store'],
    ['STORE = "store"', 'STEPS = 2', 'SAMPLE = 5', 'BATCH = 8'],
    'run',
  )
  assert run.step == 2
  assert len(run.generate('it', tokens=5)) == 1


def test_every_cited_work_is_in_the_list_of_references():
  known = set(
    re.findall(r'^\| ([^|]*\d{4}) \| ', TEXTS['meliad_rec/README.md'], re.M)
  )
  sources = [*PACKAGE.rglob('*.py'), *(ROOT / 'gin').rglob('*.gin')]
  sources += (ROOT / 'colab').glob('*.ipynb')
  text = '\n'.join(path.read_text(encoding='utf-8') for path in sources)
  text = re.sub(r'\n *#?|\s+', ' ', text + CODE)
  work = r'((?:Ray )?[A-Z]\w+(?: et al\.| and [A-Z]\w+)) \(?((?:19|20)\d\d)'
  cited = {f'{names} {year}' for names, year in re.findall(work, text)}
  assert len(cited) > 60
  assert cited <= known, cited - known


def test_the_readme_is_short():
  assert len(README.encode()) <= 9000


def anchors(text):
  """Returns the names of a text's headings, as links have them."""
  heads = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return {re.sub(r'[^\w -]', '', h.lower()).replace(' ', '-') for h in heads}


@every
def test_relative_links_resolve(name):
  for link in re.findall(r'\]\((?!https?:)([^)\s]+)\)', TEXTS[name]):
    path, _, anchor = link.partition('#')
    target = (ROOT / name).parent / path if path else ROOT / name
    assert target.exists(), link
    if anchor:
      assert anchor in anchors(target.read_text(encoding='utf-8')), link


@every
def test_files_exist(name):
  """Files in backticks, from the root, the package, or the README's folder."""
  bases = ROOT, PACKAGE, PACKAGE / 'archs', (ROOT / name).parent
  known = r'`((?:launch|tests|colab)/[\w/.]*|[\w/]+\.(?:py|sh|ipynb))`'
  for path in re.findall(known, TEXTS[name]):
    exists = any((base / path).exists() for base in bases)
    assert exists or path == 'leaky.py', path


@every
def test_gin_files_exist(name):
  kinds = r'(?<![\w/])(?:arch|size|task|options|experiments)'
  named = rf'({kinds}(?:/[a-z0-9]\w*)+)(?![\w/*]|\.gin)'
  for path in set(re.findall(named, TEXTS[name])):
    path = files.root() / path
    assert path.with_suffix('.gin').is_file() or path.is_dir(), path


def test_names_in_the_tour_of_the_package_exist():
  """In meliad_rec/README.md a row names a file, and what is in it."""
  rows = re.findall(
    r'^\| [^|]* \| `([\w/]+\.py)` \| (.*) \|$',
    TEXTS['meliad_rec/README.md'],
    re.MULTILINE,
  )
  assert rows
  for path, names in rows:
    text = (PACKAGE / path).read_text(encoding='utf-8')
    for each in re.findall(r'`(\w+)`', names):
      assert re.search(rf'\b{each}\b', text), f'{each} is not in {path}'


def test_batches_divide_over_the_slices_of_documented_commands():
  """Each chip has equally many rows, or as many as the others of its group."""
  checked, plain = 0, (PACKAGE / 'commands' / 'plan.py').read_text('utf-8')
  for line in (
    '\n'.join([*TEXTS.values(), plain]).replace('\\\n', '').splitlines()
  ):
    slices = re.search(r'--topology=([\w:,]+\d)', line)
    chosen = re.findall(r'--gin_file=([\w/]+)', line)
    if not slices or not chosen or 'BATCH' in line:
      continue
    batch = config.read(chosen, [], kinds=()).bindings['', 'BATCH', ''].value
    groups = int((re.search(r'\bmodel:(\d+)', line) or [0, 1])[1])
    for topology in slices[1].split(','):
      shape = topology.partition(':')[2].split('x')
      assert batch % (math.prod(map(int, shape)) // groups) == 0, line
      checked += 1
  assert checked >= 4
