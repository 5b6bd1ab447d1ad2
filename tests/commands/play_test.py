"""Plays episodes of an agent, and shows one."""

from pathlib import Path
from unittest import mock

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from meliad_rec.archs.lstm import LSTM
from meliad_rec.commands import play
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.corridor import Corridor
from meliad_rec.reinforcement.maze import Maze
from meliad_rec.reinforcement.water_maze import WaterMaze
from meliad_rec.runs.agent_run import AgentRun
from tests import command


def run(env):
  agent = Agent(LSTM(6), 6, env.actions)
  params = a2c.initialize(agent, env, 1, jax.random.key(0))
  return AgentRun(agent, env, params, 3)


def test_the_command_prints_returns_and_writes_an_episode(
  tmp_path, monkeypatch, capsys
):
  one = run(Corridor(2))
  monkeypatch.setattr(play, 'load_agent', lambda *args: one)
  for path in tmp_path / 'x.gif', tmp_path / 'x.png':
    code = command.run(play, 'RUN', '--episodes=9', f'--out={path}')
    assert code in (None, 0)
    out = capsys.readouterr().out
    returns = one.play(9)['mean_return']
    assert one._play._cache_size() == 1  # Also at the second call.
    error = returns.std(ddof=1) / 3
    told = f'return   {returns.mean():.3f} (standard error {error:.3f})\n'
    assert told in out
    pictures = one.pictures()
    assert f'an episode of {len(pictures)} steps' in out
  image = Image.open(tmp_path / 'x.gif')
  changes = (np.diff(pictures, axis=0) != 0).any((1, 2, 3)).sum()
  assert image.n_frames == 1 + changes  # Equal ones in a row are joined.
  assert '.png' in command.mistake(play, 'RUN', '--out=x.jpg')
  command.run(play, 'RUN', '--episodes=1')
  assert 'standard error' not in capsys.readouterr().out


@pytest.mark.parametrize('name', ['x.gif', 'x.png'])
def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch, name):
  def save(image, path, *args, **kwargs):
    Path(path).write_text('half')
    raise OSError('No space left on device')

  (tmp_path / name).write_text('before')
  monkeypatch.setattr(Image.Image, 'save', save)
  with pytest.raises(OSError):
    play.write(str(tmp_path / name), [np.zeros((3, 4, 3), np.uint8)] * 2)
  assert [path.read_text() for path in tmp_path.iterdir()] == ['before']


def test_flags_reach_the_agent(tmp_path, monkeypatch):
  one = mock.MagicMock()
  one.play.return_value = dict.fromkeys(
    ('mean_return', 'success', 'episode_steps'), np.ones(7)
  )
  one.pictures.return_value = run(Corridor(2)).pictures()
  load = mock.Mock(return_value=one)
  monkeypatch.setattr(play, 'load_agent', load)
  chosen = '--step=4', '--trusted', '--agent=1', '--seed=3', '--greedy'
  out = f'--out={tmp_path / "x.png"}'
  assert command.run(play, 'RUN', '--episodes=7', *chosen, out) == 0
  load.assert_called_once_with('RUN', 4, True, 1)
  one.play.assert_called_once_with(7, seed=3, greedy=True)
  one.pictures.assert_called_once_with(seed=3, greedy=True)


class Walker(nn.Module):
  """Opens the right door in its first episode, and the wrong one later.

  State: the color seen, and the number of episodes.
  """

  def initial_state(self, rows):
    return jnp.zeros(rows, int), jnp.zeros(rows, int)

  def __call__(self, state, x_BO, start_B):
    color_B, episodes_B = state
    color_B = jnp.where(start_B, x_BO[:, 1].astype(int), color_B)
    episodes_B += start_B
    door_B = 1 + jnp.where(episodes_B == 1, color_B, 1 - color_B)
    action_B = jnp.where(x_BO[:, 2] > 0, door_B, 0)
    logits_BA = 100 * jax.nn.one_hot(action_B, 3)
    return (color_B, episodes_B), logits_BA, jnp.zeros(len(start_B))


def test_a_greedy_agent_plays_one_episode():
  """No reward counts after its end."""
  one = AgentRun(Walker(), Corridor(2), {}, 0)
  found = one.play(9, greedy=True)
  assert found['mean_return'].tolist() == found['success'].tolist() == [1] * 9
  assert found['episode_steps'].tolist() == [3] * 9
  assert len(one.pictures(greedy=True)) == 3


def test_in_training_episodes_follow_one_another():
  """Each begins with its own start and its own sum of rewards."""
  env, walker = Corridor(2), Walker()
  key = jax.random.key(0)
  acting = a2c.begin(walker, env, {}, 3, key)
  _, steps, _ = a2c.rollout(walker, env, {}, acting, 9, key)
  np.testing.assert_array_equal(steps.start[1:], steps.done[:-1])
  np.testing.assert_array_equal(np.flatnonzero(steps.done[:, 0]), [2, 5, 8])
  np.testing.assert_array_equal(
    steps.total[2::3], [[1] * 3, [-1] * 3, [-1] * 3]
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'env',
  [Maze(5, 3, limit=7), Maze(5, 3, 7, turn=False), WaterMaze(3, limit=7)],
)
def test_an_episode_is_played_to_its_end(env):
  one = run(env)
  found, pictures = one.play(4, greedy=True), one.pictures()
  assert found['episode_steps'].tolist() == [7] * 4
  assert len(pictures) == 7 and pictures[0].dtype == np.uint8
  black = [(each == 0).all(2).sum() for each in pictures]
  assert black == [1] * 7  # The agent.
