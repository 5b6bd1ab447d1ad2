"""Peak speed of the chips that are known."""

from collections.abc import Sequence

import jax

# Dense bfloat16 FLOP/s of one JAX device, from the makers' data sheets. The
# key begins `device_kind`; the longest key that fits counts.
PEAK_FLOPS = {
  'TPU v2': 22.5e12,  # A device is a core, half a chip.
  'TPU v3': 61.5e12,  # A device is a core, half a chip.
  'TPU v4': 275e12,
  'TPU v4 lite': 138e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,  # What a v5p calls itself.
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,  # A device is a core, half a chip.
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H200': 989e12,
}


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
  """Dense bfloat16 FLOP/s of the devices together; None if one is unknown."""
  peaks = [_peak(device.device_kind) for device in devices]
  return None if None in peaks else sum(peaks)


def _peak(kind):
  fitting = [name for name in PEAK_FLOPS if kind.startswith(name)]
  return PEAK_FLOPS[max(fitting, key=len)] if fitting else None
