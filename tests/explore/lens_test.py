"""Predictions after each step of depth."""

import numpy as np
import pytest

from meliad_rec import explore
from tests import observed
from tests.explored import check
from tests.explored import close
from tests.explored import TEXT


@pytest.mark.parametrize(
  'name',
  [
    'gated_universal',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('universal', 'staircase')
    ),
  ],
)
def test_lens(name, tmp_path):
  run = observed.run(name)
  shown = explore.lens(run, TEXT, tokens=12)
  check(shown, tmp_path)
  close(shown.data['nats'][-1], run.nats(TEXT)[0])
  found, last = run.predictions(TEXT), shown.data.isel(step=-1)
  assert last['top_text'].dims == found['top_text'].dims
  assert (last['top_text'] == found['top_text']).mean() > 0.99  # Ties.
  assert run.lens(TEXT, top=2).sizes['choice'] == 2
  assert ('depth' in shown.data) == (name != 'staircase')
  panels = [a for a in shown.figure.axes if 'steps taken' in a.get_ylabel()]
  assert len(panels) == (name != 'staircase')
  for panel in panels:  # The text is too short to be smoothed.
    close(panel.lines[0].get_ydata(), shown.data['depth'])
  count = shown.data.sizes['step']
  assert shown.data['step'].values.tolist() == [*range(1, count + 1)]
  assert '\u23ce' in [t.get_text() for t in shown.figure.axes[1].texts] + [
    t.get_text() for t in shown.figure.axes[1].get_xticklabels()
  ]
  kind = 'pass' if name == 'staircase' else 'step'
  assert shown.figure.axes[1].get_ylabel() == kind
  with pytest.raises(ValueError, match='tokens must be'):
    explore.lens(run, TEXT, tokens=0)


@pytest.mark.slow
def test_lens_of_labels(tmp_path):
  """The losses after the last step equal those that predictions returns."""
  run = observed.run('gated_universal', labels=True)
  ids = run.encode(TEXT)
  labels = np.roll(ids, -1)
  labels[-3] = 0  # Not scored.
  shown = explore.lens(run, ids, labels=labels)
  check(shown, tmp_path)
  close(shown.data['nats'][-1], run.predictions(ids, labels=labels)['nats'])
  assert np.isnan(shown.data['nats'][:, -3]).all()
  texts = shown.figure.axes[1].texts
  colors = [t.get_color() for t in texts if t.get_position()[0] == 45]
  assert {*colors} == {'black'}
  with pytest.raises(ValueError, match='labels were not given'):
    run.lens(ids)
