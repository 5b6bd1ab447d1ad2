"""Eight fake devices, so that every test may shard; set before JAX starts.

Tests compile much and run little. So XLA does not optimize, and fuses in the
way that compiles in less than half of the time (quick_xla.py). Compiled
programs are kept for all tests and processes of one call of pytest. Tracing
makes so many objects that looking for unreachable ones took an eighth of the
time; it is done less often.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
import threading

import pytest

from tests import quick_xla

gc.set_threshold(1_000_000, 100)
platform = os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Commands that find it set do not start again (cli._use_huge_pages).
os.environ.setdefault('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1')
if platform == 'cpu':
  os.environ['XLA_FLAGS'] = ' '.join(
    [
      os.environ.get('XLA_FLAGS', ''),
      '--xla_force_host_platform_device_count=8',
      *quick_xla.FLAGS,
    ]
  )
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  # Workers of xdist, and commands that tests start, find the variable set.
  _kept = tempfile.mkdtemp(prefix='meliad_rec_tests_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _kept
  atexit.register(shutil.rmtree, _kept, ignore_errors=True)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.02')


@pytest.fixture(autouse=True)
def ctrl_c():
  """Begins and ends each test with Python's own handler of Ctrl-C.

  Commands that run in the test's process replace it. A shell that starts tests
  in the background has Ctrl-C ignored, also in the processes that tests start.
  """
  restore = lambda: None
  if threading.current_thread() is threading.main_thread():
    handler = signal.default_int_handler
    restore = lambda: signal.signal(signal.SIGINT, handler)
  restore()
  yield
  restore()


@pytest.fixture
def drawn(monkeypatch):
  """Returns a list of the figures that are saved; they are saved as usual."""
  from matplotlib.figure import Figure

  figures, save = [], Figure.savefig

  def spy(figure, *args, **kwargs):
    figures.append(figure)
    save(figure, *args, **kwargs)

  monkeypatch.setattr(Figure, 'savefig', spy)
  return figures


@pytest.fixture(scope='session')
def data(tmp_path_factory):
  """A store of short documents of random letters."""
  from tests import tiny_run  # JAX may only start after tests/conftest.py.

  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')
