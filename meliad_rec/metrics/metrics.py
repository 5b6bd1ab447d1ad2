"""Metrics that a compiled step counts on the devices.

`Sums` holds the counts of one training or evaluation step: its tokens, its
loss, and the metrics that modules `sow`. JAX traces everything here, except the
names and units. In totals.py, the host adds up the Sums of several steps and
computes the reported numbers.
"""

from collections.abc import Mapping
import re
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

# Units of the metrics that every run reports.
UNITS: Mapping[str, str] = {
  'loss_nats_per_token': 'nats/token',
  'bits_per_token': 'bits/token',
  'bits_per_byte': 'bits/byte',
  'perplexity': 'per token',
  'word_perplexity': 'per word, split at whitespace',
  'accuracy': 'share of tokens',
  'sequence_accuracy': 'share of documents without an error',
  'error': 'share of scored tokens',
  'padding_share': 'share of positions',
  'tokens': 'tokens',
  'scored_tokens': 'tokens',
  'mean_return': 'sum of the rewards of an episode',
  'success': 'share of episodes with a return above 0',
  'episode_steps': 'steps',
  'learning_rate': 'per update',
  'gradient_norm': 'L2, before clipping',
  'tokens_per_second': 'tokens/s',
  'step_seconds': 's',
  'mfu': 'share of peak FLOP/s',
  'epoch': 'passes over the data',
}
# Units of metrics that modules of this library sow; a number may follow a name.
SOWN_UNITS: Mapping[str, str] = {
  'halting_depth': 'steps in depth',
  'halting_depth_max': 'steps in depth',
  'halting_remainder': 'share of the weight',
  'halting_waste': 'steps computed / steps taken',
  'halting_p': 'probability',
  'expert_imbalance': 'nats',
  'state_change': 'RMS difference of blocks / RMS',
  'slot_difference': 'RMS difference from the mean slot / RMS',
  'slot_entropy': 'share of log(slots)',
  'gate': 'weight of the old state',
  'gate_spread': 'standard deviation',
  'memory_weight': 'share of attention',
  'row_difference': 'RMS difference of rows / RMS',
  'cleared_cost': 'nats/token',
  'shuffled_cost': 'nats/token',
  'reward': 'per step',
  'entropy': 'nats',
}


# Metrics that `label` describes by other words than their names.
_WORDS = {
  'loss_nats_per_token': 'loss',
  'word_perplexity': 'perplexity',
  'step_seconds': 'time of a training step',
  'mfu': 'model FLOPs utilization',
}


def label(name: str) -> str:
  """Returns a metric and its unit in words, such as 'loss (nats per token)'."""
  words = _WORDS.get(name, name.replace('_', ' '))
  of = unit(name).replace(' / ', '/').replace('/', ' per ')
  return f'{words} ({of})' if of and of != words else words


def unit(name: str) -> str:
  """Returns the unit of a metric; '' if UNITS and SOWN_UNITS lack it."""
  known = {**SOWN_UNITS, **UNITS}
  return known.get(name) or known.get(split_name(name)[0], '')


# Metrics that can select the best checkpoint, and their best value.
BEST = {
  'bits_per_byte': 'lowest',
  'bits_per_token': 'lowest',
  'loss_nats_per_token': 'lowest',
  'perplexity': 'lowest',
  'word_perplexity': 'lowest',
  'accuracy': 'highest',
  'sequence_accuracy': 'highest',
  'error': 'lowest',
  'mean_return': 'highest',
  'success': 'highest',
}


def split_name(name: str) -> tuple[str, int | None]:
  """Splits a name such as 'halting_p_10' into ('halting_p', 10).

  The number is None if the name does not end in a number.
  """
  base, number = re.fullmatch(r'(.*?)(?:(?:^|_)(\d+))?', name).groups()
  return base, None if number is None else int(number)


COLLECTION = 'metrics'  # The flax collection that modules sow into.


class MeanMetric(struct.PyTreeNode):
  """A mean or a share: the sum of `total` divided by the sum of `count`."""

  total: jax.Array
  count: jax.Array


class MaxMetric(struct.PyTreeNode):
  """A maximum of values."""

  value: jax.Array


Metric = MeanMetric | MaxMetric


def sow(module: nn.Module, name: str, metric: Metric) -> None:
  """Sows a metric in COLLECTION; does nothing if COLLECTION is immutable.

  A module sows each time it runs. All metrics sown under one name in a step (by
  several modules, a scan or a stack of layers) are combined into one metric.

  Args:
    module: a bound module.
    name: name of the metric in reports.
    metric: a metric whose arrays have any shape and numeric dtype. `collect`
      reduces them to scalars.
  """
  # Not over rows, which would take communication between devices in each
  # iteration of a scan.
  metric = _reduce(metric, lambda a: tuple(range(1, a.ndim)))
  module.sow(COLLECTION, name, jax.lax.stop_gradient(metric))


def collect(sown: Any) -> dict[str, Metric]:
  """Returns {name: metric} of all that one step sowed.

  The values in the metrics are float32 scalars.

  Args:
    sown: the collection COLLECTION as `apply` returned it; {} if nothing was
      sown.

  Raises:
    ValueError: a name is sown both as a MeanMetric and as a MaxMetric.
  """
  by_name = {}
  is_metric = lambda node: isinstance(node, Metric)
  for path, metric in jax.tree.leaves_with_path(sown, is_leaf=is_metric):
    # Flax keeps a tuple under each name, with an entry for each call.
    by_name.setdefault(path[-2].key, []).append(_reduce(metric))
  return {name: _combine(name, metrics) for name, metrics in by_name.items()}


class Sums(struct.PyTreeNode):
  """Counts of one training or evaluation step, over the whole batch."""

  nats: jax.Array  # float32, sum of the loss over scored tokens.
  correct: jax.Array  # int32, scored tokens predicted correctly.
  tokens: jax.Array  # int32, real tokens.
  scored: jax.Array  # int32, tokens whose target counts; all tokens of text.
  padding: jax.Array  # int32, positions without a token.
  gradient_norm: jax.Array  # float32, before clipping.
  steps: jax.Array  # int32, always 1.
  sown: dict[str, Metric]  # Metrics that modules sowed.

  @classmethod
  def of_step(
    cls,
    nats_BT: jax.Array,
    correct_BT: jax.Array,
    mask_BT: jax.Array,
    scored_BT: jax.Array,
    gradient_norm: float | jax.Array = 0.0,
    sown: Mapping[str, Metric] | None = None,
  ) -> 'Sums':
    """Returns the counts of one step.

    Args:
      nats_BT: cross-entropy in nats; values at unscored tokens are ignored.
      correct_BT: bool, whether the most likely token is the target.
      mask_BT: bool, True at tokens and False at padding.
      scored_BT: bool, True at tokens whose target counts toward the loss.
      gradient_norm: L2 norm of the gradient before clipping; 0 in evaluation.
      sown: metrics from `collect`. None if nothing was sown.

    Raises:
      ValueError: a module sowed a metric under a name of UNITS.
    """
    sown = dict(sown or {})
    for name in sown.keys() & UNITS.keys():
      raise ValueError(
        f'A module sows the metric {name}, but every run reports a metric of '
        'that name. Sow it under another name.'
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


def _reduce(metric, axes=lambda a: None):
  """Returns a metric whose arrays are reduced over some axes, as float32.

  Args:
    metric: a MeanMetric, whose arrays are summed; or a MaxMetric.
    axes: function of an array that returns the axes, or None for all axes.
  """
  reduce = jnp.max if isinstance(metric, MaxMetric) else jnp.sum

  def of(a):
    a = jnp.asarray(a, jnp.float32)
    return reduce(a, axes(a))

  return jax.tree.map(of, metric)


def _combine(name, metrics):
  if len({type(metric) for metric in metrics}) > 1:
    raise ValueError(
      f'The metric {name} is sown as a MeanMetric and as a MaxMetric. Give one '
      'of them another name.'
    )
  return _reduce(jax.tree.map(lambda *a: jnp.stack(a), *metrics))
