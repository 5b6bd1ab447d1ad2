"""The command line: `meliad-rec COMMAND`, help, exit codes.

A command is a module with `main(argv)` and `define_flags()`, which is called
once. The first line of its docstring is its summary.
"""

import ast
from collections.abc import Callable
import errno
import functools
import importlib
import importlib.util
import os
from pathlib import Path
import signal
import sys

from absl import app
from absl import flags

from meliad_rec.config import config
from meliad_rec.config.files import nearest

# Names of commands, and their modules inside the package.
COMMANDS = {
  'train': 'main',
  'evaluate': 'commands.evaluate',
  'depth': 'commands.depth',
  'generate': 'commands.generate',
  'runs': 'commands.runs',
  'settings': 'commands.settings',
  'tokenize': 'commands.tokenize',
  'train_vocab': 'commands.train_vocab',
  'import_meliad': 'commands.import_meliad',
  'plan': 'commands.plan',
  'bench': 'commands.bench',
}

# Write errors without a file name: the disk is full, or the quota used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_main(
  main: Callable[[list[str]], int | None],
  define_flags: Callable[[], None],
  argv: list[str] | None = None,
) -> None:
  """Runs a command and exits with one of these codes.

  0, or what the command returns.
  2: a user's mistake (a ValueError raised by this package, an unknown flag, a
    file that cannot be read or written), as one line on stderr. An error with
    its own `exit_code` sets 1 if the same command may succeed later.
  1, with a traceback: a bug.
  130: Control-C. 143: SIGTERM. Both clean up first.
  141: the reader of stdout has left.

  Characters that the encoding of stdout lacks are written as `?`.

  Args:
    main: takes the arguments that are not flags.
    define_flags: defines the flags of the command.
    argv: the program's name and its arguments; None for those of the process.
  """
  define_flags()
  signal.signal(signal.SIGTERM, _terminate)
  sys.stdout.reconfigure(errors='replace')

  def parse(args):
    if {'--help', '-h'} & set(args[1:]):
      print(_usage(args[0], main))
      sys.exit(0)
    try:
      return flags.FLAGS(args)
    except flags.UnrecognizedFlagError as error:
      near = nearest(error.flagname, flags.FLAGS)
      sys.exit(_fail(f'There is no flag --{error.flagname}{near}.'))
    except flags.Error as error:
      sys.exit(_fail(str(error)))

  app.run(functools.partial(guarded, main), argv=argv, flags_parser=parse)


def guarded(
  main: Callable[[list[str]], int | None], rest: list[str]
) -> int | None:
  """Returns a command's exit code (None: 0); prints a mistake in one line."""
  try:
    code = main(rest)
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    # The reader of the output, such as `head`, has left; write no more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  except (ValueError, OSError) as error:
    message = _file_sentence(error) or config.sentence(error)
    if message is None:
      raise
    return _fail(message, getattr(error, 'exit_code', 2))


def summary(command: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  return _docstring(f'meliad_rec.{COMMANDS[command]}').splitlines()[0]


def main() -> None:
  """Runs the console command: `meliad-rec COMMAND ARGUMENTS`."""
  program, *arguments = sys.argv
  if not arguments or arguments[0] in ('--help', '-h', 'help'):
    print('Usage: meliad-rec COMMAND [--help] [FLAGS]\n')
    for command in COMMANDS:
      print(f'  {command:<14} {summary(command)}')
    sys.exit(0)
  command, *rest = arguments
  if command not in COMMANDS:
    sys.exit(
      _fail(
        f'There is no command {command!r}{nearest(command, COMMANDS)}; the'
        f' commands are {", ".join(COMMANDS)}.'
      )
    )
  module = importlib.import_module(f'meliad_rec.{COMMANDS[command]}')
  started = Path(program).name
  if started == '__main__.py':
    started = f'python -m {__package__}'
  run_main(module.main, module.define_flags, [f'{started} {command}', *rest])


def _file_sentence(error) -> str | None:
  """Returns the message for an error of the file system, or None."""
  match error:
    case OSError(filename=str() | bytes() as name):
      name = os.fsdecode(name)
    case OSError(errno=number) if number in _FULL:
      name = 'A file'
    case _:
      return None
  return (
    f'{name} cannot be read or written ({error.strerror}); fix that, or give '
    'another path.'
  )


def _terminate(number, frame):
  del number, frame
  os.write(sys.__stderr__.fileno(), b'terminated\n')
  sys.exit(143)


def _fail(text, code=2) -> int:
  print(f'error: {text}', file=sys.stderr)
  return code


def _docstring(module) -> str:
  source = Path(importlib.util.find_spec(module).origin)
  return ast.get_docstring(ast.parse(source.read_text(encoding='utf-8')))


def _usage(program, main) -> str:
  """Returns the docstring of the command and its flags."""
  module = sys.modules[main.__module__]
  lines = [f'Usage: {program} [FLAGS]\n', module.__doc__.strip(), '\nFlags:']
  for name, defined in flags.FLAGS.flags_by_module_dict().items():
    # absl names the started module by its path.
    if name in (module.__name__, sys.argv[0]) or name.startswith(__package__):
      lines += [
        f'  --{flag.name}: {" ".join(flag.help.split())}'
        f' (default {flag.default!r})'
        for flag in defined
      ]
  return '\n'.join(lines)
