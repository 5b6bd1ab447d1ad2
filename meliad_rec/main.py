r"""Trains a model, or resumes training where it stopped.

  meliad-rec train --gin_file=arch/block_recurrent --gin_file=size/tiny \
    --gin_file=task/code --workdir=runs/tiny

`python -m meliad_rec.main` takes the same flags.

Ctrl-C or SIGTERM saves and stops, with exit code 130 or 143. --dry_run prints
what would be done. `meliad-rec settings` lists what can be set.
"""

from meliad_rec.distributed import interrupts

if __name__ == '__main__':
  interrupts.end_at_once()  # Before the imports, which take seconds.

import hashlib
import json
import shlex

from absl import flags
from absl import logging
import jax

from meliad_rec import cli
from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.distributed import compilation_cache
from meliad_rec.distributed import pod
from meliad_rec.runs import folder
from meliad_rec.runs import training
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.workdir import check_writable
from meliad_rec.storage.workdir import full_name
from meliad_rec.storage.workdir import in_bucket
from meliad_rec.storage.workdir import place
from meliad_rec.training import profile
from meliad_rec.training import summary
from meliad_rec.training import trainer

DOES_NOT_FIT = 3  # Exit code of --dry_run, as in `plan`.


def define_flags() -> None:
  config_flags.define_flags()
  config_flags.define_mesh_flag()
  flags.DEFINE_string(
    'workdir', None, 'Folder of the run; created if it does not exist.'
  )
  flags.DEFINE_string(
    'init_from',
    None,
    'Begin a new run with the parameters of another: the folder of a run or an '
    'exported model; RUN:STEP or RUN:best for another step than the newest.',
  )
  flags.DEFINE_bool(
    'dry_run',
    False,
    'Print configuration, parameters, memory and data, without training; the '
    'exit code is 3 if a step does not fit in memory.',
  )
  flags.DEFINE_string(
    'profile',
    None,
    'First and last step to trace with the profiler, such as 10:15; the traces '
    'are in the folder profile of the run, for XProf.',
  )
  flags.DEFINE_bool(
    'verbose',
    False,
    'Print at the end the sha256 of the parameters, the optimizer, the carry '
    '(recurrent state) and the position in the data, to compare two runs bit '
    'for bit.',
  )


def main(argv: list[str]) -> int:
  config_flags.check_no_arguments(argv)
  args = flags.FLAGS
  if not (args.workdir or args.dry_run):
    raise ValueError('A run needs a folder. Add --workdir=DIR.')
  for name in 'profile', 'verbose':
    if args.dry_run and args[name].value:
      raise ValueError(
        f'--dry_run takes no training steps, so --{name} has nothing to do. '
        'Remove one of them.'
      )
  compilation_cache.enable()
  return pod.run_on_all_processes(work, cli.guarded)


def work() -> int:
  """Trains, or prints the report of --dry_run; returns the exit code."""
  args = flags.FLAGS
  traced = profile.steps(args.profile) if args.profile else range(0)
  source = training.open_source(args.init_from, args.workdir)
  config.parse(args.gin_file, [*args.gin_param, *config_flags.given_mesh()])
  if args.workdir and not args.dry_run:
    check_writable(place(args.workdir))  # Before any data are read.
  experiment = training.build(args.workdir, source)
  account = source and source.account(
    experiment.program.shapes.params, experiment.data.vocabulary
  )
  if args.dry_run:
    print(config.operative())
    try:
      summary.show(experiment)
    except jax.errors.JaxRuntimeError as error:
      problem = summary.refused(error)
      if problem is None:
        raise
    else:
      problem = summary.shortage(experiment.program)
    for line in filter(None, (account, problem)):
      print(line)
    return DOES_NOT_FIT if problem else 0
  with training.advising(args.workdir):  # Reads the documents.
    logging.info('%s', summary.sentence(experiment))
  run, reason = training.run_experiment(
    experiment, args.workdir, traced, source
  )
  digests = all_digests(run) if args.verbose else []
  if jax.process_index() == 0:
    logging.info('%s', run.goodput.sentence())
    for line in digests:
      print(line)
    if run.finished and not reason:
      last = experiment.last_step
      name = 'STEPS'
      if last < experiment.steps:
        name = 'experiment.Experiment.stop_at'
      print(
        f'Nothing was left to do: this run has trained {run.step:,} steps, and '
        f'{name} is {last:,}. The folder of the run is unchanged. A larger '
        f'{name} trains it further.'
      )
    print(
      f'{"Stopped at" if reason else "Finished"} step {run.step} after '
      f'{run.goodput.whole:.0f} s{": " + reason if reason else ""}. Results: '
      + full_name(run.workdir)
    )
    if reason and run.checkpoints.exit_code:
      again = 'Repeat the command to resume'
      if not in_bucket(run.workdir):
        whole = run.workdir.resolve()
        saved = shlex.quote(f'{whole / folder.CONFIG}')
        given = shlex.quote(f'{whole}')
        again += (
          f', or start {cli.started()} train --gin_file={saved} '
          f'--workdir={given}'
        )
      print(f'{again}.')
  return run.checkpoints.exit_code


def all_digests(run: trainer.Run) -> list[str]:
  """Returns the sha256 of each part of a run's state, as lines of text.

  The parts are the parameters, the optimizer state, the carry (recurrent
  state), the position in the data and, if the run keeps it, the moving average
  of the parameters.
  """
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
