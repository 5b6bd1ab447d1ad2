"""The command that writes, and what it says when it cannot."""

import io
import sys
import types

import pytest

from meliad_rec.commands import generate
from meliad_rec.commands import run_flags
from meliad_rec.runs.trained_run import load_run
from meliad_rec.runs.trained_run import TrainedRun
from tests import command
from tests import trained


def prompt(**changes):
  settings = {'prompt': None, 'prompt_file': None}
  return generate.read_prompt(types.SimpleNamespace(**settings | changes))


@pytest.fixture
def stdin(monkeypatch):
  """Sets the bytes on stdin."""
  return lambda given: monkeypatch.setattr(
    sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(given))
  )


def test_prompts(tmp_path, stdin):
  (tmp_path / 'p').write_text('wörd')
  assert prompt(prompt='text') == 'text'
  assert prompt(prompt_file=str(tmp_path / 'p')) == 'wörd'
  assert prompt() == ''
  for name in ('prompt', 'prompt_file'):
    stdin('é'.encode())
    assert prompt(**{name: '-'}) == 'é'


def test_prompts_that_are_none(stdin):
  stdin(b'\xe9')
  for given, told in (
    ({'prompt': 'a', 'prompt_file': 'b'}, 'not both'),
    ({'prompt_file': '/no/such'}, 'cannot be read'),
    ({'prompt': '\udce9'}, '--prompt is not UTF-8'),
    ({'prompt': '-'}, 'on stdin is not UTF-8'),
  ):
    with pytest.raises(ValueError, match=told):
      prompt(**given)


class State(str):
  """Stands for the state after `count` tokens; equal to its name."""

  count = 0


def write(steps, **given):
  """Runs the command's `write` on a model that writes these steps."""
  decoder = types.SimpleNamespace(chunk=1)
  writer = types.SimpleNamespace(write=lambda *_: iter(steps), decoder=decoder)
  run = types.SimpleNamespace(text_generator=writer)
  args = types.SimpleNamespace(**given, seed=0, until=None)
  return generate.write(run, State(), None, args)


@pytest.mark.parametrize('terminal', [True, False])
def test_only_a_terminal_is_spared_control_codes(monkeypatch, terminal):
  """What goes into a file is what the model wrote."""
  out = io.StringIO()
  out.isatty = lambda: terminal
  monkeypatch.setattr(sys, 'stdout', out)
  write([(State(), ['a\x1b[2J', 'b\x9b\n'])], samples=2, tokens=9)
  written = '--- sample 1\na\x1b[2J\n--- sample 2\nb\x9b\n\n'
  if terminal:
    written = written.replace('\x1b', '\ufffd').replace('\x9b', '\ufffd')
  assert out.getvalue() == written


def test_where_nobody_reads_on_it_stops_and_says_where(monkeypatch):
  read, devnull = [], []

  def tell(text):
    if text == 'b':
      raise BrokenPipeError
    read.append(text)

  monkeypatch.setattr(generate, '_print', tell)
  monkeypatch.setattr(generate.os, 'dup2', lambda *fds: devnull.append(fds))
  steps = ((State(reading), [reading]) for reading in 'abc')
  assert write(steps, samples=1, tokens=3) == ('b', None)
  assert read == ['a'] and len(devnull) == 1


def test_a_reader_that_ends_is_reported_after_the_state_is_saved(
  monkeypatch, tmp_path
):
  state = tmp_path / 's.npz'
  monkeypatch.setattr(
    generate, 'write', lambda _, reading, *__: (reading, None)
  )
  arguments = f'--workdir={trained.folder()}', f'--save_state={state}'
  assert command.run(generate, *arguments) == 141
  assert state.is_file()


def test_a_saved_state_goes_on_as_one_text(tmp_path, capsys):
  def command_writes(*arguments):
    folder = f'--workdir={trained.folder()}'
    capsys.readouterr()  # Training prints.
    assert command.run(generate, folder, '--greedy', *arguments) == 0
    out, err = capsys.readouterr()
    return strip(out), err

  strip = lambda text: text.removesuffix('\n').replace('\ufffd', '')
  state = tmp_path / 's.npz'
  (tmp_path / 'book').write_text('a long book ' * 9)
  book = f'--prompt_file={tmp_path / "book"}'
  save, load = f'--save_state={state}', f'--load_state={state}'
  first, told = command_writes(book, '--tokens=5', save, '--show_speed')
  assert 'read 108 tokens' in told and 'wrote 5 tokens, after 108' in told
  second, _ = command_writes('--tokens=7', load)
  run = load_run(trained.folder())
  whole = run.generate('a long book ' * 9, 12, temperature=0)[0]
  assert first + second == strip(whole)


def test_a_prompt_is_tokenized_once(monkeypatch, capsys):
  run, texts = load_run(trained.folder()), []
  encode = run.vocabulary.encode
  count = lambda _, text: texts.append(text) or encode(text)
  monkeypatch.setattr(type(run.vocabulary), 'encode', count)
  monkeypatch.setattr(run_flags, 'open_run', lambda *_: run)
  assert command.run(generate, '--prompt=long', '--tokens=0') == 0
  assert texts == ['long']


@pytest.mark.slow
def test_a_search_finds_what_greedy_writing_and_more_beams_find(capsys):
  def command_writes(*arguments):
    folder = f'--workdir={trained.folder()}'
    capsys.readouterr()  # Training prints.
    prompt = '--prompt=a long ', '--tokens=6'
    assert command.run(generate, folder, *prompt, *arguments) == 0
    return capsys.readouterr().out

  assert command_writes('--beams=1') == command_writes('--greedy')
  two = command_writes('--beams=3', '--samples=2', '--no_repeat=2')
  assert two.startswith('--- sample 1\n') and '\n--- sample 2\n' in two


@pytest.mark.parametrize(('found', 'told'), [(1, 'found 1 of 2'), (2, '')])
def test_fewer_texts_than_asked_for_are_reported(
  monkeypatch, capsys, found, told
):
  run = load_run(trained.folder())
  search = lambda *_: ['a'] * found
  monkeypatch.setattr(run.text_generator, 'search', search)
  monkeypatch.setattr(run_flags, 'open_run', lambda *_: run)
  capsys.readouterr()
  assert command.run(generate, '--beams=3', '--samples=2', '--until=.') == 0
  out, err = capsys.readouterr()
  assert out.count('a\n') == found
  assert told in err and bool(told) == bool(err)


def test_the_end_of_a_search_is_checked_before_the_prompt_is_read(monkeypatch):
  monkeypatch.setattr(TrainedRun, 'read', lambda *_: pytest.fail('read'))
  arguments = f'--workdir={trained.folder()}', '--beams=2', '--until=two'
  assert "but 'two' is not one" in command.mistake(generate, *arguments)


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    (['--samples=2', '--save_state=x'], '--samples is 2'),
    (['--save_state=/no/such/s.npz'], '/no/such/s.npz'),
    (['--greedy', '--top_k=3'], '--top_k cannot'),
    (['--greedy', '--seed=5'], '--seed cannot be combined with --greedy'),
    (['--beams=3', '--top_k=3'], '--top_k cannot be combined with --beams'),
    (['--beams=3', '--samples=4'], '--samples is 4'),
    (['--until=.', '--save_state=a.npz'], '--until cannot be combined'),
    (['--length_norm=gnmt'], '--length_norm needs --beams'),
    (['--until='], "not empty, got ''"),
    (['--until=\udce9'], 'until must be a UTF-8 text'),
  ],
)
def test_mistakes_are_found_before_anything_is_read(
  monkeypatch, arguments, told
):
  monkeypatch.setattr(run_flags, 'open_run', lambda *_: pytest.fail('opened'))
  assert told in command.mistake(generate, *arguments)


def test_a_step_is_a_number_or_best():
  told = command.mistake(generate, '--workdir=x', '--step=first')
  assert '--step' in told and "'first'" in told
