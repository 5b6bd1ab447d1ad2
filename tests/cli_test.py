"""The command line as a person sees it: most tests start a process."""

import ast
import errno
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from meliad_rec import cli
from meliad_rec.config import config_flags

ROOT = Path(cli.__file__).parents[1]
COMMAND = '''
"""Counts.

Counts up to a number.
"""
import os, signal, sys
from absl import flags
from meliad_rec import cli
from meliad_rec.config import config, config_flags

def define_flags():
  config_flags.define_flags()
  flags.DEFINE_integer('upto', 3, 'the last number')

def main(argv):
  match flags.FLAGS.upto:
    case 1:
      raise KeyboardInterrupt
    case 2:
      int('no number')
    case 4:
      return 7
    case 5:
      config.parse(flags.FLAGS.gin_file, flags.FLAGS.gin_param)
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


def test_flags_repeat_and_the_rest_is_left(count):
  arguments = ['--gin_param=A = 1', '--gin_param', 'B = 2', 'more']
  assert count(*arguments) == (0, "3 ['A = 1', 'B = 2'] ['more']\n", '')


def test_what_main_returns_is_the_exit_code(count):
  assert count('--upto=4') == (7, '', '')


def test_interrupt_exits_130(count):
  assert count('--upto=1') == (130, '', 'interrupted\n')


def test_sigterm_cleans_up_and_exits_143(count):
  assert count('--upto=6') == (143, 'cleaned up\n', 'terminated\n')


def test_a_mistake_is_one_line(count):
  code, out, err = count('--upto=5', '--gin_param=WIDTH')
  assert (code, out) == (2, '')
  assert err.startswith('error: ') and '--gin_file=arch/NAME' in err
  assert err.count('\n') == 1


def test_what_may_do_better_again_exits_1(capsys):
  def fail(_):
    error = OSError(5, 'Input/output error', 'metrics.jsonl')
    error.exit_code = 1
    raise error

  assert cli.guarded(fail, []) == 1
  assert 'metrics.jsonl cannot be read or written' in capsys.readouterr().err


@pytest.mark.parametrize(
  'use',
  [
    lambda folder: (folder / 'no' / 'x').write_text(''),
    lambda folder: (folder / 'file' / 'run').mkdir(),
    lambda folder: (folder / 'file').mkdir(),
    lambda folder: os.replace(folder / 'no', folder / 'x'),
    lambda folder: os.rmdir(os.fsencode(folder)),
  ],
)
def test_a_file_that_the_system_refuses_is_one_line(tmp_path, capsys, use):
  (tmp_path / 'file').touch()
  assert cli.guarded(lambda _: use(tmp_path), []) == 2
  err = capsys.readouterr().err
  assert re.fullmatch(
    rf'error: {tmp_path}\S* cannot be read or written \([A-Z][a-z ]+\); .*\n',
    err,
  )


def test_a_full_disk_is_one_line(capsys):
  def fill(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  assert cli.guarded(fill, []) == 2
  assert 'written (No space left on device); ' in capsys.readouterr().err


def test_other_errors_of_the_system_are_defects():
  def misuse(_):
    os.close(-1)

  with pytest.raises(OSError, match='Bad file descriptor'):
    cli.guarded(misuse, [])


def test_stdout_that_lacks_a_letter_ends_nothing(count, monkeypatch):
  monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
  assert count('é', '\u2028') == (0, "3 [] ['?', '\\u2028']\n", '')


def test_a_reader_of_stdout_that_has_left_is_no_defect(count, tmp_path):
  del count  # It wrote the command.
  writer = subprocess.Popen(
    [sys.executable, tmp_path / 'count.py'],
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
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
  assert bounds.pop(('generate', 'seed')) is None
  assert bounds.pop(('generate', 'tokens')).value == 0
  assert len(bounds) >= 10
  for flag, bound in bounds.items():
    assert bound is not None and bound.value == 1, flag


def test_a_defect_keeps_its_traceback(count):
  code, _, err = count('--upto=2')
  assert code == 1
  assert 'Traceback' in err
  assert "invalid literal for int() with base 10: 'no number'" in err


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    (
      '--gin_fil=arch/x',
      'There is no flag --gin_fil (nearest is gin_file).',
    ),
    (
      '--upto=x',
      "flag --upto=x: invalid literal for int() with base 10: 'x'",
    ),
  ],
)
def test_wrong_flags_are_one_line(count, flag, message):
  assert count(flag) == (2, '', f'error: {message}\n')


def test_help_of_a_command_lists_its_flags(count):
  code, out, _ = count('--help')
  assert code == 0
  assert 'Counts up to a number.' in out
  assert '--upto: the last number (default 3)' in out
  assert '--gin_file: ' in out


def test_defining_the_flags_twice_is_harmless():
  config_flags.define_flags()
  config_flags.define_flags()


CALL = 'from meliad_rec import cli; cli.main()'


def test_unknown_command_names_the_nearest():
  code, out, err = run('-c', CALL, 'trian')
  assert (code, out) == (2, '')
  assert err.startswith(
    "error: There is no command 'trian' (nearest is train);"
  )


@pytest.mark.parametrize('command', cli.COMMANDS)
def test_each_command_is_an_entry_point(command):
  path = cli.COMMANDS[command].replace('.', '/')
  source = ROOT / 'meliad_rec' / f'{path}.py'
  text = source.read_text()
  assert len(cli.summary(command)) <= 80
  assert '\ndef main(' in text
  assert '\ndef define_flags(' in text or 'import define_flags' in text


@pytest.mark.parametrize('arguments', [[], ['--help']])
def test_help_lists_every_command_without_heavy_imports(arguments):
  call = f'import sys; sys.modules["jax"] = None; {CALL}'
  code, out, err = run('-c', call, *arguments)
  assert (code, err) == (0, '')
  for command in cli.COMMANDS:
    assert f'\n  {command} ' in out
