"""A head learns what stands segments before its label, from carried states."""

import jax
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.lstm import LSTM
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.metrics import losses
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.model import Model
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram
from tests import architectures as tiny

ROWS = 32


def documents(count, segment, classes, seed=0, hides=0):
  """Of two and a half segments; the label at the end is the first token.

  The first `hides` tokens are left out.
  """
  rng = np.random.default_rng(seed)

  def document(i):
    ids = rng.integers(classes + 1, classes + 5, 5 * segment // 2)
    ids[0] = rng.integers(1, classes + 1)
    labels = np.zeros(len(ids), int)
    labels[-1] = ids[0]
    return Document(f'{i}', ids[hides:], len(ids), 1, labels[hides:])

  return Documents.collect(map(document, range(count)), Bytes())


@pytest.mark.parametrize(
  ('cell', 'segment', 'classes', 'rate', 'steps'),
  [
    (lambda: stack.layers(1, lambda: LSTM(tiny.D)), 4, 2, 0.02, 300),
    pytest.param(
      *(lambda: tiny.recurrent(1, (0,)), tiny.W, 4, 0.01, 1500),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_the_first_token_is_known_two_segments_later(
  cell, segment, classes, rate, steps
):
  head = Classifier(classes, pooling.Last())
  program = TrainProgram(
    model=Model(classes + 5, cell(), tiny.D, head=head),
    mesh=make_mesh(devices=jax.devices()[:1]),
    segment=segment,
    optimizer=optimizer.chain(
      optimizer.adamw, schedules.cosine(rate, steps, 20)
    ),
    objective=losses.objective,
    rows=ROWS,
  )
  state = program.create(0)
  lanes = Lanes(documents(3000, segment, classes), ROWS, segment, seed=0)
  for _ in range(steps):
    batch, _ = next(lanes)
    state, _ = program.train_step(state, program.put(batch, ROWS))
  error = lambda hides: evaluate(
    program, state.params, documents(96, segment, classes, 1, hides), ROWS
  )['error']
  assert error(0) < 0.1
  # Without the first segment, it is only a guess.
  assert error(segment) > 0.5 * (1 - 1 / classes)
