r"""Trains a model; run again, it goes on where it stopped.

  python -m meliad_rec.main --gin_file=arch/block_recurrent \
    --gin_file=size/tiny --gin_file=task/code --workdir=runs/tiny

Ctrl-C or SIGTERM saves and stops, with exit code 130 or 143. With --dry_run it
only says what it would do.
"""

import hashlib
import json
import pathlib

from absl import flags
from absl import logging
import jax

from meliad_rec import cli
from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.distributed import compilation_cache
from meliad_rec.distributed import pod
from meliad_rec.report import console
from meliad_rec.runs import folder
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.workdir import in_bucket
from meliad_rec.training import profile
from meliad_rec.training import summary
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment


def define_flags() -> None:
  config_flags.define_flags()
  config_flags.define_mesh_flag()
  flags.DEFINE_string(
    'workdir', None, 'Folder of the run; made if it is not there.'
  )
  flags.DEFINE_bool(
    'dry_run',
    False,
    'Print configuration, parameters, memory and data, and train nothing.',
  )
  flags.DEFINE_string(
    'profile',
    None,
    'Steps to trace, first and last, such as 10:15; XProf shows what is then in'
    ' the folder profile of the run.',
  )


def main(argv: list[str]) -> int:
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is no flag; write --flag=value.')
  args = flags.FLAGS
  if not (args.workdir or args.dry_run):
    raise ValueError('A run needs a folder; give --workdir=DIR.')
  console.plain()
  compilation_cache.enable()
  return pod.together(work, cli.guarded)


def work() -> int:
  """What the flags ask for; the exit code."""
  args = flags.FLAGS
  traced = profile.steps(args.profile) if args.profile else range(0)
  config.parse(args.gin_file, [*args.gin_param, *config_flags.given_mesh()])
  experiment = config.build(Experiment)()
  _ = experiment.program.shapes  # Builds all layers, which read their settings.
  config.check_read()
  if args.dry_run:
    print(config.operative())
    summary.show(experiment)
    return 0
  logging.info('%s', summary.sentence(experiment))
  run, reason = train(experiment, args.workdir, traced)
  digests = all_digests(run)
  if jax.process_index() == 0:
    logging.info('%s', run.goodput.sentence())
    print(*digests, sep='\n')
    print(
      f'{"Stopped at" if reason else "Finished"} step {run.step} after '
      f'{run.goodput.whole:.0f} s{": " + reason if reason else ""}. Results: '
      f'{run.workdir if in_bucket(run.workdir) else run.workdir.resolve()}'
    )
  return run.checkpoints.exit_code


def train(
  experiment: Experiment,
  workdir: str | pathlib.Path,
  traced: range = range(0),
) -> tuple[trainer.Run, str | None]:
  """Trains, or goes on where the run in the folder stopped.

  Args:
    experiment: what `config.build` made; the configuration is kept with it.
    workdir: folder of the run.
    traced: steps to trace.

  Returns:
    The run as it ended, and why it did before its last step, or None.

  Raises:
    ValueError: the folder holds another run, or a loss is not finite.
  """
  _ = experiment.program.shapes  # Builds all layers, which read their settings.
  operative = config.operative()
  run = trainer.Run(experiment, str(workdir), {'config': operative})
  run.profile = profile.Profile(run.workdir / 'profile', traced)
  try:
    run.begin()
    if run.step:
      tell_changes(run.workdir / folder.CONFIG, operative)
    folder.write(run.workdir, experiment, operative)
    return run, run.live()
  except OSError as error:
    # No mistake of a setting: a disk or a bucket failed, and may do better.
    error.exit_code = 1
    raise


def tell_changes(path: pathlib.Path, operative: str) -> None:
  """Says which settings are not those that the run went by before."""
  if not path.is_file():
    return
  try:
    changes = config.differences(path.read_text(encoding='utf-8'), operative)
  except ValueError as error:
    logging.warning('What changed since the run began is not known: %s', error)
    return
  for line in changes:
    logging.warning('changed since the run began: %s', line)


def all_digests(run: trainer.Run) -> list[str]:
  """sha256 of all that a run consists of, to compare two runs by."""
  position = json.dumps(run.position, sort_keys=True).encode()
  marks = {
    'parameters': digest(run.state.params),
    'optimizer': digest(run.state.opt_state),
    'carry': digest(run.state.carry),
    'data': hashlib.sha256(position).hexdigest(),
  }
  if run.state.ema is not None:
    marks['average'] = digest(run.state.ema)
  return [
    f'step {run.step} sha256 {name:<10} {mark}' for name, mark in marks.items()
  ]


if __name__ == '__main__':
  cli.run_main(main, define_flags)
