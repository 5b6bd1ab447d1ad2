"""The optimizer of a run: update rule, schedule, clipping, accumulation.

A rule is a function that takes the learning rate first, a schedule or a number,
and returns an optax transformation. Rules are `adafactor` and `adamw` below,
and optimizers of optax. In gin:

    from meliad_rec.training import optimizer
    from meliad_rec.training import schedules
    import optax

    optimizer.chain:
      rule = @optax.lion
      schedule = @schedules.rsqrt()
    optax.lion.b1 = 0.95

`@optax.lion` has no `()` because `chain` calls the rule, with the same schedule
that gives the reported learning rate.

An update with a non-finite gradient is not skipped: it makes the parameters and
the loss non-finite, which stops the run.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.distributed.partition import path_string
from meliad_rec.training.schedules import Schedule

Rule = Callable[..., optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The functions that a training step needs.

  Every training step calls `update`, but the updates are 0 except in the last
  of each `every` steps.

  Attributes:
    init: params -> state of the optimizer.
    update: (gradients, state, params, tokens) -> (updates, state). The
      gradients are of the mean loss over `tokens` scored tokens; the caller
      applies the updates with `optax.apply_updates`.
    schedule: step -> learning rate. Training steps are counted from 0.
    every: training steps per update of the parameters.
  """

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]
  schedule: Schedule
  every: int

  def learning_rate(self, step: int | jax.Array) -> jax.Array:
    """Returns the learning rate of the update that a training step belongs to.

    Args:
      step: number of the step, counted from 0.
    """
    return self.schedule(step // self.every * self.every)


def chain(
  rule: Rule,
  schedule: Schedule,
  clip_norm: float | None = None,
  every: int = 1,
  factors: Mapping[str, float] | None = None,
  momentum: Schedule | None = None,
) -> Optimizer:
  """Returns the optimizer of a run.

  Args:
    rule: learning rate -> optax transformation. It gets a schedule of updates,
      not of training steps, or with `momentum` the rate of one update.
    schedule: step -> learning rate. Training steps are counted from 0. An
      update from several steps uses the learning rate of the first of them.
    clip_norm: maximum global norm of the gradient of an update, which is the
      mean over all scored tokens of its steps. A larger gradient is scaled down
      to this norm. None: no clipping, as for the Block-Recurrent Transformer.
    every: training steps per update; see `accumulate`.
    factors: {pattern: factor of the learning rate} of parameters whose path,
      such as 'cell/cells_4/state_gate/gate', has the regular expression in it.
      The first pattern that is found counts.
    momentum: step -> the argument `b1` of rule, for rules of the family of
      Adam. None: the constant of rule.

  Raises:
    ValueError: clip_norm is not above 0, every is below 1, or a pattern is no
      regular expression; later, if a pattern fits no parameter.
  """
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(
      f'clip_norm must be above 0, or None for no clipping, got {clip_norm}. '
      'Set optimizer.chain.clip_norm.'
    )
  if not 1 <= every < 2**31:
    raise ValueError(
      'every, the training steps of an update, must be at least 1 and below '
      f'2**31, got {every}. Set optimizer.chain.every.'
    )
  by_update = lambda schedule: lambda update: schedule(update * every)
  if momentum is None:
    inner = rule(by_update(schedule))
  else:
    of_update = lambda rate, b1: rule(rate, b1=b1)
    of_update(schedule(0), momentum(0))  # Mistakes show now, not in `init`.
    changing = optax.inject_hyperparams(of_update, hyperparam_dtype=jnp.float32)
    inner = changing(by_update(schedule), by_update(momentum))
  if factors:
    inner = optax.chain(inner, scale_by_path(factors))
  if clip_norm is not None:
    inner = optax.chain(optax.clip_by_global_norm(clip_norm), inner)
  if every == 1:
    init = inner.init

    def update(gradients, state, params, tokens):
      del tokens  # The gradients are already a mean over them.
      return inner.update(gradients, state, params)

  else:
    init, update = accumulate(inner, every)
  return Optimizer(init, update, schedule, every)


def adafactor(
  schedule: Schedule, momentum: float | None = 0.9, decay_rate: float = 0.8
) -> optax.GradientTransformation:
  """Returns Adafactor with parameter scaling, without weight decay.

  A gradient becomes an update of the parameters in four steps:

  1. It is divided by the root of its second moments. These are factored if the
     parameter has at least two axes of 128 or more elements.
  2. If its root mean square is above 1, it is scaled down to 1.
  3. It is multiplied by the learning rate and by the root mean square of the
     parameter, which counts as at least 1e-3.
  4. It is averaged with earlier updates, in float32.

  Here, a parameter is one array. Layers that are stacked for a scan are one
  array, so they share the root mean squares in 2 and 3.

  Args:
    schedule: learning rate relative to the size of the parameter.
    momentum: decay of the average in 4; None: no average.
    decay_rate: at update t, counted from 1, the second moments so far are
      multiplied by 1 - t^-decay_rate.

  Shazeer and Stern 2018; settings of Hutchins et al. 2022.
  """
  steps = [
    optax.scale_by_factored_rms(decay_rate=decay_rate),
    optax.clip_by_block_rms(1.0),
    optax.scale_by_learning_rate(schedule, flip_sign=False),
    scale_by_param_rms(),
  ]
  if momentum is not None:
    steps.append(
      optax.ema(momentum, debias=False, accumulator_dtype=jnp.float32)
    )
  return optax.chain(*steps, optax.scale(-1))


def scale_by_param_rms(minimum: float = 1e-3) -> optax.GradientTransformation:
  """Returns a transformation that scales each update to its parameter's size.

  The update is multiplied by the root mean square of the parameter. The result
  equals optax.scale_by_param_block_rms, but that function reads all parameters
  twice, so that it can be differentiated.

  Args:
    minimum: the least factor.
  """

  def update(updates, state, params):
    rms = lambda p: jnp.sqrt(jnp.mean(jnp.square(p)))
    scale = lambda u, p: u * jnp.maximum(rms(p), minimum)
    return jax.tree.map(scale, updates, params), state

  return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
  """Returns a transformation that scales the updates of some parameters.

  Args:
    factors: see `chain`; so are the errors.
  """
  for pattern in factors:
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(
        f'The pattern {pattern!r} is not a regular expression ({error}). Set '
        'optimizer.chain.factors.'
      ) from None

  def factor(path: str) -> tuple[str, float]:
    for pattern, value in factors.items():
      if re.search(pattern, path):
        return pattern, value
    return '', 1.0

  def init(params):
    used = {factor(path)[0] for path in leaves_by_path(params)}
    if unused := [pattern for pattern in factors if pattern not in used]:
      raise ValueError(
        f'The pattern {unused[0]!r} fits no parameter, or others come first. '
        'Correct or remove it in optimizer.chain.factors.'
      )
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    scaled = lambda path, u: u * factor(path_string(path))[1]
    return jax.tree.map_with_path(scaled, updates), state

  return optax.GradientTransformation(init, update)


def adamw(
  schedule: Schedule,
  b1: float = 0.9,
  b2: float = 0.98,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
) -> optax.GradientTransformation:
  """Returns Adam with decoupled weight decay of matrices only.

  The matrices are the parameters named `kernel` and, in an LSTM, those named
  `input_kernel` and `recurrence`. Embeddings, norms, biases, gates and initial
  states are not decayed.

  Args:
    schedule: absolute learning rate; it also multiplies the decay.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: each update subtracts weight_decay * learning rate * weight.

  Loshchilov and Hutter 2019.
  """
  return optax.adamw(
    schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_matrices
  )


class Accumulated(struct.PyTreeNode):
  """State of `accumulate`: sums so far, and the state of `inner`."""

  gradients: Any  # Like the parameters, float32: sum of tokens * gradient.
  tokens: jax.Array  # float32, tokens in the sum.
  steps: jax.Array  # int32, steps in the sum, below `every`.
  inner: optax.OptState


def accumulate(
  inner: optax.GradientTransformation, every: int
) -> tuple[Callable, Callable]:
  """Accumulates the gradients of several segments into one update.

  The segments are consecutive: each training step reads the next segment and
  updates the carry, while the parameters stay the same. So accumulating n
  segments is like reading segments n times as long, except that gradients are
  stopped between them. Each scored token has the same weight. optax.MultiSteps
  gives the same weight to each segment instead, even if few of its tokens are
  scored.

  Args:
    inner: the transformation that makes the updates. It runs once in `every`
      steps, on the mean gradient over all scored tokens of these steps.
    every: training steps per update.

  Returns:
    `init` and `update`, as in Optimizer. Updates are zero except in the last of
    each `every` steps.
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


def ema_update(ema: Any, params: Any, decay: float, step: jax.Array) -> Any:
  """Returns the moving average of the parameters after one more step.

  Args:
    ema: the average so far, a tree like params.
    params: parameters after the step's update.
    decay: weight of the average so far. In the first steps, the weight is only
      (1 + step) / (10 + step), so that the initial parameters fade quickly, as
      in ExponentialMovingAverage of TensorFlow.
    step: number of the training step, counted from 0.
  """
  kept = jnp.minimum(decay, (1 + step) / (10 + step))
  return jax.tree.map(
    lambda e, p: (kept * e + (1 - kept) * p).astype(e.dtype), ema, params
  )


def _matrices(params):
  """Returns a tree like params: True for matrices, False for other leaves."""
  names = 'kernel', 'input_kernel', 'recurrence'

  def is_kernel(path, _):
    return path_string(path[-1:]) in names

  return jax.tree_util.tree_map_with_path(is_kernel, params)
