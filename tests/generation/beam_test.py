"""Beam search equals greedy and exhaustive search, on a recurrent toy model."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.beam import repeats

B, V, L, D = 3, 5, 4, 6
END = 1
RNG = np.random.default_rng(0)
W_DD, E_VD, W_DV = (
  RNG.normal(size=shape) for shape in ((D, D), (V, D), (D, V))
)
H_BD, FIRST_B = RNG.normal(size=(B, D)), np.array([2, 3, 4])


def step(state, tokens_BK):
  """Reads a token of each hypothesis; a scalar counts the tokens."""
  h_BKD, count = state
  h_BKD = jnp.tanh(h_BKD @ W_DD + jnp.asarray(E_VD)[tokens_BK] + 0.1 * count)
  return (h_BKD, count + 1), 2 * h_BKD @ W_DV


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def search(beam, h_BD, first_B, length=L, end=END):
  state = jnp.repeat(h_BD[:, None], beam.beams, 1), jnp.int32(0)
  return beam(step, state, first_B, length, end)


def log_p(b, tokens):
  """Returns ln p of each token after those before it, in NumPy."""
  h_D, found = H_BD[b], []
  for t, (before, token) in enumerate(
    itertools.pairwise([FIRST_B[b], *tokens])
  ):
    h_D = np.tanh(h_D @ W_DD + E_VD[before] + 0.1 * t)
    logits_V = 2 * h_D @ W_DV
    found.append(logits_V[token] - np.log(np.sum(np.exp(logits_V))))
  return np.array(found)


def ended(tokens_L):
  """Returns the tokens of a hypothesis, without those after its end."""
  return [int(i) for i in tokens_L if i]


def score(b, tokens, alpha, penalty):
  n = len(tokens) if penalty == 'power' else (5 + len(tokens)) / 6
  return np.sum(log_p(b, tokens)) / n**alpha


def all_ended():
  """Yields each hypothesis that ends within L tokens."""
  for n in range(L):
    for words in itertools.product(range(2, V), repeat=n):
      yield [*words, END]


SETTINGS = [
  *(('power', alpha) for alpha in (0.0, 0.6, 1.0)),
  *(('gnmt', alpha) for alpha in (0.6, 1.0)),
]


@pytest.mark.parametrize(('penalty', 'alpha'), SETTINGS)
def test_at_full_width_it_is_exhaustive(penalty, alpha):
  width = (V - 2) ** (L - 1) * (V - 1)
  found = search(BeamSearch(width, alpha, penalty), H_BD, FIRST_B)
  for b in range(B):
    every = {tuple(t): score(b, t, alpha, penalty) for t in all_ended()}
    best = max(every, key=every.get)
    assert ended(found.tokens_BKL[b, 0]) == list(best)
    np.testing.assert_allclose(found.score_BK[b, 0], every[best], atol=1e-5)


@pytest.mark.parametrize('alpha', [0.0, 2.0])
def test_one_beam_is_greedy(alpha):
  found = search(BeamSearch(1, alpha), H_BD, FIRST_B, 9)
  lengths = set()
  for b in range(B):
    tokens = []
    while len(tokens) < 9 and END not in tokens:
      nexts = [log_p(b, [*tokens, i])[-1] for i in range(1, V)]
      tokens.append(1 + int(np.argmax(nexts)))
    lengths.add(len(tokens))
    assert ended(found.tokens_BKL[b, 0]) == tokens
  assert len(lengths) > 1  # A row that is done waits for others.


@pytest.mark.parametrize('beams', [1, 3])
def test_what_cannot_go_on_without_repetition_ends(beams):
  """Each of the four tokens can occur once."""
  beam = BeamSearch(beams, 0.6, no_repeat=1)
  found = search(beam, H_BD, FIRST_B, 9, None)
  assert np.isfinite(found.score_BK[:, 0]).all()
  for b in range(B):
    tokens = ended(found.tokens_BKL[b, 0])
    assert sorted(tokens) == [1, 2, 3, 4]
    want = score(b, tokens, 0.6, 'power')
    np.testing.assert_allclose(found.score_BK[b, 0], want, atol=1e-5)


def test_scores_are_those_of_teacher_forcing():
  found = search(BeamSearch(3, 0.6), H_BD, FIRST_B, 9)
  score_BK = np.asarray(found.score_BK)
  assert np.all(score_BK[:, :-1] >= score_BK[:, 1:])
  assert np.sum(np.isfinite(score_BK)) > B
  for b, k in np.argwhere(np.isfinite(score_BK)):
    want = score(b, ended(found.tokens_BKL[b, k]), 0.6, 'power')
    np.testing.assert_allclose(score_BK[b, k], want, atol=1e-5)


def test_without_an_end_all_have_the_longest_length():
  found = search(BeamSearch(3, 0.6), H_BD, FIRST_B, 9, None)
  assert np.all(found.tokens_BKL > 0)
  for b, k in np.ndindex(B, 3):
    want = score(b, ended(found.tokens_BKL[b, k]), 0.6, 'power')
    np.testing.assert_allclose(found.score_BK[b, k], want, atol=1e-5)


def test_rows_do_not_depend_on_each_other():
  beam, order = BeamSearch(3, 0.6), np.array([2, 0, 1])
  found = search(beam, H_BD, FIRST_B, 9)
  permuted = search(beam, H_BD[order], FIRST_B[order], 9)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a[order], b, atol=1e-6),
    found,
    permuted,
  )


def test_no_run_of_three_occurs_twice():
  found = search(BeamSearch(4, 1.0, no_repeat=3), H_BD, FIRST_B, 20, None)
  free = search(BeamSearch(4, 1.0), H_BD, FIRST_B, 20, None)

  def twice(tokens_L):
    runs = list(zip(*(tokens_L[i:].tolist() for i in range(3)), strict=False))
    return len(set(runs)) < len(runs)

  rows = lambda found: np.asarray(found.tokens_BKL).reshape(-1, 20)
  assert not any(map(twice, rows(found)))
  assert any(map(twice, rows(free)))


@pytest.mark.parametrize('size', [1, 2, 3])
def test_repeats_are_those_found_by_comparing_all_runs(size):
  tokens_BKL = RNG.integers(1, V, (100, 2, 9))
  for t in (0, 2, 6, 9):
    got = np.asarray(repeats(jnp.asarray(tokens_BKL), jnp.int32(t), size, V))
    for b, k, v in np.ndindex(100, 2, V):
      line = [*tokens_BKL[b, k, :t].tolist(), v]
      runs = [line[i : i + size] for i in range(len(line) - size + 1)]
      assert got[b, k, v] == (runs[-1:] != [] and runs[-1] in runs[:-1])


def test_devices_gather_no_rows():
  mesh = partition.make_mesh()
  rows = NamedSharding(mesh, PartitionSpec(partition.BATCH_AXES))
  shapes = (
    jax.ShapeDtypeStruct((8, D), jnp.float32),
    jax.ShapeDtypeStruct((8,), jnp.int32),
  )
  beam = BeamSearch(3, 0.6)
  with jax.set_mesh(mesh):
    compiled = jax.jit(
      functools.partial(search, beam), in_shardings=rows, out_shardings=rows
    )
    text = compiled.lower(*shapes).compile().as_text()
  assert 'while' in text
  assert 'all-gather' not in text


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'beams': 0}, 'beams must be'),
    ({'alpha': -1.0}, 'alpha must be'),
    ({'alpha': None}, 'alpha must be .* got None'),
    ({'penalty': 'none'}, 'penalty must be one of power, gnmt'),
    ({'no_repeat': 0}, 'no_repeat must be'),
  ],
)
def test_settings_are_checked(settings, message):
  with pytest.raises(ValueError, match=message):
    BeamSearch(**settings)


def test_short_endings_do_not_hide_a_longer_and_likelier_hypothesis():
  """At each step the end is second best; only the fifth token ends surely."""

  def step(state, tokens_BK):
    sure_BK = state >= 4
    end_BK = jnp.where(sure_BK, 0.0, -6.0)
    go_on_BK = jnp.where(sure_BK, -20.0, 0.0)
    worse_BK = jnp.full(tokens_BK.shape, -9.0)
    never_BK = jnp.full(tokens_BK.shape, -99.0)
    logits = [never_BK, end_BK, go_on_BK, worse_BK]
    return state + 1, jnp.stack(logits, -1)

  state = jnp.zeros((1, 2), jnp.int32)
  found = BeamSearch(2, 0.0)(step, state, jnp.zeros(1, jnp.int32), 9, 1)
  assert found.tokens_BKL[0, 0].tolist() == [2, 2, 2, 2, 1, 0, 0, 0, 0]
