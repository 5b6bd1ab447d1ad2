"""Errors of what compiles a step, and others."""

import jax
import pytest

from meliad_rec.planning import topology
from meliad_rec.planning import worker


class MosaicError(Exception):
  """As jax has one, which it does not publish."""

  __module__ = 'jax._src.pallas.mosaic'


@pytest.mark.parametrize(
  'error, text',
  [
    (NotImplementedError('no  dot\nof these'), 'no dot of these'),
    (NotImplementedError(), 'NotImplementedError'),
    (ValueError('Block (3, 5) is odd.'), 'Block (3, 5) is odd.'),
    (MosaicError('unsupported shape cast'), 'unsupported shape cast'),
    (
      jax.errors.JaxRuntimeError('EXHAUSTED: E1001:\nRan out of vmem.'),
      'EXHAUSTED: E1001: Ran out of vmem.',
    ),
  ],
)
def test_it_is_one_line(error, text):
  with pytest.raises(type(error)) as caught:
    raise error
  assert worker.compiler_sentence(caught.value) == text


def test_what_is_long_is_cut():
  text = worker.compiler_sentence(MosaicError(100 * 'many words\n'))
  assert 180 < len(text) <= 200 and text.endswith('[...]')


def test_defects_and_mistakes_are_none_of_theirs():
  assert worker.compiler_sentence(KeyError('x')) is None
  assert worker.compiler_sentence(TypeError('x')) is None
  with pytest.raises(ValueError, match='names no slice') as mistake:
    topology.parse('v9:1')
  assert worker.compiler_sentence(mistake.value) is None
