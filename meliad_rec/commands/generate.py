r"""Writes text with a trained model, to the terminal as it comes.

  python -m meliad_rec generate --workdir=RUN --prompt='def main(' --tokens=300
  python -m meliad_rec generate --workdir=RUN --prompt_file=BOOK --tokens=0 \
    --save_state=S.npz
  python -m meliad_rec generate --workdir=RUN --load_state=S.npz --prompt='Who'

A prompt may be a whole book: a token costs the same however much was read.
"""

import os
import sys
import time

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.config import config_flags
from meliad_rec.generation.decoder import Reading
from meliad_rec.generation.sampling import Sampler
from meliad_rec.report.console import printable
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage import array_file


def define_flags() -> None:
  run_flags.define_flags()
  flags.DEFINE_string('prompt', None, 'Text to go on from; - reads it.')
  flags.DEFINE_string('prompt_file', None, 'File of the prompt; - for stdin.')
  flags.DEFINE_integer('tokens', 200, 'Tokens to write.', lower_bound=0)
  flags.DEFINE_float('temperature', 0.8, 'Logits are divided by it.')
  flags.DEFINE_integer(
    'top_k', None, 'Draw among so many likeliest tokens.', lower_bound=1
  )
  flags.DEFINE_float(
    'top_p', 1.0, 'Draw among the likeliest that reach this probability.'
  )
  flags.DEFINE_bool('greedy', False, 'Take the likeliest token each time.')
  flags.DEFINE_integer('seed', 0, 'The same seed writes the same text.')
  flags.DEFINE_integer('samples', 1, 'Texts to write.', lower_bound=1)
  flags.DEFINE_string(
    'save_state', None, 'File for where the model stands at the end, an .npz.'
  )
  flags.DEFINE_string('load_state', None, 'Go on from a file of --save_state.')
  flags.DEFINE_bool('show_speed', False, 'Tokens per second, on stderr.')


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is no flag; write --flag=value.')
  args = flags.FLAGS
  if args.save_state and args.samples > 1:
    raise ValueError(
      f'--save_state keeps one text, and --samples is {args.samples}; leave '
      'out one of the two.'
    )
  if args.save_state:
    array_file.check_place(args.save_state)
  if args.greedy:
    names = 'temperature', 'top_k', 'top_p'
    config_flags.refuse(
      names, 'is of drawing, and --greedy takes the likeliest'
    )
  temperature = 0.0 if args.greedy else args.temperature
  sampler = Sampler(temperature, args.top_k, args.top_p)
  prompt = read_prompt(args)
  run = run_flags.open_run()
  reading = run.load_reading(args.load_state) if args.load_state else None
  began = time.perf_counter()
  reading = run.read(prompt, reading)
  seen = int(reading.count)
  on_progress = [_speed('read', len(run.vocabulary.encode(prompt)), began)]
  reading, speed = write(run, reading.repeat(args.samples), sampler, args)
  if args.show_speed:
    print(*on_progress, f'{speed}, behind {seen:,}', sep='\n', file=sys.stderr)
  if args.save_state:
    run.save_reading(args.save_state, reading)


def read_prompt(args) -> str:
  """The text to go on from; empty if no flag gives any.

  Raises:
    ValueError: both flags are there, or the text is not UTF-8.
  """
  if args.prompt is not None and args.prompt_file is not None:
    raise ValueError('Give --prompt or --prompt_file, not both.')
  if '-' in (args.prompt, args.prompt_file):
    try:
      return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
      raise ValueError(
        f'The prompt on stdin is not UTF-8 (byte {error.start}); convert it.'
      ) from None
  if args.prompt_file is not None:
    return run_flags.read_text(args.prompt_file)
  try:
    (args.prompt or '').encode()
  except UnicodeEncodeError:
    raise ValueError(
      'The text of --prompt is not UTF-8; put it in a file and give '
      '--prompt_file.'
    ) from None
  return args.prompt or ''


def write(
  run: TrainedRun, reading: Reading, sampler: Sampler, args
) -> tuple[Reading, str]:
  """Prints each text; the first as it is written, all written side by side.

  Returns:
    Where the model stands behind what was written, and how fast it wrote. It
    stops early where nobody reads on, as behind `| head`.
  """
  texts, rate = [''] * args.samples, 'stopped writing'
  done, began, end = 0, time.perf_counter(), reading
  try:
    if args.samples > 1:
      _print('--- sample 1\n')
    for step in run.writer.write(reading, args.tokens, sampler, args.seed):
      end, pieces = step
      _print(pieces[0])
      texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
      if not done:  # The first piece waited for the compiler.
        done, began = run.writer.decoder.chunk, time.perf_counter()
    rate = _speed('wrote', max(args.tokens - done, 0) * args.samples, began)
    if args.tokens:
      _print('\n')
    for number, text in enumerate(texts[1:], 2):
      _print(f'--- sample {number}\n{text}\n')
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
