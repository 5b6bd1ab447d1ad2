"""Settings of translation, as a run keeps them."""

import json

import pytest

from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.translation import Translation


def test_settings_are_kept_as_json():
  made = Translation(BeamSearch(3, 0.5, 'gnmt', 2), average=4)
  assert Translation.of(json.loads(json.dumps(made.facts))) == made
  assert Translation.of({}) == Translation()  # As older runs have it.


@pytest.mark.parametrize(
  ('facts', 'told'),
  [
    ({'length': 3}, "not settings of translation: {'length': 3}"),
    ({'beam': {'width': 3}}, "not settings of translation: .*'width': 3"),
    ({'average': 0}, 'average'),
  ],
)
def test_damage_is_a_sentence(facts, told):
  with pytest.raises(ValueError, match=told):
    Translation.of(facts)
