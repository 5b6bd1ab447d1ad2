"""Trains a tiny encoder-decoder, translates with it, and scores the result."""

import io
import json
import re
import sys
import types
from unittest import mock

import numpy as np
import pytest

from meliad_rec.commands import score
from meliad_rec.commands import translate
from meliad_rec.config import config
from meliad_rec.data.split_files import read_lines
from meliad_rec.generation.decoder import Decoder
from meliad_rec.metrics import text_scores
from meliad_rec.runs import trained_run
from meliad_rec.runs import training
from meliad_rec.runs.trained_run import load_run
from tests import command

LINES = ['one two three four', 'five six', 'one two three five']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The folder of a run that reads three words of each source."""
  folder = tmp_path_factory.mktemp('pairs')
  for split in 'train', 'valid':
    (folder / f'{split}.en').write_text('\n'.join(LINES) + '\n')
    (folder / f'{split}.de').write_text('eins\nzwei\ndrei\n')
  params = [
    f'SOURCE = "{folder}/{{split}}.en"',
    f'TARGET = "{folder}/{{split}}.de"',
    *('SOURCE_WORDS = 3', 'SEGMENT = 24', 'BATCH = 8', 'STEPS = 2'),
    *('SAVE_EVERY = 1', 'AVERAGE = 2', 'BEAMS = 3', 'NO_REPEAT = 2'),
  ]
  names = ['arch/feedback', 'size/test', 'task/pairs']
  config.parse([*names, 'options/encoder/transformer'], params)
  training.run_experiment(training.build(folder), folder / 'run')
  return folder


@pytest.mark.slow
def test_targets_are_written_and_scored(run, capsys):
  flags = '--tokens=7', '--beams=2'
  command.run(translate, str(run / 'run'), str(run / 'train.en'), *flags)
  first, second, third = capsys.readouterr().out.removesuffix('\n').split('\n')
  assert first == third  # Their first three words are the same.
  assert max(map(len, (first, second))) <= 7
  opened = load_run(run / 'run')
  assert not opened.translate([])
  for lines, batch, told in (
    ('abc', None, 'lines must be a list of strings, got str'),
    (LINES, -1, 'batch must be a whole number of at least 1'),
  ):
    with pytest.raises(ValueError, match=told):
      opened.translate(lines, batch=batch)
  with pytest.raises(ValueError, match='beam must be .* got 0'):
    opened.translate(LINES, beam=0)
  with mock.patch.object(trained_run, 'Decoder', wraps=Decoder) as made:
    opened.translate(LINES, tokens=7), opened.translate(LINES, tokens=7)
  assert made.call_count == 1  # Compiled functions are kept.
  opened.export(run / 'exported')
  card = (run / 'exported' / 'README.md').read_text()
  assert 'pipeline_tag: translation\n' in card
  assert ', encoder EncoderLayers, width ' in card
  (use,) = re.findall(r'print\((run\.translate\(.*\))\[0\]\)', card)
  assert len(eval(use, {'run': opened})) == 1
  assert 'run.generate' not in card and 'run.evaluate' not in card
  (run / 'found').write_text('eins\nzwei\nvier\n')
  command.run(score, str(run / 'found'), str(run / 'train.de'))
  assert 'tokenized_bleu' in capsys.readouterr().out
  command.run(score, str(run / 'found'), str(run / 'train.de'), '--rouge')
  rouge = dict(line.split() for line in capsys.readouterr().out.splitlines())
  assert float(rouge['rouge1']) == pytest.approx(200 / 3, abs=0.01)


class Echo:
  """A decoder whose targets are the sources, as hypothesis 0 of two."""

  def __init__(self):
    self.shapes = []

  def translate(self, source_BS, count, beam, end):
    self.shapes.append(source_BS.shape)
    return types.SimpleNamespace(
      tokens_BKL=np.stack([source_BS, np.zeros_like(source_BS)], 1)
    )


@pytest.mark.slow
def test_targets_of_many_batches_are_in_the_order_of_the_sources(run):
  opened = load_run(run / 'run')
  opened.__dict__['_decoder'] = echo = Echo()
  lines = [chr(ord('a') + i) * (1 + 7 * i % 20) for i in range(20)]
  seen = []
  assert opened.translate(lines, batch=8, on_progress=seen.append) == lines
  assert seen == [8, 16, 20]
  assert [rows for rows, _ in echo.shapes] == [8] * 3


@pytest.mark.slow
def test_a_split_is_written_as_the_configuration_says(run):
  """The sources, as long as training read them; and how they are scored."""
  out, metrics = run / 'targets', run / 'scores.json'
  flags = '--split=validation', '--tokens=9'
  saved = f'--out={out}', f'--metrics={metrics}'
  command.run(translate, str(run / 'run'), *flags, *saved)
  found = json.loads(metrics.read_text())
  text = out.read_text()
  targets = text.removesuffix('\n').split('\n')
  assert found['average'] == 2 and found['step'] == 2
  assert found['beam'] == {
    'beams': 3,
    'alpha': 1.0,
    'penalty': 'power',
    'no_repeat': 2,
  }
  references = ['eins', 'zwei', 'drei']
  measured = text_scores.measure(targets, references)
  assert {name: found[name] for name in measured} == measured
  assert [*measured] == [*text_scores.NAMES]
  explicit = '--beams=3', '--no_repeat=2', '--average=2', '--tokens=9'
  explicit += '--length_penalty=1', '--length_norm=power'
  command.run(
    translate, str(run / 'run'), str(run / 'valid.en'), *explicit, saved[0]
  )
  assert out.read_text() == text
  load_run(run / 'run', average=2).export(run / 'averaged')
  command.run(translate, str(run / 'averaged'), *flags, *saved)
  assert out.read_text() == text
  assert json.loads(metrics.read_text()) == found | {
    'run': str((run / 'averaged').resolve())
  }


def test_mistakes(tmp_path):
  (tmp_path / 'one').write_text('a\n')
  (tmp_path / 'two').write_text('a\nb\n')
  (tmp_path / 'none').write_text('')
  of = lambda *names: [str(tmp_path / name) for name in names]
  assert 'Got 0 arguments' in command.mistake(translate)
  both = *of('run', 'one'), '--split=test'
  assert 'Got 2 arguments and --split' in command.mistake(translate, *both)
  scores = *of('run', 'one'), '--metrics=a.json'
  late = *of('run', 'one'), '--out=/none/targets'
  assert 'The folder of /none/targets' in command.mistake(translate, *late)
  assert '--metrics needs references' in command.mistake(translate, *scores)
  assert 'one text per line' in command.mistake(translate, *of('run', 'none'))
  assert 'has 1 lines, but' in command.mistake(score, *of('one', 'two'))


def test_missing_packages_are_found_before_the_run(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  arguments = 'run', '--split=test', f'--metrics={tmp_path}/a.json'
  assert 'meliad_rec[text]' in command.mistake(translate, *arguments)


def test_stdin_is_read_like_a_file(tmp_path, monkeypatch):
  """In any locale, and with the newlines of no system."""
  content = 'é\r\na\rb\n'.encode()
  (tmp_path / 'file').write_bytes(content)
  stdin = lambda given: monkeypatch.setattr(
    sys, 'stdin', io.TextIOWrapper(io.BytesIO(given), 'ascii')
  )
  stdin(content)
  assert read_lines('-') == read_lines(tmp_path / 'file') == ['é', 'a\rb']
  stdin(b'\xe9')
  arguments = '-', str(tmp_path / 'file')
  assert 'on stdin is not UTF-8' in command.mistake(score, *arguments)


def test_rouge_of_sentences_in_another_order():
  found = text_scores.rouge(['d e. a b c.'], ['a b c. d e.'])
  # In the whole text, the longest common subsequence is a b c.
  expected = {'rouge1': 100, 'rouge2': 75, 'rougeL': 60, 'rougeLsum': 100}
  assert found == pytest.approx(expected)


def test_bleu_is_that_of_its_definition():
  texts, references = ['the cat sat on the mat'], ['the cat sat on a mat']
  # Of 6, 5, 4 and 3 n-grams, 5, 3, 2 and 1 are in the reference.
  expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
  found = text_scores.bleu(texts, references)
  assert [*found.values()] == pytest.approx([expected] * 3)
  assert [*text_scores.bleu(references, references).values()] == pytest.approx(
    [100] * 3
  )
  # x-ray is three words or one: 6 of 7 match, or 4 of 5, and so on.
  found = text_scores.bleu(['the x-ray of a cat'], ['the x-ray of a dog'])
  split, whole = 6 / 7 * 5 / 6 * 4 / 5 * 3 / 4, 4 / 5 * 3 / 4 * 2 / 3 * 1 / 2
  expected = {'tokenized_bleu': split, 'tokenized_bleu_unsplit': whole}
  for name, product in expected.items():
    assert found[name] == pytest.approx(100 * product**0.25)
  assert text_scores.split_compounds('a well-known -') == (
    'a well ##AT##-##AT## known -'
  )
