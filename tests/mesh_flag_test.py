"""--mesh, and the mesh that it makes."""

import pytest

from meliad_rec import mesh_flag
from meliad_rec.config import config
from meliad_rec.experiment import Experiment


def test_parse():
  assert mesh_flag.parse('data:64, model:4') == {'data': 64, 'model': 4}


@pytest.mark.parametrize(
  'text', ['', 'data', 'data:', 'data:0', 'data:-1', 'data:2,data:4', 'x:2']
)
def test_other_texts_are_refused(text):
  with pytest.raises(ValueError, match='such as data:64,model:4'):
    mesh_flag.parse(text)


def test_the_nearest_axis_is_named():
  with pytest.raises(ValueError, match='nearest is model'):
    mesh_flag.parse('mode:4')


def test_bindings_make_the_trainers_mesh():
  params = mesh_flag.bindings({'model': 4})
  files = ['arch/window', 'size/tiny', 'task/recall']
  config.parse(files, list(params))
  mesh = config.build(Experiment)().mesh()
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 1, 'model': 4}
  config.reset()


def test_flag_is_what_parse_reads():
  sizes = {'data': 1, 'fsdp': 8, 'model': 4}
  assert mesh_flag.flag(sizes) == 'fsdp:8,model:4'
  assert mesh_flag.parse(mesh_flag.flag(dict.fromkeys(sizes, 1))) == {'data': 1}
