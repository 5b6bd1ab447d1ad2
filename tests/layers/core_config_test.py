"""Sizes and choices that a core refuses, each with a sentence."""

import functools

import pytest

from meliad_rec.layers import positions
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.core_config import POSITIONS
from tests.architectures import core_config

SIZES = 'd_model', 'num_heads', 'head_dim', 'mlp_dim'


@pytest.mark.parametrize('name', SIZES)
def test_sizes_are_positive(name):
  sizes = dict.fromkeys(SIZES, 2) | {name: 0}
  with pytest.raises(ValueError, match=f'{name} is 0; .* Set {name.upper()}.'):
    CoreConfig(**sizes, causal=True)


@pytest.mark.parametrize('name', ['dropout', 'attention_dropout'])
@pytest.mark.parametrize('rate', [-0.1, 1.0])
def test_rates_are_shares(name, rate):
  with pytest.raises(ValueError, match=f'{name} is {rate}; .* {name.upper()}'):
    core_config(**{name: rate})


def test_dtypes():
  with pytest.raises(ValueError, match="dtype is 'float16'; .* Set DTYPE"):
    core_config(dtype='float16')


def test_positions_that_add_to_logits_are_refused():
  """They would be ignored."""
  for position in POSITIONS:
    assert core_config(position=position).position is position
    core_config(position=functools.partial(position))
  for position in (positions.T5Bias, positions.ALiBi, positions.RelativeKeys):
    with pytest.raises(ValueError, match='NoPosition, RoPE, XPos, Symmetric'):
      core_config(position=position)
