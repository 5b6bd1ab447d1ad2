"""What a process needs in its environment to compile for TPUs without one.

libtpu reads it once, when it is loaded: a command starts a child with it, and
a test calls `ensure` before the first topology.
"""

from collections.abc import Sequence
import importlib.util
import os
import subprocess
import sys

VARIABLES = {
  'JAX_PLATFORMS': 'cpu',  # What runs, runs here; TPUs are compiled for only.
  'TPU_SKIP_MDS_QUERY': '1',  # No query of a machine's metadata.
  'TPU_WORKER_HOSTNAMES': 'localhost',  # Or an error is printed.
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',  # Or another; it restricts nothing.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # Or a second process is aborted.
  'TPU_LOG_DIR': 'disabled',  # Or each start leaves files.
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_MIN_LOG_LEVEL': '3',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}


def variables(libtpu: Sequence[str] = (), devices: int = 0) -> dict[str, str]:
  """The environment of a child that compiles for TPUs.

  Args:
    libtpu: flags of libtpu, '--xla_...=...', added to those that are set.
    devices: of the CPU that the child is to have in place of TPUs; 0: as is.
  """
  found = {**os.environ, **VARIABLES}
  count = f'--xla_force_host_platform_device_count={devices}'
  for name, more in (
    ('LIBTPU_INIT_ARGS', libtpu),
    ('XLA_FLAGS', [count] if devices else ()),
  ):
    if more:
      found[name] = ' '.join([os.environ.get(name, ''), *more]).strip()
  return found


def ensure() -> None:
  """Sets what this process needs; before libtpu is loaded, or it is idle.

  Raises:
    ValueError: libtpu is not installed.
  """
  check()
  for name, value in VARIABLES.items():
    # JAX reads its platform when it is imported: not to be changed here.
    if name != 'JAX_PLATFORMS':
      os.environ.setdefault(name, value)


def installed() -> bool:
  """Whether libtpu, which compiles for TPUs, is there."""
  return importlib.util.find_spec('libtpu') is not None


def check() -> None:
  """Raises ValueError if libtpu is not installed."""
  if not installed():
    raise ValueError(
      'Compiling for a TPU needs libtpu, which is not installed; install '
      'meliad_rec[tpu].'
    )


def failed(task: str, done: subprocess.CompletedProcess) -> RuntimeError:
  """What to raise of a process that ended without its answer.

  Args:
    task: what it does; 'compiles for v5e:2x2'.
    done: what ended.
  """
  # Errors of JAX may print a whole program before they say what they are.
  last = '\n'.join(done.stderr.splitlines()[-30:])
  return RuntimeError(
    f'The process that {task} ended with {done.returncode}:\n{last}'
  )


def run(
  module: str,
  arguments: Sequence[str],
  libtpu: Sequence[str] = (),
  devices: int = 0,
) -> subprocess.CompletedProcess:
  """Runs `python -m module arguments` with the environment, to its end.

  Args:
    module: dotted name.
    arguments: of the command line.
    libtpu, devices: see `variables`.

  Returns:
    What ended, with its stdout and stderr as text.
  """
  return subprocess.run(
    [sys.executable, '-m', module, *arguments],
    env=variables(libtpu, devices),
    capture_output=True,
    text=True,
    check=False,
  )
