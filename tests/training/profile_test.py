"""Which steps are traced, and that the trace has their names."""

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.training import profile
from meliad_rec.training.profile import Profile


def test_steps():
  assert profile.steps('10:15') == range(10, 16)
  assert profile.steps('3:3') == range(3, 4)


@pytest.mark.parametrize('text', ['5', '0:3', '4:3', 'a:b', '1:2:3', '-1:2'])
def test_steps_that_are_none(text):
  with pytest.raises(ValueError, match='^--profile is .*, such as 10:15.$'):
    profile.steps(text)


@pytest.fixture
def traces(monkeypatch):
  """What jax was asked to start and to stop."""
  found = []
  monkeypatch.setattr(
    jax.profiler, 'start_trace', lambda f: found.append(str(f))
  )
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: found.append('stop'))
  return found


def run(traced, trained, traces, folder='folder'):
  """(step, what has been asked by its end) for each step trained."""
  made = Profile(folder, traced)
  asked = []
  for step in trained:
    with made.step(step):
      pass
    asked.append((step, list(traces)))
  made.close()
  made.close()
  return asked


def test_a_trace_ends_when_its_last_step_has_been_waited_for(traces):
  asked = run(range(2, 4), range(1, 7), traces)
  assert asked[0] == (1, [])
  assert asked[1] == (2, ['folder'])
  assert asked[3] == (4, ['folder'])
  assert asked[4] == (5, ['folder', 'stop'])
  assert traces == ['folder', 'stop']


def test_a_run_that_goes_on_within_them_traces_the_rest(traces):
  assert run(range(2, 5), range(3, 5), traces)[0] == (3, ['folder'])
  assert traces == ['folder', 'stop']


def test_steps_that_were_not_trained_are_told(traces, caplog):
  run(range(8, 10), range(1, 5), traces)
  assert traces == []
  assert caplog.text.count('none of the steps 8 to 9') == 1
  run(range(0), range(1, 5), traces)
  assert caplog.text.count('traced') == 1


def test_other_processes_trace_nothing(traces, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  run(range(1, 3), range(1, 5), traces)
  assert traces == []


def test_a_trace_names_the_steps(tmp_path):
  made = Profile(tmp_path / 'profile', range(41, 42))
  for step in range(40, 45):
    with made.step(step):
      jnp.sin(step).block_until_ready()
  (trace,) = (tmp_path / 'profile').rglob('*.xplane.pb')
  content = trace.read_bytes()
  assert b'train' in content
  assert b'step_num' in content
