"""Profiles: which steps are traced, and the names in the trace."""

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.training import profile
from meliad_rec.training.profile import Profile


def test_steps():
  assert profile.steps('10:15') == range(10, 16)
  assert profile.steps('3:3') == range(3, 4)


@pytest.mark.parametrize('text', ['5', '0:3', '4:3', 'a:b', '1:2:3', '-1:2'])
def test_wrong_steps(text):
  with pytest.raises(ValueError, match='--profile'):
    profile.steps(text)


@pytest.fixture
def traces(monkeypatch):
  """The calls of jax.profiler."""
  calls = []
  start = lambda folder: calls.append(str(folder))
  monkeypatch.setattr(jax.profiler, 'start_trace', start)
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  return calls


def run(traced, trained, traces):
  """Returns the number of calls after each trained step."""
  made, calls = Profile('folder', traced), {}
  for step in trained:
    with made.step(step):
      pass
    calls[step] = len(traces)
  made.close()
  made.close()
  return calls


def test_a_trace_ends_after_its_last_step_is_done(traces):
  """That is in step 5, since steps are dispatched ahead."""
  calls = run(range(2, 4), range(1, 7), traces)
  assert calls == {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
  assert traces == ['folder', 'stop']


def test_a_run_that_resumes_within_them_traces_the_rest(traces):
  assert run(range(2, 5), range(3, 5), traces)[3] == 1
  assert traces == ['folder', 'stop']


def test_steps_that_did_not_run_are_reported(traces, caplog):
  run(range(8, 10), range(1, 5), traces)
  assert traces == []
  assert caplog.text.count('steps 8 to 9') == 1
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
  assert b'train' in content and b'step_num' in content
