r"""Generates text with a trained model, and prints it as it is generated.

  meliad-rec generate --workdir=RUN --prompt='def main(' --tokens=300
  meliad-rec generate --workdir=RUN --prompt_file=BOOK --tokens=0 \
    --save_state=S.npz
  meliad-rec generate --workdir=RUN --load_state=S.npz --prompt='Who'
  meliad-rec generate --workdir=RUN --prompt='It was' --beams=5 --until=.

A prompt may be a whole book: the cost of a generated token does not grow with
the length of the prompt.
"""

import os
import signal
import sys
import time

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.config import config_flags
from meliad_rec.data.split_files import read_text
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.beam import PENALTIES
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import check_until
from meliad_rec.report.console import printable
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import output_file

# Arguments that the help shows, besides flags.
ARGUMENTS = run_flags.ARGUMENTS


def define_flags() -> None:
  run_flags.define_flags()
  flags.DEFINE_string('prompt', None, 'Text to continue; - for stdin.')
  flags.DEFINE_string(
    'prompt_file', None, 'File that holds the prompt; - for stdin.'
  )
  flags.DEFINE_integer(
    'tokens', 200, 'Number of tokens to generate.', lower_bound=0
  )
  flags.DEFINE_float('temperature', 0.8, 'Temperature of sampling.')
  flags.DEFINE_integer(
    'top_k', None, 'Sample from the TOP_K most likely tokens.', lower_bound=1
  )
  flags.DEFINE_float(
    'top_p',
    1.0,
    'Sample from the most likely tokens whose probabilities reach this sum.',
  )
  flags.DEFINE_bool('greedy', False, 'Take the most likely token each time.')
  flags.DEFINE_integer(
    'seed', 0, 'Seed of sampling.', lower_bound=0, upper_bound=2**32 - 1
  )
  flags.DEFINE_integer(
    'samples', 1, 'Number of texts to generate.', lower_bound=1
  )
  flags.DEFINE_integer(
    'beams',
    None,
    'Search for the most likely texts with this many beams, instead of '
    'sampling.',
    lower_bound=1,
  )
  flags.DEFINE_float(
    'length_penalty',
    1.0,
    'With --beams: exponent of the penalty on short texts; 0 for none.',
    lower_bound=0,
  )
  flags.DEFINE_enum(
    'length_norm',
    'power',
    list(PENALTIES),
    'With --beams: log-probabilities are divided by tokens (power) or '
    '(5 + tokens) / 6 (gnmt), to the power of --length_penalty.',
  )
  flags.DEFINE_integer(
    'no_repeat',
    None,
    'With --beams: no sequence of this many tokens occurs twice in a text.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    'until',
    None,
    'Text that ends a sample, such as a full stop; with --beams, one token.',
  )
  flags.DEFINE_string(
    'save_state',
    None,
    'File to write the final state of the model to, an .npz.',
  )
  flags.DEFINE_string(
    'load_state', None, 'File written by --save_state, to continue from.'
  )
  flags.DEFINE_bool('show_speed', False, 'Print tokens per second to stderr.')


def main(argv: list[str]) -> int | None:
  run_flags.take_arguments(argv)
  args = flags.FLAGS
  if args.save_state and args.samples > 1:
    raise ValueError(
      f'--save_state writes the state of one text, but --samples is '
      f'{args.samples}. Remove one of the two.'
    )
  if args.save_state:
    config_flags.refuse(['until'], 'cannot be combined with --save_state')
    output_file.check(args.save_state, '.npz')
  if args.greedy:
    names = 'temperature', 'top_k', 'top_p', 'seed'
    config_flags.refuse(names, 'cannot be combined with --greedy')
  beam = given_beam(args)
  temperature = 0.0 if args.greedy else args.temperature
  sampler = Sampler(temperature, args.top_k, args.top_p)
  check_until(args.until)
  prompt = read_prompt(args)
  run = run_flags.open_run(args.workdir)
  if beam is not None:
    run.text_generator.end_token(args.until)  # Reading may take long.
  reading = run.load_state(args.load_state) if args.load_state else None
  before = 0 if reading is None else int(reading.count)
  began = time.perf_counter()
  reading = run.read(prompt, reading)
  seen = int(reading.count)  # Waits for the devices.
  read = _speed('read', seen - before, began)
  if beam is not None:
    texts = run.text_generator.search(reading, args.tokens, beam, args.until)
    print_texts(texts[: args.samples])
    if len(texts) < args.samples:
      print(
        f'The search found {len(texts)} of {args.samples} texts before it was '
        'certain of the best.',
        file=sys.stderr,
      )
    return None
  reading, speed = write(run, reading.repeat(args.samples), sampler, args)
  if args.show_speed:
    wrote = f'{speed or "stopped writing"}, after {seen:,} tokens'
    print(read, wrote, sep='\n', file=sys.stderr)
  if args.save_state:
    run.save_state(args.save_state, reading)
  return 128 + signal.SIGPIPE if speed is None else None


def given_beam(args) -> BeamSearch | None:
  """Returns the settings of the search; None without --beams.

  Raises:
    ValueError: flags of a search and of sampling are mixed, or the search finds
      fewer texts than --samples.
  """
  if args.beams is None:
    names = 'length_penalty', 'length_norm', 'no_repeat'
    config_flags.refuse(names, 'needs --beams')
    return None
  names = 'greedy', 'temperature', 'top_k', 'top_p', 'seed'
  names += 'save_state', 'show_speed'
  config_flags.refuse(names, 'cannot be combined with --beams')
  if args.samples > args.beams or not args.tokens:
    raise ValueError(
      f'--beams={args.beams} finds at most that many texts of at least one '
      f'token, but --samples is {args.samples} and --tokens is {args.tokens}. '
      'Set --beams to at least --samples, and --tokens to at least 1.'
    )
  return BeamSearch(
    args.beams, args.length_penalty, args.length_norm, args.no_repeat
  )


def print_texts(texts: list[str]) -> None:
  """Prints whole texts, under headings if there are several."""
  for number, text in enumerate(texts, 1):
    _print(f'--- sample {number}\n{text}\n' if texts[1:] else f'{text}\n')


def read_prompt(args) -> str:
  """Returns the text of --prompt or --prompt_file; '' if neither is given.

  Raises:
    ValueError: both flags are given, the file cannot be read, or the text is
      not UTF-8.
  """
  if args.prompt is not None and args.prompt_file is not None:
    raise ValueError('Give --prompt or --prompt_file, not both.')
  if '-' in (args.prompt, args.prompt_file):
    return read_text('-')
  if args.prompt_file is not None:
    return read_text(args.prompt_file)
  try:
    (args.prompt or '').encode()
  except UnicodeEncodeError:
    raise ValueError(
      'The text of --prompt is not UTF-8. Put it in a UTF-8 file and '
      'give --prompt_file.'
    ) from None
  return args.prompt or ''


def write(
  run: TrainedRun, reading: DecoderState, sampler: Sampler, args
) -> tuple[DecoderState, str | None]:
  """Generates --samples texts in parallel, and prints them.

  The first text is printed as it is generated, and the others at the end. Stops
  early if the program that reads stdout, such as `head`, ends.

  Args:
    run: the run.
    reading: state of the model after the prompt, with one row for each text.
    sampler: draws the tokens.
    args: the flags.

  Returns:
    The final state of the model, and the speed of generation as text, or None
    if the program that reads stdout has ended.
  """
  texts = [''] * args.samples
  done, began, end = 0, time.perf_counter(), reading
  try:
    if args.samples > 1:
      _print('--- sample 1\n')
    for step in run.text_generator.write(
      reading, args.tokens, sampler, args.seed, args.until
    ):
      end, pieces = step
      _print(pieces[0])
      texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
      if not done:  # The first piece waited for the compiler.
        done, began = run.text_generator.decoder.chunk, time.perf_counter()
    written = int(end.count) - int(reading.count)
    timed = max(written - done, 0) * args.samples
    rate = f'wrote {written * args.samples:,} tokens'
    if timed:
      rate = _speed('wrote', timed, began)
      rate += f' (without the first {done * args.samples:,}, before which the'
      rate += ' program was compiled)'
    if args.tokens:
      _print('\n')
    for number, text in enumerate(texts[1:], 2):
      _print(f'--- sample {number}\n{text}\n')
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return end, None
  return end, rate


def _print(text: str) -> None:
  if sys.stdout.isatty():
    text = printable(text)
  print(text, end='', flush=True)


def _speed(did: str, tokens: int, began: float) -> str:
  seconds = time.perf_counter() - began
  return (
    f'{did} {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f}/s'
  )
