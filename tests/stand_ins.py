"""Stand-ins for commands that scripts call; they record their arguments."""

import os
from pathlib import Path
import subprocess

LAUNCH = Path(__file__).parents[1] / 'launch'
# Bash writes line by line. Without a newline, a call is one write, and calls of
# concurrent commands do not mix.
SCRIPT = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" $'\\x1e' >>"$RECORD"
"""


class StandIns:
  """A folder of commands that is first on the PATH of scripts.

  Args:
    folder: an empty folder.
    bodies: what each command does after recording, in bash, by name.
  """

  def __init__(self, folder: Path, **bodies: str):
    self._folder = folder
    self._record = folder / 'record'
    for name, body in bodies.items():
      self.answer(name, body)

  def answer(self, name: str, body: str) -> None:
    """Changes what a command does after recording."""
    path = self._folder / name
    path.write_text(SCRIPT + body + '\n')
    path.chmod(0o755)

  def start(self, script: str, *arguments: str, **env: str):
    """Starts a script of launch/."""
    inherited = dict(os.environ)
    inherited['PATH'] = f'{self._folder}:{inherited["PATH"]}'
    inherited |= {'RECORD': str(self._record), 'PYTHON': 'python'}
    return subprocess.Popen(
      ['bash', LAUNCH / script, *arguments],
      env=inherited | env,
      cwd=self._folder,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def run(self, script: str, *arguments: str, **env: str):
    """Runs a script of launch/ to its end."""
    with self.start(script, *arguments, **env) as started:
      try:
        output = started.communicate(timeout=60)
      finally:
        started.kill()
    return subprocess.CompletedProcess(
      started.args, started.returncode, *output
    )

  def calls(self) -> list[list[str]]:
    """Returns [command, argument, ...] of each call since the last time."""
    if not self._record.exists():
      return []
    text = self._record.read_text()
    self._record.unlink()
    return [call.split('\0')[:-1] for call in text.split('\x1e\0')[:-1]]


def refusal(done) -> str:
  """Returns the error message of a script that exits with 2."""
  assert done.returncode == 2, (done.stdout, done.stderr)
  (line,) = done.stderr.splitlines()
  assert line.startswith('error: ')
  return line
