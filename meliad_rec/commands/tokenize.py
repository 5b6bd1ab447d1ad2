r"""Tokenizes a source once into a token store, which training then opens.

  meliad-rec tokenize --source=folder --path=BOOKS \
    --vocabulary=bytes --out=STORE
  meliad-rec tokenize --source=hf --path='rows/*.parquet' \
    --vocabulary=tokenizer.json --out=STORE
  meliad-rec tokenize --verify=STORE

Prints the numbers of documents, tokens, bytes and words of each split. --verify
reads every file of a store and checks that none has changed.
"""

from collections.abc import Iterator
import time

from absl import flags

from meliad_rec.config import config_flags
from meliad_rec.data import sources
from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.text import Text
from meliad_rec.data.text import vocabulary_of
from meliad_rec.report import console

# Flags that cannot be combined with --verify.
_WRITE_FLAGS = (
  *('source', 'path', 'field', 'split_file', 'module', 'subset', 'limit'),
  *('splits_from', 'stream', 'newlines', 'suffixes', 'licenses', 'names'),
  *('concatenate', 'target'),
  *('splits', 'vocabulary', 'out', 'force'),
)


def define_flags() -> None:
  sources.define_flags()
  flags.DEFINE_list(
    'splits', None, 'Splits to write. Default: all splits of the source.'
  )
  flags.DEFINE_string(
    'vocabulary',
    'bytes',
    'bytes, words (all words of the split train), or the path of a '
    'SentencePiece .model file (see train_vocab), of a tokenizer.json of '
    'Hugging Face or of a .txt file with a word in each line.',
  )
  flags.DEFINE_string('out', None, 'Folder of the store.')
  flags.DEFINE_bool('force', False, 'Replace the store in --out.')
  flags.DEFINE_string(
    'verify', None, 'Folder of a store to check; nothing is written.'
  )


def main(argv: list[str]) -> None:
  config_flags.check_no_arguments(argv)
  args = flags.FLAGS
  if args.verify:
    config_flags.refuse(_WRITE_FLAGS, 'cannot be combined with --verify')
    store.verify(args.verify)
    print(f'{args.verify} is unchanged')
    return
  if not args.out:
    raise ValueError('--out is missing. Set it to the folder of the new store.')
  store.check_free(args.out, args.force)
  source = sources.from_flags()
  if hasattr(source, 'pairs'):
    raise ValueError(
      'A store cannot hold pairs of sequences. Train on the files themselves, '
      'with task/pairs.'
    )
  text = Text(source, vocabulary_of(source, args.vocabulary))
  splits = {
    split: _report_counts(split, text.stream(split))
    for split in args.splits or text.splits
  }
  store.write(
    args.out, splits, text.vocabulary, text.source.description, args.force
  )
  print(f'wrote {args.out}')


def _report_counts(
  split: str, documents: Iterator[Document]
) -> Iterator[Document]:
  """Yields documents unchanged, and prints a line about them at the end.

  The line has the numbers of documents, tokens, bytes and words, and the time.

  Args:
    split: name of the split, for the line.
    documents: documents of the split.
  """
  began = time.monotonic()
  count = tokens = bytes_ = words = 0
  for document in documents:
    count += 1
    tokens += len(document.tokens)
    bytes_ += document.bytes_
    words += document.words
    yield document
  counts = {'document': count, 'token': tokens, 'byte': bytes_, 'word': words}
  listed = ', '.join(console.counted(n, noun) for noun, n in counts.items())
  seconds = time.monotonic() - began
  print(f'{split}: {listed}, {seconds:.1f} seconds', flush=True)
