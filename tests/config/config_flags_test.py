"""--mesh, and the mesh that it gives."""

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.training.experiment import Experiment


def test_parse():
  assert config_flags.parse_mesh('data:64, model:4') == {'data': 64, 'model': 4}
  for text in '', 'data:', 'data:0', 'data:-1', 'data:2,data:4', 'mode:2':
    with pytest.raises(ValueError, match='such as data:64,model:4'):
      config_flags.parse_mesh(text)


def test_bindings_make_the_trainers_mesh():
  params = config_flags.mesh_bindings({'model': 4})
  files = ['arch/window', 'size/tiny', 'task/recall']
  config.parse(files, list(params))
  mesh = config.build(Experiment)().mesh()
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 1, 'model': 4}
  config.reset()


def test_flag_is_what_parse_reads():
  sizes = {'data': 1, 'fsdp': 8, 'model': 4}
  assert config_flags.mesh_text(sizes) == 'fsdp:8,model:4'
  assert config_flags.mesh_text(dict.fromkeys(sizes, 1)) == 'data:1'


def test_a_mesh_uses_up_the_devices():
  with flagsaver.flagsaver():  # Removes flags defined inside.
    config_flags.define_mesh_flag()
    flags.FLAGS(['plan'])
    assert config_flags.given_mesh() == ()
    config_flags.check_mesh(7, 'v5e:1x7')
    for text in 'data:4,model:2', 'model:2', 'fsdp:8':
      flags.FLAGS.mesh = text
      config_flags.check_mesh(8, 'v5e:2x4')
    for text in 'data:4', 'model:3', 'fsdp:16':
      flags.FLAGS.mesh = text
      with pytest.raises(ValueError, match=f'{text} .* v5e:2x4 has 8'):
        config_flags.check_mesh(8, 'v5e:2x4')
    flags.FLAGS.mesh = ''
    with pytest.raises(ValueError, match='such as data:64,model:4'):
      config_flags.given_mesh()
