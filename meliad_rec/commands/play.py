r"""Lets a trained agent play, and shows an episode as an animation.

  meliad-rec play runs/corridor
  meliad-rec play runs/maze --step=best --episodes=500 --out=episode.gif

It prints the mean return without discount, the share of episodes with a return
above 0, and the steps of an episode. --out=FILE.gif is an animation of one more
episode, and --out=FILE.png shows all its states, row by row.
"""

from pathlib import Path

from absl import flags
import numpy as np

from meliad_rec.commands import run_flags
from meliad_rec.distributed import compilation_cache
from meliad_rec.runs.agent_run import load_agent
from meliad_rec.storage import output_file

# Arguments that the help shows, besides flags.
ARGUMENTS = 'RUN'

_PIXELS = 240  # Longest side of a state in an animation, at least.
_COLUMNS = 10  # States in a row of a picture.
_MILLISECONDS = 150  # Of a state in an animation.


def define_flags() -> None:
  run_flags.define_step_flags()
  flags.DEFINE_integer('episodes', 100, 'Number of episodes.', lower_bound=1)
  flags.DEFINE_integer(
    'seed', 0, 'Seed of the episodes.', lower_bound=0, upper_bound=2**32 - 1
  )
  flags.DEFINE_integer('agent', 0, 'Index of the agent, from 0.', lower_bound=0)
  flags.DEFINE_bool(
    'greedy', False, 'Take the likeliest action instead of drawing one.'
  )
  flags.DEFINE_string('out', None, 'Animation .gif or picture .png to write.')


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if len(argv) != 2:
    raise ValueError(f'Give the folder of one run, got {len(argv) - 1}.')
  if args.out:
    output_file.check(args.out, '.gif', '.png')
  step = run_flags.step()
  compilation_cache.enable()
  run = load_agent(argv[1], step, args.trusted, args.agent)
  found = run.play(args.episodes, seed=args.seed, greedy=args.greedy)
  returns = found['mean_return']
  error = ''
  if len(returns) > 1:
    spread = returns.std(ddof=1) / np.sqrt(len(returns))
    error = f' (standard error {spread:.3f})'
  print(
    f'step {run.step} in {run.env}, {args.episodes} episodes\n'
    f'return   {returns.mean():.3f}{error}\n'
    f'success  {found["success"].mean():.1%}\n'
    f'steps    {found["episode_steps"].mean():.1f}'
  )
  if args.out:
    pictures = run.pictures(seed=args.seed, greedy=args.greedy)
    write(args.out, pictures)
    print(f'wrote {args.out}: an episode of {len(pictures)} steps')


def write(path: str, pictures: list[np.ndarray]) -> None:
  """Writes an episode as an animation or as one picture.

  Args:
    path: name of the file, which ends in .gif or .png. It is written whole or
      not at all.
    pictures: the states, RGB as uint8 [rows, columns, 3].
  """
  from PIL import Image  # Comes with matplotlib.

  height, width, _ = pictures[0].shape
  if Path(path).suffix == '.gif':
    times = max(1, _PIXELS // max(height, width))
    size = width * times, height * times
    first, *others = (
      Image.fromarray(each).resize(size, Image.Resampling.NEAREST)
      for each in pictures
    )
    with output_file.replacing(path) as new:
      first.save(
        new,
        save_all=True,
        append_images=others,
        duration=_MILLISECONDS,
        loop=0,
      )
    return
  rows = -(-len(pictures) // _COLUMNS)
  columns = min(_COLUMNS, len(pictures))
  times = max(1, _PIXELS // (2 * max(height, width)))
  shape = rows * (height * times + 4), columns * (width * times + 4), 3
  whole = np.full(shape, 255, np.uint8)
  for i, each in enumerate(pictures):
    row, column = divmod(i, _COLUMNS)
    large = each.repeat(times, 0).repeat(times, 1)
    top, left = row * (len(large) + 4), column * (large.shape[1] + 4)
    whole[top : top + len(large), left : left + large.shape[1]] = large
  with output_file.replacing(path) as new:
    Image.fromarray(whole).save(new)
