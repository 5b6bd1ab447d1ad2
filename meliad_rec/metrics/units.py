"""Every figure that a run reports, and its unit."""

from collections.abc import Mapping
import re

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
