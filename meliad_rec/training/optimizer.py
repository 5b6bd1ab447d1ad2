"""The optimiser of a run: a rule, its schedule, clipping, accumulation.

A rule is any function whose first argument is the learning rate and that
returns an optax transformation: `adafactor` and `adamw` below, or one of
optax itself. In a gin file:

    from meliad_rec.training import optimizer
    from meliad_rec.training import schedules
    import optax

    optimizer.chain:
      rule = @optax.lion
      schedule = @schedules.rsqrt()
    optax.lion.b1 = 0.95

The rule is named without `()`: `chain` gives it the schedule, so that the
learning rate reported is the one used. Nothing skips a non-finite gradient:
it reaches the parameters and the loss, and stops the run.

Gradients of several segments in one update, each token weighing the same.

The segments are consecutive in time: every training step reads the next one
and the carry goes on, only the parameters wait. So accumulating K segments
is like reading segments K times as long, with gradients cut K times as often.
optax.MultiSteps would weigh each segment the same, however few of its tokens
are real; here padding changes nothing.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from meliad_rec.training.schedules import Schedule


class Accumulated(struct.PyTreeNode):
  """State: gradients summed so far, and the state of the inner optimiser."""

  gradients: Any  # Like the parameters, float32: sum of tokens * gradient.
  tokens: jax.Array  # float32, tokens in that sum.
  steps: jax.Array  # int32, steps in that sum, below `every`.
  inner: optax.OptState


def accumulate(
  inner: optax.GradientTransformation, every: int
) -> tuple[Callable, Callable]:
  """`init(params)` and `update(gradients, state, params, tokens)`.

  Args:
    inner: runs once in `every` steps, on the mean over all tokens of them.
    every: steps.

  Returns:
    init, and update, which takes the gradients of a mean over `tokens` tokens
    and returns (updates, state); updates are zeros in all but each last step.
  """

  def init(params):
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return Accumulated(
      gradients=zeros,
      tokens=jnp.zeros((), jnp.float32),
      steps=jnp.zeros((), jnp.int32),
      inner=inner.init(params),
    )

  def update(gradients, state, params, tokens):
    tokens = jnp.asarray(tokens, jnp.float32)
    summed = state.replace(
      gradients=jax.tree.map(
        lambda total, g: total + tokens * g, state.gradients, gradients
      ),
      tokens=state.tokens + tokens,
      steps=state.steps + 1,
    )

    def now(summed):
      mean = jax.tree.map(
        lambda total, g: (total / jnp.maximum(summed.tokens, 1)).astype(
          g.dtype
        ),
        summed.gradients,
        gradients,
      )
      updates, new = inner.update(mean, summed.inner, params)
      updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
      return updates, Accumulated(
        gradients=jax.tree.map(jnp.zeros_like, summed.gradients),
        tokens=jnp.zeros_like(summed.tokens),
        steps=jnp.zeros_like(summed.steps),
        inner=new,
      )

    def later(summed):
      return jax.tree.map(jnp.zeros_like, params), summed

    return jax.lax.cond(summed.steps == every, now, later, summed)

  return init, update


Rule = Callable[[Schedule], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What a training step needs.

  Attributes:
    init: params -> state.
    update: (gradients, state, params, tokens) -> (updates, state), where the
      gradients are of a mean over `tokens` real tokens; add the updates with
      `optax.apply_updates`.
    schedule: training step -> learning rate.
    every: training steps per update.
  """

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]
  schedule: Schedule
  every: int

  def learning_rate(self, step: int | jax.Array) -> jax.Array:
    """Learning rate of the update that training step `step`, from 0, is in."""
    return self.schedule(step // self.every * self.every)


def chain(
  rule: Rule,
  schedule: Schedule,
  clip_norm: float | None = None,
  every: int = 1,
) -> Optimizer:
  """The optimiser of a run.

  Args:
    rule: makes the optax transformation, given the schedule.
    schedule: training step, from 0 -> learning rate; an update over several
      steps takes that of the first.
    clip_norm: gradients with a larger global norm are scaled down to it; the
      norm is that of a mean over tokens, after accumulation. None: no
      clipping, as in the Block-Recurrent Transformer's training.
    every: training steps per update; see accumulation.py.

  Raises:
    ValueError: clip_norm not above 0, or every below 1.
  """
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(
      f'clip_norm is {clip_norm}; it needs a norm above 0, or None for no '
      'clipping. Set optimizer.chain.clip_norm.'
    )
  if every < 1:
    raise ValueError(
      f'Gradients are accumulated over {every} steps; it needs 1 or more. Set '
      'optimizer.chain.every.'
    )
  inner = rule(lambda update: schedule(update * every))
  if clip_norm is not None:
    inner = optax.chain(optax.clip_by_global_norm(clip_norm), inner)
  if every == 1:
    init = inner.init

    def update(gradients, state, params, tokens):
      del tokens  # The mean over one step's tokens is what came in.
      return inner.update(gradients, state, params)

  else:
    init, update = accumulate(inner, every)
  return Optimizer(init, update, schedule, every)


def adafactor(
  schedule: Schedule, momentum: float | None = 0.9, decay_rate: float = 0.8
) -> optax.GradientTransformation:
  """Adafactor with parameter scaling, momentum in float32, no weight decay.

  A step has the size of the learning rate times the root mean square of the
  parameter, at least 1e-3. Second moments are factored where two axes have
  128 or more places; updates are clipped per parameter at RMS 1. A parameter is
  an array: layers that `Repeat` stacks share one scale and one clip.

  Args:
    schedule: relative learning rate.
    momentum: decay of the average of updates; None: none, and no memory.
    decay_rate: second moments decay with 1 - t^-decay_rate.

  Shazeer and Stern 2018; settings of Hutchins et al. 2022.
  """
  return optax.adafactor(
    schedule,
    decay_rate=decay_rate,
    multiply_by_parameter_scale=True,
    momentum=momentum,
    dtype_momentum=jnp.float32,
    weight_decay_rate=None,
  )


def adamw(
  schedule: Schedule,
  b1: float = 0.9,
  b2: float = 0.98,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay, applied to matrices only.

  The matrices are the parameters called `kernel`, stacked over layers or not:
  embeddings, norms, biases, gates and first states are not decayed.

  Args:
    schedule: absolute learning rate; it multiplies the decay too.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: share of a weight taken off per unit of learning rate.

  Loshchilov and Hutter 2019.
  """
  return optax.adamw(
    schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_matrices
  )


def ema_update(ema: Any, params: Any, decay: float, step: jax.Array) -> Any:
  """Moving average of the weights after one more training step.

  Args:
    ema: like params.
    params: after the step's update.
    decay: what is kept of the average in each training step, once warm.
    step: number of the training step, from 0. The decay is at most
      (1 + step) / (10 + step), or the first weights would stay for long.
  """
  kept = jnp.minimum(decay, (1 + step) / (10 + step))
  return jax.tree.map(
    lambda e, p: (kept * e + (1 - kept) * p).astype(e.dtype), ema, params
  )


def _matrices(params):
  """Like params, True at kernels, those of an LSTM too."""
  names = 'kernel', 'input_kernel', 'recurrence'

  def is_kernel(path, _):
    return jax.tree_util.keystr(path[-1:], simple=True) in names

  return jax.tree_util.tree_map_with_path(is_kernel, params)
