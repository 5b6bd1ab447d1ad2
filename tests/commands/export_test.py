"""The command that exports a model."""

from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from meliad_rec.commands import export
from meliad_rec.runs.trained_run import load_run
from tests import trained


def call(*arguments):
  with flagsaver.flagsaver():  # Removes the flags that are defined here.
    export.define_flags()
    return export.main(flags.FLAGS(['export', *arguments]))


def test_the_command_exports_a_step_and_says_what(tmp_path, capsys):
  out = tmp_path / 'model'
  trained.folder()
  capsys.readouterr()
  call(f'--workdir={trained.folder()}', '--step=2', f'--out={out}')
  first, *_, last = capsys.readouterr().out.splitlines()
  assert first == f'TrainedRun of {trained.folder()}, step 2'
  assert last.startswith(f'wrote {out}: ')
  assert load_run(out).step == 2


def test_an_average_is_the_mean_of_the_checkpoints(tmp_path):
  out, run = tmp_path / 'model', trained.folder()
  call(f'--workdir={run}', '--average=2', f'--out={out}')
  average, *both = load_run(out), load_run(run, 2), load_run(run, 4)
  assert (average.step, average.average) == (4, 2)
  card = (out / 'README.md').read_text()
  assert '| step | mean of 2 checkpoints up to 4 |' in card
  assert 'validation' not in card  # Only single checkpoints have metrics.
  jax.tree.map(
    lambda got, a, b: np.testing.assert_allclose(
      got, np.mean(np.array([a, b], np.float64), 0), atol=1e-7
    ),
    average.params,
    *(each.params for each in both),
  )


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (['--workdir={run}'], 'Add --out=DIR'),
    (['--workdir={run}', '--out={run}'], 'not empty'),
    (['--out=x'], 'Add --workdir=DIR'),
    (['--workdir={run}', '--out=x', '--average=9'], 'fewer than the 9'),
  ],
)
def test_mistakes_are_one_sentence(arguments, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  arguments = [each.format(run=trained.folder()) for each in arguments]
  with pytest.raises(ValueError, match=expected):
    call(*arguments)
  assert list(tmp_path.iterdir()) == []
