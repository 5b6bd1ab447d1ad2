r"""Shows the number of steps that a halting model takes, token by token.

  meliad-rec depth --workdir=RUN --text='[MAX 2 [MIN 3 4 ] 0 ]'
  meliad-rec depth --workdir=RUN --split=test --out=depth.png

A halting model decides by itself how many times it applies its layer (steps) to
a token, a chunk or a document. For --text, this prints the steps of each token,
and the labels if the model predicts labels. For --split, it prints the mean and
maximum number of steps and the share of correct predictions, by length of the
document and, if some words are brackets, by depth of nesting. In the mean,
tokens that halt together, as a chunk or a document, count once. Exactly one of
--text and --split is needed. --out plots the result.
"""

import contextlib

from absl import flags

from meliad_rec.commands import depth_report
from meliad_rec.commands import run_flags
from meliad_rec.data.documents import Documents
from meliad_rec.evaluation import depth
from meliad_rec.evaluation.depth import bracket_steps
from meliad_rec.evaluation.depth import Depths
from meliad_rec.evaluation.depth import measure
from meliad_rec.report.console import Countdown
from meliad_rec.report.console import counted
from meliad_rec.report.console import printable
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import output_file

# Arguments that the help shows, besides flags.
ARGUMENTS = run_flags.ARGUMENTS


def define_flags() -> None:
  run_flags.define_flags()
  flags.DEFINE_multi_string(
    'text',
    [],
    'Text to read, repeatable; for a run on pairs, two texts separated by ||.',
  )
  run_flags.define_data_flags()
  flags.DEFINE_integer(
    'documents',
    None,
    'Read only this many documents of --split.',
    lower_bound=1,
  )
  run_flags.define_reading_flags()
  flags.DEFINE_string('out', None, 'Plot to write, a .png file.')


def main(argv: list[str]) -> None:
  run_flags.take_arguments(argv)
  args = flags.FLAGS
  check_flags(args)
  run = run_flags.open_run(args.workdir)
  if args.text:
    depths = read(run, depth_report.documents_of(run, args.text), args)
    lines = [
      depth_report.line_of(run, depths, i) for i in range(len(args.text))
    ]
    for line in lines:
      print(printable(str(line)))
    if args.out:
      depth_report.draw_lines(lines, args.out)
  else:
    data = run_flags.open_data(run, args)
    documents = data.documents(args.split).head(args.documents)
    depths = read(run, documents, args)
    print(
      f'step {run.step} of {args.workdir}: '
      f'{counted(len(documents), "document")}, '
      f'{counted(len(documents.tokens), "token")}'
    )
    found = grouped(run, depths)
    for heading, each in found.items():
      print(depth.table(heading, [*each, depth.everything(depths)]))
    if args.out:
      depth_report.draw_groups(found, args.out)
  if args.out:
    print(f'wrote {args.out}')


def check_flags(args) -> None:
  """Checks the combination of flags, and that --out can be written.

  Raises:
    ValueError: not exactly one of --split and --text is given, a flag has no
      effect with the others, or --out cannot be written.
  """
  if bool(args.split) == bool(args.text):
    run_flags.check_workdir(args)
    given = 'both' if args.split else 'neither'
    raise ValueError(
      "Give one thing to read: either --text='...' or --split=validation, got "
      f'{given}.'
    )
  run_flags.check_data_flags(args)
  if args.documents and args.text:
    raise ValueError('--documents has no effect with --text. Remove it.')
  if args.out:
    output_file.check(args.out, '.png')


def read(run: TrainedRun, documents: Documents, args) -> Depths:
  """Runs the model on documents and returns the steps of each token."""
  sharded = run_flags.with_segment(run.sharded, documents, args.segment)
  rows = run.rows(len(documents), args.batch)
  countdown = Countdown(len(documents.tokens), 'tokens')
  with contextlib.closing(countdown):
    return measure(sharded, run.params, documents, rows, countdown.show)


def grouped(run: TrainedRun, depths: Depths) -> dict[str, list[depth.Group]]:
  """Groups the documents by length and by depth of nesting.

  Returns:
    {heading: groups}. 'tokens' has the groups by length. 'brackets' has those
    by depth of nesting, and exists only if some words of the vocabulary are
    brackets.
  """
  found = {'tokens': depth.by_length(depths)}
  brackets = bracket_steps(run.vocabulary)
  if brackets is not None:
    found['brackets'] = depth.by_nesting(depths, brackets)
  return found
