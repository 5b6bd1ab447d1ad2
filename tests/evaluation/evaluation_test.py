"""Every token once, whatever the rows."""

import dataclasses

import jax
import numpy as np
import pytest

from meliad_rec.data.lanes import Lanes
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.evaluation import figures_given
from meliad_rec.evaluation.evaluation import Part
from meliad_rec.evaluation.evaluation import probe
from tests import tiny_run
from tests.counting import Counting


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


@pytest.fixture(scope='module')
def params():
  return tiny_run.program().create(1).params


def nats_by_hand(program, params, before, document):
  """Of one document, behind these inputs, segment by segment, alone."""
  carry = program.empty_carry(params, 1)
  T, found = program.segment, []
  apply = jax.jit(program.model.apply)
  for at in range(0, len(document), T):
    take = len(document[at : at + T])
    tokens_BT = np.zeros((1, T), np.int32)
    tokens_BT[0, :take] = before[at : at + take]
    carry, logits_BTV = apply(
      {'params': params},
      carry,
      tokens_BT,
      np.array([at == 0]),
      np.arange(T)[None] < take,
    )
    log_p = jax.nn.log_softmax(logits_BTV[0, :take])
    found.append(-log_p[np.arange(take), document[at : at + take]])
  return np.concatenate(found)


@pytest.mark.parametrize('rows', [1, 2, 5])
def test_every_token_once_whatever_the_rows(data, params, rows):
  """Five rows are more than there are documents."""
  program, documents = tiny_run.program(), data.documents('validation')
  nats_of = [np.full(n, np.nan, np.float32) for n in documents.lengths]
  counted = []
  figures = evaluate(
    program,
    params,
    documents,
    rows,
    nats_of=nats_of,
    on_progress=counted.append,
  )
  by_hand = [
    nats_by_hand(program, params, np.concatenate([[0], d[:-1]]), d)
    for d in documents
  ]
  for found, expected in zip(nats_of, by_hand, strict=True):
    np.testing.assert_allclose(found, expected, atol=1e-4)
  assert figures['tokens'] == len(documents.tokens) == counted[-1]
  total = np.concatenate(by_hand).sum(dtype=np.float64)
  bits = total / np.log(2) / documents.bytes_.sum()
  assert figures['bits_per_byte'] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize('rows', [1, 4])
def test_labels_are_predicted_from_their_own_tokens(params, rows):
  """Documents of 2 episodes of 11 words; the first of each is not scored."""
  task = RandomWalk(episodes=30, actions=10, grid=3, episodes_per_document=2)
  program, documents = tiny_run.program(), task.documents('validation')
  nats_of = [np.zeros(n, np.float32) for n in documents.lengths]
  figures = evaluate(program, params, documents, rows, nats_of=nats_of)
  by_hand = []
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, len(documents[i]))
    nats_T = nats_by_hand(program, params, tokens, labels)
    by_hand.append(np.where(labels > 0, nats_T, np.nan))
  for found, expected in zip(nats_of, by_hand, strict=True):
    np.testing.assert_allclose(found, expected, atol=1e-4)
  mean = np.nanmean(np.concatenate(by_hand), dtype=np.float64)
  assert figures['loss_nats_per_token'] == pytest.approx(mean, rel=1e-5)
  assert (figures['tokens'], figures['scored_tokens']) == (33, 30)
  assert figures['error'] == pytest.approx(1 - figures['accuracy'])
  assert list(figures) == figures_given(documents)


def test_figures_are_those_that_the_documents_give(data):
  text = set(figures_given(data.documents('test')))
  labelled = set(figures_given(RandomWalk(episodes=9).documents('test')))
  assert text - labelled == {'bits_per_byte', 'word_perplexity'}
  assert labelled - text == {'error', 'scored_tokens'}


def test_what_modules_count_is_over_all_of_the_pass(data, params):
  """Documents of up to 82 tokens in segments of 16, and rows that end early."""
  program = tiny_run.program()
  model = program.model.clone(cell=Counting())
  documents = data.documents('validation')
  found = evaluate(
    dataclasses.replace(program, model=model), params, documents, 2
  )
  depths = np.concatenate([1 + np.arange(n) % 16 for n in documents.lengths])
  assert found['halting_depth'] == pytest.approx(depths.mean(), rel=1e-12)
  assert found['halting_depth_max'] == 16
  assert set(found) - set(figures_given(documents)) == {
    *('halting_depth', 'halting_depth_max')
  }


def test_it_is_given_up_when_asked(data, params):
  asked = iter([False, True])
  documents = data.documents('validation')
  stop = lambda: next(asked)
  assert evaluate(tiny_run.program(), params, documents, 1, stop) is None


def test_a_part(data):
  documents = data.documents('validation')
  part = Part(documents=2, tokens=30).of(documents, data.vocabulary)
  assert part.lengths.tolist() == [30, 30]
  assert Part().of(documents, data.vocabulary).identity == documents.identity


def test_a_probe_counts_one_batch(data, params):
  program = tiny_run.program()
  lanes = Lanes(data.documents('train'), program.rows, program.segment, seed=0)
  batch, _ = next(lanes)
  sums = probe(program, params, batch, program.rows)
  assert sums.tokens == batch.mask_BT.sum()
  bad = jax.tree.map(lambda p: p + np.inf, params)
  assert np.isnan(probe(program, bad, batch, program.rows).nats)
