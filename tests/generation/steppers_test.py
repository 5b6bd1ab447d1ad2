"""A fast path is tested by the slow one: the open block run again."""

import numpy as np

from meliad_rec.generation.decoder import BlockStepper
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from tests import architectures as tiny
from tests.architectures import ARCHITECTURES
from tests.architectures import build


def test_steps_equal_the_generic_ones():
  for name in ('recurrent_fixed_skip', 'block_feedback'):
    m = build(name)
    fast = Decoder(m.model, m.params, segment=tiny.W)
    slow = Decoder(m.model, m.params, segment=tiny.W)
    slow._stepper = BlockStepper(m.model)
    texts = []
    for d in (fast, slow):
      written = d.generate(d.start(tiny.B), 20, Sampler(top_k=9), seed=3)
      texts.append(np.concatenate([t for _, t in written], 1))
    np.testing.assert_array_equal(*texts)


def test_every_architecture_has_steps_of_its_own_or_blocks():
  for architecture in ARCHITECTURES.values():
    cell = architecture.cell()
    assert cell.can_step or cell.block_length
