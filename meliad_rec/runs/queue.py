"""Several runs of a table, a few at a time, each in processes of its own."""

from collections.abc import Iterator
from collections.abc import Sequence
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Protocol


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

  Returns:
    {name of a run that failed: exit code}.

  Raises:
    KeyboardInterrupt, SystemExit: the command was stopped, after its runs have
      saved and stopped.
  """
  waiting, active, failed = [*runs], {}, {}
  shares = [*range(jobs)]
  try:
    while waiting or active:
      while waiting and shares:
        run, share = waiting.pop(0), shares.pop(0)
        active[run] = share, run.commands(), None
      for run, (share, commands, process) in [*active.items()]:
        code = process.poll() if process else 0
        if code is None:
          continue
        command = None if code else next(commands, None)
        if command:
          active[run] = share, commands, start(run, command, share, jobs)
          continue
        del active[run]
        shares.append(share)
        if code:
          failed[run.name] = code
      time.sleep(0.1)
  except (KeyboardInterrupt, SystemExit):
    processes = [process for _, _, process in active.values() if process]
    for process in processes:
      process.terminate()
    for process in processes:
      process.wait()
    raise
  return failed


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
