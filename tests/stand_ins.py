"""Commands that only record what they are given, for scripts that call them."""

import os
from pathlib import Path
import subprocess

LAUNCH = Path(__file__).parents[1] / 'launch'
# Bash writes line by line: without a newline, a command's words are one write,
# and those of commands that run at once do not mix.
SCRIPT = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" $'\\x1e' >>"$RECORD"
"""


class StandIns:
  """A folder that is first on the PATH of the scripts run with it.

  Args:
    folder: an empty one.
    bodies: what each command does after recording, in bash, by its name.
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
    """A script of launch/, which runs."""
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
    """A script of launch/, finished."""
    with self.start(script, *arguments, **env) as started:
      try:
        said = started.communicate(timeout=60)
      finally:
        started.kill()
    return subprocess.CompletedProcess(started.args, started.returncode, *said)

  def calls(self) -> list[list[str]]:
    """[command, argument, ...] of each since the last call of this."""
    if not self._record.exists():
      return []
    text = self._record.read_text()
    self._record.unlink()
    return [call.split('\0')[:-1] for call in text.split('\x1e\0')[:-1]]


def refusal(done) -> str:
  """The one sentence of a script that refused."""
  assert done.returncode == 2, (done.stdout, done.stderr)
  (line,) = done.stderr.splitlines()
  assert line.startswith('error: ')
  return line
