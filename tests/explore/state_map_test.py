"""The state along a text, and its rank."""

import copy
import re
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec import explore
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.explore.shown import COLORS
from meliad_rec.explore.state_map import effective_rank
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from tests import architectures as tiny
from tests import observed
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close
from tests.explored import OTHER
from tests.explored import TEXT
from tests.explored import W


def test_effective_rank():
  close(effective_rank(np.eye(4)[None]), 4)
  close(effective_rank(np.ones((1, 4, 3))), 1)


@pytest.mark.parametrize('rank', [1, 3, 32])
def test_effective_rank_of_a_tall_matrix(rank):
  draw = np.random.default_rng(rank).normal
  s_NSD = draw(size=(2, 900, rank)) @ draw(size=(rank, 32))
  values = np.linalg.svd(s_NSD, compute_uv=False)[:, :rank]
  p = values / values.sum(1, keepdims=True)
  expected = np.exp(-(p * np.log(p)).sum(1))
  np.testing.assert_allclose(effective_rank(s_NSD), expected, rtol=1e-5)


@pytest.mark.slow
def test_state_map(tmp_path):
  run = block_recurrent()
  shown = explore.state_map(run, [TEXT, OTHER])
  check(shown, tmp_path)
  count = len(TEXT) // W
  slots = run.states(TEXT)['slots'].sel(layer=1).values
  change = np.linalg.norm(slots[1:] - slots[:-1], axis=-1)
  close(
    shown.data['change'][:count], change / np.linalg.norm(slots[1:], axis=-1)
  )
  close(shown.data['effective_rank'][:count], effective_rank(slots[1:]))
  use = shown.data['use'].values
  close(use.sum(1), 1)
  weights = run.attention(TEXT)['token_to_state'][0].mean('head').values
  close(use[1], weights[W : 2 * W].mean(0))
  keep = run.gates(TEXT)['state_keep'][0].mean(['slot', 'feature']).values
  close(shown.data['keep'][:count], keep)
  assert shown.data['document'].values.tolist().count(0) == count
  assert shown.data['read'].values[count] == count * W + W
  where = 'tokens read (whole blocks of each document)'
  panel = shown.figure.axes[0]
  assert panel.get_xlabel() == where
  assert panel.get_ylabel() == shown.data.attrs['rows'] == 'slot'
  coarse = explore.state_map(run, TEXT, every=2 * W)
  close(coarse.data['keep'], keep[: count // 2 * 2].reshape(-1, 2).mean(1))
  assert coarse.figure.axes[0].get_xlabel() == 'tokens read'
  close(explore.state_map(run, TEXT, layer=-1).data['keep'], keep)
  ids = run.encode(TEXT)
  assert explore.state_map(run, ids).data.identical(
    explore.state_map(run, [ids]).data
  )
  for wrong, message in ({'layer': 0}, 'one of .1'), ({'part': 'x'}, 'slots'):
    with pytest.raises(ValueError, match=message):
      explore.state_map(run, TEXT, **wrong)


@pytest.mark.slow
def test_state_map_of_parts_without_slots(tmp_path):
  lstm, block = observed.run('lstm'), observed.run('lstm').block
  shown = explore.state_map(lstm, TEXT)
  check(shown, tmp_path)
  assert len(shown.figure.axes) == 1  # One vector: no maps, and no rank.
  colors = {n.get_label(): n.get_color() for n in shown.figure.axes[0].lines}
  assert colors['gate: weight of the old state'] == COLORS[4]
  assert colors['change (share of its size)'] == COLORS[1]
  assert shown.data.attrs['part'] == 'cell'
  token_keep = lstm.gates(TEXT, -1)['token_keep'].squeeze().mean('feature')
  close(shown.data['keep'][1], token_keep.values[block : 2 * block].mean())
  hidden = explore.state_map(lstm, TEXT, part='hidden')
  assert hidden.data.attrs['part'] == 'hidden'
  assert 'hidden' in hidden.figure.get_suptitle()
  feedback = observed.run('feedback')
  shown = explore.state_map(feedback, TEXT)
  check(shown, tmp_path)
  assert shown.data.attrs['part'] == 'memory'
  assert shown.figure.axes[0].get_ylabel() == 'token'
  with pytest.raises(ValueError, match='not divided into layers'):
    explore.state_map(feedback, TEXT, layer=0)


@pytest.mark.slow
def test_state_and_its_use_are_of_one_layer():
  """Also where higher layers read the state, but have none of their own."""
  run = observed.run('block_feedback')
  layer = run.states(TEXT)['layer'].values[-1]
  assert layer < run.layers_with(('token_to_state',))[-1]
  found, block = explore.state_map(run, TEXT).data, run.block
  weights = run.attention(TEXT, layer)['token_to_state'].mean('head').squeeze()
  close(found['use'][1], weights[block : 2 * block].mean('token'))
  keep = run.gates(TEXT, layer)['state_keep'].squeeze()
  close(found['keep'], keep.mean(['slot', 'feature']))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['staircase', 'feedback', 'memorizing'])
def test_axes_of_states_have_names(name):
  states = observed.run(name).states(TEXT)
  axes = {dim for a in states.data_vars.values() for dim in a.dims}
  assert axes & {'token', 'place'}
  assert not any('_axis_' in axis for axis in axes)
  assert not any(re.search(r'/\d', part) for part in states.data_vars)
  changed = observed.run(name).with_state(states.isel(border=0))
  close(changed.nats(TEXT)[0], observed.run(name).nats(TEXT)[0])


class Sums(Cell):
  """Has parts with names, but not the axes, of other architectures."""

  is_recurrent = True

  def initial_state(self, batch):
    return jnp.zeros((batch, tiny.D)), jnp.zeros((batch, 3))

  def parts(self, state):
    return dict(zip(('memory', 'mask'), state, strict=True))

  def with_parts(self, state, parts):
    return parts['memory'], parts['mask']

  def __call__(self, state, block):
    sum_BD, three_B3 = state
    return (sum_BD + block.x.sum(1), three_B3), block.x


class Numbered(Cell):
  """Has two layers, each with two parts of tokens as a Staircase has."""

  is_recurrent = True
  names = [f'layer_{i}/pass_{n}' for i in (2, 10) for n in (9, 10)]

  def initial_state(self, batch):
    return jnp.zeros((batch, 4, 300, tiny.D))

  def parts(self, state):
    return {name: state[:, i] for i, name in enumerate(self.names)}

  def with_parts(self, state, parts):
    return jnp.stack([parts[name] for name in self.names], 1)

  def __call__(self, state, block):
    numbers = 1.0 + jnp.arange(4)[:, None, None]
    rows = 1 + jnp.arange(300)[:, None]
    return state + numbers * rows * block.x.sum(1)[:, None, None], block.x


def test_gates_in_training(tmp_path):
  """If a step was logged twice, the later record counts."""
  runs = {}
  for name, steps in ('a', (2, 4, 4)), ('b', (4, 6)):
    runs[name] = copy.copy(block_recurrent())
    runs[name].workdir = tmp_path / name
    runs[name].workdir.mkdir()
    lines = ['{"step": 4}', '{"step": 4, "split": "test", "gate": 0.1}']
    for i, step in enumerate(steps):
      gates = f'"gate": 0.{5 + i}, "gate_spread": 0.{1 + i}'
      lines.append(f'{{"step": {step}, "split": "train", {gates}}}')
    (tmp_path / name / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  shown = explore.gates_in_training(runs)
  check(shown, tmp_path)
  nan = np.nan
  close(shown.data['keep'], [[0.5, 0.7, nan], [nan, 0.5, 0.6]])
  close(shown.data['spread'], [[0.1, 0.3, nan], [nan, 0.1, 0.2]])
  assert shown.data['step'].values.tolist() == [2, 4, 6]
  alone = explore.state_map(runs['a'], TEXT).figure.axes
  panel = next(a for a in alone if 'gates in training' in a.get_ylabel())
  close(panel.lines[0].get_xydata(), [[2, 0.5], [4, 0.7]])
  with pytest.raises(ValueError, match='has no metrics.jsonl with gates'):
    explore.gates_in_training(block_recurrent())


def test_the_last_of_numbered_parts_and_layers_is_shown(tmp_path):
  """10 is above 9 and 2. Maps of many rows show means."""
  run = observed.untrained(Model(Bytes().size, Numbered(), tiny.D))
  states = run.states(TEXT)
  assert list(states.data_vars) == ['pass_9', 'pass_10']
  assert states['layer'].values.tolist() == [2, 10]
  close(states['pass_10'].sel(layer=10), 4 * states['pass_9'].sel(layer=2))
  shown = explore.state_map(run, TEXT)
  check(shown, tmp_path)
  expected = {'part': 'pass_10', 'rows': 'token', 'layer': 10}
  assert shown.data.attrs == expected
  assert shown.figure.get_suptitle().endswith(': pass_10 of layer 10')
  heat, curves = shown.figure.axes[:2]
  assert heat.get_ylabel() == 'token\n(means of 2 rows)'
  means = shown.data['change'].values.reshape(-1, 150, 2).mean(2)
  close(heat.images[0].get_array(), means.T)
  # A curve has the same color in every map.
  colors = {line.get_label(): line.get_color() for line in curves.lines}
  assert colors['mean cosine between tokens'] == COLORS[2]
  tracemalloc.start()
  try:
    size = run.states(TEXT * 9).nbytes
    assert tracemalloc.get_traced_memory()[1] < 1.6 * size + 2**20
  finally:
    tracemalloc.stop()


def test_parts_of_a_users_cell_have_numbered_axes():
  run = observed.untrained(Model(Bytes().size, Sums(), tiny.D))
  states = run.states(TEXT, every=16)
  assert states['memory'].dims == ('border', 'memory_axis_0')
  assert states['mask'].dims[0] == 'border'


def test_states_of_labeled_runs_are_read_from_ids():
  """The inputs are then the tokens themselves, and labels are the targets."""
  run, plain = observed.run('lstm', labels=True), observed.run('lstm')
  ids = plain.encode(TEXT)
  states = run.states(ids)
  shifted = plain.states(np.append(ids, 5))
  labels = np.roll(ids, -1)
  found = run.predictions(ids, labels=labels)
  assert found['nats'].shape == ids.shape
  # Without the first input, which stands for the start of a text.
  assert (
    np.abs(states['hidden'] - shifted['hidden'][: len(states['border'])]).max()
    > 1e-3
  )
  with pytest.raises(ValueError, match='labels were not given'):
    run.predictions(ids)
  with pytest.raises(ValueError, match='Use predictions'):
    run.nats(TEXT)
  with pytest.raises(ValueError, match='one label'):
    run.predictions(ids, labels=labels[:-1])
