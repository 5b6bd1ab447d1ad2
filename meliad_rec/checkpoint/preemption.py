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


class StopRequest:
  """Whether this run was asked to stop; listens from `listen` to `close`."""

  def __init__(self):
    self._asked = threading.Event()
    self._previous = None

  def reached(self, step):
    """True if all hosts should save and stop now, after `step`.

    Args:
      step: every host calls this once after each of its steps.
    """
    self.listen()
    if jax.process_count() > 1:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._asked.is_set()

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
    self._asked.set()
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

  To be called before any other use of jax; a second call does nothing.
  Cloud TPU, Slurm, Open MPI and Kubernetes are found by jax; elsewhere the
  variables JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and
  JAX_PROCESS_ID name the cluster.

  Raises:
    ValueError: JAX_COORDINATOR_ADDRESS alone does not say how many there are.
  """
  if jax.distributed.is_initialized():
    return
  address = os.environ.get('JAX_COORDINATOR_ADDRESS')
  count = os.environ.get('JAX_NUM_PROCESSES')
  index = os.environ.get('JAX_PROCESS_ID')
  try:
    jax.distributed.initialize(
      num_processes=count and int(count), process_id=index and int(index)
    )
  except ValueError as error:
    if address is not None:
      raise ValueError(
        f'JAX_COORDINATOR_ADDRESS is {address}, JAX_NUM_PROCESSES {count} and'
        f' JAX_PROCESS_ID {index}: {error} Set all three or none.'
      ) from error
  except RuntimeError:
    # jax was used before, as in a notebook: harmless on one host.
    if address is not None or jax.process_count() > 1:
      raise
