"""Universal and Gated Universal Transformer: one layer, run until it halts.

Ray Chowdhury and Caragea 2024, algorithms 1 and 3. In the Universal Transformer
(UT, Dehghani et al. 2019) each token halts on its own, depending on its state;
keys and values are computed from the output so far (see `mix`). In the gated
one (GUT) all tokens of a row halt together, depending on the mean of their
states before the layer and on the mean of those after it. In a causal GUT each
token halts on its own, depending on such means over this token and all earlier
ones.

`Universal` is the module; `Recurrence` is its step as a function of arrays,
which the loops of recurrence/early_exit.py repeat. Letters of this file: U
units of a row (see recurrence/halt.py), L the maximum number of steps.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers import experts
from meliad_rec.layers.dropout import check_layer_drop
from meliad_rec.layers.dropout import drop_by
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import mean_imbalance
from meliad_rec.metrics import losses
from meliad_rec.metrics import metrics
from meliad_rec.metrics import pictures
from meliad_rec.metrics.metrics import MaxMetric
from meliad_rec.metrics.metrics import MeanMetric
from meliad_rec.recurrence import halt as halting
from meliad_rec.recurrence.early_exit import compacted_loop
from meliad_rec.recurrence.early_exit import recorded_loop
from meliad_rec.recurrence.early_exit import while_loop
from meliad_rec.recurrence.halt import Counts
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import mean_state
from meliad_rec.recurrence.halt import Units

INFERENCE_LOOPS = {'while': while_loop, 'compacted': compacted_loop}


class Universal(nn.Module):
  """A layer repeated in depth until all units halt.

  Attributes:
    layer: the layer to repeat.
    steps: maximum number of steps, in training and, if eval_steps is None, in
      evaluation.
    global_halt: whether all tokens of a row halt together, depending on the
      mean of their states (GUT). If False, each token halts on its own,
      depending on its state (UT). If True and the layer is causal, each token
      halts on its own too, depending on the mean over it and all earlier ones.
    transition: whether the halting gate reads the states before and after the
      layer (GUT), or only the state before it (UT).
    halt: settings of halting. None means that all steps run, and the last state
      is the output.
    eval_steps: maximum number of steps in evaluation; None means `steps`.
    inference: name in INFERENCE_LOOPS of the loop outside of training. In
      'compacted', rows leave the batch as they halt.
    layer_drop: probability in training that a step in depth skips the layer.
      There is one draw for each step, for all rows and chunks. A skipped step
      still counts for halting.
    early_exit: whether the loop ends when all rows have halted. If False, all
      steps are computed, and rows that have halted keep their states.
  """

  layer: EncoderLayer
  steps: int
  global_halt: bool
  transition: bool
  halt: Halt | None = Halt()
  eval_steps: int | None = None
  inference: str = 'while'
  layer_drop: float = 0.0
  early_exit: bool = True

  def setup(self):
    if min(self.steps, self.max_steps(False)) < 1:
      raise ValueError(
        f'steps and eval_steps must be at least 1, got steps={self.steps}, '
        f'eval_steps={self.eval_steps}. Set DEPTH and EVAL_DEPTH.'
      )
    if self.inference not in INFERENCE_LOOPS:
      raise ValueError(
        f'inference must be one of {", ".join(INFERENCE_LOOPS)}, got '
        f'{self.inference!r}. Set universal.Universal.inference.'
      )
    check_layer_drop(self.layer_drop)
    if self.halt:
      self.gate = HaltingGate(self.layer.config.d_model, self.halt.bias_init)

  @property
  def causal(self) -> bool:
    """Whether no output depends on a later token."""
    return self.layer.config.causal

  def __call__(self, x_BTD, mask_BT, memory_BSD=None):
    """Returns y_BTD; the arguments are as in EncoderLayer.__call__."""
    if self.is_initializing():
      return self.run_once(x_BTD, mask_BT, memory_BSD)
    training = self.has_rng('dropout')
    steps = self.max_steps(training)
    # A bound in a causal layer would reveal how many tokens follow.
    bounded = self.halt and self.halt.length_bound and not self.causal
    if bounded:
      steps = min(steps, x_BTD.shape[1] + 1)
    recurrence = self.recurrence(steps)
    shared = self.shared()
    rows = Rows.of(mask_BT, memory_BSD, bounded)
    state, initial_counts = recurrence.initial_state(shared, rows, x_BTD)
    if pictures.wanted(self):
      self.sow_steps(recurrence, shared, rows, state, steps)
    loop = self.loop(training)
    state, added, ran_B = loop(recurrence, shared, rows, state, steps)
    counts = jax.tree.map(jnp.add, initial_counts, added.counts)
    self.report(rows, state.units.remainder, counts, ran_B)
    if added.routes:
      real_1 = jnp.any(mask_BT)[None].astype(jnp.float32)  # 0: not counted.
      imbalance_1 = mean_imbalance(added.routes)[None]
      loss = losses.RowMeans(self.layer.experts.balance * imbalance_1, real_1)
      self.sow('losses', 'balance', loss)
      metrics.sow(self, 'expert_imbalance', MeanMetric(imbalance_1, real_1))
    return self.output(state, added)

  def output(self, state: 'DepthState', added: 'Added'):
    """Returns y_BTD, the output if all units halted at this state.

    Args:
      state: state after the last step.
      added: sums over the steps.
    """
    mixed_BTD = added.mixed_BTD if self.global_halt else state.mixed_BTD
    return mix(mixed_BTD, state)

  def sow_steps(self, recurrence, shared, rows, state, steps: int) -> None:
    """Sows the output after each step, and the layer's pictures in each step.

    Args:
      recurrence, shared, rows, state: the step, its inputs, and the initial
        state.
      steps: number of steps.
    """
    before, after = recorded_loop(recurrence, shared, rows, state, steps)

    def show(carries):
      l, (state, _, _), (next_state, added, _) = carries
      kind = pictures.COLLECTION
      _, sown = recurrence.run_layer(shared, rows, l, state, kind)
      return self.output(next_state, added), sown

    y_LBTD, sown = jax.lax.map(show, (jnp.arange(steps), before, after))
    pictures.sow(self, 'lens', lambda: y_LBTD)
    for path, picture in jax.tree.leaves_with_path(sown):
      pictures.sow(self, path[-2].key, lambda picture=picture: picture)

  def loop(self, training: bool) -> Callable:
    """Returns the loop to use, a function of early_exit.py."""
    return while_loop if training else INFERENCE_LOOPS[self.inference]

  def max_steps(self, training: bool) -> int:
    """Returns the maximum number of steps in training or in evaluation."""
    if training or self.eval_steps is None:
      return self.steps
    return self.eval_steps

  def run_once(self, x_BTD, mask_BT, memory_BSD):
    """Runs one step to create the parameters; returns the layer's y_BTD.

    All steps share the parameters.
    """
    if self.halt:
      self.gate(*[x_BTD[:, :1]] * (2 if self.transition else 1))
    return self.layer(x_BTD, mask_BT, memory_BSD)

  def recurrence(self, steps: int) -> 'Recurrence':
    """Returns the step in depth as a function of arrays."""
    return Recurrence(
      self.layer.unbind()[0],
      self.gate.unbind()[0] if self.halt else None,
      self.halt,
      self.global_halt,
      self.transition,
      steps,
      self.layer_drop,
      self.early_exit,
    )

  def shared(self) -> 'Shared':
    """Returns the parameters and a new random key, for all steps and rows."""
    rng = None
    if self.has_rng('dropout'):
      rng = jax.random.key_data(self.make_rng('dropout'))
    # Gathered once rather than in each step.
    params = all_gather_params(self.variables['params'])
    return Shared(params['layer'], params.get('gate'), rng)

  def report(self, rows: 'Rows', remainder_BU, counts: Counts, ran_B):
    """Sows the loss and the metrics of halting, and the depth of each unit.

    The loss is a mean over the units of a row that are not padding, and then
    over rows that hold tokens. In a cell that reads chunks, it is also a mean
    over the chunks of a row that hold tokens. U is the number of units of a
    row.

    Args:
      rows: values that all steps read.
      remainder_BU: weight that no step has given to a state.
      counts: counts of all steps.
      ran_B: number of steps computed for each row.
    """
    if not self.halt:
      return
    unit_BU = rows.mask_BT
    if remainder_BU.shape[1] == 1:
      unit_BU = jnp.any(unit_BU, 1, keepdims=True)
    real_BU = unit_BU.astype(jnp.float32)
    units_B = jnp.maximum(jnp.sum(real_BU, 1), 1)
    mean_B = lambda a_BU: jnp.sum(a_BU * real_BU, 1) / units_B
    real_B = jnp.any(unit_BU, 1).astype(jnp.float32)
    steps_BU = halting.expected_steps(self.halt, remainder_BU, counts)
    # Rows without tokens cost nothing, and are not counted in the mean.
    loss = losses.RowMeans(self.halt.ponder_cost * mean_B(steps_BU), real_B)
    self.sow('losses', losses.HALTING, loss)
    self.sow(pictures.DEPTHS, 'depth', counts.depth)
    sow = functools.partial(metrics.sow, self)
    units = jnp.sum(real_BU)
    sow('halting_depth', MeanMetric(jnp.sum(counts.depth * real_BU), units))
    sow('halting_depth_max', MaxMetric(jnp.max(counts.depth)))
    sow('halting_remainder', MeanMetric(jnp.sum(remainder_BU * real_BU), units))
    sow(
      'halting_waste',
      MeanMetric(jnp.sum(ran_B * real_B), jnp.sum(mean_B(counts.depth))),
    )
    for l in range(counts.p.shape[1]):
      evaluated = jnp.sum(counts.evaluated[:, l])
      sow(f'halting_p_{l}', MeanMetric(jnp.sum(counts.p[:, l]), evaluated))


class Shared(struct.PyTreeNode):
  """Values shared by all rows.

  Attributes:
    layer: parameters of the layer.
    gate: parameters of the halting gate; None means that nothing halts.
    rng: jax.random.key_data of the random key of dropout; None means no
      dropout.
  """

  layer: dict
  gate: dict | None
  rng: jax.Array | None


class Rows(struct.PyTreeNode):
  """Values of each row that steps read but do not change.

  Attributes:
    mask_BT: bool, False at padding.
    memory_BSD: memory slots; None means that there are none.
    last_step_B1: int32, index, from 0, of the last step that the units of a row
      may take.
  """

  mask_BT: jax.Array
  memory_BSD: jax.Array | None
  last_step_B1: jax.Array

  @classmethod
  def of(cls, mask_BT, memory_BSD, bounded: bool) -> 'Rows':
    """Returns the Rows of a batch.

    Args:
      mask_BT: bool, False at padding.
      memory_BSD: memory slots, or None.
      bounded: whether a row may take at most one step more than it has tokens.
        If False, the number of its steps is not limited here.
    """
    last_step_B1 = jnp.sum(mask_BT, 1, keepdims=True, dtype=jnp.int32)
    if not bounded:
      last_step_B1 = jnp.full_like(last_step_B1, jnp.iinfo(jnp.int32).max)
    return cls(mask_BT, memory_BSD, last_step_B1)


class DepthState(struct.PyTreeNode):
  """State that one step passes to the next.

  Attributes:
    h_BTD: state of each token.
    units: progress of each unit toward halting.
    p_BU: halting probability of each unit at h_BTD; None if the gate also reads
      the state after the layer, or if nothing halts.
    mixed_BTD: weighted sum of each token's states before h_BTD, float32, from
      which keys are computed; None if Universal.global_halt is True.
  """

  h_BTD: jax.Array
  units: Units
  p_BU: jax.Array | None
  mixed_BTD: jax.Array | None


class Added(struct.PyTreeNode):
  """Values that each step returns and the loop adds up.

  Attributes:
    counts: terms of the ponder loss and of the depth; see Counts.
    mixed_BTD: float32, the state of each token before the step times its
      weight; None if DepthState holds the sum of these.
    routes: for each router of experts, terms of its loss; empty without
      experts.
  """

  counts: Counts
  mixed_BTD: jax.Array | None
  routes: list[experts.Routes]


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
  """The step in depth and the initial state; implements early_exit.DepthSteps.

  Attributes:
    layer: unbound module (without parameters).
    gate: unbound module; None if nothing halts.
    halt, global_halt, transition, layer_drop, early_exit: see Universal.
    steps: maximum number of steps.
  """

  layer: EncoderLayer
  gate: HaltingGate | None
  halt: Halt | None
  global_halt: bool
  transition: bool
  steps: int
  layer_drop: float = 0.0
  early_exit: bool = True

  def initial_state(self, shared: Shared, rows: Rows, x_BTD):
    """Returns the DepthState and the Counts before step 0.

    The counts hold the halting probabilities of step 0 if they are known before
    the step, and otherwise zeros. The sums of the loop do not include these
    counts.
    """
    active_BU = rows.mask_BT
    if self.global_halt and not self.layer.config.causal:
      active_BU = jnp.any(active_BU, 1, keepdims=True)
    units = Units.initial(active_BU)
    p_BU, counts = None, self.zero_counts(units)
    if self.halt and not self.transition:
      units, p_BU, counts = self.next_halting_probability(
        shared, rows, 0, x_BTD, units
      )
    mixed_BTD = None
    if not self.global_halt:
      mixed_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
    return DepthState(x_BTD, units, p_BU, mixed_BTD), counts

  def active(self, state: DepthState):
    """Returns bool [B], True at rows in which any unit continues.

    If early_exit is False, it is True at all rows.
    """
    return state.units.active_B | (not self.early_exit)

  def changed(self, added: Added):
    """Returns bool [B], True at rows in which any unit took its new state.

    If early_exit is False, it is True at all rows.
    """
    return jnp.any(added.counts.depth > 0, 1) | (not self.early_exit)

  def step(self, shared: Shared, rows: Rows, l, state: DepthState):
    """Returns the DepthState after step l, and the Added of this step.

    Args:
      shared, rows: values that steps read but do not change.
      l: int, the step, from 0.
      state: the state before the step.
    """
    new_BTD, sown = self.run_layer(shared, rows, l, state)
    units, h_BTD, next_p_BU = state.units, state.h_BTD, None
    counts = self.zero_counts(units)
    if not self.halt:
      updated_BU, weight_BU = units.active > 0, jnp.zeros_like(units.active)
    else:
      p_BU = state.p_BU
      if self.transition:
        p_BU = self.halting_probability(shared, rows, h_BTD, new_BTD)
        counts = self.count_evaluated(counts, p_BU, units, l)
      units, updated_BU, weight_BU = halting.advance(
        self.halt, units, p_BU, l, rows.last_step_B1
      )
    counts = counts.replace(
      expected_steps=weight_BU * (l + 1), depth=updated_BU.astype(jnp.float32)
    )
    routes = experts.routes(sown, updated_BU & rows.mask_BT)
    weighted_BTD = weight_BU[..., None] * h_BTD.astype(jnp.float32)
    h_BTD = jnp.where(updated_BU[..., None], new_BTD, h_BTD)
    if self.halt and not self.transition:
      units, next_p_BU, more = self.next_halting_probability(
        shared, rows, l + 1, h_BTD, units
      )
      counts = counts.replace(p=more.p, evaluated=more.evaluated)
    if self.global_halt:
      state = DepthState(h_BTD, units, next_p_BU, None)
      return state, Added(counts, weighted_BTD, routes)
    mixed_BTD = state.mixed_BTD + weighted_BTD
    state = DepthState(h_BTD, units, next_p_BU, mixed_BTD)
    return state, Added(counts, None, routes)

  def run_layer(self, shared, rows, l, state, collection='routes'):
    """Returns the layer's output in step l, and a collection that it sowed.

    The routers of the layer's experts sow 'routes'. If global_halt is False,
    keys and values are computed from the output so far (see `mix`).
    """
    rngs, source_BTD, key = {}, None, None
    if shared.rng is not None:
      key = jax.random.fold_in(jax.random.wrap_key_data(shared.rng), l)
      rngs['dropout'] = key
    if not self.global_halt:
      source_BTD = mix(state.mixed_BTD, state)
    new_BTD, sown = self.layer.apply(
      {'params': shared.layer},
      state.h_BTD,
      rows.mask_BT,
      rows.memory_BSD,
      source_BTD,
      rngs=rngs,
      mutable=[collection],
    )
    if self.layer_drop and key is not None:
      # Another key, since the layer draws from this one.
      drop_key = jax.random.fold_in(key, 0)
      new_BTD = drop_by(drop_key, self.layer_drop, state.h_BTD, new_BTD)
    return new_BTD, sown.get(collection, {})

  def halting_probability(self, shared, rows, *h_BTD):
    """Returns p_BU, the halting probability of each unit.

    Args:
      shared: parameters and random keys, the same for all rows.
      rows: values of each row that steps read but do not change.
      *h_BTD: states of the tokens before the layer and, if `transition`, also
        those after it.
    """
    if self.global_halt:
      causal = self.layer.config.causal
      h_BTD = [mean_state(h, rows.mask_BT, causal) for h in h_BTD]
    return self.gate.apply({'params': shared.gate}, *h_BTD)

  def next_halting_probability(self, shared, rows, l, h_BTD, units):
    """Computes the halting probabilities of step l before the step.

    Args:
      shared, rows: values that steps read but do not change.
      l: int, the step, from 0.
      h_BTD: states of the tokens before the step.
      units: Units before the step.

    Returns:
      The units, of which those that step l would halt are no longer active; the
      probabilities p_BU; and Counts of which only `p` and `evaluated` are not
      0.
    """
    p_BU = self.halting_probability(shared, rows, h_BTD)
    counts = self.count_evaluated(self.zero_counts(units), p_BU, units, l)
    units = halting.halt_ahead(self.halt, units, p_BU, l, rows.last_step_B1)
    return units, p_BU, counts

  def zero_counts(self, units: Units) -> Counts:
    zeros_BU = jnp.zeros_like(units.remainder)
    zeros_BL = jnp.zeros((len(zeros_BU), self.steps))
    return Counts(zeros_BU, zeros_BU, zeros_BL, zeros_BL)

  def count_evaluated(self, counts: Counts, p_BU, units: Units, l) -> Counts:
    return counts.replace(
      p=halting.at_step(p_BU * units.active, l, self.steps),
      evaluated=halting.at_step(units.active, l, self.steps),
    )


def mix(mixed_BTD, state: DepthState):
  """Returns y_BTD, what the output would be if all units halted at `state`.

  Args:
    mixed_BTD: weighted sum of each token's states before state.h_BTD.
    state: the DepthState to treat as the last one.
  """
  last_BTD = state.units.remainder[..., None] * state.h_BTD.astype(jnp.float32)
  return (mixed_BTD + last_BTD).astype(state.h_BTD.dtype)
