r"""Shows on an HTML page what a trained model does with a text.

  meliad-rec explore RUN TEXT --out=report.html
  meliad-rec explore RUN TEXT --out=report.html --baseline=OTHER_RUN

RUN is the folder of a trained run, TEXT a text file. The page is one file,
which any browser opens without a network. It colors each token by how much the
recurrent state lowers its loss, by the loss itself, or by its rank among all
tokens. Below the text, the page shows the state at block borders and several
figures. With --baseline, the losses are compared with those of another run,
which has the same vocabulary.
"""

from pathlib import Path
import sys

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.data.split_files import read_text
from meliad_rec.explore.page import write_page
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage import output_file

# Arguments that the help shows, besides flags.
ARGUMENTS = 'RUN TEXT'


def define_flags() -> None:
  run_flags.define_step_flags()
  flags.DEFINE_string('out', None, 'Path of the page, an .html file.')
  flags.DEFINE_string(
    'baseline', None, 'Folder of a run to compare with; see above.'
  )
  flags.DEFINE_integer(
    'top',
    None,
    'Number of likely tokens to show at each token. Unset: 5, or all of a '
    'vocabulary that has fewer.',
    lower_bound=1,
  )


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if len(argv) != 3:
    raise ValueError(
      'Give the folder of a run and a text file, as in: meliad-rec explore RUN '
      f'TEXT --out=report.html. Got {len(argv) - 1} arguments.'
    )
  if not args.out:
    raise ValueError('A page needs a path. Add --out=report.html.')
  output_file.check(args.out, '.html')
  workdir, path = argv[1:]
  text = read_text(path)
  run = run_flags.open_run(workdir)
  baseline = None
  if args.baseline:
    baseline = load_run(args.baseline, trusted=args.trusted)
  show = lambda what: print(what, file=sys.stderr)
  write_page(
    run,
    text,
    args.out,
    name=Path(path).name,
    baseline=baseline,
    top=args.top,
    on_progress=show,
  )
  size = Path(args.out).stat().st_size / 1e6
  print(f'Wrote {args.out}, {size:.1f} MB. Open it in a browser.')
