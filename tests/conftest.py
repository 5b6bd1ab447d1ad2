"""Eight fake devices, so that every test may shard; set before JAX starts.

Tests compile much and run little: half of the time to compile is saved by not
optimising, and half of the rest by keeping what is compiled, for all tests and
processes of one call of pytest.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
  ]
)
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  # Workers of xdist, and commands that tests start, find the variable set.
  _kept = tempfile.mkdtemp(prefix='meliad_rec_tests_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _kept
  atexit.register(shutil.rmtree, _kept, ignore_errors=True)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.02')
