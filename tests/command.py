"""Runs a command of meliad-rec in this process, with its flags."""

import contextlib
import io

from absl import flags
from absl.testing import flagsaver

from meliad_rec import cli


def run(command, *arguments) -> int:
  """Returns the exit code of a module of commands/."""
  with flagsaver.flagsaver():  # Removes the flags that are defined here.
    command.define_flags()
    rest = flags.FLAGS([command.__name__, *map(str, arguments)])
    return cli.guarded(command.main, rest) or 0


def mistake(command, *arguments) -> str:
  """Returns the line that tells a person of a mistake."""
  with contextlib.redirect_stderr(io.StringIO()) as err:
    assert run(command, *arguments) == 2
  (line,) = err.getvalue().splitlines()
  return line
