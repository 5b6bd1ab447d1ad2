"""Peaks by the names that devices give themselves."""

import types

import jax
import pytest

from meliad_rec.metrics import flops


def device(kind):
  return types.SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
  'kind, peak',
  [
    ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('TPU v5p', 459e12),
    ('TPU v6 lite', 918e12),
    ('TPU7x', 1153.5e12),
    ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H200', 989e12),
  ],
)
def test_peaks(kind, peak):
  assert flops.peak_flops([device(kind)] * 2) == 2 * peak


def test_unknown_chips_have_none():
  assert flops.peak_flops(jax.devices('cpu')) is None
  assert flops.peak_flops([device('TPU v4'), device('TPU v99')]) is None
