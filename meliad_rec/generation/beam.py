"""Beam search over a state of any shape, for any function that reads a token.

The state of the hypotheses has leaves [B, K, ...], and is reordered within its
row, so that rows sharded over devices never leave them.

Letters of this file: K hypotheses of a row, N candidates of a row, L tokens of
the longest output, I places in a hypothesis at which a repetition may begin.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.config.values import check_count
from meliad_rec.config.values import is_number

State = Any
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]

PENALTIES = {
  'power': lambda length: length,
  'gnmt': lambda length: (5 + length) / 6,
}


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """Settings of a search for the most likely hypotheses.

  The score of a hypothesis is its log-probability in nats, divided by
  f(length)**alpha, where the length counts the token that ends it.

  Attributes:
    beams: number of hypotheses of a row, at least 1. With one, the search is
      greedy.
    alpha: exponent of the penalty on short hypotheses, at least 0. With 0, the
      score is the log-probability.
    penalty: 'power', where f(n) = n (fairseq), or 'gnmt', where f(n) =
      (5 + n) / 6 (Wu et al. 2016, equation 14, without coverage). The same
      alpha means something else in each.
    no_repeat: no sequence of this many tokens occurs twice in a hypothesis
      (Paulus et al. 2017, section 2.5, with 3). If no hypothesis of a row can
      go on, all end where they are. None allows repetition.

  Raises:
    ValueError: a setting is outside its range.
  """

  beams: int = 5
  alpha: float = 1.0
  penalty: str = 'power'
  no_repeat: int | None = None

  def __post_init__(self):
    check_count('beams', self.beams, 1)
    if self.no_repeat is not None:
      check_count('no_repeat', self.no_repeat, 1)
    if self.penalty not in PENALTIES:
      raise ValueError(
        f'penalty must be one of {", ".join(PENALTIES)}, got {self.penalty!r}.'
      )
    # Only then is the best score that a live hypothesis can reach that of the
    # longest length, which the search relies on to stop.
    if not (is_number(self.alpha) and 0 <= self.alpha < float('inf')):
      raise ValueError(
        f'alpha must be a finite number of at least 0, got {self.alpha!r}.'
      )

  def score(self, log_p, length):
    """Returns the score of hypotheses of this many tokens."""
    return log_p / PENALTIES[self.penalty](length) ** self.alpha

  def __call__(
    self,
    step: Step,
    state: State,
    first_B: jax.Array,
    length: int,
    end: int | None,
  ) -> 'Hypotheses':
    """Returns hypotheses of each row, the best first.

    The first is the best that the beams can find; the others are the best that
    were found before the search stopped. A hypothesis ends where `end` is among
    the `beams` most likely extensions of the row, as in fairseq. A row is done
    when no unfinished hypothesis could still become the best; with one beam,
    when its hypothesis has ended. t5x goes on until none could become one of
    the best K. fairseq also stops when `beams` hypotheses have ended, and so
    misses a longer one that is far more likely. If no hypothesis of a row has
    ended, its unfinished hypotheses of `length` tokens are returned. Rows do
    not influence each other.

    Args:
      step: function of a state and tokens_BK; returns the state after reading
        them, and logits_BKV of the next tokens.
      state: leaves [B, K, ...], the same for all K; a leaf without axes is
        shared by all rows.
      first_B: token that the first step reads in each row.
      length: longest hypothesis, in tokens, at least 1.
      end: id of the token that ends a hypothesis. None: only `length` does. Id
        0, padding, never occurs.
    """
    check_count('length', length, 1)
    end = -1 if end is None else end
    B, K = len(first_B), self.beams
    none_BK = jnp.full((B, K), -jnp.inf)
    zeros_BKL = jnp.zeros((B, K, length), jnp.int32)
    search = _Search(
      t=jnp.int32(0),
      state=state,
      last_BK=jnp.tile(first_B[:, None], K),
      live=Hypotheses(none_BK.at[:, 0].set(0), zeros_BKL),
      ended=Hypotheses(none_BK, zeros_BKL),
      done_B=jnp.zeros(B, bool),
    )

    def advance(search):
      return self._advance(step, search, end)

    def unfinished(search):
      return (search.t < length) & ~jnp.all(search.done_B)

    search = jax.lax.while_loop(unfinished, advance, search)
    any_B = jnp.isfinite(search.ended.score_BK[:, 0])
    live = search.live.replace(
      score_BK=self.score(search.live.score_BK, length)
    )
    return jax.tree.map(
      lambda ended, live: jax.vmap(jnp.where)(any_B, ended, live),
      search.ended,
      live,
    )

  def _advance(self, step: Step, search: '_Search', end: int) -> '_Search':
    """Returns the search after one more token of each hypothesis."""
    t, live, K = search.t, search.live, self.beams
    state, logits_BKV = step(search.state, search.last_BK)
    log_p_BKV = jax.nn.log_softmax(logits_BKV.astype(jnp.float32), -1)
    log_p_BKV = log_p_BKV.at[..., 0].set(-jnp.inf)
    if self.no_repeat is not None:
      repeats_BKV = repeats(
        live.tokens_BKL, t, self.no_repeat, log_p_BKV.shape[-1]
      )
      log_p_BKV = jnp.where(repeats_BKV, -jnp.inf, log_p_BKV)
    B, _, V = log_p_BKV.shape
    all_BN = (live.score_BK[..., None] + log_p_BKV).reshape(B, K * V)
    # A hypothesis has one extension that ends it, so K of these go on.
    top_BN, at_BN = top(all_BN, 2 * K)
    from_BN, token_BN = at_BN // V, at_BN % V
    tokens_BNL = take(live.tokens_BKL, from_BN).at[:, :, t].set(token_BN)
    ends_BN = token_BN == end

    ended_BK = jnp.where(ends_BN, top_BN, -jnp.inf)[:, :K]
    new = Hypotheses(self.score(ended_BK, t + 1), tokens_BNL[:, :K])
    ended = jax.tree.map(
      lambda old, new: jax.vmap(jnp.where)(search.done_B, old, new),
      search.ended,
      search.ended.best_with(new),
    )

    if self.no_repeat is not None:  # Every extension may be a repetition.
      stuck_B = jnp.isneginf(jnp.maximum(top_BN[:, 0], ended.score_BK[:, 0]))
      whole_BK = self.score(live.score_BK, jnp.maximum(t, 1))
      ended = jax.tree.map(
        lambda whole, ended: jax.vmap(jnp.where)(stuck_B, whole, ended),
        live.replace(score_BK=whole_BK),
        ended,
      )

    score_BK, kept_BK = top(jnp.where(ends_BN, -jnp.inf, top_BN), K)
    live = Hypotheses(score_BK, take(tokens_BNL, kept_BK))
    from_BK = take(from_BN, kept_BK)
    L = tokens_BNL.shape[-1]
    beaten_B = ended.score_BK[:, 0] >= self.score(score_BK[:, 0], L)
    # With one beam the search is greedy: it stops when its hypothesis ends,
    # since any continuation is less likely.
    greedy_B = (K == 1) & jnp.isfinite(ended.score_BK[:, 0])
    return _Search(
      t=t + 1,
      state=jax.tree.map(
        lambda a: take(a, from_BK) if jnp.ndim(a) else a, state
      ),
      last_BK=take(token_BN, kept_BK),
      live=live,
      ended=ended,
      done_B=search.done_B | beaten_B | greedy_B,
    )


class Hypotheses(struct.PyTreeNode):
  """Hypotheses of each row, the best first."""

  score_BK: jax.Array  # float32, -inf where there is none.
  tokens_BKL: jax.Array  # int32 with the token that ends them, then 0.

  def best_with(self, other: 'Hypotheses') -> 'Hypotheses':
    """Returns the K best of both."""
    both = jax.tree.map(lambda *a: jnp.concatenate(a, 1), self, other)
    score_BK, at_BK = top(both.score_BK, self.score_BK.shape[1])
    return Hypotheses(score_BK, take(both.tokens_BKL, at_BK))


class _Search(struct.PyTreeNode):
  """A search after t tokens."""

  t: jax.Array
  state: State  # After all except the last token of each hypothesis.
  last_BK: jax.Array
  live: Hypotheses  # Not ended; their scores are log-probabilities.
  ended: Hypotheses
  done_B: jax.Array  # Whether nothing changes in a row any more.


def take(a_BK: jax.Array, at_BN: jax.Array) -> jax.Array:
  """Returns a[b, at[b, n]]: [B, N, ...].

  Devices that share the rows exchange nothing for this, as they would for an
  index into all rows at once.
  """
  return jax.vmap(lambda a_K, at_N: jnp.take(a_K, at_N, 0))(a_BK, at_BN)


def top(a_BN: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the greatest values of each row, and their indices: [B, count].

  Equals lax.top_k, except that an index may occur twice if its value is -inf.
  Over a mesh, XLA gathers all rows for lax.top_k, but not for this.
  """

  def take_one(a_BN, _):
    at_B = jnp.argmax(a_BN, -1)
    is_taken_BN = jnp.arange(a_BN.shape[-1]) == at_B[:, None]
    return jnp.where(is_taken_BN, -jnp.inf, a_BN), (jnp.max(a_BN, -1), at_B)

  _, (value_NB, at_NB) = jax.lax.scan(take_one, a_BN, length=count)
  return value_NB.T, at_NB.T


def repeats(
  tokens_BKL: jax.Array, t: jax.Array, size: int, vocab: int
) -> jax.Array:
  """Returns which next tokens would repeat `size` tokens in a row: [B, K, V].

  Args:
    tokens_BKL: hypotheses, of which the first t tokens count.
    t: number of tokens of each hypothesis.
    size: length of a repeated sequence.
    vocab: number of ids.
  """
  starts = tokens_BKL.shape[-1] - size + 1
  if starts <= 0:  # Too short to repeat anything.
    return jnp.zeros((*tokens_BKL.shape[:2], vocab), bool)
  same_BKI = jnp.arange(starts) + size <= t
  for i in range(size - 1):
    last_BK1 = jnp.take(tokens_BKL, t - size + 1 + i, -1, mode='clip')[
      ..., None
    ]
    same_BKI = same_BKI & (tokens_BKL[..., i : i + starts] == last_BK1)
  next_BKI = tokens_BKL[..., size - 1 :]
  is_next_BKIV = next_BKI[..., None] == jnp.arange(vocab)
  return jnp.any(is_next_BKIV & same_BKI[..., None], -2)
