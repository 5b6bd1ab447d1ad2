"""The list of settings is complete, and each name can be looked up."""

import functools
import re

import pytest

from meliad_rec.commands import settings
from meliad_rec.config import files


def test_every_macro_of_the_shipped_files_has_a_meaning():
  used = set()
  for name in files.names():
    text = (files.root() / f'{name}.gin').read_text()
    text = re.sub(r'#.*', '', text)
    used |= set(re.findall(r'^([A-Z_]+) =|%([A-Z_]+)', text, re.MULTILINE))
  used = {macro for pair in used for macro in pair if macro}
  assert used == set(settings.meanings())


def test_the_overview_names_every_file(monkeypatch):
  # Read once, and not again for each setting.
  read = functools.cache(lambda file, of=settings._statements: [*of(file)])
  monkeypatch.setattr(settings, '_statements', read)
  text = '\n'.join(settings.overview())
  for name in files.names():
    folder, _, short = name.partition('/')
    assert name == 'defaults' or short in text.partition(folder)[2], name
  assert max(map(len, text.splitlines())) <= 80
  assert 'qk_scale 5.0' in text


@pytest.mark.parametrize(
  ('name', 'parts'),
  [
    ('PASSES', ('passes of a staircase', 'arch/staircase', ' 4')),
    ('options/position/rope', ('gin/options/position/rope.gin', 'RoPE')),
    ('rope', ('layer_config.LayerConfig.position = @positions.RoPE',)),
    ('size/tiny', ('WINDOW = 64  # tokens',)),
    ('recall', ('gin/size/recall.gin', 'includes defaults.gin')),
    ('layer_config.LayerConfig', ('num_kv_heads          number of', '[None]')),
    # Described in the base class.
    ('layer_config.LayerConfig.mlp_dim', ('hidden units', '[to be set]')),
    ('layers.gates.FixedGate.keep_bias', ('initial logits', '[0.0]')),
    ('losses.objective.z_loss', ('(ln Z)^2', '[0.0]')),
    # Another module of this name has such a function without the parameter.
    ('compare.compare.top', ('of units to show',)),
  ],
)
def test_details(name, parts):
  text = '\n'.join(settings.details(name))
  assert all(part in text for part in parts), text


def test_an_unknown_name():
  for name, near in (
    ('PASES', 'PASSES'),
    ('arch/widow', 'arch/window'),
    ('arch/blok', 'arch/block_'),
    ('LEARN', 'LEARNING_RATE'),
  ):
    with pytest.raises(ValueError, match=f'{name}.*nearest is {near}'):
      settings.details(name)
  for name, near in (
    ('layer_config.LayerConfig.num_kv', 'LayerConfig.num_kv_heads'),
    ('layer_config.Config', 'Write it as module.Class'),
  ):
    with pytest.raises(ValueError, match=f'{name}.*{near}'):
      settings.details(name)


def test_one_parameter_of_a_class():
  (text,) = settings.details('layer_config.LayerConfig.num_kv_heads')
  assert 'num_kv_heads' in text
  assert 'window' not in text.partition('\n\n')[2]
