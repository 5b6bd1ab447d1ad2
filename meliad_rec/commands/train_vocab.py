r"""Trains a SentencePiece vocabulary on any source.

  python -m meliad_rec train_vocab --source=folder --path=BOOKS --size=32000 \
    --out=books.model

It loses nothing: no text is normalised, spaces and newlines are kept, and what
has no piece of its own is spelt in bytes. Id 0 is padding, 1 end, 2 unknown.
"""

from collections.abc import Callable
from collections.abc import Iterator
import functools
import io
import os
from pathlib import Path
import re
import time

from absl import flags
import sentencepiece

from meliad_rec.data import sources
from meliad_rec.data.text import texts
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.storage import array_file
from meliad_rec.storage.workdir import local

# Characters; the trainer counts bytes, of which each has at most four.
_SENTENCE = 2048
# Cut before whitespace where there is any.
_PIECE = re.compile(rf'(?s:.{{1,{_SENTENCE}}}(?=\s|\Z)|.{{1,{_SENTENCE}}})')


def define_flags() -> None:
  sources.define_flags()
  flags.DEFINE_integer(
    'size', None, 'Ids in the vocabulary.', lower_bound=1, required=True
  )
  flags.DEFINE_string('out', None, 'The .model file to write.', required=True)
  flags.DEFINE_bool('force', False, 'Replace the file in --out.')
  flags.DEFINE_string('split', 'train', 'The split to train on.')
  flags.DEFINE_integer(
    'max_bytes',
    50_000_000,
    'Read no more text than this, in bytes.',
    lower_bound=1,
  )


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is no flag; write --flag=value.')
  args = flags.FLAGS
  out = Path(args.out)
  if out.suffix != '.model':
    raise ValueError(f'--out={out} names no .model file; end it in .model.')
  local(out, 'A vocabulary')
  source = sources.from_flags()
  out.parent.mkdir(parents=True, exist_ok=True)
  array_file.check_writable(out)
  if out.exists() and not args.force:
    raise ValueError(
      f'{out} exists; choose another file or replace it with --force.'
    )
  began = time.monotonic()
  read = functools.partial(texts, source, args.split)
  model = train(sentences(read, args.max_bytes), args.size)
  out.write_bytes(model)
  vocabulary = SentencePiece(out)
  print(
    f'wrote {out}: {vocabulary.size} ids, trained on {source.description}, '
    f'split {args.split}, in {time.monotonic() - began:.0f} seconds'
  )


def sentences(
  read: Callable[[], Iterator[str]], max_bytes: int
) -> Iterator[str]:
  """Pieces of the texts short enough for the trainer, each with its newlines.

  Of more text than max_bytes, every second, third, ... piece is taken, so that
  all documents have their share.

  Args:
    read: gives the texts; called twice.
    max_bytes: UTF-8 bytes to take, about.
  """
  total = sum(len(text.encode()) for text in read())
  every = -(-total // max_bytes)
  number = 0
  for text in read():
    for piece in _PIECE.finditer(text):
      if number % every == 0:
        # The trainer takes no null characters; byte pieces spell them.
        yield piece[0].replace('\0', ' ')
      number += 1


def train(sentences: Iterator[str], size: int) -> bytes:
  """A SentencePiece model (unigram, Kudo 2018) that loses nothing.

  Args:
    sentences: the text to train on.
    size: ids, of which 3 are special and 256 are bytes.

  Raises:
    ValueError: the text does not give that many pieces, or there is none.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=sentences,
      model_writer=model,
      vocab_size=size,
      model_type='unigram',
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      allow_whitespace_only_pieces=True,
      byte_fallback=True,
      required_chars='\n\t',
      character_coverage=0.9999,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      max_sentence_length=4 * _SENTENCE,
      num_threads=os.cpu_count(),
      minloglevel=2,
    )
  except RuntimeError as error:
    # What reading the text raised comes back inside the trainer's message.
    read = re.search(r'ValueError: (.*)', str(error))
    if read:
      raise ValueError(read[1]) from error
    raise ValueError(
      f'No vocabulary of {size} ids can be trained on this text: '
      f'{str(error).rpartition("] ")[2] or "it is empty"} Set another --size '
      'or give more text.'
    ) from error
  return model.getvalue()
