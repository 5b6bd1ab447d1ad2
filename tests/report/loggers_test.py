"""Loggers of other programs: what they get, and that they cannot end a run."""

import importlib.util
import sys
from unittest import mock

import jax
import pytest

from meliad_rec.report import loggers
from meliad_rec.report.report import Report
from meliad_rec.training import trainer
from tests import tiny_run


class Recording:
  """Records its calls; fails where it is told to."""

  def __init__(self, fails=()):
    self.calls, self.fails = [], fails

  def _record(self, *call):
    self.calls.append(call)
    if call[0] in self.fails:
      raise RuntimeError(f'no {call[0]}\nand more')

  def start(self, workdir, step, config):
    self._record('start', workdir, step, config)

  def log(self, step, metrics):
    self._record('log', step, metrics)

  def close(self):
    self._record('close')


def test_a_run_logs_everything_and_outlives_every_error(tmp_path, caplog):
  data = tiny_run.write_store(tmp_path / 'store')
  logger = Recording(fails=('log', 'close'))
  changes = {'steps': 3, 'metrics_logger': logger}
  experiment = tiny_run.experiment(data, tiny_run.program(), **changes)
  config = 'A = 1\nf.b = (2.5, None)\nf.c = @g\nf.d = %A\n'
  run = trainer.Run(experiment, tmp_path / 'run', {'config': config})
  run.begin()
  assert run.live() is None
  (start, *logs, close) = logger.calls
  settings = {'A': 1, 'f.b': (2.5, None), 'f.c': '@g', 'f.d': '%A'}
  assert start == ('start', str(tmp_path / 'run'), 0, settings)
  assert [step for _, step, _ in logs] == [1, 2, 3, 3]
  for (_, _, metrics), split in zip(
    logs[1:], ('train', 'train', 'validation'), strict=True
  ):
    assert metrics[f'{split}/loss_nats_per_token'] > 0
    assert all(name.startswith(f'{split}/') for name in metrics)
  assert close == ('close',)
  assert caplog.text.count('Recording failed') == 1
  assert '(RuntimeError: no log). The run continues' in caplog.text
  assert 'and more' not in caplog.text


def test_a_logger_that_cannot_start_is_not_called_again(tmp_path, caplog):
  logger = Recording(fails=('start',))
  report = Report(tmp_path, 4, logger=logger, config={'A': 1})
  report.write(5, {'loss': 1.0})
  report.close()
  assert logger.calls == [('start', str(tmp_path), 4, {'A': 1})]
  assert '(RuntimeError: no start)' in caplog.text


def test_only_the_first_host_logs(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  logger = Recording()
  report = Report(tmp_path, 0, logger=logger)
  report.write(1, {'loss': 1.0})
  report.close()
  assert logger.calls == []


@pytest.mark.parametrize('wrong', ['wandb', Recording])
def test_what_is_no_logger_is_refused(tmp_path, wrong):
  data = tiny_run.write_store(tmp_path / 'store')
  program = tiny_run.program()
  with pytest.raises(ValueError, match='metrics_logger'):
    tiny_run.experiment(data, program, metrics_logger=wrong)


@pytest.mark.slow
def test_wandb_offline_continues_its_run(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_SILENT', 'true')
  for place in 'CONFIG', 'CACHE', 'DATA':  # Otherwise in the user's home.
    monkeypatch.setenv(f'WANDB_{place}_DIR', str(tmp_path / place))
  run = tmp_path / 'run'
  ids = []
  for resumed in 0, 2, 0:
    logger = loggers.WandB('books', mode='offline', tags=('small',))
    report = Report(run, resumed, logger=logger, config={'LAYERS': 2})
    report.write(resumed + 1, {'loss': 1.0})
    report.close()
    ids.append((run / 'wandb_id').read_text())
  assert ids[0] == ids[1] != ids[2]
  written = sorted(path.name for path in run.glob('wandb/*/*.wandb'))
  assert set(written) == {f'run-{each}.wandb' for each in ids}


def test_wandb_names_a_run_after_its_folder(tmp_path, monkeypatch):
  wandb = mock.MagicMock()
  monkeypatch.setitem(sys.modules, 'wandb', wandb)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: wandb)
  (tmp_path / 'run').mkdir()
  monkeypatch.chdir(tmp_path / 'run')
  logger = loggers.WandB('books', entity='lab', tags=('small',))
  logger.start('.', 0, {'LAYERS': 2})
  given = wandb.init.call_args.kwargs
  expected = {
    'name': 'run',
    'project': 'books',
    'entity': 'lab',
    'tags': ('small',),
    'config': {'LAYERS': 2},
    'mode': 'online',
    'resume': 'allow',
    'id': (tmp_path / 'run' / 'wandb_id').read_text(),
  }
  assert {name: given[name] for name in expected} == expected
  run = wandb.init.return_value
  run.define_metric.assert_called_once_with('*', step_metric='step')
  logger.log(3, {'train/loss': 1.0})
  run.log.assert_called_once_with({'train/loss': 1.0, 'step': 3})


def test_wandb_must_be_installed(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r'Install meliad_rec\[wandb\]'):
    loggers.WandB('books')
