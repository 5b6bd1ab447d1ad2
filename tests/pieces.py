"""Small SentencePiece models, trained on the spot."""

import atexit
import functools
import io
from pathlib import Path
import shutil
import tempfile

import sentencepiece

from meliad_rec.data.vocabulary import SentencePiece

IDS = {'pad_id': 0, 'unk_id': 2, 'eos_id': 1, 'bos_id': -1}


def train(sentences, size, **settings) -> bytes:
  """The file of a model that falls back to bytes; further settings win."""
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences),
    model_writer=out,
    vocab_size=size,
    hard_vocab_limit=False,
    minloglevel=2,
    **{'byte_fallback': True} | settings,
  )
  return out.getvalue()


@functools.cache
def vocabulary() -> SentencePiece:
  """A vocabulary that keeps texts as they are."""
  path = Path(tempfile.mkdtemp(prefix='pieces')) / 'any.model'
  atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
  sentences = ['two words third', ' naïve end'] * 9
  model = train(sentences, 290, normalization_rule_name='identity', **IDS)
  path.write_bytes(model)
  return SentencePiece(path)
