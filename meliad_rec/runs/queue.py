"""Several runs of a table, a few at a time, each in processes of its own."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
import traceback
from typing import Protocol

from meliad_rec.config import config


class Job(Protocol):
  """Interface of a run that `work` trains; must be hashable.

  Attributes:
    name: name of the run.
    out: folder of the table, for logs.
  """

  @property
  def name(self) -> str: ...

  @property
  def out(self) -> Path: ...

  def commands(self) -> Iterator[list[str]]:
    """Yields names and flags of the commands to run, one after another."""
    ...


def work(runs: Sequence[Job], jobs: int) -> dict[str, int]:
  """Trains and evaluates runs, `jobs` of them at a time.

  Any error, and SIGHUP, lets the runs save and stop first.

  Returns:
    {name of a run that failed: exit code}.

  Raises:
    KeyboardInterrupt, SystemExit: the command was stopped.
  """
  waiting, active, failed = [*runs], {}, {}
  shares = [*range(jobs)]
  # After nohup, SIGHUP is ignored.
  ends = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
  if ends:
    signal.signal(signal.SIGHUP, _hang_up)
  try:
    while waiting or active:
      while waiting and shares:
        run, share = waiting.pop(0), shares.pop(0)
        active[run] = share, run.commands(), None
      for run, (share, commands, process) in [*active.items()]:
        code = process.poll() if process else 0
        if code is None:
          continue
        try:
          command = None if code else next(commands, None)
        except Exception as error:
          command, code = None, 1
          report(run, error, jobs)
        if command:
          active[run] = share, commands, start(run, command, share, jobs)
          continue
        del active[run]
        shares.append(share)
        if code:
          failed[run.name] = code
      time.sleep(0.1)
  except BaseException:
    processes = [process for _, _, process in active.values() if process]
    for process in processes:
      process.terminate()
    for process in processes:
      process.wait()
    raise
  finally:
    if ends:
      signal.signal(signal.SIGHUP, signal.SIG_DFL)
  return failed


def _hang_up(number, frame):
  """Ends the command when its terminal is closed."""
  del frame
  signal.signal(number, signal.SIG_IGN)  # Shells send it twice.
  sys.exit(128 + number)


def report(run: Job, error: Exception, jobs: int) -> None:
  """Prints an error of a run, or writes it to its log if there are `jobs`."""
  text = config.sentence(error) or ''.join(traceback.format_exception(error))
  log = (run.out / f'{run.name}.log').open('a') if jobs > 1 else None
  with log or contextlib.nullcontext(sys.stderr) as file:
    print(f'error: {text}', file=file)


def start(run: Job, command: list[str], share: int, jobs: int):
  """Starts a command of a run, and returns its process.

  Args:
    run: the run.
    command: name and flags of the command.
    share: which share of the CPU cores the process gets, from 0.
    jobs: number of shares.
  """
  log = None
  if jobs > 1:
    path = run.out / f'{run.name}.log'
    print(f'{run.name}: {command[0]}, see {path}', flush=True)
    log = path.open('a')
  else:
    print(f'== {run.name}: {command[0]}', flush=True)
  process = subprocess.Popen(
    [sys.executable, '-m', 'meliad_rec', *command],
    stdout=log,
    stderr=log,
    # Ctrl-C reaches this process only. It stops the others once, since a run
    # that is stopped twice does not save.
    process_group=0,
  )
  if log:
    log.close()
    if hasattr(os, 'sched_setaffinity'):
      cores = sorted(os.sched_getaffinity(0))
      os.sched_setaffinity(process.pid, cores[share::jobs] or cores)
  return process
