"""The command that writes, and what it says when it cannot."""

import io
import re
import sys
import types

import pytest

from meliad_rec.commands import generate
from meliad_rec.commands import run_flags
from meliad_rec.runs.trained_run import load_run
from tests import tiny_run
from tests import trained


def flags(**changes):
  settings = {'prompt': None, 'prompt_file': None}
  return types.SimpleNamespace(**settings | changes)


def command(*arguments, **more):
  python = tiny_run.command('', '')[0]
  workdir = f'--workdir={trained.folder()}'
  return tiny_run.run(
    [python, '-m', 'meliad_rec', 'generate', workdir, *arguments], **more
  )


def test_prompts(tmp_path, monkeypatch):
  (tmp_path / 'p').write_text('wörd')
  assert generate.read_prompt(flags(prompt='text')) == 'text'
  assert generate.read_prompt(flags(prompt_file=str(tmp_path / 'p'))) == 'wörd'
  assert generate.read_prompt(flags()) == ''
  for name in ('prompt', 'prompt_file'):
    stdin = types.SimpleNamespace(buffer=io.BytesIO('é'.encode()))
    monkeypatch.setattr(sys, 'stdin', stdin)
    assert generate.read_prompt(flags(**{name: '-'})) == 'é'


def test_prompts_that_are_none(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='not both'):
    generate.read_prompt(flags(prompt='a', prompt_file='b'))
  with pytest.raises(ValueError, match='cannot be read'):
    generate.read_prompt(flags(prompt_file='/no/such'))
  (tmp_path / 'latin').write_bytes(b'\xe9')
  with pytest.raises(ValueError, match='not UTF-8'):
    generate.read_prompt(flags(prompt_file=str(tmp_path / 'latin')))
  with pytest.raises(ValueError, match='--prompt is not UTF-8'):
    generate.read_prompt(flags(prompt='\udce9'))
  stdin = types.SimpleNamespace(buffer=io.BytesIO(b'\xe9'))
  monkeypatch.setattr(sys, 'stdin', stdin)
  with pytest.raises(ValueError, match='on stdin is not UTF-8'):
    generate.read_prompt(flags(prompt='-'))


@pytest.mark.parametrize('terminal', [True, False])
def test_only_a_terminal_is_spared_control_codes(monkeypatch, terminal):
  """What goes into a file is what the model wrote."""
  out = io.StringIO()
  out.isatty = lambda: terminal
  monkeypatch.setattr(sys, 'stdout', out)
  step = types.SimpleNamespace(count=1), ['a\x1b[2J', 'b\x9b\n']
  decoder = types.SimpleNamespace(chunk=9)
  writer = types.SimpleNamespace(write=lambda *_: [step], decoder=decoder)
  args = types.SimpleNamespace(samples=2, tokens=9, seed=0)
  generate.write(types.SimpleNamespace(text_generator=writer), None, None, args)
  written = '--- sample 1\na\x1b[2J\n--- sample 2\nb\x9b\n\n'
  if terminal:
    written = written.replace('\x1b', '\ufffd').replace('\x9b', '\ufffd')
  assert out.getvalue() == written


def test_a_state_saved_by_one_command_is_gone_on_from_by_another(tmp_path):
  state = tmp_path / 's.npz'
  (tmp_path / 'book').write_text('a long book ' * 9)
  book = f'--prompt_file={tmp_path / "book"}'
  save, load = f'--save_state={state}', f'--load_state={state}'
  first = command(book, '--tokens=5', '--greedy', save, '--show_speed')
  second = command('--tokens=7', '--greedy', load)
  assert (first.returncode, second.returncode) == (0, 0), second.stderr
  assert 'read 108 tokens' in first.stderr
  run = load_run(trained.folder())
  whole = run.generate('a long book ' * 9, 12, temperature=0)[0]
  strip = lambda text: text.removesuffix('\n').replace('\ufffd', '')
  assert strip(first.stdout) + strip(second.stdout) == strip(whole)


def test_an_unwritable_state_is_found_out_before_anything_is_read(monkeypatch):
  monkeypatch.setattr(run_flags, 'open_run', lambda: pytest.fail('opened'))
  given = flags(save_state='/no/such/s.npz', samples=1, prompt='text')
  monkeypatch.setattr(generate.flags, 'FLAGS', given)
  with pytest.raises(ValueError, match='/no/such/s.npz'):
    generate.main(['generate'])


def test_where_nobody_reads_on_it_stops_and_says_where(monkeypatch):
  class Writing:
    decoder = types.SimpleNamespace(chunk=1)

    def write(self, *_):
      for reading in 'abc':
        yield reading, [reading]

  read, devnull = [], []

  def tell(text):
    if text == 'b':
      raise BrokenPipeError
    read.append(text)

  monkeypatch.setattr(generate, '_print', tell)
  monkeypatch.setattr(generate.os, 'dup2', lambda *fds: devnull.append(fds))
  run = types.SimpleNamespace(text_generator=Writing())
  given = flags(samples=1, tokens=3, seed=0)
  end, said = generate.write(run, '', None, given)
  assert (end, said, read) == ('b', 'stopped writing', ['a'])
  assert len(devnull) == 1


def test_mistakes_are_one_sentence():
  done = command('--samples=2', '--save_state=x')
  assert done.returncode == 2
  assert re.fullmatch(
    'error: --save_state .* --samples is 2; .*\n', done.stderr
  )
  done = command('--step=first')
  assert done.returncode == 2
  assert done.stderr.startswith('error: --step ') and "'first'" in done.stderr
