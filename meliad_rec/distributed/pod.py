"""One process of several: it joins them, and never ends without a word.

Where one process fails, the others cannot go on. Those that wait for it in
C++ are aborted by jax when its heartbeats stop, and no Python code runs then:
a small child process that outlives this one says what is to be said.
"""

from collections.abc import Callable
import os
import re
import subprocess
import sys
import time
import traceback

from absl import logging
import jax

from meliad_rec.distributed import preemption

# What a computation with a process that is gone ends with, here or there.
_GONE = 'UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED'
_AGAIN = 'Run the same command on all hosts again, to go on.'
# Its input ends with the process that holds the other end, however that ends.
_CHILD = """
while IFS= read -r line; do words=$line; done
[ -z "$words" ] || printf '%s\\n' "$words" >&2
"""


class LastWords:
  """What is written to stderr if this process is killed or aborted."""

  def __init__(self):
    # A session of its own: Ctrl-C is for this process only.
    self._child = subprocess.Popen(
      ['sh', '-c', _CHILD],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      start_new_session=True,
    )

  def say(self, words: str) -> None:
    """Takes the place of what was to be said before."""
    self._child.stdin.write(words.encode() + b'\n')
    self._child.stdin.flush()

  def close(self) -> None:
    """Nothing is to be said any more."""
    self.say('')
    self._child.stdin.close()
    self._child.wait()


def together(
  work: Callable[[], int],
  guarded: Callable[[Callable, list[str]], int | None],
) -> int:
  """Does the work as one of all processes of the run; its exit code.

  Alone it is but `work()`. A process that fails leaves at once, without waiting
  for the others, which follow it within a minute.

  Args:
    work: to be done by all processes at once.
    guarded: cli.guarded, which tells mistakes.

  Raises:
    ValueError: no cluster comes of the variables that name one.
  """
  words = LastWords()
  try:
    words.say(
      'error: This process was ended before it had found the others of its'
      f' run, by hand or after {preemption.JOIN_SECONDS} s; see that all were'
      ' started, and that all reach the port of the first.'
    )
    preemption.initialize_distributed()
    if jax.process_count() == 1:
      words.say('')
      return work()
    who = f'Process {jax.process_index()} of {jax.process_count()}'
    logging.info('%s has joined.', who)
    words.say(
      f'error: {who} was ended: by hand, for lack of memory, or by jax since'
      f' another process was lost. {_AGAIN}'
    )
    code = 1
    try:
      code = guarded(lambda _: _work(work, who), [])
    except BaseException:
      traceback.print_exc()
    # Those that have done their work have parted: see _work.
    failed = jax.distributed.is_initialized()
  finally:
    words.close()
  if failed:
    sys.stdout.flush()
    sys.stderr.flush()
    # jax aborts all others when process 0 goes: those that have found the same
    # mistake say so first.
    if jax.process_index() == 0:
      time.sleep(3)
    # An orderly exit would wait for processes that wait for this one.
    os._exit(code or 1)
  return code


def _work(work, who):
  try:
    code = work()
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    first = str(error).strip().partition('\n')[0][:200]
    if not re.match(f'({_GONE}): ', first):
      raise
    print(
      f'error: {who} has stopped, since what all compute together failed'
      f' ({first}): most likely another process was lost. {_AGAIN}',
      file=sys.stderr,
    )
    return 1
  jax.distributed.shutdown()
  return code
