"""Messages while a command runs: plain lines on stderr, without stamps."""

import logging

from absl import logging as absl_logging


def plain() -> None:
  """Makes every message of the process one plain line; twice is harmless.

  What other libraries tell for information is left out.
  """
  absl_logging.use_absl_handler()
  handler = absl_logging.get_absl_handler()
  handler.setFormatter(_Plain())
  handler.filters = [_is_for_people]


class _Plain(logging.Formatter):
  """'message', 'warning: message', 'error: message'."""

  def format(self, record):
    text = super().format(record)
    if record.levelno <= logging.INFO:
      return text
    return f'{record.levelname.lower()}: {text}'


def _is_for_people(record):
  return record.name == 'absl' or record.levelno > logging.INFO
