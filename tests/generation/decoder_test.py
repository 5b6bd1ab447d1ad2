"""Reading and generating equal teacher forcing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.generation.decoder import BlockStepper
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from tests import architectures as tiny
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import build
from tests.architectures import real

slow = lambda *names: [
  pytest.param(name, marks=pytest.mark.slow) for name in names
]
every = pytest.mark.parametrize(
  'name', ['window', 'recurrent_lstm_dual', *slow('vanilla', 'block_feedback')]
)
GREEDY = Sampler(temperature=0.0)


def teacher_forced(m, tokens_BT):
  """Logits of every next token, from one segment that holds all tokens."""
  T = tokens_BT.shape[1]
  pad = -(T + 1) % tiny.W
  inputs = jnp.pad(jnp.asarray(tokens_BT), ((0, 0), (1, pad)))
  _, logits = m.apply(m.carry, inputs, ALL, real(inputs))
  return logits[:, : T + 1]


@every
def test_greedy_text_is_what_teacher_forcing_gives(name):
  m = build(name)
  decoder = Decoder(m.model, m.params, segment=2 * tiny.W, chunk=5)
  prompt = np.asarray(m.tokens_BT)[:, : tiny.W + 3]
  state = decoder.read(decoder.start(tiny.B), prompt)
  written = [t for _, t in decoder.generate(state, 12, GREEDY, seed=0)]
  text = np.concatenate([prompt, *written], 1)
  assert text.shape == (tiny.B, tiny.W + 15)
  logits = np.array(teacher_forced(m, text[:, :-1]))
  logits[..., 0] = -np.inf
  np.testing.assert_array_equal(
    np.argmax(logits, -1)[:, prompt.shape[1] :], text[:, prompt.shape[1] :]
  )


@pytest.mark.parametrize(
  'name', ['recurrent_lstm_dual', *slow('block_feedback')]
)
@pytest.mark.parametrize(
  'cuts',
  [
    *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ((), (3,))),
    (tiny.W, 2 * tiny.W + 1),
  ],
)
def test_states_are_cleared_at_segments_only(name, cuts):
  m = build(name)
  segment = 2 * tiny.W
  tokens = np.asarray(m.tokens_BT)[:, : segment + tiny.W]

  def read(clear_state):
    """Returns the state after all tokens, read in parts."""
    model = m.model.clone(clear_state=clear_state)
    decoder = Decoder(model, m.params, segment)
    state = decoder.start(tiny.B)
    for part in np.split(tokens, cuts, 1):
      state = decoder.read(state, part)
    variables = {'params': m.params}
    return model.apply(variables, state.decode_state, method='to_segment_state')

  inputs = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  state = m.model.apply({'params': m.params}, tiny.B, method='initial_state')
  for part in np.split(inputs, [segment], 1):
    cleared = m.model.clone(clear_state=True)
    none = np.zeros(tiny.B, bool)
    state, _ = cleared.apply(
      {'params': m.params}, state, part, none, np.ones(part.shape, bool)
    )
  close = functools.partial(np.testing.assert_allclose, atol=2e-5)
  jax.tree.map(close, read(True), state)
  with pytest.raises(AssertionError):
    jax.tree.map(close, read(False), state)


@every
@pytest.mark.parametrize('cuts', [(0, 5), (8, 21), (1, 2), (19,)])
def test_text_read_in_parts_is_the_text(name, cuts):
  m = build(name)
  decoder = Decoder(m.model, m.params, segment=2 * tiny.W)
  tokens = np.asarray(m.tokens_BT)
  whole = decoder.read(decoder.start(tiny.B), tokens)
  parts = decoder.start(tiny.B)
  for part in np.split(tokens, cuts, 1):
    parts = decoder.read(parts, part)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    *(decoder.generate(r, 1, GREEDY, 0).__next__()[0] for r in (whole, parts)),
  )


def test_seeds_and_chunks():
  m = build('recurrent_fixed_skip')

  def text(chunk, seed):
    decoder = Decoder(m.model, m.params, segment=tiny.W, chunk=chunk)
    parts = decoder.generate(decoder.start(tiny.B), 14, Sampler(), seed)
    return np.concatenate([t for _, t in parts], 1)

  np.testing.assert_array_equal(text(4, seed=7), text(9, seed=7))
  assert (text(4, seed=7) != text(4, seed=8)).any()
  assert (text(4, seed=7) > 0).all()


def test_a_segment_must_be_whole_blocks():
  m = build('recurrent_fixed_skip')
  with pytest.raises(ValueError, match='8, got 12. Set SEGMENT'):
    Decoder(m.model, m.params, segment=12)


def test_a_text_is_the_same_beside_others():
  m = build('window')
  decoder = Decoder(m.model, m.params, segment=tiny.W, chunk=4)
  one = decoder.read(decoder.start(1), np.asarray(m.tokens_BT)[:1, :5])
  texts = []
  for rows in (1, 3):
    written = decoder.generate(one.repeat(rows), 6, Sampler(), seed=7)
    texts.append(np.concatenate([t for _, t in written], 1))
  np.testing.assert_array_equal(texts[0], texts[1][:1])
  assert (texts[1][0] != texts[1][1]).any()


def test_recent_tokens_are_the_last_that_were_read_or_written():
  m = build('vanilla')
  decoder = Decoder(m.model, m.params, segment=tiny.W, chunk=3)
  state = decoder.read(decoder.start(1), np.array([[7, 8, 9]]))
  np.testing.assert_array_equal(state.recent_BN, [[0, 7, 8, 9]])
  *_, (state, tokens_BT) = decoder.generate(state, 2, GREEDY, seed=0)
  np.testing.assert_array_equal(state.recent_BN[0, :2], [8, 9])
  np.testing.assert_array_equal(state.recent_BN[:, 2:], tokens_BT)


def test_steps_equal_running_the_block_again():
  for name in ('recurrent_fixed_skip', 'block_feedback'):
    m = build(name)
    fast = Decoder(m.model, m.params, segment=tiny.W)
    slow = Decoder(m.model, m.params, segment=tiny.W)
    slow._stepper = BlockStepper(m.model)
    texts = []
    for d in (fast, slow):
      written = d.generate(d.start(tiny.B), 20, Sampler(top_k=9), seed=3)
      texts.append(np.concatenate([t for _, t in written], 1))
    np.testing.assert_array_equal(*texts)


def test_every_architecture_has_steps_or_blocks():
  for architecture in ARCHITECTURES.values():
    cell = architecture.cell()
    assert cell.can_step or cell.block_length
