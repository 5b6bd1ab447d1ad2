"""The benchmark of translation: its rows and what they measure."""

import dataclasses

import pytest

from meliad_rec.benchmarks import translation


@pytest.mark.slow
def test_a_row_for_each_model_and_number_of_sources():
  sizes = dataclasses.replace(
    translation.SETTINGS['small'],
    size='test',
    layers=3,
    encoder_layers=1,
    vocab=9,
    batches=(1, 2),
    source=4,
    target=4,
    beams=2,
  )
  rows = translation.measure(sizes, rounds=1)
  assert [*rows] == [
    f'{name}, {count}' for count in (1, 2) for name in translation.ARCHS
  ]
  assert rows['feedback, 2'].tokens == 8
  of = {name: rows[f'{name}, 1'].state_bytes for name in translation.ARCHS}
  # Keys and values of one layer, and the vectors that they come from.
  assert of['feedback'] < of['transformer']
  assert rows['transformer, 1'].ratio == 1
