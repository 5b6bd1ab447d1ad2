"""Eight fake devices, so that every test may shard; set before JAX starts.

Tests compile much and run little: half of the time to compile is saved by not
optimising.
"""

import os

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
