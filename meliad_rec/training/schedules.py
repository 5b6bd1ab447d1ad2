"""Learning-rate schedules: functions of the training step, counted from 0.

All but one_cycle share one form, that of the Block-Recurrent Transformer's
code: a linear ramp from 0 over `warmup_steps`, times a curve that is held at
its value for `warmup_steps` until the ramp ends. So the first update, at step
0, has a rate of 0 where there is a warm-up.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

# From the training step to the learning rate, a float32 scalar.
Schedule = Callable[[jax.Array], jax.Array]


def rsqrt(warmup_steps: int, scale: float = 1.0) -> Schedule:
  """scale / sqrt(step), never ending.

  With scale 1 and 1000 steps of warm-up, the peak is 0.0316 and step 500,000
  has 0.0014: Hutchins et al. 2022 and Wu et al. 2022, for Adafactor with
  parameter scaling.

  Args:
    warmup_steps: the peak, scale / sqrt(warmup_steps), comes there.
    scale: the rate at step 1 were there no warm-up.

  Raises:
    ValueError: warmup_steps below 1, where the curve has no peak.
  """
  _need(warmup_steps >= 1, f'warmup_steps is {warmup_steps}', '1 or more')
  _need(scale > 0, f'scale is {scale}', 'more than 0')
  return _warm(warmup_steps, lambda step: scale * jax.lax.rsqrt(step))


def cosine(
  peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> Schedule:
  """Half a cosine from `peak` at step 0 to `final` at `total_steps`.

  Args:
    peak: the rate at step 0 were there no warm-up. The highest rate reached
      is a little lower with one: the curve has begun to fall by its end.
    total_steps: of training; the rate stays at `final` after them.
    warmup_steps: fewer than total_steps.
    final: the last rate, at most `peak`.

  Raises:
    ValueError: rates or steps not in that order.

  Hoffmann et al. 2022, appendix B; the paper's figure 3 with peak 0.01, final
  0.001 and 1000 steps of warm-up.
  """
  _need_order(peak, final, total_steps, warmup_steps)

  def curve(step):
    done = jnp.minimum(step / total_steps, 1)
    return final + (peak - final) * 0.5 * (1 + jnp.cos(math.pi * done))

  return _warm(warmup_steps, curve)


def linear(
  peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> Schedule:
  """A line from `peak` at step 0 to `final` at `total_steps`.

  Args:
    peak: the rate at step 0 were there no warm-up.
    total_steps: of training; the rate stays at `final` after them.
    warmup_steps: fewer than total_steps.
    final: the last rate, at most `peak`.

  Raises:
    ValueError: rates or steps not in that order.
  """
  _need_order(peak, final, total_steps, warmup_steps)

  def curve(step):
    done = jnp.minimum(step / total_steps, 1)
    return final + (peak - final) * (1 - done)

  return _warm(warmup_steps, curve)


def one_cycle(peak: float, total_steps: int, warmup_steps: int) -> Schedule:
  """A line from peak / 25 up to `peak`, and a line down to almost nothing.

  Args:
    peak: the rate of the last of the warm-up's steps.
    total_steps: of training; the rate of the last one is peak / 250,000, and
      stays so.
    warmup_steps: 2 or more, fewer than total_steps.

  Raises:
    ValueError: peak not above 0, or steps out of range.

  Smith and Topin 2019; both shares are the defaults of PyTorch's OneCycleLR.
  """
  _need_order(peak, 0, total_steps, warmup_steps)
  _need(warmup_steps >= 2, f'warmup_steps is {warmup_steps}', '2 or more')
  first, final, turn = peak / 25, peak / 250_000, warmup_steps - 1

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    up = first + (peak - first) * step / turn
    left = jnp.maximum(total_steps - 1 - step, 0) / (total_steps - 1 - turn)
    return jnp.where(step < turn, up, final + (peak - final) * left)

  return schedule


def constant(peak: float, warmup_steps: int = 0) -> Schedule:
  """`peak` at every step after the warm-up.

  Raises:
    ValueError: peak not above 0, or warmup_steps below 0.
  """
  _need(peak > 0, f'peak is {peak}', 'more than 0')
  _need(warmup_steps >= 0, f'warmup_steps is {warmup_steps}', '0 or more')
  return _warm(warmup_steps, lambda step: jnp.full_like(step, peak))


def _warm(warmup_steps, curve):
  """The curve after a linear ramp; until its end the curve's step is held."""
  if not warmup_steps:
    return lambda step: curve(jnp.asarray(step, jnp.float32))

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    ramp = jnp.minimum(step / warmup_steps, 1)
    return ramp * curve(jnp.maximum(step, warmup_steps))

  return schedule


def _need_order(peak, final, total_steps, warmup_steps):
  _need(peak > 0, f'peak is {peak}', 'more than 0')
  _need(0 <= final <= peak, f'final is {final}', f'0 to peak, {peak}')
  _need(total_steps >= 1, f'total_steps is {total_steps}', '1 or more')
  _need(
    0 <= warmup_steps < total_steps,
    f'warmup_steps is {warmup_steps}',
    f'0 or more and fewer than total_steps, {total_steps}',
  )


# In gin.
_SETTINGS = {
  'peak': 'LEARNING_RATE',
  'scale': 'LEARNING_RATE',
  'total_steps': 'STEPS',
  'warmup_steps': 'WARMUP_STEPS',
}


def _need(condition, given, needed):
  if not condition:
    setting = _SETTINGS.get(given.split()[0], given.split()[0])
    raise ValueError(
      f"The schedule's {given}; it needs {needed}. Set {setting}."
    )
