"""Reading and generating equal teacher forcing."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import BlockStepper
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from meliad_rec.models.model import Model
from tests import architectures as tiny
from tests.architectures import ALL
from tests.architectures import ARCHITECTURES
from tests.architectures import build
from tests.architectures import NONE

B, T, W = tiny.B, tiny.T, tiny.W
SEGMENT = 2 * W
GREEDY = Sampler(temperature=0.0)
close = functools.partial(np.testing.assert_allclose, atol=2e-5)


def of(*fast, slow=()):
  marked = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
  return pytest.mark.parametrize('name', [*fast, *marked])


@functools.cache
def decoder(name, chunk=5, **changes):
  m = build(name)
  return Decoder(m.model.clone(**changes), m.params, SEGMENT, chunk)


def written(decoder, state, count, sampler, seed=0):
  """Returns the tokens generated after a state."""
  parts = decoder.generate(state, count, sampler, seed)
  return np.concatenate([tokens_BC for _, tokens_BC in parts], 1)


@of('window', slow=['recurrent_lstm_dual', 'vanilla', 'block_feedback'])
def test_read_and_greedy_text_are_what_teacher_forcing_gives(name):
  m, made = build(name), decoder(name)
  tokens_BT = np.asarray(m.tokens_BT)
  prompt = tokens_BT[:, : W + 3]
  state = made.read(made.start(B), prompt)
  text = np.hstack([prompt, written(made, state, T - W - 3, GREEDY)])
  inputs = np.pad(text, ((0, 0), (1, 0)))[:, :T]
  _, logits = m.apply(m.carry, inputs, ALL, inputs >= 0)
  likeliest = 1 + np.argmax(np.asarray(logits)[..., 1:], -1)
  np.testing.assert_array_equal(likeliest[:, W + 3 :], text[:, W + 3 :])
  # In any parts, it is the same text.
  after = lambda state: next(made.generate(state, 1, GREEDY, 0))[0]
  whole = after(made.read(made.start(B), tokens_BT))
  for cuts in (0, 5), (8, 21), (1, 2), (19,):
    state = made.start(B)
    for part in np.split(tokens_BT, cuts, 1):
      state = made.read(state, part)
    jax.tree.map(close, after(state), whole)


@of(
  'recurrent_fixed_skip',
  slow=['recurrent_lstm_dual', 'feedback', 'block_feedback', 'lstm'],
)
def test_a_search_scores_as_teacher_forcing_does(name):
  m, made = build(name), decoder(name)
  prompt_BT = np.asarray(m.tokens_BT)[:, : W - 2]
  state = made.read(made.start(B), prompt_BT)
  greedy = written(made, state, 7, GREEDY)
  found = made.search(state, 7, BeamSearch(1))
  np.testing.assert_array_equal(found.tokens_BKL[:, 0], greedy)
  found = made.search(state, 7, BeamSearch(3, alpha=0.0))
  for k in range(3):
    text_BT = np.hstack([prompt_BT, found.tokens_BKL[:, k]])
    text_BT = np.pad(text_BT, ((0, 0), (0, T - text_BT.shape[1])))
    inputs_BT = np.pad(text_BT, ((0, 0), (1, 0)))[:, :T]
    _, logits_BTV = m.apply(m.carry, inputs_BT, ALL, inputs_BT >= 0)
    log_p_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    log_p_BT = np.take_along_axis(log_p_BTV, text_BT[..., None], -1)[..., 0]
    close(log_p_BT[:, W - 2 : W + 5].sum(1), found.score_BK[:, k])


@of('recurrent_fixed_skip', slow=['recurrent_lstm_dual', 'block_feedback'])
def test_states_are_cleared_at_segments_only(name):
  m = build(name)
  tokens = np.asarray(m.tokens_BT)

  def read(clear_state, cuts):
    """Returns the state after all tokens, read in parts."""
    made = decoder(name, clear_state=clear_state)
    state = made.start(B)
    for part in np.split(tokens, cuts, 1):
      state = made.read(state, part)
    variables = {'params': m.params}
    return m.model.apply(
      variables, state.decode_state, method='to_segment_state'
    )

  inputs = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  cleared = jax.jit(m.model.clone(clear_state=True).apply)
  state, start_B = m.carry, ALL
  for part in np.split(inputs, [SEGMENT], 1):
    state, _ = cleared({'params': m.params}, state, part, start_B, part >= 0)
    start_B = NONE
  for cuts in (), (3,), (W, SEGMENT + 1):
    jax.tree.map(close, read(True, cuts), state)
  with pytest.raises(AssertionError):
    jax.tree.map(close, read(False, ()), state)


def test_texts_depend_on_seeds_but_not_on_chunks_or_rows():
  made, other = decoder('window'), decoder('window', 9)
  tokens = written(made, made.start(B), 14, Sampler(), seed=7)
  again = written(other, made.start(B), 14, Sampler(), seed=7)
  np.testing.assert_array_equal(tokens, again)
  one = written(made, made.start(1), 14, Sampler(), seed=7)
  np.testing.assert_array_equal(tokens[:1], one)
  repeated = written(made, made.start(1).repeat(B), 14, Sampler(), seed=7)
  np.testing.assert_array_equal(tokens, repeated)
  assert (tokens != written(made, made.start(B), 14, Sampler(), 8)).any()
  assert (tokens[0] != tokens[1]).any()
  assert (tokens > 0).all()


def test_recent_tokens_are_the_last_that_were_read_or_written():
  made = decoder('window')
  state = made.read(made.start(B), np.tile([[7, 8, 9]], (B, 1)))
  np.testing.assert_array_equal(state.recent_BN, [[0, 7, 8, 9]] * B)
  *_, (state, tokens_BT) = made.generate(state, 2, GREEDY, seed=0)
  np.testing.assert_array_equal(state.recent_BN[:, :2], [[8, 9]] * B)
  np.testing.assert_array_equal(state.recent_BN[:, 2:], tokens_BT)


@of(slow=['block_feedback', 'recurrent_fixed_skip'])
def test_steps_equal_running_the_block_again(name):
  m = build(name)
  by_blocks = Decoder(m.model, m.params, SEGMENT, 5)
  by_blocks._stepper = BlockStepper(m.model)
  texts = [
    written(made, made.start(B), 20, Sampler(top_k=9), seed=3)
    for made in (decoder(name), by_blocks)
  ]
  np.testing.assert_array_equal(*texts)


def test_every_architecture_has_steps_or_blocks_that_fit_a_segment():
  for architecture in ARCHITECTURES.values():
    cell = architecture.cell()
    assert cell.can_step or cell.block_length
    if cell.block_length:
      with pytest.raises(ValueError, match=', got 9. Set SEGMENT'):
        Decoder(Model(tiny.V, cell, tiny.D), {}, segment=9)
