"""How a process of several ends; launch/local_pod_test.py trains with some."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from meliad_rec import cli
from meliad_rec.distributed import pod

ROOT = pathlib.Path(__file__).parents[2]


def test_alone_it_is_but_the_work():
  assert pod.together(lambda: 7, cli.guarded) == 7
  assert not jax.distributed.is_initialized()
  with pytest.raises(KeyError):
    pod.together(lambda: {}['x'], cli.guarded)


@pytest.mark.parametrize(
  'end, said',
  [
    ('words.close()', ''),
    ('os._exit(3)', 'two\n'),
    ('os.abort()', 'two\n'),
    ('os.kill(os.getpid(), 9)', 'two\n'),
    ('words.say(""); os.abort()', ''),
  ],
)
def test_last_words_are_those_said_last(end, said):
  program = (
    'import os; from meliad_rec.distributed.pod import LastWords; '
    'words = LastWords();'
    f'words.say("one"); words.say("two"); {end}'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.stderr == said


def start(count, what, indices=None, **more):
  """Processes that do what this file does when it is run.

  Args:
    indices: those of the count that are started; None: all.
    more: variables.
  """
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  cluster = {
    'JAX_COORDINATOR_ADDRESS': address,
    'JAX_NUM_PROCESSES': str(count),
  }
  return [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.distributed.pod_test', what],
      env=os.environ
      | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT), 'JAX_PROCESS_ID': str(index)}
      | cluster
      | more,
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in (range(count) if indices is None else indices)
  ]


def ended(children):
  """(exit code, last line of stderr) of each."""
  errors = [child.communicate(timeout=90)[1] for child in children]
  lasts = [text.splitlines()[-1] if text else '' for text in errors]
  return list(zip((c.returncode for c in children), lasts, strict=True))


def test_those_that_end_together_say_nothing():
  for code, last in ended(start(2, 'end')):
    assert code == 143
    assert not last.startswith('error: ')


def test_one_that_fails_ends_the_others():
  """Its own sentence and exit code stay, and none waits for the other."""
  (code, last), (wrong, mistake) = ended(start(2, 'fail'))
  assert (wrong, mistake) == (2, 'error: Wrong here.')
  assert code not in (0, 2)
  assert last.startswith('error: Process 0 of 2 ')
  assert last.endswith('Run the same command on all hosts again, to go on.')


@pytest.mark.parametrize(
  'index, asked', [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT)]
)
def test_one_that_waits_for_others_to_join_ends_when_it_is_told_to(
  index, asked
):
  [child] = start(2, 'end', [index], JAX_LOGGING_LEVEL='INFO')
  for line in child.stderr:
    if 'Connecting to JAX distributed service' in line:
      break
  time.sleep(0.5)
  child.send_signal(asked)
  began = time.monotonic()
  [(code, last)] = ended([child])
  assert time.monotonic() - began < 20
  assert code == -asked
  assert last.startswith('error: This process was ended before it had found')


@pytest.mark.slow
@pytest.mark.parametrize('lost', [0, 1])
def test_one_that_is_killed_ends_those_that_wait_for_it(lost):
  """Also where nothing that they compute tells them, as on a TPU."""
  children = start(2, 'wait')
  for child in children:
    assert child.stdout.readline() == 'ready\n'
  children[lost].kill()
  began = time.monotonic()
  ends = ended(children)
  assert time.monotonic() - began < 60
  assert ends[lost][0] == -signal.SIGKILL
  for index, (code, last) in enumerate(ends):
    assert code != 0
    assert last.startswith(f'error: Process {index} of 2 was ended: ')


def work():
  what, index = sys.argv[1], jax.process_index()
  if what == 'wait':
    print('ready', flush=True)
    time.sleep(120)
  for _ in range(3):
    multihost_utils.process_allgather(np.ones(2))
    if what == 'fail' and index == 1:
      raise ValueError('Wrong here.')
  return 143


def guarded(main, rest):
  """As cli.guarded, which tells mistakes of the package's own code only."""
  try:
    return main(rest)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  # As cli.run_main has them, also where this was started in the background.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  signal.signal(signal.SIGINT, signal.default_int_handler)
  sys.exit(pod.together(work, guarded))
