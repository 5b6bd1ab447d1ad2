"""What a run counts on the device, and the figures made of it on the host.

Every figure that a run reports, and its unit.
"""

from collections.abc import Mapping
import dataclasses
import math
import re

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.metrics.figures import Figure
from meliad_rec.metrics.figures import over_steps

UNITS: Mapping[str, str] = {
  'loss_nats_per_token': 'nats/token',
  'bits_per_token': 'bits/token',
  'bits_per_byte': 'bits/byte',
  'word_perplexity': 'exp(nats/word)',
  'accuracy': 'share of tokens',
  'error': 'share of scored tokens',
  'padding_share': 'share of places',
  'tokens': 'tokens',
  'scored_tokens': 'tokens',
  'learning_rate': 'per update',
  'gradient_norm': 'L2, before clipping',
  'tokens_per_second': 'tokens/s',
  'step_seconds': 's',
  'mfu': 'share of peak FLOP/s',
  'epoch': 'passes over the data',
}
# Of figures that the library's modules sow; a number may follow the name.
SOWN_UNITS: Mapping[str, str] = {
  'halting_depth': 'steps in depth',
  'halting_depth_max': 'steps in depth',
  'halting_left': 'share of the weight',
  'halting_waste': 'steps computed by steps taken',
  'halting_p': 'probability',
  'expert_imbalance': 'nats',
}


def unit(name: str) -> str:
  """The unit of a figure; '' of one that only another's module knows."""
  known = {**SOWN_UNITS, **UNITS}
  return known.get(name) or known.get(parts(name)[0], '')


def parts(name: str) -> tuple[str, int]:
  """('halting_p', 10) of halting_p_10; 0 of a name without a number."""
  base, number = re.fullmatch(r'(.*?)(?:_(\d+))?', name).groups('0')
  return base, int(number)


class Sums(struct.PyTreeNode):
  """Counts of a step, on the device."""

  nats: jax.Array  # float32, over scored tokens.
  correct: jax.Array  # int32, scored tokens whose target was the likeliest.
  tokens: jax.Array  # int32, real tokens.
  scored: jax.Array  # int32, those of them whose target counts; of text, all.
  padding: jax.Array  # int32, places that hold none.
  gradient_norm: jax.Array  # float32.
  steps: jax.Array  # int32.
  sown: dict[str, Figure]  # What modules counted, by name.

  @classmethod
  def of_step(
    cls,
    nats_BT: jax.Array,
    correct_BT: jax.Array,
    mask_BT: jax.Array,
    scored_BT: jax.Array,
    gradient_norm: float | jax.Array = 0.0,
    sown: Mapping[str, Figure] | None = None,
  ) -> 'Sums':
    """The sums over one step.

    Args:
      nats_BT: cross-entropy; what is not scored has no influence.
      correct_BT: whether the likeliest token was the target.
      mask_BT: real tokens.
      scored_BT: those whose target counts.
      gradient_norm: before clipping; 0 in evaluation.
      sown: figures that modules sowed; None: none.

    Raises:
      ValueError: one of them is called like a figure of every run.
    """
    sown = dict(sown or {})
    for name in sown.keys() & UNITS.keys():
      raise ValueError(
        f'A module sows the figure {name}, and every run has one of that name; '
        'sow it under another.'
      )
    tokens = jnp.sum(mask_BT, dtype=jnp.int32)
    return cls(
      nats=jnp.sum(jnp.where(scored_BT, nats_BT, 0), dtype=jnp.float32),
      correct=jnp.sum(correct_BT & scored_BT, dtype=jnp.int32),
      tokens=tokens,
      scored=jnp.sum(scored_BT, dtype=jnp.int32),
      padding=mask_BT.size - tokens,
      gradient_norm=jnp.asarray(gradient_norm, jnp.float32),
      steps=jnp.ones((), jnp.int32),
      sown=sown,
    )


@dataclasses.dataclass
class Totals:
  """Counts on the host, exact over any number of steps."""

  correct: int = 0
  tokens: int = 0
  scored: int = 0
  padding: int = 0
  steps: int = 0
  _nats: list[float] = dataclasses.field(default_factory=list)
  _norms: list[float] = dataclasses.field(default_factory=list)
  _sown: dict[str, list[Figure]] = dataclasses.field(default_factory=dict)

  def add(self, sums: Sums) -> None:
    """Reads the sums from the device, waiting for them, and adds them."""
    sums = jax.device_get(sums)
    self.correct += int(sums.correct)
    self.tokens += int(sums.tokens)
    self.scored += int(sums.scored)
    self.padding += int(sums.padding)
    self.steps += int(sums.steps)
    self._nats.append(float(sums.nats))
    self._norms.append(float(sums.gradient_norm))
    for name, figure in sums.sown.items():
      self._sown.setdefault(name, []).append(figure)

  @property
  def nats(self) -> float:
    """Correctly rounded sum, whatever the number and order of the terms."""
    return math.fsum(self._nats)

  @property
  def gradient_norm(self) -> float:
    """Mean over steps."""
    return math.fsum(self._norms) / self.steps

  @property
  def sown(self) -> dict[str, float]:
    """Figures that modules sowed, but means of nothing, in natural order."""
    values = {
      name: over_steps(self._sown[name])
      for name in sorted(self._sown, key=parts)
    }
    return {name: v for name, v in values.items() if v is not None}


def quality(
  totals: Totals, bytes_: float | None = None, words: int | None = None
) -> dict[str, float]:
  """Figures of how well the scored tokens were predicted.

  Args:
    totals: at least one scored token.
    bytes_: bytes that the counted tokens stand for; while training, tokens
      times the data's bytes per token. None or 0: no bits per byte.
    words: words that the counted tokens stand for, split at whitespace as
      PG19's published counts are. None or 0: no word-level perplexity.

  Raises:
    ValueError: no token was scored.
  """
  if not totals.scored:
    raise ValueError(
      f'No scored token was counted in {totals.steps} steps; figures need one. '
      'Set the task to a split that holds text, or labels.'
    )
  nats, bits = totals.nats, totals.nats / math.log(2)
  figures = {
    'loss_nats_per_token': nats / totals.scored,
    'bits_per_token': bits / totals.scored,
    'accuracy': totals.correct / totals.scored,
    'padding_share': totals.padding / (totals.padding + totals.tokens),
    'tokens': totals.tokens,
  }
  if bytes_:
    figures['bits_per_byte'] = bits / bytes_
  if words:
    figures['word_perplexity'] = _exp(nats / words)
  return figures


def label_quality(totals: Totals) -> dict[str, float]:
  """Figures of how well labels were predicted, which stand for no text.

  Args:
    totals: at least one scored token.

  Raises:
    ValueError: no token was scored.
  """
  figures = quality(totals)
  figures['error'] = 1 - figures['accuracy']
  figures['scored_tokens'] = totals.scored
  return figures


def speed(
  totals: Totals,
  seconds: float,
  flops_per_place: float | None = None,
  peak_flops: float | None = None,
) -> dict[str, float]:
  """Figures of how fast the counted steps were.

  Args:
    totals: at least one step.
    seconds: wall-clock time of the counted steps.
    flops_per_place: model FLOPs, forward and backward, for a token or for a
      padded place; what remat computes again is not counted. None: no mfu.
    peak_flops: FLOP/s of all devices together; see chips.py. None: no mfu.
  """
  figures = {
    'tokens_per_second': totals.tokens / seconds,
    'step_seconds': seconds / totals.steps,
  }
  if flops_per_place is not None and peak_flops is not None:
    places = totals.tokens + totals.padding
    figures['mfu'] = flops_per_place * places / seconds / peak_flops
  return figures


def _exp(x):
  try:
    return math.exp(x)
  except OverflowError:
    return math.inf
