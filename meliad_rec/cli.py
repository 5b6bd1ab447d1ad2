"""The command line: its flags, how a command ends, and `meliad-rec COMMAND`.

An entry point is a module with `main(argv)`, its docstring's first line saying
what it does, and `define_flags()` for its flags, called once when it runs.
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

COMMANDS = {
  'train': 'main',
  **{
    name: f'commands.{name}'
    for name in (
      'evaluate',
      'depth',
      'generate',
      'runs',
      'tokenize',
      'train_vocab',
      'import_meliad',
      'plan',
      'bench',
    )
  },
}


# Errors of writing that name no file: the disk is full, or the quota used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_main(
  main: Callable[[list[str]], int | None],
  define_flags: Callable[[], None],
  argv: list[str] | None = None,
) -> None:
  """Runs a command and exits: 0 or what it returns, 1, 2, 130, 141, 143.

  A mistake of the person at the keyboard (a ValueError raised by this package,
  an unknown flag, a file that cannot be read or written) is one line on stderr,
  and 2, or the error's own `exit_code`, 1 where the same command may do better
  again; a defect of the program keeps its traceback; 130 follows Control-C, 143
  SIGTERM, and both clean up first; 141 a reader of stdout that has left. What
  the encoding of stdout lacks is written as `?`.

  Args:
    main: takes what is left of argv when flags are taken out.
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
  """The exit code of a command; None: 0. Mistakes are told in one line."""
  try:
    found = main(rest)
    sys.stdout.flush()
    return found
  except BrokenPipeError:
    # Who read the output has left, as `head` does: nothing more is written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  except (ValueError, TypeError, OSError) as error:
    told = _file_sentence(error) or config.sentence(error)
    if told is None:
      raise
    return _fail(told, getattr(error, 'exit_code', 2))


def summary(command: str) -> str:
  """The first line of a command's docstring, read without importing it."""
  return _docstring(f'meliad_rec.{COMMANDS[command]}').splitlines()[0]


def main() -> None:
  """The console command: `meliad-rec COMMAND ARGUMENTS`."""
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
  """What to tell of a file that the system refuses; None: it refuses none."""
  match error:
    case OSError(filename=str() | bytes() as name):
      name = os.fsdecode(name)
    case OSError(errno=number) if number in _FULL:
      name = 'A file'
    case _:
      return None
  return (
    f'{name} cannot be read or written ({error.strerror}); give another path, '
    'or put that right.'
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
  """What the command does, and the flags of this package's modules."""
  module = sys.modules[main.__module__]
  lines = [f'Usage: {program} [FLAGS]\n', module.__doc__.strip(), '\nFlags:']
  for name, defined in flags.FLAGS.flags_by_module_dict().items():
    # absl calls the module that was started by the path it was started with.
    if name in (module.__name__, sys.argv[0]) or name.startswith(__package__):
      lines += [
        f'  --{flag.name}: {" ".join(flag.help.split())}'
        f' (default {flag.default!r})'
        for flag in defined
      ]
  return '\n'.join(lines)
