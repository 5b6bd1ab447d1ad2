"""Sources of text, and the command-line flags that choose one."""

from collections.abc import Iterator
import dataclasses
from typing import Any
from typing import Protocol

from absl import flags

from meliad_rec.data.code import Code
from meliad_rec.data.corpus import Corpus
from meliad_rec.data.folder import Folder
from meliad_rec.data.huggingface import HuggingFace
from meliad_rec.data.jsonl import Jsonl
from meliad_rec.data.pairs import JsonPairs
from meliad_rec.data.pairs import Lines
from meliad_rec.data.pg19 import Pg19
from meliad_rec.data.projects import LICENSES
from meliad_rec.data.projects import Projects


class TextReader(Protocol):
  """The interface of a source of texts, such as Folder or a class of your own.

  Attributes:
    description: one line that describes the source in logs and token stores.
    splits: names of the splits.
  """

  description: str
  splits: tuple[str, ...]

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields the (name, text) of each document of a split in a fixed order."""


@dataclasses.dataclass(frozen=True)
class Registered:
  """A registered seqio task or mixture with a feature 'targets'.

  Attributes:
    name: name of the task or mixture in the registry of seqio.
    module: Python module that registers the task when it is imported. None if
      the task is registered already.
  """

  name: str
  module: str | None = None

  @property
  def description(self) -> str:
    return f'seqio: {self.name}'


@dataclasses.dataclass(frozen=True)
class Concatenated:
  r"""Long documents made by joining short documents of another source.

  Short documents waste the rest of their last segment, because a row begins a
  new document at a segment. Concatenated, they waste nothing.

  Attributes:
    source: the source of the short documents.
    size: characters at which a long document ends, after a whole short one.
    separator: text after each short document.
  """

  source: TextReader
  size: int = 10_000_000
  separator: str = '\n\n'

  def __post_init__(self):
    if self.size < 1:
      raise ValueError(
        f'Concatenated.size must be at least 1, got {self.size}. Set '
        '--concatenate (in gin: sources.Concatenated.size).'
      )

  @property
  def description(self) -> str:
    return f'{self.source.description}, concatenated'

  @property
  def splits(self) -> tuple[str, ...]:
    return self.source.splits

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name of the first short document, text) of each long one."""
    parts, size, first = [], 0, ''
    for name, text in self.source.read(split):
      first = first if parts else name
      parts += text, self.separator
      size += len(text) + len(self.separator)
      if size >= self.size:
        yield first, ''.join(parts)
        parts, size = [], 0
    if parts:
      yield first, ''.join(parts)


Source = TextReader | Registered

# The flags that each kind of source uses. Any other kind is a seqio task.
_FLAGS = {
  'code': (),
  'corpus': ('path', 'newlines'),
  'folder': ('path', 'split_file'),
  'jsonl': ('path', 'field'),
  'hf': ('path', 'field', 'subset', 'splits_from', 'stream', 'limit'),
  'pairs': ('path', 'field', 'target'),
  'pg19': ('path',),
  'projects': ('path', 'suffixes', 'licenses', 'names'),
}


def source(
  kind: str,
  path: str | None = None,
  concatenate: int | None = None,
  **others: Any,
) -> Source:
  """Returns the source that the flags of a command describe.

  Args:
    kind: code, corpus, folder, jsonl, hf, pairs, pg19, projects, or the name
      of a seqio task or mixture.
    path: for corpus, a file or a pattern with {split}; for folder, a folder or
      pattern; for jsonl, a file, folder or pattern; for hf, one of these or the
      name of a dataset on the Hub; for pg19, the data_dir of
      tensorflow-datasets; for projects, a folder or pattern.
    concatenate: size of a document that consists of many; see Concatenated.
      None means that documents are not concatenated.
    **others: the remaining flags by name; None is like a missing one:
    field: for jsonl and hf, name of the field that holds the text. None means
      'text'. For pairs in JSON Lines, name of the field that holds the source.
    split_file: for folder, a file that assigns files to splits; see Folder.
    module: for a seqio task, the Python module that registers it.
    subset, stream, limit: for hf; see HuggingFace.
    splits_from: for hf, one entry 'SPLIT=NAME' for each split; see HuggingFace.
    newlines: for corpus; see Corpus.
    suffixes, licenses, names: for projects; see Projects.
    target: for pairs; see Lines, of which `path` is the source, or JsonPairs.

  Raises:
    ValueError: a flag is missing, does not apply to this kind of source, or has
      an invalid value.
  """
  given = {'path': path, **others}
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
  needs_path = 'path' in _FLAGS.get(kind, ()) and kind != 'pg19'
  if needs_path and not path:
    raise ValueError(f'The source {kind!r} needs a path. Set --path.')
  if concatenate is not None:
    if kind not in _FLAGS:
      raise ValueError(
        f'A seqio task such as {kind!r} cannot be concatenated. Remove '
        '--concatenate.'
      )
    if kind == 'pairs':
      raise ValueError('Pairs cannot be concatenated. Remove --concatenate.')
    return Concatenated(source(kind, **given), concatenate)
  of = given.get
  match kind:
    case 'code':
      return Code()
    case 'corpus':
      return Corpus(path, of('newlines') is not False)
    case 'folder':
      return Folder(path, of('split_file'))
    case 'jsonl':
      return Jsonl(path, of('field') or 'text')
    case 'hf':
      names = of('splits_from') and dict(map(_pair, of('splits_from')))
      more = of('subset'), names, bool(of('stream')), of('limit')
      return HuggingFace(path, of('field') or 'text', *more)
    case 'pairs':
      field, target = of('field'), of('target')
      if not target:
        raise ValueError(
          "The source 'pairs' needs the files of targets. Set --target, such "
          "as 'data/{split}.de', or to a field beside --field."
        )
      return JsonPairs(path, field, target) if field else Lines(path, target)
    case 'pg19':
      return Pg19(path)
    case 'projects':
      if not of('suffixes'):
        raise ValueError(
          "The source 'projects' needs the suffixes of files. Set --suffixes, "
          'such as .tex or .py,.c.'
        )
      return Projects(path, of('suffixes'), of('licenses'), of('names'))
    case _:
      return Registered(kind, of('module'))


def _pair(text: str) -> tuple[str, str]:
  split, equals, name = text.partition('=')
  if not equals:
    raise ValueError(
      f'--splits_from takes SPLIT=NAME, such as validation=dev, got {text!r}.'
    )
  return split, name


def define_flags() -> None:
  """Defines the command-line flags that describe a source."""
  flags.DEFINE_string(
    'source',
    None,
    'The source: code (the Python packages of this machine), corpus, folder, '
    'jsonl, hf (a dataset of Hugging Face), pairs (sources and targets), pg19, '
    'projects (articles or repositories), or the name of a seqio task or '
    'mixture.',
  )
  flags.DEFINE_string(
    'path',
    None,
    'corpus: a file that is cut in 90, 5 and 5 %, or a pattern with {split}, '
    'such as wiki.{split}.tokens. '
    'folder: a folder of UTF-8 files or a pattern, one document per file. '
    'jsonl: a file, a folder with train.jsonl etc. or a pattern with {split}. '
    'hf: a file, folder or pattern, or the name of a dataset on the Hub. '
    'pairs: a pattern of the files of sources, such as data/{split}.en, or of '
    'JSON Lines with --field. '
    'pg19: the data_dir of tensorflow-datasets. '
    'projects: a folder or pattern of folders and archives, one document each.',
  )
  flags.DEFINE_string(
    'field',
    None,
    "jsonl, hf: the field that holds the text; default: 'text'. pairs: the "
    'field of the source in JSON Lines.',
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
  flags.DEFINE_string(
    'subset', None, 'hf: the configuration of the dataset, if it has several.'
  )
  flags.DEFINE_list(
    'splits_from',
    None,
    'hf: for each split, its name in the dataset, such as '
    'validation=dev,test=eval.',
  )
  flags.DEFINE_string(
    'target',
    None,
    'pairs: a pattern of the files of targets, or their field in JSON Lines.',
  )
  flags.DEFINE_bool(
    'stream',
    None,
    'hf: read rows as they are downloaded, without a copy on the disk.',
  )
  flags.DEFINE_integer(
    'limit', None, 'hf: maximum rows to read of each split.', lower_bound=1
  )
  flags.DEFINE_bool(
    'newlines',
    None,
    'corpus: whether to keep newlines; default: they are kept.',
  )
  flags.DEFINE_list(
    'suffixes', None, 'projects: suffixes of the files to read, such as .py,.c.'
  )
  flags.DEFINE_list(
    'licenses',
    None,
    'projects: licenses of the projects to read, of '
    f'{", ".join(LICENSES)}; default: any or none.',
  )
  flags.DEFINE_string(
    'names', None, 'projects: a file that lists the projects to read.'
  )
  flags.DEFINE_integer(
    'concatenate',
    None,
    'Concatenates short documents into long ones of this many characters.',
    lower_bound=1,
  )


def from_flags() -> Source:
  """Returns the source that the flags on the command line describe.

  Raises:
    ValueError: --source is missing, or the other flags do not fit --source.
  """
  args = flags.FLAGS
  if not args.source:
    raise ValueError(
      f'--source is missing. Set it to {", ".join(_FLAGS)} or the name of a '
      'seqio task.'
    )
  names = dict.fromkeys(sum(_FLAGS.values(), ('module', 'concatenate')))
  return source(args.source, **{name: getattr(args, name) for name in names})
