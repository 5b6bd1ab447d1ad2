"""The command line as a person sees it: some tests start a process."""

import ast
import errno
import os
from pathlib import Path
import re
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from meliad_rec import cli
from meliad_rec.commands import play
from meliad_rec.commands import score
from meliad_rec.config import config
from meliad_rec.data.folder import Folder
from tests.libtpu import needs_libtpu

ROOT = Path(cli.__file__).parents[1]
COMMAND = '''
"""Counts.

Counts up to a number.
"""
import os, signal
from absl import flags
from meliad_rec import cli
from meliad_rec.config import config_flags

def define_flags():
  config_flags.define_flags()
  flags.DEFINE_integer('upto', 3, 'the last number')

def main(argv):
  match flags.FLAGS.upto:
    case 2:
      int('no number')
    case 4:
      return 7
    case 6:
      try:
        os.kill(os.getpid(), signal.SIGTERM)
      finally:
        print('cleaned up')
  print(flags.FLAGS.upto, flags.FLAGS.gin_param, argv[1:])

if __name__ == '__main__':
  cli.run_main(main, define_flags)
'''


def run(*command):
  """Returns exit code, stdout and stderr of Python with these arguments."""
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  done = subprocess.run(
    [sys.executable, *command],
    env={**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=120,
  )
  return done.returncode, done.stdout, done.stderr


@pytest.fixture
def count(tmp_path):
  """Runs a small command with flags."""
  (tmp_path / 'count.py').write_text(COMMAND.lstrip())
  return lambda *arguments: run(tmp_path / 'count.py', *arguments)


def test_flags_repeat_and_the_rest_is_left(count, monkeypatch):
  """Characters that stdout cannot encode do not end the command."""
  monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
  found = count('--gin_param=A = 1', '--gin_param', 'B = 2', 'é', '\u2028')
  assert found == (0, "3 ['A = 1', 'B = 2'] ['?', '\\u2028']\n", '')


def test_the_home_folder_is_found_in_a_flag(count, monkeypatch):
  monkeypatch.setenv('HOME', '/home/a')
  _, out, _ = count('--gin_param=~/x', '--gin_param=~a = 1')
  assert "['/home/a/x', '~a = 1']" in out
  for text in '--prompt=~/x', '--text=~/x', '--until=~/x':
    assert cli._expand_home(text) == text


@pytest.mark.parametrize(
  ('flag', 'binding'),
  [
    ('--batch=8', "'BATCH = 8'"),
    ('--batch', "'BATCH = VALUE'"),
    ('--learning_rate=%LR', "'LEARNING_RATE = %LR'"),
    ('--store=data/books', '\'STORE = "data/books"\''),
  ],
)
def test_a_flag_with_the_name_of_a_setting(count, flag, binding):
  code, _, err = count(flag)
  assert code == 2 and err.endswith(f'Write --gin_param={binding}.\n')


def test_exit_codes_of_a_command(count):
  assert count('--upto=4') == (7, '', '')
  assert count('--upto=6') == (143, 'cleaned up\n', 'terminated\n')
  code, _, err = count('--upto=2')
  assert code == 1
  assert 'Traceback' in err
  assert "invalid literal for int() with base 10: 'no number'" in err


def raised(error):
  """Returns a command that raises an error."""

  def command(_):
    raise error

  return command


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# The memory of a device.
NO_MEMORY = jax.errors.JaxRuntimeError(
  'RESOURCE_EXHAUSTED: 73 TiB.\n\nBuffers:'
)
NO_BACKEND = RuntimeError("Unable to initialize backend 'tpux': ... ")
AGAIN = OSError(5, 'Input/output error', 'metrics.jsonl')
AGAIN.exit_code = 1


@pytest.mark.parametrize(
  ('command', 'code', 'said'),
  [
    (raised(KeyboardInterrupt), 130, '^interrupted$'),
    (lambda _: Folder('/no/such').splits, 2, r'Set --path \(in gin: FOLDER\)'),
    (lambda _: config.parse([], ['WIDTH']), 2, '^error: .*--gin_file=arch/'),
    (raised(FULL), 2, r'written \(No space left on device\)\. '),
    (raised(NO_MEMORY), 2, r'\(RESOURCE_EXHAUSTED: 73 TiB\)\. Reduce'),
    (raised(NO_BACKEND), 2, "backend 'tpux': .* JAX_PLATFORMS is '"),
    # What may do better if it is tried again.
    (raised(AGAIN), 1, 'metrics.jsonl cannot be read or written'),
  ],
)
def test_a_mistake_is_one_line(capsys, command, code, said):
  assert cli.guarded(command, []) == code
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1
  assert re.search(said, err)


def test_a_file_that_the_system_refuses_is_one_line(tmp_path, capsys):
  (tmp_path / 'file').touch()
  for use in (
    lambda _: (tmp_path / 'no' / 'x').write_text(''),
    lambda _: (tmp_path / 'file').mkdir(),
    lambda _: os.rmdir(os.fsencode(tmp_path)),
  ):
    assert cli.guarded(use, []) == 2
    assert re.fullmatch(
      rf'error: {tmp_path}\S* cannot be read or written '
      r'\([A-Z][a-z ]+\)\. .*\n',
      capsys.readouterr().err,
    )


def test_other_errors_of_the_system_and_of_jax_are_defects():
  with pytest.raises(OSError, match='Bad file descriptor'):
    cli.guarded(lambda _: os.close(-1), [])
  with pytest.raises(jax.errors.JaxRuntimeError, match='a kernel failed'):
    cli.guarded(raised(jax.errors.JaxRuntimeError('a kernel failed')), [])


def test_a_reader_of_stdout_that_has_left_is_no_defect(count, tmp_path):
  del count  # It wrote the command.
  with subprocess.Popen(
    [sys.executable, tmp_path / 'count.py'],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as writer:
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait(timeout=120)) == ('', 141)


def test_whole_numbers_have_a_lower_bound():
  """Zero rows, tokens or rounds would fail in the middle, or say nothing."""
  bounds = {}
  for path in sorted((ROOT / 'meliad_rec').rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Call) and node.args:
        made, name = ast.unparse(node.func), ast.unparse(node.args[0])
        bound = {key.arg: key.value for key in node.keywords}
        if made == 'flags.DEFINE_integer':
          bounds[path.stem, name.strip("'")] = bound.get('lower_bound')
  for flag in ('generate', 'seed'), ('generate', 'tokens'):
    assert bounds.pop(flag).value == 0
  for flag in ('play', 'seed'), ('play', 'agent'), ('translate', 'no_repeat'):
    assert bounds.pop(flag).value == 0
  assert len(bounds) >= 10
  for flag, bound in bounds.items():
    assert bound is not None and bound.value == 1, flag


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    (
      '--gin_fil=arch/x',
      'There is no flag --gin_fil (nearest is gin_file). See --help.',
    ),
    (
      '--upto=x',
      '--upto=x is not a whole number. See --help.',
    ),
  ],
)
def test_wrong_flags_are_one_line(count, flag, message):
  assert count(flag) == (2, '', f'error: {message}\n')


@pytest.mark.parametrize(
  'define',
  [flags.DEFINE_string, flags.DEFINE_list, flags.DEFINE_multi_string],
)
def test_a_flag_without_text_is_not_ignored(define):
  """A shell writes --place= for --place=$PLACE if PLACE is not set."""
  for name, words, said in (
    ('place', ['--place='], '--place is empty'),
    ('place', [], ''),
    ('place', ['--place=a'], ''),
    ('prompt', ['--prompt='], ''),  # A text may be empty.
  ):
    with flagsaver.flagsaver():
      define(name, None, 'help')
      flags.FLAGS(['count', *words])
      assert (cli._empty_flag() or '').partition('. ')[0] == said


def test_an_empty_flag_ends_a_command(count):
  said = '--gin_file is empty. Give it a value, or leave it out.'
  assert count('--gin_file=') == (2, '', f'error: {said}\n')


def test_workdir_of_commands_that_take_a_run():
  error = flags.UnrecognizedFlagError('workdir', '--workdir=RUN')
  for module, told in (play, 'as the first argument'), (score, 'See --help'):
    message = cli._unknown_flag(error, cli._arguments(module.main))
    assert told in message


def test_how_the_program_is_started_again(monkeypatch):
  for program, words in (
    ('/a b/bin/meliad-rec', "'/a b/bin/meliad-rec'"),
    ('/x/meliad_rec/__main__.py', f'{sys.executable} -m meliad_rec'),
  ):
    monkeypatch.setattr(sys, 'argv', [program, 'train'])
    assert cli.started() == words


def test_help_of_a_command_lists_its_flags(count):
  code, out, _ = count('--help')
  assert code == 0
  assert 'Counts up to a number.' in out
  assert '--upto: the last number (default 3)' in out
  assert '--gin_file: ' in out


def test_unknown_command_names_the_nearest(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['meliad-rec', 'trian'])
  with pytest.raises(SystemExit, match='2'):
    cli.main()
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith(
    "error: There is no command 'trian' (nearest is train)."
  )


def test_each_command_is_an_entry_point():
  for command, module in cli.COMMANDS.items():
    source = ROOT / 'meliad_rec' / f'{module.replace(".", "/")}.py'
    text = source.read_text()
    assert len(cli.summary(command)) <= 80
    assert '\ndef main(' in text
    assert '\ndef define_flags(' in text or 'import define_flags' in text


@needs_libtpu
def test_nothing_is_printed_about_an_absent_tpu():
  call = """import jax
from meliad_rec import cli; cli.guarded(lambda _: len(jax.devices()), [])"""
  environment = {k: v for k, v in os.environ.items() if 'TPU' not in k}
  environment.pop('JAX_PLATFORMS', None)
  done = subprocess.run(
    [sys.executable, '-c', call],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')


@pytest.mark.parametrize('arguments', ['--help', 'settings --help'])
def test_help_whose_reader_leaves_ends_silently(arguments):
  line = f'set -o pipefail; "$0" -m meliad_rec {arguments} | true'
  done = subprocess.run(
    ['bash', '-c', line, sys.executable],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.stderr == ''
  assert done.returncode in (0, 141)  # All was written, or SIGPIPE.


def test_help_of_a_command_may_be_asked_for_in_front(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['meliad-rec', 'help', 'scroe'])
  with pytest.raises(SystemExit, match='2'):
    cli.main()
  assert 'nearest is score' in capsys.readouterr().err
  seen = []
  monkeypatch.setattr(cli, 'run_main', lambda *words: seen.append(words[-1]))
  monkeypatch.setattr(sys, 'argv', ['meliad-rec', 'help', 'score'])
  cli.main()
  assert seen == [['meliad-rec score', '--help']]


def test_help_shows_arguments_that_are_not_flags():
  code, out, _ = run('-m', 'meliad_rec', 'settings', '--help')
  assert code == 0
  assert out.splitlines()[0].endswith('settings [NAME] [FLAGS]')
  assert 'Flags:' not in out


def test_help_lists_every_command_without_heavy_imports():
  call = """import sys; sys.modules['jax'] = None
from meliad_rec import cli; cli.main()"""
  code, out, err = run('-c', call, '--help')
  assert (code, err) == (0, '')
  for command in cli.COMMANDS:
    assert f'\n  {command} ' in out


@pytest.mark.skipif(sys.platform != 'linux', reason='an option of glibc')
@pytest.mark.parametrize(
  ('command', 'given'),
  [('train', None), ('train', 'glibc.malloc.check=0'), ('translate', None)],
)
def test_large_arrays_lie_on_huge_pages(command, given):
  """The program starts again, with the same arguments, in the same process."""
  call = """import os, sys
from meliad_rec import cli
cli.importlib.import_module = lambda _: cli
cli.run_main = lambda *call: print(os.getpid(), os.environ['GLIBC_TUNABLES'])
cli.define_flags = None
cli.main()"""
  environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  if given:
    environment['GLIBC_TUNABLES'] = given
  started = subprocess.Popen(
    [sys.executable, '-c', call, command, '--a=b c'],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    text=True,
  )
  out, _ = started.communicate()
  assert out == f'{started.pid} {given or "glibc.malloc.hugetlb=1"}\n'


@pytest.mark.parametrize(
  'module',
  ['meliad_rec', pytest.param('meliad_rec.main', marks=pytest.mark.slow)],
)
def test_control_c_during_the_start_is_one_line(module, tmp_path):
  # Python imports sitecustomize when it starts.
  (tmp_path / 'sitecustomize.py').write_text(
    'import os, signal, sys\n'
    'class Hook:\n'
    '  def find_spec(self, name, *_):\n'
    '    if name == os.environ["AT"]:\n'
    '      os.kill(os.getpid(), signal.SIGINT)\n'
    'sys.meta_path.insert(0, Hook())\n'
  )
  for at in 'meliad_rec.cli', 'jax', 'jax.numpy', 'flax':
    done = subprocess.run(
      [sys.executable, '-m', module, 'train'],
      env=os.environ | {'PYTHONPATH': f'{tmp_path}:{ROOT}', 'AT': at},
      capture_output=True,
      text=True,
      timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, 'interrupted\n'), at
