"""The sources of text, and which of them the flags of a command name."""

from collections.abc import Iterator
import dataclasses
from typing import Protocol

from absl import flags

from meliad_rec.data.code import Code
from meliad_rec.data.folder import Folder
from meliad_rec.data.jsonl import Jsonl


class Reader(Protocol):
  """Documents from plain Python: Code, Folder, Jsonl or one of your own."""

  description: str
  splits: tuple[str, ...]

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every document of a split, always in one order."""


@dataclasses.dataclass(frozen=True)
class Pg19:
  """The PG-19 books (Rae et al. 2020), prepared by tensorflow-datasets.

  Attributes:
    data_dir: where it was prepared; None: the place tensorflow-datasets uses.
  """

  data_dir: str | None = None

  name = 'pg19:0.1.1'
  description = 'pg19: tensorflow-datasets pg19 0.1.1'


@dataclasses.dataclass(frozen=True)
class Registered:
  """Any seqio task or mixture with a feature 'targets'.

  Attributes:
    name: what it is registered under.
    module: Python module to import first, the one that registers it.
  """

  name: str
  module: str | None = None

  @property
  def description(self) -> str:
    return f'seqio: {self.name}'


Source = Reader | Pg19 | Registered


# The flags that each kind of source reads; any other kind is a seqio task.
_READS = {
  'code': (),
  'folder': ('path', 'split_file'),
  'jsonl': ('path', 'field'),
  'pg19': ('path',),
}


def source(
  kind: str,
  path: str | None = None,
  field: str | None = None,
  split_file: str | None = None,
  module: str | None = None,
) -> Source:
  """The source that the flags of a command name.

  Args:
    kind: code, folder, jsonl, pg19, or the name of a seqio task or mixture.
    path: a folder or pattern of files, or a file of jsonl; of pg19, the folder
      it was prepared in.
    field: of the JSON objects, the document's text; None: 'text'.
    split_file: of a folder, lines of name, tab and split.
    module: of a seqio task, the Python module that registers it.

  Raises:
    ValueError: a flag that this kind of source needs, or does not read.
  """
  given = {
    'path': path,
    'field': field,
    'split_file': split_file,
    'module': module,
  }
  unread = [
    f'--{name}'
    for name, value in given.items()
    if value is not None and name not in _READS.get(kind, ('module',))
  ]
  if unread:
    taken = f', taken for a seqio task as it is none of {", ".join(_READS)},'
    raise ValueError(
      f'The source {kind!r}{"" if kind in _READS else taken} does not read '
      f'{", ".join(unread)}; leave it out, or correct --source.'
    )
  if kind in ('folder', 'jsonl') and not path:
    raise ValueError(f'The source {kind!r} needs a place to read; give --path.')
  match kind:
    case 'code':
      return Code()
    case 'folder':
      return Folder(path, split_file)
    case 'jsonl':
      return Jsonl(path, field or 'text')
    case 'pg19':
      return Pg19(path)
    case _:
      return Registered(kind, module)


def define_flags() -> None:
  """Defines the flags that name a source, for a command that reads one."""
  flags.DEFINE_string(
    'source',
    None,
    'What to read: code (the Python packages of this machine), folder, jsonl, '
    'pg19, or the name of a seqio task or mixture.',
  )
  flags.DEFINE_string(
    'path',
    None,
    'folder: a folder of UTF-8 files or a pattern, one document a file. jsonl: '
    'a file, a folder with train.jsonl etc. or a pattern with {split}. pg19: '
    'the data_dir of tensorflow-datasets.',
  )
  flags.DEFINE_string(
    'field', None, "jsonl: the field that holds the text; default: 'text'."
  )
  flags.DEFINE_string(
    'split_file',
    None,
    'folder: a file with lines of name, tab and split (train, validation or '
    'test); files not listed are left out.',
  )
  flags.DEFINE_string(
    'module', None, 'Python module that registers your seqio task.'
  )


def from_flags() -> Source:
  """The source that this command line names; ValueError if it names none."""
  given = flags.FLAGS
  if not given.source:
    raise ValueError('What to read? Give --source: code, folder, jsonl, ...')
  return source(
    given.source, given.path, given.field, given.split_file, given.module
  )
