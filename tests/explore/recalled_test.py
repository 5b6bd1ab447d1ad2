"""What memories recall, draw from and attend to."""

import re

import jax
import numpy as np
import pytest

from meliad_rec import explore
from tests import observed
from tests.explored import block_recurrent
from tests.explored import check
from tests.explored import close
from tests.explored import TEXT
from tests.explored import W


@pytest.mark.slow
def test_recalled(tmp_path):
  run = observed.run('memorizing')
  check(explore.recalled(run, r'$\[$ $^$ ' * 9, token=-1), tmp_path)
  shown = explore.recalled(run, TEXT, token=-1, context=2)
  check(shown, tmp_path)
  close(shown.data['weight'].sum('neighbor'), 1)
  place = int(shown.data['place'][0, 0])
  passage = f'{TEXT[place - 2 : place]}[{TEXT[place]}]'
  passage += TEXT[place + 1 : place + 3]
  assert shown.data['passage'].values[0, 0] == passage
  with pytest.raises(ValueError, match='context must be a whole number'):
    explore.recalled(run, TEXT, token=-1, context=-2)
  assert place < len(TEXT) // W * W - 1  # Read before this block.
  share = run.attention(TEXT)['recall_share'][0, -1]
  close(shown.data['share'], share)
  assert 'head 1 50%' in shown.figure.axes[0].get_title(loc='left')
  for token in 1000, 1.5:
    with pytest.raises(ValueError, match='token must be a whole number from'):
      explore.recalled(run, TEXT, token=token)
  with pytest.raises(ValueError, match='memorizing layers: 1'):
    explore.recalled(run, TEXT, token=-1, layer=0)
  with pytest.raises(ValueError, match='yet.*Choose one from') as error:
    explore.recalled(run, TEXT, token=0)
  first = int(re.search(r'from (\d+) on', str(error.value))[1])
  shown = explore.recalled(run, TEXT, token=first)
  absent = shown.data['weight'].values == 0
  assert (shown.data['place'].values[absent] == -1).all()
  assert (shown.data['passage'].values[absent] == '').all()
  assert len(shown.figure.axes[0].patches) == (~absent[:, :4]).sum()
  with pytest.raises(ValueError, match='recalls no keys'):
    explore.recalled(block_recurrent(), TEXT, token=-1)


@pytest.mark.parametrize(
  'name', ['feedback', pytest.param('window', marks=pytest.mark.slow)]
)
def test_source_map(name, tmp_path):
  run, source, text = observed.translator(name), 'a dog', TEXT[: 2 * W + 1]
  shown = explore.source_map(run, source, text)
  check(shown, tmp_path)
  assert ''.join(shown.data['source_text'].values) == source + '\n'
  close(shown.data['weight'].sum('source'), 1)
  upper = explore.source_map(run, source, text, layer=1).data['weight']
  assert np.abs(upper - shown.data['weight']).max() > 1e-5
  # Reading block by block gives the losses of reading all at once.
  ids = [run.encode(a)[None] for a in (text, source + '\n')]
  start_B, mask_BT = np.ones(1, bool), np.ones(ids[0].shape, bool)
  model, variables = run.sharded.model, {'params': run.params}
  inputs_BT = np.pad(ids[0], ((0, 0), (1, 0)))[:, :-1]
  length = -len(text) % W
  start = model.apply(variables, 1, method='initial_state')
  pad = lambda a: np.pad(a, ((0, 0), (0, length)))
  _, logits = jax.jit(model.apply)(
    variables, start, pad(inputs_BT), start_B, pad(mask_BT), ids[1]
  )
  expected = -jax.nn.log_softmax(logits)[0, np.arange(len(text)), ids[0][0]]
  found = run.with_source(source)
  close(found.predictions(text)['nats'], expected)
  with pytest.raises(ValueError, match='Give the source by with_source'):
    run.predictions(text)
  with pytest.raises(ValueError, match='The source has several lines'):
    run.with_source('a\nb')
  with pytest.raises(ValueError, match='no encoder, so it cannot read'):
    block_recurrent().with_source(source)


def test_memory_sources(tmp_path):
  shown = explore.memory_sources(observed.run('feedback'))
  check(shown, tmp_path)
  close(shown.data['weight'], np.full((1, 3), 1 / 3))
  with pytest.raises(ValueError, match='weighted memory'):
    explore.memory_sources(block_recurrent())


@pytest.mark.parametrize(
  'name, rows',
  [pytest.param('staircase', 8, marks=pytest.mark.slow), ('universal', 6)],
)
def test_attention_map(name, rows, tmp_path):
  run = observed.run(name)
  shown = explore.attention_map(run, TEXT)
  check(shown, tmp_path)
  assert shown.data.sizes == {'row': rows, 'back': W}
  close(shown.data['weight'].sum('back'), 1)
  assert shown.data['back'].values[0] == 0
  first = shown.data['name'].values[0]
  assert first.endswith(('pass 1', 'step 1'))
  # NaN where no token can see a key, and nowhere else.
  for name, picture in run.attention(TEXT).items():
    if name == 'token_to_token':
      seen = picture.max(['token', 'head']).values.reshape(rows, -1) > 0
      missing = np.isnan(shown.data['weight'].values)
      np.testing.assert_array_equal(missing, ~seen)
  both = {r'$\[$': run, 'b': observed.run('window')}
  compared = explore.attention_map(both, TEXT)
  check(compared, tmp_path)
  names = compared.data['name'].values.tolist()
  assert names[0].startswith(r'$\[$: ')
  assert names[rows:] == ['b: layer 0', 'b: layer 1']
  close(compared.data['weight'][:rows, -W:], shown.data['weight'])
