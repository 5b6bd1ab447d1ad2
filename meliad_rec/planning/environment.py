"""Environment variables for compiling for TPUs on a machine without TPUs.

libtpu reads the variables once, when it is loaded. A command therefore starts a
child process with them, and a test calls `ensure` before it first uses libtpu.
"""

from collections.abc import Sequence
import importlib.util
import os
import subprocess
import sys

VARIABLES = {
  'JAX_PLATFORMS': 'cpu',  # Programs run here and are only compiled for TPUs.
  'TPU_SKIP_MDS_QUERY': '1',  # Does not ask for the machine's metadata.
  'TPU_WORKER_HOSTNAMES': 'localhost',  # Avoids an error message.
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',  # Any value; it restricts nothing.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # Otherwise a second process is aborted.
  'TPU_LOG_DIR': 'disabled',  # Otherwise each start writes files.
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_MIN_LOG_LEVEL': '3',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}


def variables(libtpu: Sequence[str] = (), devices: int = 0) -> dict[str, str]:
  """Returns the environment of a child process that compiles for TPUs.

  Args:
    libtpu: flags of libtpu, '--xla_...=...', added to those already set.
    devices: number of CPU devices that replace the TPUs; 0 means XLA's default.
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
  """Sets the variables of libtpu in this process, unless they are already set.

  Call this before libtpu is loaded.

  Raises:
    ValueError: libtpu is not installed.
  """
  check()
  for name, value in VARIABLES.items():
    # JAX read its platform when it was imported.
    if name != 'JAX_PLATFORMS':
      os.environ.setdefault(name, value)


def silence_libtpu() -> None:
  """Keeps an installed libtpu from reporting that the machine has no TPU.

  Call this after importing JAX, since the import finds out whether there is a
  TPU, and before the first computation.
  """
  if os.environ.get('TPU_SKIP_MDS_QUERY') == '1':  # JAX found no TPU.
    for name in ('TPU_WORKER_HOSTNAMES', 'TPU_ACCELERATOR_TYPE'):
      os.environ.setdefault(name, VARIABLES[name])


def installed() -> bool:
  """Returns whether libtpu, the compiler for TPUs, is installed."""
  return importlib.util.find_spec('libtpu') is not None


def check() -> None:
  """Raises ValueError if libtpu is not installed."""
  if not installed():
    raise ValueError(
      'Compiling for a TPU needs libtpu, which is not installed. Install '
      'meliad_rec[tpu].'
    )


def failed(task: str, done: subprocess.CompletedProcess) -> Exception:
  """Returns the error for a child process that ended without a result.

  Args:
    task: what the process does, as in 'compiles for v5e:2x2'. The message
      reads 'The process that {task} failed'.
    done: the finished process.

  Returns:
    ValueError if a signal killed the process, otherwise RuntimeError.
  """
  if done.returncode < 0:
    return ValueError(
      f'The process that {task} was killed by signal {-done.returncode}, '
      'probably for lack of memory. Use a machine with more memory, or a '
      'smaller model or slice.'
    )
  # JAX may print a whole program before the error itself.
  last = '\n'.join(done.stderr.splitlines()[-30:])
  return RuntimeError(
    f'The process that {task} failed with exit code {done.returncode}. The end '
    f'of its output:\n{last}'
  )


def run(
  module: str,
  arguments: Sequence[str],
  libtpu: Sequence[str] = (),
  devices: int = 0,
) -> subprocess.CompletedProcess:
  """Runs `python -m module arguments` in the environment from `variables`.

  Args:
    module: dotted name of the module.
    arguments: arguments of the command line.
    libtpu, devices: see `variables`.

  Returns:
    The finished process, with its stdout and stderr as text.
  """
  return subprocess.run(
    [sys.executable, '-m', module, *arguments],
    env=variables(libtpu, devices),
    capture_output=True,
    text=True,
    check=False,
  )
