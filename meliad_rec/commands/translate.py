r"""Writes the targets of sources, such as translations, by a beam search.

  meliad-rec translate RUN FILE --beams=5 --length_penalty=1 >TARGETS
  meliad-rec translate RUN --split=test --metrics=SCORES.json >TARGETS

FILE has one source in each line, and is - for stdin. The run must be of a model
with an encoder. --split reads sources of the run's own data, and --metrics
scores their targets by BLEU and ROUGE (see meliad-rec score), which needs
meliad_rec[text]. --average=10 takes the mean of the last ten checkpoints. Flags
that are not given take their values from the configuration of the run.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import json
from pathlib import Path
import sys
import time
from typing import Any

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.data.dataset import Dataset
from meliad_rec.data.pairs import Pairs
from meliad_rec.data.split_files import read_lines
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.beam import PENALTIES
from meliad_rec.generation.translation import Translation
from meliad_rec.metrics import text_scores
from meliad_rec.report.console import Countdown
from meliad_rec.report.console import counted
from meliad_rec.runs import exported
from meliad_rec.runs import folder
from meliad_rec.storage import output_file
from meliad_rec.storage.workdir import full_name
from meliad_rec.storage.workdir import place

# Arguments that the help shows, besides flags.
ARGUMENTS = 'RUN [FILE]'


def define_flags() -> None:
  run_flags.define_step_flags()
  run_flags.define_data_flags()
  flags.DEFINE_string(
    'out', None, 'File to write the targets to; default: stdout.'
  )
  flags.DEFINE_string(
    'metrics',
    None,
    'File to write BLEU and ROUGE to as JSON, a .json; with --split; needs '
    'meliad_rec[text].',
  )
  flags.DEFINE_integer(
    'beams', None, 'Number of beams of the search.', lower_bound=1
  )
  flags.DEFINE_float(
    'length_penalty',
    None,
    'Exponent of the penalty on short targets; 0 for none.',
    lower_bound=0,
  )
  flags.DEFINE_enum(
    'length_norm',
    None,
    list(PENALTIES),
    'Log-probabilities are divided by tokens (power) or (5 + tokens) / 6 '
    '(gnmt), to the power of --length_penalty.',
  )
  flags.DEFINE_integer(
    'no_repeat',
    None,
    'No sequence of this many tokens occurs twice in a target; 0 allows all.',
    lower_bound=0,
  )
  flags.DEFINE_integer(
    'tokens',
    None,
    'Maximum tokens of a target; default: 1.2 times as many as the longest '
    'source of a batch, rounded up to a multiple of 16, plus 10.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'batch',
    None,
    'Number of sources translated at once; affects only speed, memory and the '
    'default of --tokens; default: the rows of a training step, at most 128.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'average', None, 'Number of last checkpoints to average.', lower_bound=1
  )


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if len(argv) != 2 + (not args.split):
    raise ValueError(
      'Give the folder of a run and either a file of sources or --split, as '
      f'in: meliad-rec translate RUN FILE. Got {len(argv) - 1} arguments'
      f'{" and --split" * bool(args.split)}.'
    )
  if args.metrics:
    if not args.split:
      raise ValueError(
        '--metrics needs references. Add --split, or score targets of a FILE '
        'by meliad-rec score.'
      )
    output_file.check(args.metrics, '.json')
    text_scores.measure(['a'], ['a'])  # Fails if a package is missing.
  if args.out:
    output_file.check(args.out)
  run_flags.check_data_flags(args)
  lines = None if args.split else read_lines(argv[2])
  _, facts, _ = folder.read(argv[1])
  translation = from_flags(Translation.of(facts['translation']), args)
  if exported.is_in(place(argv[1])) and args.average is None:
    # An export of the mean of checkpoints already has it.
    translation = dataclasses.replace(translation, average=1)
  run = run_flags.open_run(argv[1], translation.average)
  references = None
  if args.split:
    data = run_flags.open_data(run, args)
    lines, references = texts(data, run.vocabulary, args.split)
  countdown, begin = Countdown(len(lines), 'lines'), time.perf_counter()
  with contextlib.closing(countdown):
    targets = run.translate(
      lines, translation.beam, args.tokens, countdown.show, args.batch
    )
  seconds = time.perf_counter() - begin
  if args.out:
    output_file.write(Path(args.out), ''.join(f'{line}\n' for line in targets))
    words = sum(len(line.split()) for line in targets)
    print(
      f'wrote {args.out}: {counted(words, "word")} in {seconds:,.1f} s, '
      f'{words / seconds:,.0f} words/s with compilation'
    )
  else:
    sys.stdout.writelines(f'{target}\n' for target in targets)
  if args.metrics:
    scores = text_scores.measure(targets, references)
    about = {'run': full_name(argv[1]), 'step': run.step}
    about |= translation.facts | {'average': run.average}
    text = json.dumps(about | scores, indent=1)
    output_file.write(Path(args.metrics), f'{text}\n')


def from_flags(translation: Translation, args) -> Translation:
  """Returns the settings with those replaced that the flags give."""
  given = lambda **flags: {k: v for k, v in flags.items() if v is not None}
  changes: Mapping[str, Any] = given(
    beams=args.beams,
    alpha=args.length_penalty,
    penalty=args.length_norm,
    no_repeat=args.no_repeat,
  )
  if changes.get('no_repeat') == 0:
    changes |= {'no_repeat': None}
  beam = dataclasses.replace(translation.beam, **changes)
  return dataclasses.replace(
    translation, beam=beam, **given(average=args.average)
  )


def texts(
  data: Dataset, vocabulary: Vocabulary, split: str
) -> tuple[list[str], list[str]]:
  """Returns the sources and the targets of pairs as text, without newlines.

  They are as in the files, if the data are read from files. If not, they are
  decoded from ids.

  Raises:
    ValueError: the documents are not sources and targets.
  """
  documents = data.documents(split)
  if isinstance(data, Pairs):
    pairs = [pair[1:] for pair in data.source.pairs(split)]
    return [source for source, _ in pairs], [target for _, target in pairs]
  if documents.first_lengths is None or documents.labels is not None:
    raise ValueError(
      f'The split {split} has no sources and targets. Give a run of a task of '
      'pairs.'
    )
  sources, targets = [], []
  starts = documents.starts
  for i, first in enumerate(documents.first_lengths):
    ids = documents.tokens[starts[i] : starts[i + 1]]
    for lines, part in (sources, ids[:first]), (targets, ids[first:]):
      lines.append(vocabulary.decode(part).strip())
  return sources, targets
