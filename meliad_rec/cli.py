"""The command line: `meliad-rec COMMAND`, help, exit codes.

A command is a module with two functions: `define_flags()`, which is called
once, and `main(argv)`. The first line of the module's docstring is the summary
of the command.
"""

import ast
from collections.abc import Callable
from collections.abc import Sequence
import errno
import importlib
import importlib.util
import json
import os
from pathlib import Path
import re
import shlex
import signal
import sys

from absl import app
from absl import flags

import meliad_rec
from meliad_rec.config import config
from meliad_rec.config.files import nearest
from meliad_rec.distributed import interrupts
from meliad_rec.planning import environment
from meliad_rec.report import console

# Names of commands, and their modules inside the package.
COMMANDS = {
  'train': 'main',
  'evaluate': 'commands.evaluate',
  'depth': 'commands.depth',
  'generate': 'commands.generate',
  'play': 'commands.play',
  'translate': 'commands.translate',
  'score': 'commands.score',
  'explore': 'commands.explore',
  'export': 'commands.export',
  'runs': 'commands.runs',
  'reproduce': 'commands.reproduce',
  'settings': 'commands.settings',
  'tokenize': 'commands.tokenize',
  'train_vocab': 'commands.train_vocab',
  'import_meliad': 'commands.import_meliad',
  'plan': 'commands.plan',
  'bench': 'commands.bench',
}

_COMPUTING = (
  *('train', 'evaluate', 'depth', 'generate', 'play', 'translate', 'explore'),
  'bench',
)
_REPEAT = '; repeat this option to specify a list of values'  # Added by absl.
_TEXTS = '--prompt', '--text', '--until'  # Flags whose values are no paths.
# Write errors without a file name: the disk is full or defective, the quota
# used up, the file larger than allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_main(
  main: Callable[[list[str]], int | None],
  define_flags: Callable[[], None],
  argv: list[str] | None = None,
) -> None:
  """Runs a command and exits with one of these codes.

  0: success, unless the command returns another code.
  1: a bug, with a traceback; or, with one line on stderr, a failure after which
    the same command may succeed later.
  2: a user's mistake (a ValueError raised by this package, an unknown flag, a
    file that cannot be read or written, sizes for which the memory is not
    enough), with one line on stderr.
  130: Ctrl-C. 143: SIGTERM. The command cleans up first. A run that is still
    compiling is ended by the signal at once, without cleaning up.
  141: the program that reads stdout, such as `head`, has ended.

  If an error has an attribute `exit_code`, this is the code instead of 2.
  Characters that the encoding of stdout lacks are written as `?`.

  Args:
    main: the command. It takes the program's name and the arguments that are
      not flags, and returns an exit code; None means 0.
    define_flags: defines the flags of the command.
    argv: the program's name and its arguments. None: sys.argv.
  """
  interrupts.end_at_once()
  define_flags()
  signal.signal(signal.SIGTERM, _terminate)
  sys.stdout.reconfigure(errors='replace')
  console.use_plain_logs()

  def parse(args):
    if {'--help', '-h'} & set(args[1:]):
      sys.exit(guarded(lambda _: print(_usage(args[0], main)), []))
    try:
      rest = flags.FLAGS([*map(_expand_home, args)])
    except flags.UnrecognizedFlagError as error:
      sys.exit(_fail(_unknown_flag(error, _arguments(main), args)))
    except flags.Error as error:
      sys.exit(_fail(_wrong_flag(str(error))))
    if message := _empty_flag():
      sys.exit(_fail(message))
    return rest

  stopped = []

  def watched(rest):
    try:
      return main(rest)
    except (KeyboardInterrupt, SystemExit):
      stopped.append(True)
      raise

  def run(rest):
    with interrupts.raising():
      try:
        code = guarded(watched, rest)
      except SystemExit as stop:
        code = stop.code
    if stopped and isinstance(code, int):
      # XLA may crash when Python ends while a computation is interrupted.
      interrupts.leave(code)
    return code

  app.run(run, argv=argv, flags_parser=parse)


def guarded(
  main: Callable[[list[str]], int | None], rest: list[str]
) -> int | None:
  """Runs a command and returns its exit code; see run_main.

  A user's mistake is printed as one line on stderr. A bug raises its error.

  Args:
    main: as in run_main.
    rest: the argument of `main`.
  """
  environment.silence_libtpu()
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
  except (MemoryError, RuntimeError) as error:
    what = str(error).partition('\n')[0].rstrip('.')
    if what.startswith('Unable to initialize backend'):
      platforms = os.environ.get('JAX_PLATFORMS', '')
      return _fail(f'{what}. JAX_PLATFORMS is {platforms!r}. Change it.')
    # JAX raises a RuntimeError for the memory of a device.
    exhausted = what.startswith('RESOURCE_EXHAUSTED')
    if not (exhausted or isinstance(error, MemoryError)):
      raise
    return _fail(
      f'There is not enough memory ({what or "an allocation failed"}). Reduce '
      'the batch, the segment or the model.'
    )
  except (ValueError, OSError) as error:
    message = _file_sentence(error) or config.sentence(error)
    if message is None:
      raise
    code = getattr(error, 'exit_code', 2)
    # An error is `logged` if it was printed already, as by a background save.
    return code if getattr(error, 'logged', False) else _fail(message, code)


def summary(command: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  return _docstring(f'meliad_rec.{COMMANDS[command]}').splitlines()[0]


def main() -> None:
  """Runs the console command: `meliad-rec COMMAND ARGUMENTS`."""
  interrupts.end_at_once()
  program, *arguments = sys.argv
  if arguments[:1] == ['--version']:
    print(f'meliad_rec {meliad_rec.__version__}')
    sys.exit(0)
  # Like `python -m`: the user's modules in the current folder are found too.
  if os.getcwd() not in map(os.path.abspath, sys.path):
    sys.path.append(os.getcwd())
  if arguments[:1] == ['help']:
    arguments = [*arguments[1:], '--help']
  if not arguments or arguments[0] in ('--help', '-h'):
    sys.exit(guarded(lambda _: print(_commands()), []))
  command, *rest = arguments
  if command not in COMMANDS:
    sys.exit(
      _fail(
        f'There is no command {command!r}{nearest(command, COMMANDS)}. The'
        f' commands are {", ".join(COMMANDS)}.'
      )
    )
  if command in _COMPUTING:
    _use_huge_pages()
  module = importlib.import_module(f'meliad_rec.{COMMANDS[command]}')
  started = Path(program).name
  if started == '__main__.py':
    started = f'python -m {__package__}'
  run_main(module.main, module.define_flags, [f'{started} {command}', *rest])


def started() -> str:
  """Returns the words that start this program, as this process was started."""
  program = sys.argv[0]
  if program.endswith('.py'):
    return f'{shlex.quote(sys.executable)} -m {__package__}'
  return shlex.quote(program)


def _use_huge_pages() -> None:
  """Starts the program again, with huge pages for large arrays, on Linux.

  XLA for CPUs returns its temporary memory to the system after each step. With
  pages of 4 KiB, getting it back takes 10 % of the step's time or more. glibc
  reads GLIBC_TUNABLES only when a program starts. If this environment variable
  is set already, nothing is done.
  """
  if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ:
    os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _expand_home(argument: str) -> str:
  """Replaces ~ in --FLAG=~/PATH with the home folder.

  Shells replace ~ only at the beginning of a word.
  """
  flag, equals, value = argument.partition('=')
  is_path = flag.startswith('--') and flag not in _TEXTS
  if not is_path or not value.startswith('~/'):
    return argument
  return flag + equals + os.path.expanduser(value)


def _file_sentence(error) -> str | None:
  """Returns the message for an error of the file system; None for others."""
  match error:
    case OSError(filename=str() | bytes() as name):
      name = os.fsdecode(name)
    case OSError(errno=number) if number in _FULL:
      name = 'A file'
    case _:
      return None
  return (
    f'{name} cannot be read or written ({error.strerror}). Fix that, or give '
    'another path.'
  )


def _unknown_flag(
  error: flags.UnrecognizedFlagError, arguments: str, words: Sequence[str] = ()
) -> str:
  """Returns the message for a flag that does not exist.

  If it has the name of a setting, the message has the --gin_param to type.

  Args:
    error: the error of absl.
    arguments: arguments of the command besides flags, as its help shows them.
    words: the command line.
  """
  from meliad_rec.commands import settings

  near = nearest(error.flagname, flags.FLAGS)
  unknown = f'There is no flag --{error.flagname}{near}. See --help.'
  # Only one of the benchmarks takes settings.
  if arguments.startswith('NAME') and 'experiments' not in words:
    return unknown
  name = error.flagname.upper().replace('-', '_')
  if 'gin_param' in flags.FLAGS and name in settings.meanings():
    value = error.flagvalue.partition('=')[2]
    try:
      config.settings(f'{name} = {value or 0}')
    except config.ConfigError:  # A string needs quotes.
      value = json.dumps(value, ensure_ascii=False)
    binding = shlex.quote(f'{name} = {value or "VALUE"}')
    return (
      f'There is no flag --{error.flagname}, but {name} is a setting. Write'
      f' --gin_param={binding}.'
    )
  if error.flagname == 'workdir' and arguments.startswith('RUN'):
    return (
      'There is no flag --workdir here. Give the folder of the run as the '
      'first argument, without a flag.'
    )
  return unknown


def _wrong_flag(text: str) -> str:
  """Returns absl's message for a wrong or missing value, as one sentence."""
  if missing := re.findall(r'flag (--\w+)=None: ', text):
    return f'{" and ".join(missing)} must be given. See --help.'
  if found := re.match(r"flag (--(\w+)=.*): \('Non-boolean", text):
    return (
      f'{found[1]} is not true or false. Give --{found[2]} or leave it out.'
    )
  if found := re.match(r'flag (--.*): (invalid literal|could not conv)', text):
    kind = 'a whole number' if found[2][0] == 'i' else 'a number'
    return f'{found[1]} is not {kind}. See --help.'
  return f'{text.removeprefix("flag ").rstrip(".")}. See --help.'


def _empty_flag() -> str | None:
  """Returns the message for a path, name or list without text, or None.

  A command would read such a flag as one that was not given. Shells write it
  for a variable that is not set: --store=$STORE.
  """
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    empty = flag.present and flag.value in ('', [], [''])
    if empty and f'--{name}' not in _TEXTS:
      return f'--{name} is empty. Give it a value, or leave it out.'
  return None


def _terminate(number, frame):
  del number, frame
  os.write(sys.__stderr__.fileno(), b'terminated\n')
  sys.exit(143)


def _fail(text, code=2) -> int:
  print(f'error: {_addressed(text)}', file=sys.stderr)
  return code


def _addressed(text: str) -> str:
  """Shortens phrases such as '--path (in gin: FOLDER)' in a message.

  For a command with --gin_param, the setting FOLDER remains. For a command with
  --source, the flag --path remains. For others, the phrase is unchanged.
  """
  kept = r'\g<0>'
  if 'gin_param' in flags.FLAGS:
    kept = r'\2'
  elif 'source' in flags.FLAGS:
    kept = r'\1'
  return re.sub(r'(--\S+) \(in gin: ([\w.]+)\)', kept, text)


def _commands() -> str:
  """Returns the help without a command: a list of all."""
  lines = [f'  {command:<14} {summary(command)}' for command in COMMANDS]
  usage = 'Usage: meliad-rec COMMAND [--help] [FLAGS]'
  return '\n'.join([usage, '       meliad-rec --version\n', *lines])


def _docstring(module) -> str:
  source = Path(importlib.util.find_spec(module).origin)
  return ast.get_docstring(ast.parse(source.read_text(encoding='utf-8')))


def _arguments(main) -> str:
  return getattr(sys.modules[main.__module__], 'ARGUMENTS', '')


def _usage(program, main) -> str:
  """Returns the help of a command: its docstring and a list of its flags."""
  module = sys.modules[main.__module__]
  if program.endswith('.py') and module.__spec__:
    program = f'python -m {module.__spec__.name}'
  words = ['Usage:', program, _arguments(main), '[FLAGS]']
  usage = ' '.join(filter(None, words))
  lines = []
  for name, defined in flags.FLAGS.flags_by_module_dict().items():
    # absl names the started module by its path.
    if name in (module.__name__, sys.argv[0]) or name.startswith(__package__):
      lines += map(_flag_line, defined)
  lines = lines and ['\nFlags:', *lines]
  return '\n'.join([f'{usage}\n', module.__doc__.strip(), *lines])


def _flag_line(flag: flags.Flag) -> str:
  words = ' '.join(flag.help.split()).removesuffix(_REPEAT)
  default = flag.default
  shown = ','.join(default) if isinstance(default, list) else repr(default)
  default = f' (default {shown})' if default else ''
  return f'  --{flag.name}: {words}{default}'
