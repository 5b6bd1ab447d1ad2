"""Starts and ends one process of a run that may have several.

If one process fails, the others cannot continue. They may be waiting for the
failed process in C++, where Python cannot stop them. When the heartbeats of the
failed process stop, jax aborts the others and prints the reason.
"""

from collections.abc import Callable
import os
import re
import signal
import sys
import threading
import time
import traceback

from absl import logging
import jax

# How long a process waits for all others to start.
_JOIN_SECONDS = 300
# A process without a heartbeat for this long counts as lost, and jax ends the
# others.
_HEARTBEAT_SECONDS = 30
# How long a process that has finished waits for the others.
_SHUTDOWN_SECONDS = 60
# Status codes of a computation that failed because another process ended.
_LOST = 'UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED'


class JoinError(ValueError):
  """The error raised if a process cannot join the others, perhaps only now."""

  exit_code = 1


def run_on_all_processes(
  work: Callable[[], int],
  guarded: Callable[[Callable, list[str]], int | None],
) -> int:
  """Joins the other processes of the run, and returns the exit code of `work`.

  A single process just runs `work`. A process that fails exits at once, without
  waiting for the others; the others stop within a minute.

  Args:
    work: function that all processes run and that returns an exit code.
    guarded: cli.guarded, which calls a function, and prints errors that a user
      can correct; `work` is called through it.

  Raises:
    ValueError, JoinError, RuntimeError: see initialize_distributed.
  """
  initialize_distributed()
  if jax.process_count() == 1:
    return work()
  name = f'Process {jax.process_index()} of {jax.process_count()}'
  logging.info('%s has joined.', name)
  code = 1
  try:
    code = guarded(lambda _: _work(work, name), [])
  except BaseException:
    traceback.print_exc()
  # If the work is finished, _work has shut down jax.distributed.
  if not jax.distributed.is_initialized():
    return code
  sys.stdout.flush()
  sys.stderr.flush()
  # jax aborts the others when process 0 exits. Those that found the same
  # mistake get time to report it.
  if jax.process_index() == 0:
    time.sleep(3)
  # An orderly exit would wait for processes that wait for this one.
  os._exit(code or 1)


def _work(work, name):
  try:
    code = work()
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    first = str(error).strip().partition('\n')[0][:200]
    if not re.match(f'({_LOST}): ', first):
      raise
    print(
      f'error: {name} stopped because a joint computation failed ({first}).'
      ' Most likely another process was lost. Run the same command on all hosts'
      ' again to resume.',
      file=sys.stderr,
    )
    return 1
  jax.distributed.shutdown()
  return code


def initialize_distributed() -> None:
  """Joins the cluster in which this process was started, if there is one.

  Call this before any other use of jax; a second call does nothing. While the
  process waits for the others, SIGTERM and Ctrl-C end it at once. jax detects
  Cloud TPU, Slurm, Open MPI and Kubernetes. Elsewhere, the environment
  variables JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and
  JAX_PROCESS_ID name the cluster.

  Raises:
    ValueError: only some of the three variables are set, or one is wrong.
    JoinError: the cluster cannot be joined, perhaps because a host is late.
    RuntimeError: jax was used before, but there is a cluster to join; or the
      devices cannot be used.
  """
  if jax.distributed.is_initialized():
    return
  names = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
  given = {name: os.environ[name] for name in names if os.environ.get(name)}
  if names[0] in given and not re.search(r':\d+$', given[names[0]]):
    raise ValueError(
      f'{names[0]} is {given[names[0]]}, which has no port. Write host:port.'
    )
  # jax waits in C++, where Python's signal handlers are not called.
  handlers = {}
  if threading.current_thread() is threading.main_thread():
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = {number: signal.getsignal(number) for number in numbers}
  for number in handlers:
    if callable(handlers[number]):
      signal.signal(number, signal.SIG_DFL)
  try:
    count, index = (
      int(given[name]) if name in given else None for name in names[1:]
    )
    jax.distributed.initialize(
      num_processes=count,
      process_id=index,
      initialization_timeout=_JOIN_SECONDS,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except ValueError as error:
    if given:
      values = ', '.join(f'{name} is {value}' for name, value in given.items())
      raise ValueError(
        f'{values}: {error} Set {names[0]}, {names[1]} and {names[2]}, or none'
        ' of them.'
      ) from error
    # Any other message means that jax detected a cluster and cannot join it.
    if 'coordinator_address should be defined' not in str(error):
      raise
  except RuntimeError as error:
    # jax was used before, as in a notebook: harmless on one host.
    used_before = 'must be called before' in str(error)
    if not used_before:
      first = str(error).strip().partition('\n')[0]
      raise JoinError(
        f'This process cannot join the others of its run ({first.rstrip(".")}).'
        ' Check that each process was started exactly once, and that the port'
        ' of process 0 is free.'
      ) from error
    if given or jax.process_count() > 1:
      raise
  else:
    if jax.process_count() > 1:
      # jax now handles SIGTERM, so that hosts agree on a step.
      handlers.pop(signal.SIGTERM, None)
  finally:
    for number, handler in handlers.items():
      if handler is not None:  # None: it was not installed by Python.
        signal.signal(number, handler)
