"""A model that is exported and opened again, and one that shows itself."""

import base64
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.runs import display
from meliad_rec.runs import exported
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.checksums import digest
from tests import trained


@pytest.fixture(scope='module')
def run():
  return load_run(trained.folder())


@pytest.fixture(scope='module')
def whole(run, tmp_path_factory):
  """An exported model, which no test changes."""
  out = tmp_path_factory.mktemp('exported') / 'model'
  run.export(out)
  return out


@pytest.fixture
def copy(whole, tmp_path):
  return shutil.copytree(whole, tmp_path / 'copy')


def test_an_exported_model_is_the_run_bit_for_bit(run, whole):
  again = load_run(whole)
  assert digest(again.params) == digest(run.params)
  assert (again.step, again.batch) == (run.step, run.batch)
  assert again.validation == run.validation
  assert again.generate('ab', 8, seed=1) == run.generate('ab', 8, seed=1)
  assert again.evaluate('abc') == run.evaluate('abc')
  with pytest.raises(ValueError, match=f'of step {trained.STEPS} only'):
    load_run(whole, 2)


def test_what_an_exported_folder_holds(whole):
  assert {path.name for path in whole.iterdir()} == {
    *('model.safetensors', 'config.gin', 'run.json', 'README.md')
  }
  card = (whole / 'README.md').read_text()
  assert card.startswith('---\nlibrary_name: meliad_rec\n')
  assert '| model | WindowLayer, BlockRecurrentLayer, width 16 |' in card
  assert re.search(r'\| validation bits_per_byte \| [\d.]+ bits/byte \|', card)


def test_the_parameters_name_no_folder(run, tmp_path, monkeypatch):
  monkeypatch.setitem(run._facts, 'began with', '/home/me/source')
  run.export(tmp_path / 'model')
  assert load_run(tmp_path / 'model').started_in == run.started_in
  content = (tmp_path / 'model' / exported.PARAMETERS).read_bytes()
  assert run.started_in and run.started_in.encode() not in content
  assert b'/home/me/source' not in content


def test_a_card_promises_what_a_model_can_do():
  whole = types.SimpleNamespace(needs_whole_document=True)
  model = types.SimpleNamespace(encoder=None, cell=whole)
  card = display.as_card('a', {'words': '| and'}, False, model)
  assert 'generat' not in card and 'pipeline_tag' not in card
  assert "run.evaluate('some text')" in card
  assert '| words | \\| and |\n' in card


def test_every_bit_of_every_dtype_returns(tmp_path):
  """Not a number with a payload, negative zero, subnormals, no elements."""
  bits = np.array([0x7FC1, 0x8000, 0x0001, 0x3F80], np.uint16)
  params = {
    'a': {'b': jax.lax.bitcast_convert_type(bits, jnp.bfloat16)[:, None]},
    'c': jnp.float32(-0.0),
    'd': jnp.zeros((0, 3), jnp.float16),
    'e': jnp.arange(24.0).reshape(4, 6).T,
  }
  exported.write(tmp_path / 'out', [], params, {'step': 3}, 'card')
  again, facts = exported.read(tmp_path / 'out', params)
  assert facts == {'step': 3}
  assert digest(again) == digest(params)
  found = jax.lax.bitcast_convert_type(again['a']['b'][:, 0], jnp.uint16)
  np.testing.assert_array_equal(found, bits)


def test_a_folder_that_is_in_use_is_not_exported_to(run, whole, tmp_path):
  before = sorted(whole.iterdir())
  with pytest.raises(ValueError, match='not empty'):
    run.export(whole)
  assert sorted(whole.iterdir()) == before
  with pytest.raises(ValueError, match='cannot be created'):
    run.export(tmp_path / 'no' / 'model')
  with pytest.raises(ValueError, match='is an address'):
    run.export('gs://bucket/model')
  assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_replaced_is_not_exported_to(
  run, tmp_path, monkeypatch
):
  disk, here, link = (tmp_path / name for name in ('disk', 'here', 'link'))
  disk.mkdir()
  here.mkdir()
  link.symlink_to(disk)
  monkeypatch.chdir(here)
  monkeypatch.setattr('os.path.ismount', lambda path: path == disk)
  for out in '.', here, link, disk:
    with pytest.raises(ValueError, match='Give a folder inside it'):
      run.export(out)


def flip(path, at):
  content = bytearray(path.read_bytes())
  content[at] ^= 1
  path.write_bytes(content)


def cut(path):
  path.write_bytes(path.read_bytes()[:-1])


def foreign(path):
  import safetensors.numpy

  safetensors.numpy.save_file({'a': np.zeros(3)}, path)


@pytest.mark.parametrize(
  ('damage', 'expected'),
  [
    (lambda path: flip(path, -1), 'has changed values'),
    (lambda path: flip(path, path.read_bytes().index(b'float32')), 'header'),
    (lambda path: flip(path, 0), 'is damaged'),
    (cut, 'is damaged'),
    (lambda path: path.write_bytes(b''), 'is damaged'),
    (foreign, 'was not written by meliad-rec export'),
    (lambda path: path.unlink(), 'no checkpoint'),
  ],
)
def test_damaged_and_foreign_files_are_refused(copy, damage, expected):
  damage(copy / exported.PARAMETERS)
  with pytest.raises(ValueError, match=expected) as error:
    load_run(copy)
  assert str(error.value).count('\n') == 0


def test_another_model_or_vocabulary_is_refused(copy):
  config = copy / 'config.gin'
  text = config.read_text()
  config.write_text(text.replace('MLP_DIM = 32', 'MLP_DIM = 48'))
  with pytest.raises(ValueError, match=r'shape \(16, 32\) .* \(16, 48\)'):
    load_run(copy)
  config.write_text(text)
  facts = json.loads((copy / 'run.json').read_text())
  facts['vocabulary'] = 'words: a b'
  (copy / 'run.json').write_text(json.dumps(facts))
  with pytest.raises(ValueError, match='tokenizer bytes'):
    load_run(copy)


def test_a_run_shows_itself(run, whole):
  assert repr(run) == (
    f'TrainedRun of {trained.folder()}, step {trained.STEPS}\n'
    '  model       WindowLayer, BlockRecurrentLayer, width 16\n'
    f'  parameters  {sum(a.size for a in jax.tree.leaves(run.params)):,}\n'
    '  vocabulary  bytes, 259 ids'
  )
  page = run._repr_html_()
  assert 'BlockRecurrentLayer' in page
  (picture,) = re.findall(r'base64,([^"]+)"', page)
  assert base64.b64decode(picture).startswith(b'\x89PNG')
  # An exported model has no metrics to draw.
  assert 'base64' not in load_run(whole)._repr_html_()


@pytest.mark.parametrize(
  ('wrong', 'name'),
  [
    ({'prompt': 123}, 'prompt'),
    ({'prompt': '\ud800'}, 'prompt'),
    ({'tokens': -1}, 'tokens'),
    ({'tokens': 2.5}, 'tokens'),
    ({'seed': 2**32}, 'seed'),
    ({'temperature': 'warm'}, 'temperature'),
    ({'top_k': '5'}, 'top_k'),
    ({'top_p': 0}, 'top_p'),
    ({'until': ''}, 'until'),
    ({'until': 5}, 'until'),
  ],
)
def test_wrong_arguments_are_refused_by_name(run, wrong, name):
  for use in run.generate, run.stream:
    with pytest.raises(ValueError, match=f'{name} (must|has)'):
      use(**wrong)


def test_other_wrong_arguments(run):
  for call, expected in [
    (lambda: run.generate(samples=0), 'samples'),
    (lambda: run.evaluate(5), 'texts must be a list'),
    (lambda: run.evaluate([b'x']), 'Text 0 must be a string'),
    (lambda: run.evaluate([]), 'no text'),
    (lambda: run.nats(None), 'Text 0'),
    (lambda: run.read('x', 3), 'state'),
    (lambda: run.documents(['a'], ['b', 'c']), '1 texts and 2 names'),
    (lambda: load_run(None), 'workdir'),
    (lambda: load_run(trained.folder(), '4'), 'step'),
  ]:
    with pytest.raises(ValueError, match=expected):
      call()
