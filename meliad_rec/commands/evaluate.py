r"""Evaluates a trained model on a split or on text files, every token once.

  meliad-rec evaluate --workdir=RUN --split=test --out=A.npz
  meliad-rec evaluate --workdir=RUN --file='books/*.txt'
  meliad-rec evaluate --compare=A.npz,B.npz

Give exactly one of --split, --file and --compare. --out writes the loss and the
text of every token to a file. --compare takes two such files, and shows
how much better the second model predicts: by position in the document, by
distance back to the previous use of a name, and at the tokens with the largest
gain, in context. --by_document shows such tokens for each document. --plot also
draws the gain.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import glob
import json
from pathlib import Path

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.config import config_flags
from meliad_rec.data.dataset import baselines
from meliad_rec.data.documents import Documents
from meliad_rec.data.split_files import read_text
from meliad_rec.evaluation.compare import compare
from meliad_rec.evaluation.evaluation import EvalSubset
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.gain_plot import plot_gain
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.metrics.metrics import unit
from meliad_rec.report import journal
from meliad_rec.report.console import Countdown
from meliad_rec.report.console import counted
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import output_file
from meliad_rec.storage.workdir import full_name

# Arguments that the help shows, besides flags.
ARGUMENTS = run_flags.ARGUMENTS
SCORED = 'scored_tokens'  # A metric that only labeled documents have.
# Flags that cannot be combined with --compare.
_READING = (
  *('workdir', 'step', 'trusted', 'split', 'store', 'path', 'split_file'),
  *('file', 'documents', 'tokens', 'batch', 'segment', 'clear_state', 'out'),
  'metrics',
)


def define_flags() -> None:
  run_flags.define_flags()
  run_flags.define_data_flags()
  flags.DEFINE_multi_string(
    'file', [], 'Text file or pattern, repeatable; one file is one document.'
  )
  flags.DEFINE_integer(
    'documents', None, 'Read only this many documents.', lower_bound=1
  )
  flags.DEFINE_integer(
    'tokens',
    None,
    'Read only this many tokens of each document.',
    lower_bound=1,
  )
  run_flags.define_reading_flags()
  flags.DEFINE_bool(
    'clear_state', False, 'Clear recurrent states before each segment.'
  )
  flags.DEFINE_string(
    'out', None, 'File to write the loss of each token to, an .npz.'
  )
  flags.DEFINE_string(
    'metrics', None, 'File to write the metrics to as JSON, a .json.'
  )
  flags.DEFINE_list('compare', None, 'Two files written by --out: A.npz,B.npz.')
  flags.DEFINE_integer(
    'top',
    20,
    'Number of tokens or words that --compare shows where the second file '
    'gains most, and as many where it loses most.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    'unit', 'token', 'Unit that --compare compares: token or word.'
  )
  flags.DEFINE_bool(
    'by_document',
    False,
    'Show --top tokens or words for each document.',
  )
  flags.DEFINE_string(
    'plot', None, 'Picture of the gain that --compare writes, a .png file.'
  )


def main(argv: list[str]) -> None:
  run_flags.take_arguments(argv)
  args = flags.FLAGS
  if args.compare is not None:
    config_flags.refuse(_READING, 'cannot be combined with --compare')
    if len(args.compare) != 2:
      raise ValueError(
        f'--compare takes two files, A.npz,B.npz, got {len(args.compare)}.'
      )
    if args.plot:
      output_file.check(args.plot, '.png')
    a, b = map(TokenLosses.load, args.compare)
    print(compare(a, b, args.top, args.unit, args.by_document))
    if args.plot:
      plot_gain(a, b, args.plot)
      print(f'wrote {args.plot}')
    return
  compared = 'top', 'unit', 'by_document', 'plot'
  config_flags.refuse(compared, 'can only be used with --compare')
  check_flags(args)
  run = run_flags.open_run(args.workdir)
  chosen, trivial = choose(run, args)
  documents = EvalSubset(args.documents, args.tokens).of(chosen, run.vocabulary)
  metrics, losses = measure(run, documents, args)
  counts = {
    'document': len(documents),
    'token': metrics['tokens'],
    'byte': documents.bytes_.sum(),
    'word': documents.words.sum(),
  }
  print(
    f'step {run.step} of {args.workdir}: '
    + ', '.join(counted(n, noun) for noun, n in counts.items())
    + (f', {metrics[SCORED]:,} scored' if SCORED in metrics else '')
  )
  for name, value in metrics.items():
    if name not in ('tokens', 'padding_share', SCORED):
      print(f'  {name:<20} {value:<12.6g} {unit(name)}')
  for name, error in trivial.items():
    print(
      f'  {name:<20} {error:<12.6g} error of a trivial predictor, whole split'
    )
  if losses:
    losses.write(args.out)
    print(f'wrote {args.out}')
  if args.metrics:
    about = {'run': full_name(args.workdir), 'step': run.step}
    found = {k: journal.to_json(float(v)) for k, v in metrics.items()}
    text = json.dumps({**about, **found, 'trivial': dict(trivial)}, indent=1)
    output_file.write(Path(args.metrics), f'{text}\n')
    print(f'wrote {args.metrics}')


def check_flags(args) -> None:
  """Checks the combination of flags, and that files can be written.

  Raises:
    ValueError: not exactly one of --split and --file is given, a flag has no
      effect with the others, or a file cannot be written.
  """
  if bool(args.split) == bool(args.file):
    run_flags.check_workdir(args)
    given = 'both' if args.split else 'neither'
    raise ValueError(
      'Give one thing to evaluate: either --split=validation or --file=TEXT, '
      f'got {given}.'
    )
  run_flags.check_data_flags(args)
  if args.out:
    output_file.check(args.out, '.npz')
  if args.metrics:
    output_file.check(args.metrics, '.json')


def choose(run: TrainedRun, args) -> tuple[Documents, Mapping[str, float]]:
  """Opens the documents that the flags name.

  Returns:
    (documents, {name of a trivial predictor: its error rate on the whole
    split}). The dict is empty for data without such predictors.
  """
  if args.file:
    names = find(args.file)
    texts = [read_text(name) for name in names]
    return run.documents(texts, names), {}
  data = run_flags.open_data(run, args)
  return data.documents(args.split), baselines(data, args.split)


def find(patterns: list[str]) -> list[str]:
  """Returns the files that match any of the patterns, each once.

  Files are in the order of the patterns and, for one pattern, sorted.

  Args:
    patterns: paths of files, or patterns of glob.

  Raises:
    ValueError: no file matches a pattern.
  """
  names = {}
  for pattern in patterns:
    found = [pattern]
    if not Path(pattern).exists():
      found = map(Path, glob.glob(pattern, recursive=True))
      found = sorted(filter(Path.is_file, found))
    if not found:
      raise ValueError(f'No file matches --file={pattern}. Give a text file.')
    names |= dict.fromkeys(map(str, found))
  return list(names)


def measure(
  run: TrainedRun, documents: Documents, args
) -> tuple[dict[str, float], TokenLosses | None]:
  """Evaluates the run on documents.

  Returns:
    ({name: value} of the metrics, loss of each token). The latter is None
    without --out.
  """
  sharded = run.sharded
  if args.clear_state:
    model = sharded.model.clone(clear_state=True)
    sharded = dataclasses.replace(sharded, model=model)
  sharded = run_flags.with_segment(sharded, documents, args.segment)
  losses = TokenLosses.of(documents, run.vocabulary) if args.out else None
  countdown = Countdown(documents.tokens_read, 'tokens')
  rows = run.rows(len(documents), args.batch)
  with contextlib.closing(countdown):
    metrics = evaluate(
      sharded,
      run.params,
      documents,
      rows,
      losses_out=losses.parts if losses else None,
      on_progress=countdown.show,
    )
  if losses:
    losses.about.update(
      run=full_name(args.workdir),
      step=run.step,
      segment=sharded.segment,
      clear_state=sharded.model.clear_state,
      vocabulary=run.vocabulary.identity,
      data=documents.identity,
      metrics=metrics,
    )
  return metrics, losses
