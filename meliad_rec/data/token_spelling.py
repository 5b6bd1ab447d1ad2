"""How Hugging Face tokenizers write the bytes of a token."""

from collections.abc import Mapping
import re

KNOWN_DECODERS = {
  *('ByteLevel', 'Metaspace', 'Replace', 'ByteFallback', 'Fuse', 'Strip')
}

# The bytes that GPT-2 writes as characters: a printable byte as itself, and the
# n-th other byte as U+0100 + n.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def decoders(setting: Mapping | None) -> set[str]:
  """Returns the types of all decoders in the 'decoder' of a tokenizer.json."""
  if setting is None:
    return set()
  if setting['type'] == 'Sequence':
    return set().union(*map(decoders, setting['decoders']))
  return {setting['type']}


def byte_level(piece: str) -> bytes:
  """Returns the bytes of a token of a tokenizer with the decoder ByteLevel."""
  if not {*piece} <= _BYTE_OF.keys():
    return piece.encode()
  return bytes(map(_BYTE_OF.get, piece))


def sentencepiece(piece: str) -> bytes:
  """Returns the bytes of a token of one with Metaspace or ByteFallback."""
  if re.fullmatch('<0x[0-9A-F]{2}>', piece):
    return bytes([int(piece[3:5], 16)])
  return piece.replace('\u2581', ' ').encode()
