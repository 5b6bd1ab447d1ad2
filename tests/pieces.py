"""Small SentencePiece models, trained on the spot."""

import io

import sentencepiece

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
