"""Flags reach what they set."""

from pathlib import Path
from unittest import mock

from meliad_rec.commands import explore
from meliad_rec.commands import generate
from meliad_rec.commands import run_flags
from meliad_rec.commands import score
from meliad_rec.generation.sampling import Sampler
from tests import command


def test_sampling_of_generate(monkeypatch):
  run = mock.MagicMock()
  run.read.return_value.count = 5
  seen = []

  def write(run, reading, sampler, args):
    seen.append((sampler, args.seed, args.tokens))
    return reading, ''

  monkeypatch.setattr(run_flags, 'open_run', lambda *_: run)
  monkeypatch.setattr(generate, 'write', write)
  chosen = '--temperature=0.5', '--top_k=3', '--top_p=0.4', '--seed=8'
  assert command.run(generate, '--prompt=a', '--tokens=2', *chosen) == 0
  assert seen == [(Sampler(0.5, 3, 0.4), 8, 2)]


def test_baseline_of_explore(monkeypatch, tmp_path):
  text, page = tmp_path / 'a.txt', tmp_path / 'a.html'
  text.write_text('a text')
  seen = []

  def write_page(run, text, out, *, baseline, top, **options):
    seen.append((run, text, baseline, top))
    Path(out).touch()

  for module in explore, run_flags:
    monkeypatch.setattr(module, 'load_run', lambda where, *_, **__: where)
  monkeypatch.setattr(explore, 'write_page', write_page)
  chosen = '--baseline=OTHER', '--top=3', f'--out={page}'
  assert command.run(explore, 'RUN', text, *chosen) == 0
  assert seen == [('RUN', 'a text', 'OTHER', 3)]


def test_lowercase_of_score(tmp_path, capsys):
  texts, references = tmp_path / 'texts', tmp_path / 'references'
  texts.write_text('One two three four five\n')
  references.write_text('one TWO three four five\n')
  found = []
  for chosen in [], ['--lowercase']:
    assert command.run(score, *chosen, texts, references) == 0
    found.append('100.00' in capsys.readouterr().out)
  assert found == [False, True]
