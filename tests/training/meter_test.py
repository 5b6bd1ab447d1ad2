"""Metrics between two lines of the report."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.metrics import flops
from meliad_rec.metrics.metrics import MeanMetric
from meliad_rec.metrics.metrics import Sums
from meliad_rec.training import meter
from tests import tiny_run


@pytest.fixture(scope='module')
def documents(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data') / 'store'
  return tiny_run.write_store(folder).documents('train')


def sums(nats=6.0, norm=0.5, scored=(0, 1, 2), sown=None):
  """Three real tokens, the first of which is correct."""
  return Sums.of_step(
    jnp.full((1, 4), nats / 3),
    jnp.array([[True, False, False, True]]),
    jnp.array([[True, True, True, False]]),
    np.isin(np.arange(4), scored)[None],
    norm,
    sown,
  )


def depth(total, count):
  return {'halting_depth': MeanMetric(np.float32(total), np.float32(count))}


def test_metrics_are_of_the_steps_since_the_last_line(documents):
  made = meter.Meter(tiny_run.program(), documents)
  made.start()
  made.add(sums(60.0, sown=depth(40, 2)))
  made.metrics(1, 3)
  made.start()
  made.add(sums(6.0, 0.5, sown=depth(6, 3)))
  made.add(sums(12.0, 1.5, sown=depth(1, 1)))
  found = made.metrics(3, 9)
  assert found['loss_nats_per_token'] == pytest.approx(3.0)
  assert found['accuracy'] == pytest.approx(1 / 3)
  assert found['halting_depth'] == 7 / 4
  assert found['padding_share'] == 0.25
  assert found['gradient_norm'] == pytest.approx(1.0)
  assert found['learning_rate'] == pytest.approx(0.01)
  assert found['epoch'] == 9 / len(documents.tokens)
  assert found['bits_per_byte'] == pytest.approx(3 / np.log(2))
  assert not {'mfu', 'error', 'scored_tokens'} & set(found)


def test_metrics_of_labels_count_scored_tokens():
  """Without a scored label there is no loss; labels have no bytes."""
  documents = RandomWalk(episodes=10, actions=9).documents('train')
  made = meter.Meter(tiny_run.program(), documents)
  made.start()
  made.add(sums(6.0, scored=(0, 2)))
  made.add(sums(6.0, scored=()))
  found = made.metrics(2, 6)
  assert found['loss_nats_per_token'] == pytest.approx(2.0)
  assert found['error'] == 0.5
  assert found['scored_tokens'] == 2
  assert found['padding_share'] == 0.25
  assert found['epoch'] == 6 / 100
  assert not {'bits_per_byte', 'word_perplexity'} & set(found)
  made.start()
  made.add(sums(6.0, scored=()))
  found = made.metrics(3, 9)
  assert 'loss_nats_per_token' not in found
  assert found['epoch'] == 9 / 100


def test_time_between_pause_and_start_is_left_out(documents, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  made = meter.Meter(tiny_run.program(), documents)
  for spent, counts in (2.0, True), (50.0, False), (4.0, True):
    if counts:
      made.start()
      made.start()
    now[0] += spent
    made.pause()
    made.pause()
  made.add(sums())
  made.add(sums())
  assert made.metrics(2, 6)['step_seconds'] == 3.0


def test_mfu_on_known_chips(documents, monkeypatch):
  monkeypatch.setattr(flops, 'peak_flops', lambda devices: 1e9)
  monkeypatch.setattr(time, 'perf_counter', iter([0.0, 2.0]).__next__)
  made = meter.Meter(tiny_run.program(), documents)
  made.start()
  made.add(sums())
  found = made.metrics(1, 3)
  places = 4
  per_place = found['mfu'] * 1e9 * 2 / places
  # Every token uses each weight, except those of the input embedding, for at
  # least 2 forward and 4 backward FLOPs.
  params = tiny_run.program().shapes.params
  kernels = sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if jax.tree_util.keystr(path[-1:], simple=True) in ('kernel', 'embedding')
  )
  assert 0.5 < per_place / (6 * kernels) < 2


def test_mfu_counts_a_loop_by_its_mean_halting_depth(documents, monkeypatch):
  monkeypatch.setattr(flops, 'peak_flops', lambda devices: 1e9)
  monkeypatch.setattr(time, 'perf_counter', itertools.count(0.0, 2.0).__next__)
  made = meter.Meter(tiny_run.program(), documents)
  w = jnp.eye(5)

  def loop(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ w, x @ w)

  made.traced = jax.make_jaxpr(loop)(jnp.zeros((3, 5)))
  found = []
  for sown in None, depth(6, 6), depth(21, 6):
    made.start()
    made.add(sums(sown=sown))
    found.append(made.metrics(1, 3)['mfu'])
  once = 3 * 2 * (2 * 3 * 5 * 5) / (tiny_run.ROWS * tiny_run.SEGMENT)
  # One product before the loop and one in each iteration; 4 places.
  once *= 4 / 2 / 1e9
  assert found == pytest.approx([once, once, once * (1 + 3.5) / 2])


def test_a_non_finite_step_names_its_batch():
  batch = tiny_run.program().batch_shapes(2)
  batch = batch.replace(document_B=np.array([7, 5]), offset_B=np.array([32, 0]))
  meter.check_finite('Step 3', batch, jax.device_get(sums()))
  for bad in sums(nats=np.nan), sums(norm=np.inf):
    with pytest.raises(ValueError, match='Step 3 .* 7:32, 5:0'):
      meter.check_finite('Step 3', batch, jax.device_get(bad))
