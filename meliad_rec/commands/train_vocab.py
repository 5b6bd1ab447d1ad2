r"""Trains a SentencePiece vocabulary on any source.

  meliad-rec train_vocab --source=folder --path=BOOKS --size=32000 \
    --out=books.model

The vocabulary is lossless: text is not normalized, spaces and newlines are
kept, and characters that no piece covers are spelled in bytes. Id 0 is padding,
1 is end, 2 is unknown.
"""

from collections.abc import Callable
from collections.abc import Iterator
import functools
import io
import os
import re
import time

from absl import flags
import sentencepiece

from meliad_rec.config import config_flags
from meliad_rec.data import sources
from meliad_rec.data.text import texts
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.storage import output_file
from meliad_rec.storage.workdir import local

# Characters in a training sentence; the trainer counts bytes, at most 4 each.
_SENTENCE = 2048
# Matches one sentence; it ends before whitespace if there is any.
_PIECE = re.compile(rf'(?s:.{{1,{_SENTENCE}}}(?=\s|\Z)|.{{1,{_SENTENCE}}})')


def define_flags() -> None:
  sources.define_flags()
  flags.DEFINE_integer(
    'size',
    None,
    'Number of ids in the vocabulary.',
    lower_bound=1,
    required=True,
  )
  flags.DEFINE_string('out', None, 'The .model file to write.', required=True)
  flags.DEFINE_bool('force', False, 'Replace the file in --out.')
  flags.DEFINE_string('split', 'train', 'The split to train on.')
  flags.DEFINE_integer(
    'max_bytes',
    50_000_000,
    'Maximum bytes of text to train on; a larger source is sampled evenly.',
    lower_bound=1,
  )


def main(argv: list[str]) -> None:
  config_flags.check_no_arguments(argv)
  args = flags.FLAGS
  out = local(args.out, 'A vocabulary')
  source = sources.from_flags()
  output_file.check_suffix(out, '.model')
  out.parent.mkdir(parents=True, exist_ok=True)
  output_file.check(out)
  if out.exists() and not args.force:
    raise ValueError(
      f'{out} exists. Choose another file, or replace it with --force.'
    )
  began = time.monotonic()
  read = functools.partial(texts, source, args.split)
  model = train(sentences(read, args.max_bytes), args.size)
  output_file.write(out, model)
  vocabulary = SentencePiece(out)
  print(
    f'wrote {out}: {vocabulary.size} ids, trained on {source.description}, '
    f'split {args.split}, in {time.monotonic() - began:.0f} seconds'
  )


def sentences(
  read: Callable[[], Iterator[str]], max_bytes: int
) -> Iterator[str]:
  """Yields pieces of the texts, each short enough for SentencePiece.

  If the texts are longer than max_bytes in all, only every n-th piece is
  yielded. The pieces are then spread evenly over all texts.

  Args:
    read: returns the texts; called twice.
    max_bytes: approximate limit for the sum of all pieces, in UTF-8 bytes.
  """
  to_bytes = lambda text: text.encode('utf-8', 'surrogateescape')
  total = sum(len(to_bytes(text)) for text in read())
  every = -(-total // max_bytes)
  number = 0
  for text in read():
    for piece in _PIECE.finditer(text):
      if number % every == 0:
        # Byte pieces spell null characters, which the trainer rejects, and
        # bytes that are not UTF-8, such as those of a character cut in two.
        whole = to_bytes(piece[0]).decode('utf-8', 'ignore')
        yield whole.replace('\0', ' ')
      number += 1


def train(sentences: Iterator[str], size: int) -> bytes:
  """Trains a lossless SentencePiece model (unigram, Kudo 2018).

  Args:
    sentences: the text to train on.
    size: number of ids, including 3 special ones and 256 bytes.

  Returns:
    The content of a .model file.

  Raises:
    ValueError: the text is empty, or too short for that many ids.
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
    # The trainer wraps an error of reading the text in its own message.
    original = re.search(r'ValueError: (.*)', str(error))
    if original:
      raise ValueError(original[1]) from error
    reason = str(error).rpartition('] ')[2] or 'The text is empty.'
    if most := re.search(r'Vocabulary size too high .*<= (\d+)', reason):
      raise ValueError(
        f'The text is enough for a vocabulary of at most {most[1]} ids, got '
        f'--size={size}. Lower --size, or add text.'
      ) from error
    # Its advice names a flag of its own.
    if few := re.search(r'required_chars\. \d+ vs (\d+)', reason):
      reason = f'The characters of the text alone need {few[1]}.'
    raise ValueError(
      f'Training a vocabulary of {size} ids failed: {reason} Change --size or '
      'add text.'
    ) from error
  return model.getvalue()
