"""Articles and repositories as documents, licenses, and near-duplicates."""

import gzip
import io
import random
import tarfile
import zipfile

import pytest

from meliad_rec.data.duplicates import sketch
from meliad_rec.data.duplicates import Sketches
from meliad_rec.data.projects import Projects
from meliad_rec.data.sources import source
from meliad_rec.data.splits import split_by_name

MIT = (
  'MIT License\n\nPermission is hereby granted, free of charge,\nto any person'
)
MIT += ' obtaining a copy'
GPL = '  GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007\n'


def packed(files):
  """Returns the bytes of a .tar of {name: text}."""
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w') as archive:
    for name, text in files.items():
      content = text if isinstance(text, bytes) else text.encode()
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return out.getvalue()


def put(folder, files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
      content if isinstance(content, bytes) else content.encode()
    )


def everything(projects):
  """Returns {name: text} of all splits; checks that their hash decides."""
  found = {s: dict(projects.read(s)) for s in projects.splits}
  texts = {name: text for part in found.values() for name, text in part.items()}
  splits = {name: split for split, part in found.items() for name in part}
  assert splits == split_by_name(sorted(splits), '', '')
  return texts


def test_articles_are_read_from_folders_and_the_archives_of_arxiv(tmp_path):
  article = {'b.tex': 'Proof \xe9.', 'a/x.tex': 'Let $x$.', 'fig.png': b'\0\1'}
  put(tmp_path, {f'0704.0001/{name}': text for name, text in article.items()})
  put(tmp_path, {'0704.0002.tar.gz': gzip.compress(packed(article))})
  latin = 'Théorème.'.encode('latin-1')
  bulk = {
    '0704/0704.0003.gz': gzip.compress(packed(article)),
    '0704/0704.0004.gz': gzip.compress(latin),  # An article of one file.
    '0704/0704.0005.pdf': b'%PDF',
  }
  put(tmp_path, {'arXiv_src_0704_001.tar': packed(bulk), '.hidden/a.tex': 'no'})
  whole = 'Let $x$.\nProof \xe9.'
  found = everything(Projects(str(tmp_path), ('.tex',), similarity=None))
  assert found == {
    '0704.0001': whole,
    '0704.0002': whole,
    '0704.0003': whole,
    '0704.0004': 'Théorème.',
  }
  put(tmp_path, {'math.txt': '0704.0002\n0704.0003\n0704.0004\n9999.9999\n'})
  flags = {'suffixes': ['.tex'], 'names': str(tmp_path / 'math.txt')}
  named = source('projects', str(tmp_path), **flags)
  assert set(named._split_of) == {'0704.0002', '0704.0003', '0704.0004'}


def test_repositories_are_chosen_by_language_and_license(tmp_path):
  code = {
    'src/a.c': 'int a;',
    'b.py': 'b = 1',
    'README.md': 'no',
    '.git/c.py': 'x',
  }
  repositories = {
    'one/mit': code | {'LICENSE.txt': MIT},
    'one/gpl': code | {'COPYING': GPL},
    'two/none': code,
    'two/vendored': code | {'LICENSE': MIT, 'lib/LICENSE': GPL},
    'two/own': code | {'LICENSE': 'Of Acme Inc.', 'lib/LICENSE': MIT},
    'two/parts': code | {'lib/LICENSE': MIT},
    'two/checks': {'license_check.py': MIT},
  }
  for repository, files in repositories.items():
    put(
      tmp_path, {f'{repository}/{name}': text for name, text in files.items()}
    )
  put(tmp_path, {f'two/named three/{n}': text for n, text in code.items()})
  (tmp_path / 'names').write_text('two/none\n\n two/named three \none/gpl\n')
  with zipfile.ZipFile(tmp_path / 'two' / 'zipped.zip', 'w') as archive:
    for name, text in (code | {'LICENSE': MIT}).items():
      archive.writestr(f'zipped-main/{name}', text)
  pattern, suffixes = str(tmp_path / '*' / '*'), ('.c', '.py')
  texts = {}
  for licenses in (('mit',), ('gpl-3.0', 'mit'), None):
    projects = Projects(pattern, suffixes, licenses, similarity=None)
    texts[licenses] = {
      name: text
      for split in projects.splits
      for name, text in projects.read(split)
    }
  assert set(texts['mit',]) == {'one/mit', 'two/vendored', 'two/zipped'}
  assert set(texts['gpl-3.0', 'mit']) == {*texts['mit',], 'one/gpl'}
  assert set(texts[None]) == {
    *texts['gpl-3.0', 'mit'],
    'two/none',
    'two/named three',
    'two/own',
    'two/parts',
    'two/checks',
  }
  listed = str(tmp_path / 'names')
  chosen = Projects(pattern, suffixes, names=listed, similarity=None)
  names = {n for split in chosen.splits for n, _ in chosen.read(split)}
  assert names == {'two/none', 'two/named three', 'one/gpl'}
  assert texts['mit',]['one/mit'] == 'b = 1\nint a;'
  assert texts['mit',]['two/zipped'] == 'b = 1\nint a;'


def text_of(seed, words=400):
  draw = random.Random(seed)
  letters = 'abcdefghijklmnopqrstuvwxyz'
  return ' '.join(''.join(draw.choices(letters, k=6)) for _ in range(words))


def test_similarity_is_the_share_of_common_shingles():
  """Against all shingles of 32 bytes, counted one by one."""
  a, b = text_of(1, 3000), text_of(2, 3000)
  half = a[: len(a) // 2] + b[len(b) // 2 :]

  def shingles(text):
    dense = ''.join(text.split())
    return {dense[i : i + 32] for i in range(len(dense) - 31)}

  exact = len(shingles(a) & shingles(half)) / len(shingles(a) | shingles(half))
  among = Sketches(map(sketch, ('', b[:99], a)))
  assert among.similarity(sketch(half)) == pytest.approx(exact, abs=0.05)
  assert among.similarity(sketch(a.replace(' ', '\n  '))) == 1
  assert among.similarity(sketch(text_of(3))) == 0
  assert among.similarity(sketch('short')) == 0
  assert len(sketch(a)) == pytest.approx(len(shingles(a)) / 32, rel=0.2)


def test_copies_of_short_texts_are_found():
  for size in range(1, 200):
    text = text_of(size)[:size]
    among = Sketches([sketch(text_of(size + 1)), sketch(text)])
    assert among.similarity(sketch(f' {text}\n')) == 1
    assert among.similarity(sketch(text_of(size + 2)[:size])) < 1


def test_no_split_has_a_copy_of_a_document_that_is_held_out(tmp_path, caplog):
  caplog.set_level('INFO')
  names = [f'p{i}' for i in range(40)]
  split = split_by_name(names, '', '')
  first = {
    s: next(n for n in names if split[n] == s) for s in ('validation', 'test')
  }
  texts = {name: text_of(name) for name in names}
  train = [name for name in names if split[name] == 'train']
  texts[train[0]] = texts[first['test']] + ' and one more sentence'
  texts[train[1]] = texts[first['validation']].replace(' ', '\n')
  texts[train[2]] = texts[train[3]]  # Copies in one split may stay.
  put(tmp_path, {f'{name}/a.tex': text for name, text in texts.items()})
  found = {
    s: [name for name, _ in Projects(str(tmp_path), ['.tex']).read(s)]
    for s in ('train', 'validation', 'test')
  }
  assert set(train) - set(found['train']) == set(train[:2])
  assert 'left out 2 projects' in caplog.text
  put(tmp_path, {f'{first["test"]}/a.tex': texts[first['validation']]})
  again = dict(Projects(str(tmp_path), ['.tex']).read('validation'))
  assert set(found['validation']) - set(again) == {first['validation']}


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'suffixes': ['tex']}, '--suffixes'),
    ({'suffixes': ['.c'], 'licenses': ['mine']}, "'mine' is not one of"),
    ({'suffixes': ['.c'], 'names': '/no/such'}, '--names'),
    ({'suffixes': ['.c'], 'similarity': 50}, 'at most 1, got 50'),
    (
      {'suffixes': ['.c'], 'fetch': 'git clone'},
      'Run `git clone`, or .*--path',
    ),
  ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path, arguments, message):
  (tmp_path / 'file.c').write_text('not a project')
  if 'names' in arguments:
    put(tmp_path, {'a/a.c': 'a'})
  with pytest.raises(ValueError, match=message):
    list(Projects(str(tmp_path), **arguments).read('train'))


def test_a_damaged_archive_is_named(tmp_path):
  put(
    tmp_path, {f'{n}.tar.gz': gzip.compress(packed({'a.c': n})) for n in 'abc'}
  )
  whole = (tmp_path / 'b.tar.gz').read_bytes()
  (tmp_path / 'b.tar.gz').write_bytes(whole[:60])
  with pytest.raises(ValueError, match='b.tar.gz cannot be read'):
    everything(Projects(str(tmp_path), ['.c']))


@pytest.mark.parametrize('damage', ['header', 'end'])
def test_no_part_of_a_damaged_archive_is_read(tmp_path, damage):
  put(tmp_path, {f'{n}.tar': packed({'a.c': n, 'b.c': n}) for n in 'abc'})
  content = bytearray((tmp_path / 'b.tar').read_bytes())
  if damage == 'end':
    content = content[:1540]
  else:
    content[1024:1030] = b'damage'
  for suffix in 'tar', 'tar.gz':
    whole = gzip.compress(content) if suffix == 'tar.gz' else content
    (tmp_path / 'b.tar').unlink(missing_ok=True)
    (tmp_path / f'b.{suffix}').write_bytes(whole)
    with pytest.raises(ValueError, match=f'b.{suffix} cannot be read'):
      everything(Projects(str(tmp_path), ['.c', '.tex']))


def test_two_projects_of_one_name_are_refused(tmp_path):
  put(tmp_path, {f'{n}/a.c': n for n in 'abc'})
  put(tmp_path, {'b.tar.gz': gzip.compress(packed({'a.c': 'b'}))})
  with pytest.raises(ValueError, match=r"b and .*b\.tar\.gz .* 'b'"):
    everything(Projects(str(tmp_path), ['.c']))
