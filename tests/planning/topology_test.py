"""Slices by name, their devices, and the environment of the compiler."""

import math
import os

import jax
import pytest

from meliad_rec.distributed import partition
from meliad_rec.metrics import flops
from meliad_rec.planning import environment
from meliad_rec.planning import topology
from tests.libtpu import needs_libtpu


def test_a_name_is_a_generation_and_a_shape():
  found = topology.parse(' v5p:2x4x4')
  assert (found.chip.name, found.shape) == ('v5p', (2, 4, 4))
  assert (found.name, found.devices) == ('v5p:2x4x4', 32)


@pytest.mark.parametrize(
  'name, told',
  [
    *(
      (name, 'v4, v5e, v5p') for name in ('v5e', 'v9:2x2', 'v5e:2x', 'v5e:0x2')
    ),
    ('v5p:4x4', ':4x4x4'),
    ('v5e:4', ':4x4'),
    ('v6e:32x32', '1024 chips, .* at most 256'),
  ],
)
def test_other_names_are_refused(name, told):
  with pytest.raises(ValueError, match=told):
    topology.parse(name)


@pytest.mark.parametrize('chip', topology.CHIPS.values(), ids=topology.CHIPS)
def test_clocks_agree_with_peak_speeds(chip):
  """Each of 2^n units does 2 x 128 x 128 operations per cycle."""
  units = chip.peak_flops / chip.clock / (2 * 128 * 128)
  assert abs(math.log2(units) - round(math.log2(units))) < 0.02
  assert flops.PEAK_FLOPS[chip.kind] == chip.peak_flops


def test_without_libtpu_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(environment, 'installed', lambda: False)
  for needs_it in environment.ensure, lambda: topology.devices('v5e:2x2'):
    with pytest.raises(ValueError, match=r'meliad_rec\[tpu\]'):
      needs_it()


def test_a_child_runs_on_the_cpu_and_keeps_what_is_set(monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu')
  monkeypatch.setenv('XLA_FLAGS', '--own=1')
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--a=1')
  found = environment.variables()
  assert found['JAX_PLATFORMS'] == 'cpu'
  assert found['TPU_SKIP_MDS_QUERY'] == '1'
  assert found['XLA_FLAGS'] == '--own=1'
  found = environment.variables(['--b=2', '--c=3'], devices=6)
  assert found['LIBTPU_INIT_ARGS'] == '--a=1 --b=2 --c=3'
  own, devices = found['XLA_FLAGS'].split()
  assert (own, devices[-2:]) == ('--own=1', '=6')


def test_ensure_keeps_variables_that_are_set(monkeypatch):
  monkeypatch.setattr(environment, 'installed', lambda: True)
  for name in environment.VARIABLES:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('TPU_LOG_DIR', 'own')
  environment.ensure()
  assert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'
  assert os.environ['TPU_LOG_DIR'] == 'own'
  assert 'JAX_PLATFORMS' not in os.environ


def test_other_errors_of_libtpu_are_quoted(monkeypatch):
  def lost(*_, **__):
    raise jax.errors.JaxRuntimeError('INTERNAL: lost\nmore')

  monkeypatch.setattr(environment, 'ensure', lambda: None)
  monkeypatch.setattr(topology.topologies, 'get_topology_desc', lost)
  with pytest.raises(ValueError, match='error begins: INTERNAL: lost$'):
    topology.devices('v5e:2x2')
  with pytest.raises(ValueError, match='are even or 1'):
    topology.devices('v5e:3x3')


@needs_libtpu
@pytest.mark.parametrize(
  'name, count, hosts',
  [
    ('v4:2x2x1', 4, 1),
    ('v5e:1x1', 1, 1),
    ('v5e:16x16', 256, 64),
    ('v5p:4x4x4', 64, 16),
    ('v6e:2x4', 8, 2),
    ('v7x:2x2x1', 8, 1),
  ],
)
def test_devices_of_a_slice(name, count, hosts):
  found = topology.devices(name)
  assert len(found) == count == topology.parse(name).devices
  assert len({device.process_index for device in found}) == hosts
  assert found[0].device_kind == topology.parse(name).chip.kind
  if count == 256:  # A mesh may split the axes of a slice.
    mesh = partition.make_mesh(64, 1, 4, devices=found)
    assert dict(mesh.shape) == {'data': 64, 'fsdp': 1, 'model': 4}
  with pytest.raises(ValueError, match='v5e:3x3'):
    topology.devices('v5e:3x3')
