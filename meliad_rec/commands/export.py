r"""Exports a trained model: parameters as safetensors, and files to load them.

  meliad-rec export --workdir=RUN --step=best --out=DIR
  meliad-rec export --workdir=RUN --average=10 --out=DIR

DIR then has model.safetensors, config.gin, run.json, the vocabulary, and
README.md, a model card to complete. `evaluate`, `generate` and
meliad_rec.load_run open DIR as they open a run, and
`meliad-rec train --init_from=DIR` begins a new run with these parameters. This
needs meliad_rec[export].
"""

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.runs import exported

# Arguments that the help shows, besides flags.
ARGUMENTS = run_flags.ARGUMENTS


def define_flags() -> None:
  run_flags.define_flags()
  flags.DEFINE_string(
    'out', None, 'Folder to write; must be empty or not exist.'
  )
  flags.DEFINE_integer(
    'average',
    1,
    'Average the parameters of this many checkpoints, up to --step.',
    lower_bound=1,
  )


def main(argv: list[str]) -> None:
  run_flags.take_arguments(argv)
  args = flags.FLAGS
  if not args.out:
    raise ValueError('No folder was given. Add --out=DIR, a new folder.')
  out = exported.check_new(args.out)
  run = run_flags.open_run(args.workdir, args.average)
  run.export(out)
  size = (out / exported.PARAMETERS).stat().st_size
  print(run)
  print(f'wrote {out}: {size:,} bytes of parameters; complete its README.md')
