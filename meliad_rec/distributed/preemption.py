"""Being asked to stop: SIGTERM, or Ctrl-C once, end a run after its step.

On one host the signals are caught here: no port is opened and no service
started. On several, jax's preemption service catches SIGTERM and has all hosts
agree on one step; Ctrl-C is handed on to it as SIGTERM.
"""

import os
import signal
import sys
import threading

import jax
from jax.experimental import multihost_utils

# How long a process waits for all others to be started.
JOIN_SECONDS = 300
# Seconds without a sign of life after which a process counts as lost, and jax
# ends the others; and how long one that has finished waits for them.
_HEARTBEAT_SECONDS = 30
_PART_SECONDS = 60


class StopRequest:
  """Whether this run was asked to stop; listens from `listen` to `close`."""

  def __init__(self):
    self._number = None  # Of the first signal that came to this process.
    self._asked = 0  # How often.
    self._agreed = False
    self._previous = None

  def reached(self):
    """True if all hosts should save and stop now.

    To be asked by every host as often, and after as much work: after each step,
    and each segment of an evaluation.
    """
    self.listen()
    if jax.process_count() > 1:
      self._asked += 1
      asked = self._asked
      self._agreed = multihost_utils.reached_preemption_sync_point(asked)
      return self._agreed
    return self._number is not None

  @property
  def exit_code(self):
    """0, or 128 + the signal, as shells have it: 130 Ctrl-C, 143 SIGTERM.

    A host that stopped since another was asked to exits as after SIGTERM.
    """
    number = self._number or (signal.SIGTERM if self._agreed else None)
    return 0 if number is None else 128 + number

  def listen(self):
    """Catches SIGTERM and the first Ctrl-C from now on."""
    # Python delivers signals to its main thread only, and on several hosts
    # SIGTERM belongs to jax.
    main = threading.current_thread() is threading.main_thread()
    if self._previous is not None or not main:
      return
    caught = [signal.SIGINT]
    if jax.process_count() == 1:
      caught.append(signal.SIGTERM)
    self._previous = {each: signal.getsignal(each) for each in caught}
    for each in caught:
      signal.signal(each, self._ask)

  def close(self):
    """Gives the signals back to who had them."""
    for each, handler in (self._previous or {}).items():
      signal.signal(each, handler)
    self._previous = None

  def _ask(self, number, frame):
    del frame
    self._number = self._number or number
    name = signal.Signals(number).name
    again = ''
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
      again = ' Ctrl-C again stops at once.'
      if jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)
    # Not print: the signal may have come while a line was being printed.
    line = f'\n{name}: saving and stopping after this step.{again}\n'
    os.write(sys.__stderr__.fileno(), line.encode())


def initialize_distributed():
  """Joins the cluster this process was started in; alone, does nothing.

  To be called before any other use of jax; a second call does nothing. While it
  waits for the others, SIGTERM and Ctrl-C end the process at once.
  Cloud TPU, Slurm, Open MPI and Kubernetes are found by jax; elsewhere the
  variables JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and
  JAX_PROCESS_ID name the cluster.

  Raises:
    ValueError: some of the three are given, and no cluster comes of it; or
      there is one that cannot be joined.
  """
  if jax.distributed.is_initialized():
    return
  # jax waits in C++, where no handler of Python's is called.
  handlers = {}
  if threading.current_thread() is threading.main_thread():
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = {number: signal.getsignal(number) for number in numbers}
  for number in handlers:
    if callable(handlers[number]):
      signal.signal(number, signal.SIG_DFL)
  names = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
  given = {name: os.environ[name] for name in names if os.environ.get(name)}
  try:
    count, index = (
      int(given[name]) if name in given else None for name in names[1:]
    )
    jax.distributed.initialize(
      num_processes=count,
      process_id=index,
      initialization_timeout=JOIN_SECONDS,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_PART_SECONDS,
    )
    if jax.process_count() > 1:
      # jax has taken it, to have hosts agree on a step.
      handlers.pop(signal.SIGTERM, None)
  except ValueError as error:
    if given:
      found = ', '.join(f'{name} is {value}' for name, value in given.items())
      raise ValueError(
        f'{found}: {error} Set {names[0]}, {names[1]} and {names[2]}, or none.'
      ) from error
    # Else there is a cluster, found by jax, that cannot be joined.
    if 'coordinator_address should be defined' not in str(error):
      raise
  except RuntimeError as error:
    # jax was used before, as in a notebook: harmless on one host.
    early = 'must be called before' in str(error)
    if not early:
      first = str(error).strip().partition('\n')[0]
      raise ValueError(
        f'This process cannot join the others of its run: {first} See that all '
        'were started once, and that the port of the first is free.'
      ) from error
    if given or jax.process_count() > 1:
      raise
  finally:
    for number, handler in handlers.items():
      if handler is not None:  # It is one of Python's.
        signal.signal(number, handler)
