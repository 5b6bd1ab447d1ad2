"""Sources of text, and the command-line flags that choose one."""

from collections.abc import Iterator
import dataclasses
from typing import Protocol

from absl import flags

from meliad_rec.data.code import Code
from meliad_rec.data.folder import Folder
from meliad_rec.data.jsonl import Jsonl


class TextReader(Protocol):
  """A source in plain Python: Code, Folder, Jsonl or a class of your own."""

  description: str
  splits: tuple[str, ...]

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields the (name, text) of every document of a split in a fixed order."""


@dataclasses.dataclass(frozen=True)
class Pg19:
  """The PG-19 books (Rae et al. 2020), prepared by tensorflow-datasets.

  Attributes:
    data_dir: folder in which `tfds build` wrote the books. None: the default of
      tensorflow-datasets.
  """

  data_dir: str | None = None

  name = 'pg19:0.1.1'
  description = 'pg19: tensorflow-datasets pg19 0.1.1'


@dataclasses.dataclass(frozen=True)
class Registered:
  """A registered seqio task or mixture with a feature 'targets'.

  Attributes:
    name: its name in the registry of seqio.
    module: Python module that registers it; it is imported first. None if the
      task is registered already.
  """

  name: str
  module: str | None = None

  @property
  def description(self) -> str:
    return f'seqio: {self.name}'


Source = TextReader | Pg19 | Registered

# The flags that each kind of source uses; any other kind is a seqio task.
_FLAGS = {
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
  """Returns the source that the flags of a command describe.

  Args:
    kind: code, folder, jsonl, pg19, or the name of a seqio task or mixture.
    path: a folder, file or pattern for folder and jsonl; the data_dir for pg19.
    field: name of the field that holds the text, for jsonl. None: 'text'.
    split_file: a file with lines of name, tab and split, for folder.
    module: the Python module that registers a seqio task.

  Raises:
    ValueError: a flag is missing or does not apply to this kind of source.
  """
  given = {
    'path': path,
    'field': field,
    'split_file': split_file,
    'module': module,
  }
  unused = [
    f'--{name}'
    for name, value in given.items()
    if value is not None and name not in _FLAGS.get(kind, ('module',))
  ]
  if unused:
    note = f' (a seqio task, because it is not {", ".join(_FLAGS)})'
    raise ValueError(
      f'The source {kind!r}{"" if kind in _FLAGS else note} does not use '
      f'{", ".join(unused)}. Remove it, or correct --source.'
    )
  if kind in ('folder', 'jsonl') and not path:
    raise ValueError(f'The source {kind!r} needs --path.')
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
  """Defines the flags that describe a source."""
  flags.DEFINE_string(
    'source',
    None,
    'The source: code (the Python packages of this machine), folder, jsonl, '
    'pg19, or the name of a seqio task or mixture.',
  )
  flags.DEFINE_string(
    'path',
    None,
    'folder: a folder of UTF-8 files or a pattern, one document per file. '
    'jsonl: a file, a folder with train.jsonl etc. or a pattern with {split}. '
    'pg19: the data_dir of tensorflow-datasets.',
  )
  flags.DEFINE_string(
    'field', None, "jsonl: the field that holds the text; default: 'text'."
  )
  flags.DEFINE_string(
    'split_file',
    None,
    'folder: a file with lines of name, tab and split (train, validation or '
    'test); files that it does not list are left out.',
  )
  flags.DEFINE_string(
    'module', None, 'seqio task: the Python module that registers it.'
  )


def from_flags() -> Source:
  """Returns the source of the command line.

  Raises:
    ValueError: --source is missing, or other flags do not fit it.
  """
  args = flags.FLAGS
  if not args.source:
    raise ValueError(
      f'--source is missing. Set it to {", ".join(_FLAGS)} or the name of a '
      'seqio task.'
    )
  return source(
    args.source, args.path, args.field, args.split_file, args.module
  )
