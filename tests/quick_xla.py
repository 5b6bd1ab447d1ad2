"""Flags of XLA with which programs for a CPU are compiled quickly."""

from importlib import metadata

FLAGS = (
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_parallel_codegen_split_count=1',
)
if metadata.version('jaxlib').startswith('0.10.'):
  # Later ones have no other way to fuse, and an unknown flag ends the process.
  FLAGS += ('--xla_cpu_use_fusion_emitters=false',)
