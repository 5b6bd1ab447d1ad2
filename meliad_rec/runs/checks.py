"""Checks of arguments of the methods of a run."""

from collections.abc import Iterable
from collections.abc import Sequence
import numbers


def check_layer(layer: int | None) -> None:
  """Raises ValueError unless the index of a layer is an integer or None."""
  whole = isinstance(layer, numbers.Integral) and not isinstance(layer, bool)
  if layer is not None and not whole:
    raise ValueError(f'layer must be a whole number or None, got {layer!r}.')


def check_arrays(name: str, values: Sequence) -> None:
  """Raises ValueError if an argument is no sequence of texts or arrays."""
  if isinstance(values, str | bytes) or not hasattr(values, '__len__'):
    raise ValueError(
      f'{name} must be a list with an element for each text, got '
      f'{type(values).__name__}.'
    )


def check_list(name: str, texts: Iterable[str]) -> None:
  """Raises ValueError if an argument is one text, or no series of texts."""
  if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
    raise ValueError(
      f'{name} must be a list of strings, got {type(texts).__name__}.'
    )


def check_text(what: str, text: str) -> None:
  """Raises ValueError if a text is not a string that UTF-8 can represent.

  Args:
    what: the text, in the message.
    text: the text.
  """
  if not isinstance(text, str):
    raise ValueError(f'{what} must be a string, got {type(text).__name__}.')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{what} has a lone surrogate at character {error.start}, which UTF-8 '
      'cannot represent. Remove it.'
    ) from None
