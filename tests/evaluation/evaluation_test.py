"""Evaluation: every token once, with any number of rows."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from meliad_rec.archs.transformer import Encoder
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation.evaluation import EvalSubset
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.evaluation import evaluate_batch
from meliad_rec.evaluation.evaluation import metrics_given
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from tests import architectures as tiny
from tests import tiny_run
from tests.counting import Counting


@pytest.fixture(scope='module')
def params():
  return tiny_run.program().create(1).params


def nats_by_hand(program, params, targets, inputs):
  """Returns the nats of each document, read alone, segment by segment."""
  found = []
  logits = logits_by_hand(program, params, inputs)
  for target, logits_TV in zip(targets, logits, strict=True):
    log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    found.append(-log_p_TV[np.arange(len(target)), target])
  return found


def logits_by_hand(program, params, inputs):
  """Returns the logits of each document, read alone, segment by segment."""
  T, found = program.segment, []
  apply = jax.jit(program.model.apply)
  for tokens in inputs:
    carry, logits = program.empty_carry(params, 1), []
    for at in range(0, len(tokens), T):
      part = tokens[at : at + T]
      tokens_1T = np.zeros((1, T), np.int32)
      tokens_1T[0, : len(part)] = part
      start_1, mask_1T = np.array([at == 0]), np.arange(T)[None] < len(part)
      carry, logits_1TV = apply(
        {'params': params}, carry, tokens_1T, start_1, mask_1T
      )
      logits.append(np.asarray(logits_1TV[0, : len(part)], np.float64))
    found.append(np.concatenate(logits))
  return found


@pytest.mark.parametrize('rows', [pytest.param(2, marks=pytest.mark.slow), 5])
def test_every_token_once_with_any_rows(data, params, rows):
  """There are fewer than five documents."""
  program, documents = tiny_run.program(), data.documents('validation')
  losses_out = [np.full(n, np.nan, np.float32) for n in documents.lengths]
  counted = []
  found = evaluate(
    program,
    params,
    documents,
    rows,
    losses_out=losses_out,
    on_progress=counted.append,
  )
  by_hand = nats_by_hand(
    *(program, params, documents),
    [np.concatenate([[0], d[:-1]]) for d in documents],
  )
  for nats, expected in zip(losses_out, by_hand, strict=True):
    np.testing.assert_allclose(nats, expected, atol=1e-4)
  assert found['tokens'] == len(documents.tokens) == counted[-1]
  total = np.concatenate(by_hand).sum(dtype=np.float64)
  bits = total / np.log(2) / documents.bytes_.sum()
  assert found['bits_per_byte'] == pytest.approx(bits, rel=1e-5)
  given = metrics_given(documents)
  assert list(found)[: len(given)] == given
  assert {'cleared_cost', 'shuffled_cost', 'slot_entropy'} < set(found)


def test_labels_are_predicted_from_their_own_tokens(params):
  """Documents of 2 episodes of 11 words; the first of each is not scored."""
  task = RandomWalk(episodes=30, actions=10, grid=3, episodes_per_document=2)
  program, documents = tiny_run.program(), task.documents('validation')
  losses_out = [np.zeros(n, np.float32) for n in documents.lengths]
  found = evaluate(program, params, documents, 2, losses_out=losses_out)
  whole = [documents.read(i, 0, len(d)) for i, d in enumerate(documents)]
  tokens, labels = zip(*whole, strict=True)
  by_hand = [
    np.where(y > 0, nats_T, np.nan)
    for y, nats_T in zip(
      labels, nats_by_hand(program, params, labels, tokens), strict=True
    )
  ]
  for nats, expected in zip(losses_out, by_hand, strict=True):
    np.testing.assert_allclose(nats, expected, atol=1e-4)
  mean = np.nanmean(np.concatenate(by_hand), dtype=np.float64)
  assert found['loss_nats_per_token'] == pytest.approx(mean, rel=1e-5)
  assert (found['tokens'], found['scored_tokens']) == (33, 30)
  assert found['error'] == pytest.approx(1 - found['accuracy'])
  given = metrics_given(documents)
  assert list(found)[: len(given)] == given


def test_targets_are_predicted_from_their_own_sources():
  """As a plain loop over single pairs does, whose sources have no padding.

  Targets may be longer than a segment.
  """
  rng, sizes = np.random.default_rng(0), [(3, 11), (9, 4), (6, 20)]
  pairs = [[rng.integers(1, tiny.V, n) for n in both] for both in sizes]
  documents = Documents.collect(
    [
      Document('', np.concatenate(pair), 1, 1, None, len(pair[0]))
      for pair in pairs
    ],
    Bytes(),
  )
  cell = tiny.windowed(cross=True)
  encoder = tiny.transformer(1, causal=False)
  model = Model(tiny.V, cell, tiny.D, encoder=encoder)
  params = jax.jit(lambda: initialize(model, jax.random.key(0), 1, tiny.T))()
  apply, nats = jax.jit(model.apply), []
  for source, target in pairs:
    tokens_1T = np.zeros((1, tiny.T), int)
    tokens_1T[0, 1 : len(target)] = target[:-1]
    mask_1T = np.arange(tiny.T)[None] < len(target)
    start_1 = np.ones(1, bool)
    _, logits_1TV = apply(
      {'params': params}, (), tokens_1T, start_1, mask_1T, source[None]
    )
    log_p_TV = jax.nn.log_softmax(logits_1TV[0])
    nats.append(-log_p_TV[np.arange(len(target)), target])
  mesh = make_mesh(devices=jax.devices()[:1])
  mean = np.concatenate(nats).mean()
  for segment in tiny.T, 8:
    sharded = ShardedModel(model, mesh, segment)
    found = evaluate(sharded, params, documents, 2)
    assert found['loss_nats_per_token'] == pytest.approx(mean, rel=1e-5)
    assert found['tokens'] == 11 + 4 + 20


def test_sequences_without_an_error_are_counted(params):
  """Labels are the model's own outputs, except for one in each of two."""
  program, rng = tiny_run.program(), np.random.default_rng(0)
  lengths = np.array([3, 40, 7, 1, 25, 12])
  tokens = [rng.integers(1, 30, length) for length in lengths]
  labels = [
    logits_TV.argmax(-1)
    for logits_TV in logits_by_hand(program, params, tokens)
  ]
  labels[1][2] = labels[1][2] % 7 + 1
  labels[4][-1] = labels[4][-1] % 7 + 1
  labels[0][1:] = 0  # Not scored.
  documents = labeled.from_tokens(
    'test',
    np.concatenate(tokens),
    np.concatenate([[0], np.cumsum(lengths)]),
    np.concatenate(labels),
    Words([f'word{i}' for i in range(program.model.vocab - 1)]),
  )
  found = evaluate(program, params, documents, 4)
  assert found['sequence_accuracy'] == pytest.approx(4 / 6)
  assert metrics_given(documents)[-1] == 'sequence_accuracy'
  one_each = np.concatenate([np.eye(1, n, n - 1, int)[0] for n in lengths])
  of_one_label = dataclasses.replace(documents, labels=one_each)
  assert 'sequence_accuracy' not in metrics_given(of_one_label)
  scored = sum(np.count_nonzero(each) for each in labels)
  assert found['accuracy'] == pytest.approx(1 - 2 / scored)


def test_whole_documents_are_read_in_segments_that_fit():
  rng = np.random.default_rng(0)
  labels = [rng.integers(1, 4, length) for length in (200, 60, 63, 251, 9)]
  documents = Documents.collect(
    [
      Document(f'{i}', rng.integers(3, tiny.V, len(each)), 1, 1, each)
      for i, each in enumerate(labels)
    ],
    Bytes(),
  )
  cell = Encoder(tiny.transformer(causal=False))
  model = Model(tiny.V, cell, tiny.D, head=Classifier(4, None))
  params = jax.jit(lambda: initialize(model, jax.random.key(0), 1, 252))()
  for segment in 251, 1003:
    sharded = ShardedModel(model, make_mesh(devices=jax.devices()[:1]), segment)
    read, losses_out = set(), [np.zeros(len(y), np.float32) for y in labels]

    def step(params, carry, batch, run=sharded.eval_step, read=read):
      read.add(batch.tokens_BT.shape)
      return run(params, carry, batch)

    vars(sharded)['eval_step'] = step
    evaluate(sharded, params, documents, 2, losses_out=losses_out)
    assert read == {(2, 251), (2, 63)}
    logits = logits_by_hand(sharded, params, [*documents])
    for nats, y, logits_TV in zip(losses_out, labels, logits, strict=True):
      log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
      by_hand = -log_p_TV[np.arange(len(y)), y]
      np.testing.assert_allclose(nats, by_hand, atol=1e-4)


def test_what_the_state_is_worth(data, params):
  """Rows 0 and 1 go on, row 2 begins a document, and row 3 is padding."""
  program, T, rng = tiny_run.program(), 16, np.random.default_rng(0)
  rows, vocab = 4, program.model.vocab
  batch = program.empty_batch(rows)
  batch = batch.replace(
    tokens_BT=rng.integers(1, vocab, (rows, T)).astype(np.int32),
    targets_BT=rng.integers(1, vocab, (rows, T)).astype(np.int32),
    start_B=np.array([False, False, True, False]),
  )
  batch.mask_BT[:3] = batch.scored_BT[:3] = True
  batch.scored_BT[0, :5] = False
  model, variables = program.model, {'params': params}
  carry = jax.tree.map(
    lambda a: rng.normal(size=a.shape).astype(a.dtype),
    program.empty_carry(params, rows),
  )
  rolled = jax.tree.map(lambda a: np.roll(a, 1, 0), carry)

  @jax.jit
  def nats(carry):
    _, logits_BTV = model.apply(
      variables, carry, batch.tokens_BT, batch.start_B, batch.mask_BT
    )
    return optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV, batch.targets_BT
    )

  def cost(carry, rows):
    counted = np.zeros_like(batch.scored_BT)
    counted[rows] = batch.scored_BT[rows]
    return float((nats(carry) - own)[counted].mean())

  own = nats(carry)
  cleared = cost(model.apply(variables, carry, method='clear'), [0, 1])
  parts = model.apply(variables, rolled, method='parts')
  shuffled = model.apply(variables, carry, parts, method='with_parts')
  # The row before row 0 is padding, so it lends its state to no row.
  shuffled = cost(shuffled, [1])
  _, sums, _ = program.ablation_step(params, carry, program.put(batch, rows))
  found = {
    n: float(m.total / m.count) for n, m in jax.device_get(sums.sown).items()
  }
  assert abs(cleared) > 1e-3 and abs(shuffled) > 1e-3
  assert found['cleared_cost'] == pytest.approx(cleared, rel=1e-3)
  assert found['shuffled_cost'] == pytest.approx(shuffled, rel=1e-3)
  assert found['row_difference'] > 0.5


def test_sown_metrics_are_over_the_whole_pass(data, params):
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
  assert set(found) - set(metrics_given(documents)) == {
    *('halting_depth', 'halting_depth_max')
  }


@pytest.mark.slow
def test_ablations_of_pairs_longer_than_half_a_segment():
  """The pairs have 12 tokens, and one sequence of up to 10."""
  ids = np.random.default_rng(0).integers(1, 30, 12)
  labels = np.eye(1, 12, 11, int)[0]
  pairs = [Document('', ids, 1, 1, labels, first) for first in (2, 3)]
  documents = Documents.collect(pairs, Bytes())
  program = tiny_run.program()
  model = program.model.clone(head=Matcher(3))
  made = jax.jit(lambda: initialize(model, jax.random.key(0), 2, 16))()
  program = dataclasses.replace(program, model=model)
  assert 'cleared_cost' in evaluate(program, made, documents, 2)


def test_a_pass_can_be_stopped(data, params):
  asked = iter([False, True])
  documents = data.documents('validation')
  stop = lambda: next(asked)
  assert evaluate(tiny_run.program(), params, documents, 1, stop) is None


def test_a_part(data):
  documents = data.documents('validation')
  part = EvalSubset(documents=2, tokens=30).of(documents, data.vocabulary)
  assert part.lengths.tolist() == [30, 30]
  assert (
    EvalSubset().of(documents, data.vocabulary).identity == documents.identity
  )


def test_evaluate_batch_counts_one_batch(data, params):
  program = tiny_run.program()
  lanes = Lanes(data.documents('train'), program.rows, program.segment, seed=0)
  batch, _ = next(lanes)
  sums = evaluate_batch(program, params, batch, program.rows)
  assert sums.tokens == batch.mask_BT.sum()
  bad = jax.tree.map(lambda p: p + np.inf, params)
  assert np.isnan(evaluate_batch(program, bad, batch, program.rows).nats)
