"""What a run measures: metrics of its steps, where time goes, traces."""

import dataclasses
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
from meliad_rec.training import profile
from meliad_rec.training.goodput import Goodput
from tests import tiny_run


def programs():
  return {tiny_run.SEGMENT: tiny_run.program()}


@pytest.fixture
def made(data):
  return meter.Meter(programs(), data.documents('train'))


def sums(nats=6.0, norm=0.5, scored=(0, 1, 2), sown=None):
  """Three real tokens, the first of which is correct."""
  return Sums.of_step(
    np.full((1, 4), nats / 3, np.float32),
    np.array([[True, False, False, True]]),
    np.array([[True, True, True, False]]),
    np.isin(np.arange(4), scored)[None],
    norm,
    sown,
  )


def depth(total, count):
  return {'halting_depth': MeanMetric(np.float32(total), np.float32(count))}


def test_metrics_are_of_the_steps_since_the_last_line(made):
  made.start()
  made.add(sums(60.0, sown=depth(40, 2)))
  made.metrics(1, 3)
  made.start()
  made.add(sums(6.0, 0.5, sown=depth(6, 3)))
  made.add(sums(12.0, 1.5, sown=depth(1, 1)))
  found = made.metrics(3, 9)
  wanted = {
    'loss_nats_per_token': 3.0,
    'accuracy': 1 / 3,
    'halting_depth': 7 / 4,
    'padding_share': 0.25,
    'gradient_norm': 1.0,
    'learning_rate': 0.01,
    'epoch': 9 / made.tokens_per_epoch,
    'bits_per_byte': 3 / np.log(2),
  }
  assert {name: found[name] for name in wanted} == pytest.approx(wanted)
  assert not {'mfu', 'error', 'scored_tokens'} & set(found)


def test_metrics_of_labels_count_scored_tokens():
  """Without a scored label there is no loss; labels have no bytes."""
  documents = RandomWalk(episodes=10, actions=9).documents('train')
  made = meter.Meter(programs(), documents)
  made.start()
  made.add(sums(6.0, scored=(0, 2)))
  made.add(sums(6.0, scored=()))
  found = made.metrics(2, 6)
  assert found['loss_nats_per_token'] == pytest.approx(2.0)
  assert (found['error'], found['scored_tokens']) == (0.5, 2)
  assert (found['padding_share'], found['epoch']) == (0.25, 6 / 100)
  assert not {'bits_per_byte', 'word_perplexity'} & set(found)
  made.start()
  made.add(sums(6.0, scored=()))
  found = made.metrics(3, 9)
  assert 'loss_nats_per_token' not in found
  counts = {'tokens': 3, 'scored_tokens': 0, 'padding_share': 0.25}
  assert {name: found[name] for name in counts} == counts


def test_time_between_pause_and_start_is_left_out(made, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
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


def test_mfu_counts_a_loop_by_its_mean_halting_depth(data, monkeypatch):
  monkeypatch.setattr(flops, 'peak_flops', lambda devices: 1e9)
  monkeypatch.setattr(time, 'perf_counter', itertools.count(0.0, 2.0).__next__)
  made = meter.Meter(programs(), data.documents('train'))

  def mfu(sown=None):
    made.start()
    made.add(sums(sown=sown))
    return made.metrics(1, 3)['mfu']

  places = 4
  per_place = mfu() * 1e9 * 2 / places
  # Every token uses each weight, except those of the input embedding, for at
  # least 2 forward and 4 backward FLOPs.
  params = tiny_run.program().shapes.params
  kernels = sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if jax.tree_util.keystr(path[-1:], simple=True) in ('kernel', 'embedding')
  )
  assert 0.5 < per_place / (6 * kernels) < 2

  def loop(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ x.T, x @ x.T)

  made.traced = {tiny_run.SEGMENT: jax.make_jaxpr(loop)(jnp.zeros((5, 5)))}
  once = 3 * 2 * 5**3 / (tiny_run.ROWS * tiny_run.SEGMENT) * places / 2 / 1e9
  # One product before the loop and one in each iteration.
  found = [mfu(), mfu(depth(6, 6)), mfu(depth(21, 6))]
  assert found == pytest.approx([2 * once, 2 * once, once * (1 + 3.5)])

  def all_steps(x):
    body = lambda carry: (carry[0] + 1, carry[1] @ carry[1].T)
    return jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))

  # If nothing halts, every iteration counts.
  traced = jax.make_jaxpr(all_steps)(jnp.zeros((5, 5))).jaxpr
  made.traced = {tiny_run.SEGMENT: traced}
  assert mfu() == pytest.approx(4 * once)

  # Shorter segments have steps and FLOPs of their own.
  short = tiny_run.SEGMENT // 4
  shorter = dataclasses.replace(tiny_run.program(), segment=short)
  made.programs = made.programs | {short: shorter}
  made.traced[short] = jax.make_jaxpr(lambda x: x @ x)(jnp.zeros((5, 5))).jaxpr
  made.add(sums(), short)
  made.add(sums(), short)
  # The counted positions are those of three steps, in the time of one.
  assert mfu() == pytest.approx(3 * once * (4 + 2) / (1 + 2 / 4))


def test_a_non_finite_step_names_its_batch():
  batch = tiny_run.program().batch_shapes(2)
  batch = batch.replace(document_B=np.array([7, 5]), offset_B=np.array([32, 0]))
  meter.check_finite('Step 3', batch, jax.device_get(sums()))
  for bad in sums(nats=np.nan), sums(norm=np.inf):
    with pytest.raises(ValueError, match='Step 3 .* 7:32, 5:0'):
      meter.check_finite('Step 3', batch, jax.device_get(bad))
  for scored, loss in ((0, 1), 3), ((), 2):  # Agents have no scored steps.
    bad = sums(norm=np.inf, scored=scored).replace(nats=np.float32(6))
    with pytest.raises(ValueError, match=f'has loss {loss} and'):
      meter.check_finite('Step 3', (), jax.device_get(bad))


class Clock:
  def __init__(self):
    self.now = self.compiled = 0.0

  def goodput(self):
    return Goodput(lambda: self.now, lambda: self.compiled)


def test_shares_of_time_by_part():
  """Also of a part that fails; compilation within another part is compile."""
  clock = Clock()
  goodput = clock.goodput()
  for part, seconds in ('step', 5), ('checkpoint', 4), ('step', 2):
    with goodput.on(part):
      clock.now += seconds
  for part in 'evaluation', 'compile':
    with pytest.raises(KeyError), goodput.on(part):
      clock.now += 3
      clock.compiled += 2
      raise KeyError
  clock.now += 3
  assert goodput.sentence() == (
    'Time: 35.0% step, 25.0% compile, 0.0% data wait, 5.0% evaluation,'
    ' 20.0% checkpoint, 15.0% other, of 20 s.'
  )


def test_waiting_for_items_is_data_wait():
  clock, closed = Clock(), []

  def items():
    try:
      for item in range(3):
        clock.now += 1
        yield item
    finally:
      closed.append(True)

  goodput, found = clock.goodput(), []
  for item in goodput.waiting(items()):
    clock.now += 10
    found.append(item)
  assert found == [0, 1, 2]
  assert goodput.seconds['data wait'] == 3
  waiting = goodput.waiting(items())
  next(waiting)
  waiting.close()
  assert closed == [True, True]


def test_real_compilation_is_seen():
  goodput = Goodput()
  with goodput.on('evaluation'):
    jax.jit(lambda x: jnp.sin(x) * 7.125)(jnp.ones(3)).block_until_ready()
  assert 0 < goodput.seconds['compile'] < goodput.whole


@pytest.mark.parametrize('text', ['5', '0:3', '4:3', 'a:b', '1:2:3'])
def test_steps_to_trace(text):
  assert profile.steps('10:15') == range(10, 16)
  with pytest.raises(ValueError, match='--profile'):
    profile.steps(text)


@pytest.fixture
def traces(monkeypatch):
  """The calls of jax.profiler."""
  calls = []
  start = lambda folder: calls.append(str(folder))
  monkeypatch.setattr(
    jax.profiler, 'start_trace', lambda folder, **options: start(folder)
  )
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  return calls


def calls_by_step(traced, trained, traces):
  """Returns the number of calls after each trained step."""
  made, calls = profile.Profile('folder', traced), {}
  for step in trained:
    with made.step(step):
      pass
    calls[step] = len(traces)
  made.close()
  made.close()
  return calls


def test_a_trace_ends_after_its_last_step_is_done(traces):
  """That is in step 5, since steps are dispatched ahead."""
  calls = calls_by_step(range(2, 4), range(1, 7), traces)
  assert calls == {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
  # A run that resumes within them traces the rest.
  assert calls_by_step(range(2, 5), range(3, 5), traces)[3] == 3
  assert traces == ['folder', 'stop'] * 2


def test_steps_that_did_not_run_are_reported(traces, caplog, monkeypatch):
  calls_by_step(range(8, 10), range(1, 5), traces)
  assert caplog.text.count('steps 8 to 9') == 1
  calls_by_step(range(0), range(1, 5), traces)
  assert caplog.text.count('traced') == 1
  monkeypatch.setattr(jax, 'process_index', lambda: 1)  # Traces nothing.
  calls_by_step(range(1, 3), range(1, 5), traces)
  assert traces == []
