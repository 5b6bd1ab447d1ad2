"""The page of `meliad-rec explore`: its numbers, and in a real browser."""

import base64
import functools
import gzip
from importlib.resources import files
import json
import re
import shutil

import jax
import numpy as np
import pytest

from meliad_rec.commands import explore as command_explore
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.explore import page
from meliad_rec.explore.page import write_page
from meliad_rec.explore.shown import Shown
from meliad_rec.report.plot import new_figure
from meliad_rec.report.plot import plain
from meliad_rec.runs.trained_run import TrainedRun
from tests import command
from tests import observed
from tests import trained

# It holds a tag that would end the script, a character of three bytes, a
# control code, and two dollar signs that begin and end a wrong formula.
TEXT = 'the cat </script><b>sat</b> \u2713 on $\\[$ mat\x07 $id\n' * 3
BROWSER = shutil.which('chromium') or shutil.which('google-chrome')


def facts_of(path):
  text = path.read_text(encoding='utf-8')
  (found,) = re.findall(r'id="facts-json">(.*?)</script>', text, re.S)
  facts = json.loads(found)
  facts['columns'] = {
    name: np.frombuffer(
      gzip.decompress(base64.b64decode(c['data'])), c['dtype']
    )
    for name, c in facts['columns'].items()
  }
  return facts


@pytest.mark.slow
def test_the_numbers_are_those_of_the_run(tmp_path):
  run, out = observed.run('recurrent_fixed_skip'), tmp_path / 'page.html'
  write_page(run, TEXT, out, name='<cats\udcff>', top=3)
  facts = facts_of(out)
  columns, T = facts['columns'], len(TEXT.encode())
  assert (facts['tokens'], facts['choices']) == (T, 3)
  assert columns['text'].tobytes() == TEXT.encode()
  assert (columns['length'] == 1).all()
  found = run.predictions(TEXT, 3)
  bits = found['nats'].values / np.log(2)
  np.testing.assert_allclose(columns['nats'] / page.STEPS, bits, atol=0.04)
  np.testing.assert_array_equal(columns['rank'], np.minimum(found['rank'], 255))
  best = [facts['vocabulary'][i] for i in columns['top'][::3]]
  assert best == found['top_text'].values[:, 0].tolist()
  cleared = run.predictions(TEXT, 1, clear_every=run.block)['nats'].values
  gain = (cleared - found['nats'].values) / np.log(2)
  np.testing.assert_allclose(columns['gain'] / page.STEPS, gain, atol=0.04)
  N, L, S, D = facts['states']['shape']
  slots = run.states(TEXT)['slots'].values
  assert slots.shape[1:] == (L, S, D)
  value = columns['value'].reshape(N, L, S, D) / 127 * np.abs(slots).max()
  np.testing.assert_allclose(value, slots[:N], atol=0.02 * slots.max())
  text = out.read_text()
  assert '&lt;cats?&gt;' in text and '<cats' not in text
  assert len(re.findall('<figure>', text)) == 6  # Too short for one.


@pytest.mark.slow
@pytest.mark.parametrize('name', ['window', 'universal', 'feedback'])
def test_pages_of_other_architectures(name, tmp_path):
  run, out = observed.run(name), tmp_path / 'page.html'
  write_page(run, TEXT, out, baseline=observed.run('lstm'))
  facts = facts_of(out)
  assert (facts['states'] is None) == (name != 'feedback')
  assert 'gain' in facts['columns']
  text = out.read_text()
  assert ('in depth or pass' in text) == (name == 'universal')
  assert ('of which the memory is made' in text) == (name == 'feedback')


def test_long_texts_are_shortened_to_fit(tmp_path, monkeypatch):
  """Likely tokens are left out first, and then the end of the text."""
  run, out = observed.run('window'), tmp_path / 'page.html'
  long = ''.join(np.random.default_rng(0).choice(list('abcd\u2713 '), 4000))
  monkeypatch.setattr(page, '_figures', lambda *_: {})
  write_page(run, long, out)
  full = out.stat().st_size
  template = (files(page.__package__) / 'page.html').stat().st_size
  little = template + 2500 + (full - template) // 10
  sizes, messages = {}, []
  for limit in (full, full - 1, little):
    monkeypatch.setattr(page, 'LIMIT', limit)
    write_page(run, long, out, on_progress=messages.append)
    facts = facts_of(out)
    T, K = facts['tokens'], facts['choices']
    sizes[limit] = T, K
    assert out.stat().st_size <= limit
    columns = facts['columns']
    assert columns['text'].tobytes() == long.encode()[:T]
    assert columns['top'].shape == columns['top_nats'].shape == (T * K,)
    assert columns['nats'].shape == columns['length'].shape == (T,)
    assert ('<th>shown</th>' in out.read_text()) == (K < 5)
  whole = len(long.encode())
  assert sizes[full] == (whole, 5)
  assert sizes[full - 1] == (whole, 4)
  assert sizes[little][0] < whole and sizes[little][1] == 1
  assert f'the first {sizes[little][0]:,} of {whole:,} tokens' in messages[-1]


def test_great_losses_and_gains_are_not_clipped():
  found = observed.run('window').predictions(TEXT, 3)
  bits = np.linspace(-90, 90, found.sizes['token'])
  found['gain'] = 'token', bits
  found['nats'] = 'token', np.abs(bits) * np.log(2)
  columns = page._token_columns(TEXT.encode(), found)
  close = functools.partial(np.testing.assert_allclose, atol=0.04)
  close(columns['gain'] / page.STEPS, bits)
  close(columns['nats'] / page.STEPS, np.abs(bits))
  known = (files(page.__package__) / 'page.html').read_text()
  for column in columns.values():  # The page reads each of these types.
    assert f'{column.dtype}: ' in known.split('return new {')[1].split('}')[0]


def test_letters_are_readable_on_the_strongest_colors():
  """The contrast of WCAG 2, for each scheme and sign."""
  style = (files(page.__package__) / 'page.html').read_text()
  light, dark = (
    dict(re.findall(r'--(\w+): ([^;]+);', part))
    for part in re.findall(r':root \{(.*?)\}', style, re.S)
  )

  def luminance(rgb):
    c = np.asarray(rgb) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]

  of_hex = lambda text: np.array([*bytes.fromhex(text[1:])])
  for scheme in light, {**light, **dark}:
    ink, card = of_hex(scheme['ink']), of_hex(scheme['card'])
    for sign in 'plus', 'minus':
      color = np.array(scheme[sign].split(','), float)
      a = float(scheme['strongest'])
      low, high = sorted(map(luminance, (ink, a * color + (1 - a) * card)))
      assert (high + 0.05) / (low + 0.05) >= 4.5


def test_states_that_are_too_large_are_left_out(tmp_path, monkeypatch):
  def refuse(*_):
    raise ValueError('too large')

  run, messages = observed.run('lstm'), []
  monkeypatch.setattr(page, '_figures', lambda *_: {})
  monkeypatch.setattr(page, '_state_columns', refuse)
  write_page(run, TEXT, tmp_path / 'page.html', on_progress=messages.append)
  assert facts_of(tmp_path / 'page.html')['states'] is None
  assert messages[-1] == '  left out: too large'


def test_a_figure_that_cannot_be_drawn_is_left_out(tmp_path, monkeypatch):
  def show(title):
    figure = new_figure(2, 2)
    figure.suptitle(title)
    return Shown(None, figure)

  out, messages = tmp_path / 'page.html', []
  made = {'bad': lambda: show('$\\[$'), 'good': lambda: show(plain('$\\[$'))}
  monkeypatch.setattr(page, '_figures', lambda *_: made)
  write_page(observed.run('window'), TEXT, out, on_progress=messages.append)
  captions = re.findall('<figcaption>(.*?)<', out.read_text())
  assert captions == ['good']
  assert messages[-3:-1] == ['bad', messages[-2]]
  assert messages[-2].startswith('  left out: ')


@pytest.mark.slow
def test_command(tmp_path, capsys):
  text, out = tmp_path / 'cats.txt', tmp_path / 'page.html'
  text.write_text(TEXT)
  call = (trained.folder(), text, f'--out={out}')
  assert command.run(command_explore, *call, '--top=2') == 0
  assert f'Wrote {out}' in capsys.readouterr().out
  assert facts_of(out)['choices'] == 2


def diverged(run):
  params = jax.tree.map(lambda a: a * np.nan, run.params)
  facts = {'batch': 1, 'labels': False}
  return TrainedRun(run.sharded, params, Bytes(), run.config, facts, 0)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: observed.run('lstm', labels=True), 'to predict labels'),
    (lambda: observed.translator('window'), 'has an encoder. Use'),
    (lambda: diverged(observed.run('lstm')), 'are NaN: its training diverged'),
  ],
)
def test_runs_that_have_no_page(make, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    write_page(make(), TEXT, tmp_path / 'page.html')
  with pytest.raises(ValueError, match='only 259 tokens'):
    write_page(observed.run('lstm'), TEXT, tmp_path / 'page.html', top=260)
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['{run}'], 'Got 1 arguments'),
    (['{run}', '{text}'], 'A page needs a path'),
    (['{run}', '{text}', '--out={tmp}/page.pdf'], 'does not end in .html'),
    (['{run}', '{text}', '--out={tmp}/no/page.html'], 'no/page.html'),
    (['{run}', '{tmp}/none', '--out={tmp}/p.html'], 'cannot be read'),
    (['{tmp}', '{text}', '--out={tmp}/p.html'], 'folder of a run'),
    (['{run}', '{text}', '--out={tmp}/p.html', '--step=x'], '--step'),
  ],
)
def test_mistakes(arguments, message, tmp_path):
  (tmp_path / 'text').write_text(TEXT)
  values = {
    'run': trained.folder(),
    'text': tmp_path / 'text',
    'tmp': tmp_path,
  }
  given = [argument.format(**values) for argument in arguments]
  assert message in command.mistake(command_explore, *given)


@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_in_a_browser(scheme, tmp_path):
  """Needs Chromium and the extra `browser`; see tests/README.md."""
  sync_api = pytest.importorskip('playwright.sync_api')
  if BROWSER is None:
    pytest.skip('There is no Chromium on this machine.')
  out = tmp_path / 'page.html'
  long = TEXT * 60
  write_page(observed.run('recurrent_fixed_skip'), long, out, name='a' * 60)
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=BROWSER, args=['--no-sandbox']
    )
    tab = browser.new_page(color_scheme=scheme)
    errors, requests = [], []
    tab.on('pageerror', lambda error: errors.append(str(error)))
    tab.on('request', lambda request: requests.append(request.url))
    tab.goto(out.as_uri())
    tab.wait_for_selector('html[data-ready]')
    back = tab.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (back == 'rgb(252, 252, 250)') == (scheme == 'light')
    shown = tab.inner_text('#text').replace('\u23ce', '')
    assert shown.startswith('the cat </script><b>sat</b> \u2713 on $\\[$ mat')
    # Keys select tokens and turn pages.
    tab.focus('#text')
    tab.keyboard.press('ArrowRight')
    assert 'Token\t1\n' in tab.inner_text('#facts')
    tab.keyboard.press('PageDown')
    assert tab.input_value('#page') == '2'
    assert 'Token\t4,000\n' in tab.inner_text('#facts')
    tab.keyboard.press('ArrowLeft')
    assert tab.input_value('#page') == '1'
    tab.keyboard.press('End')
    assert tab.input_value('#page') == '3'
    tab.focus('#strip')
    tab.keyboard.press('ArrowLeft')
    assert tab.input_value('#page') == '2'
    tab.keyboard.press('Home')
    assert tab.input_value('#page') == '1'
    tab.fill('#page', '1.5')
    tab.keyboard.press('Enter')
    assert tab.input_value('#page') == '2'
    tab.focus('#text')
    tab.keyboard.press('Home')
    # The mouse does, too.
    tab.hover('#text span[data-token="6"]')
    assert 'Token\t6\n' in tab.inner_text('#facts')
    tab.click('#strip', position={'x': 1, 'y': 5})
    assert tab.input_value('#page') == '1'
    # Other colors, and other states.
    color = 'getComputedStyle(document.querySelector("#text span")).background'
    before = tab.evaluate(color)
    tab.select_option('#color', 'nats')
    assert tab.evaluate(color) != before
    pixels = 'document.getElementById("heat").toDataURL()'
    before = tab.evaluate(pixels)
    tab.focus('#border')
    tab.keyboard.press('Home')
    assert tab.evaluate(pixels) != before
    assert tab.inner_text('#where') == 'after 0 tokens'
    tab.click('#jump')
    assert 'Token\t0\n' in tab.inner_text('#facts')
    # On a telephone, only wide tables scroll sideways.
    tab.set_viewport_size({'width': 390, 'height': 800})
    assert tab.evaluate('document.documentElement.scrollWidth') == 390
    assert errors == []
    # Nothing is loaded besides the page and the pictures in it.
    assert [r for r in requests if not r.startswith('data:')] == [out.as_uri()]
    browser.close()
