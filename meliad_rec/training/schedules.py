"""Learning-rate schedules: functions of the training step, counted from 0.

All except those of one cycle and finetune have the form of the Block-Recurrent
Transformer's code: a ramp times a curve. The ramp rises linearly from 0 at step
0 to 1 at step `warmup_steps`, and then stays at 1. The curve is constant during
the ramp, at its value of step `warmup_steps`. So with a warm-up, the first
update (step 0) has a rate of 0.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

# Training step -> learning rate or momentum, a float32 scalar.
Schedule = Callable[[jax.Array], jax.Array]


def rsqrt(
  warmup_steps: int | None = None,
  scale: float = 1.0,
  total_steps: int | None = None,
) -> Schedule:
  """Returns a schedule: scale / sqrt(step), after a linear warm-up.

  With scale 1, 1000 steps of warm-up and no end, the rate is 0.0316 at its peak
  and 0.0014 at step 500,000. Hutchins et al. 2022 and Wu et al. 2022 use this
  with Adafactor with parameter scaling.

  With an end, the rate is also multiplied by a line from 1 at step 0 to 0 at
  step `total_steps`. It is then never above scale / 10, so that a run of a few
  hundred steps does not start too high.

  Args:
    warmup_steps: step of the highest rate, which is at most
      scale / sqrt(warmup_steps). 0 means no warm-up, which needs an end. None:
      see default_warmup.
    scale: the rate at step 1 if there were neither warm-up nor end.
    total_steps: step of the end, at which the rate reaches 0; None: no end.

  Raises:
    ValueError: scale is not above 0; with an end, warmup_steps is below 0 or
      not below total_steps; or without an end, warmup_steps is None or below 1.
  """
  warmup_steps = default_warmup(warmup_steps, total_steps)
  _need(0 < scale < math.inf, 'scale', scale, 'a finite number above 0')
  if total_steps is None:
    _need(warmup_steps >= 1, 'warmup_steps', warmup_steps, 'at least 1')
    return _warm(warmup_steps, lambda step: scale * jax.lax.rsqrt(step))
  _need_order(scale, 0, total_steps, warmup_steps)

  def curve(step):
    left = 1 - jnp.minimum(step / total_steps, 1)
    return scale * jax.lax.rsqrt(jnp.maximum(step, 100)) * left

  return _warm(warmup_steps, curve)


def cosine(
  peak: float,
  total_steps: int,
  warmup_steps: int | None = 0,
  final: float = 0.0,
) -> Schedule:
  """Returns a schedule: half a cosine down to `final`, after a linear warm-up.

  Loshchilov and Hutter 2017, without restarts.

  Args:
    peak: the value of the cosine at step 0. With a warm-up, the highest rate is
      the cosine's value at step `warmup_steps`, which is a little lower.
    total_steps: step at which the rate reaches `final`, where it stays.
    warmup_steps: fewer than total_steps; 0: no warm-up; None: see
      default_warmup.
    final: the last rate, at most `peak`.

  Raises:
    ValueError: rates or steps are out of range.

  Hoffmann et al. 2022, appendix B. Figure 3 of Hutchins et al. 2022 has peak
  0.01, final 0.001 and 1000 steps of warm-up.
  """
  warmup_steps = default_warmup(warmup_steps, total_steps)
  _need_order(peak, final, total_steps, warmup_steps)

  def curve(step):
    done = jnp.minimum(step / total_steps, 1)
    return final + (peak - final) * 0.5 * (1 + jnp.cos(math.pi * done))

  return _warm(warmup_steps, curve)


def linear(
  peak: float,
  total_steps: int,
  warmup_steps: int | None = 0,
  final: float = 0.0,
) -> Schedule:
  """Returns a schedule: a line down to `final`, after a linear warm-up.

  Args:
    peak: the value of the line at step 0. With a warm-up, the highest rate is
      the line's value at step `warmup_steps`, which is lower.
    total_steps: step at which the rate reaches `final`, where it stays.
    warmup_steps: fewer than total_steps; 0: no warm-up; None: see
      default_warmup.
    final: the last rate, at most `peak`.

  Raises:
    ValueError: rates or steps are out of range.
  """
  warmup_steps = default_warmup(warmup_steps, total_steps)
  _need_order(peak, final, total_steps, warmup_steps)

  def curve(step):
    done = jnp.minimum(step / total_steps, 1)
    return final + (peak - final) * (1 - done)

  return _warm(warmup_steps, curve)


def one_cycle(peak: float, total_steps: int, warmup_steps: int) -> Schedule:
  """Returns a schedule: a line up to `peak`, then a line down to almost 0.

  Args:
    peak: the highest rate, at step `warmup_steps` - 1. The first rate is
      peak / 25.
    total_steps: training steps. At the last one, step `total_steps` - 1, and
      after it, the rate is peak / 250,000.
    warmup_steps: at least 2, fewer than total_steps.

  Raises:
    ValueError: peak is not above 0, or steps are out of range.

  Smith and Topin 2019; both fractions are the defaults of PyTorch's OneCycleLR.
  """
  _need(0 < peak < math.inf, 'peak', peak, 'a finite number above 0')
  return _cycle(peak / 25, peak, peak / 250_000, total_steps, warmup_steps)


def one_cycle_momentum(total_steps: int, warmup_steps: int) -> Schedule:
  """Returns a schedule: a line from 0.95 down to 0.85, then a line back up.

  It is the momentum of a run with the rates of one_cycle: it is lowest where
  they are highest.

  Args:
    total_steps: training steps. At the last one, and after it, the momentum is
      0.95 again.
    warmup_steps: at least 2, fewer than total_steps. The momentum is 0.85 at
      step `warmup_steps` - 1.

  Raises:
    ValueError: steps are out of range.

  Smith and Topin 2019; both ends are the defaults of PyTorch's OneCycleLR.
  """
  return _cycle(0.95, 0.85, 0.95, total_steps, warmup_steps)


def constant(peak: float, warmup_steps: int = 0) -> Schedule:
  """Returns a schedule: `peak` at every step, after a linear warm-up.

  Args:
    peak: the rate after the warm-up.
    warmup_steps: step at which the rate reaches `peak`; 0: no warm-up.

  Raises:
    ValueError: peak is not above 0, or warmup_steps is below 0.
  """
  _need(0 < peak < math.inf, 'peak', peak, 'a finite number above 0')
  _need(warmup_steps >= 0, 'warmup_steps', warmup_steps, 'at least 0')
  return _warm(warmup_steps, lambda step: jnp.full_like(step, peak))


def finetune(
  schedule: Schedule, total_steps: int, last_steps: int, factor: float = 0.1
) -> Schedule:
  """Returns a schedule: another one, and a lower rate in the last steps.

  Fan et al. 2020 (section 7.6) train at a tenth of the rate in the end.

  Args:
    schedule: the rate before the last steps; in the last steps, it is
      multiplied by `factor`.
    total_steps: training steps.
    last_steps: number of steps with the lower rate, from 0 to total_steps.
    factor: above 0.

  Raises:
    ValueError: last_steps or factor is out of range.
  """
  needed = f'from 0 to total_steps, {total_steps}'
  _need(0 <= last_steps <= total_steps, 'last_steps', last_steps, needed)
  _need(factor > 0, 'factor', factor, 'above 0')

  def lower(step):
    is_last = jnp.asarray(step) >= total_steps - last_steps
    return schedule(step) * jnp.where(is_last, factor, 1.0)

  return lower


def default_warmup(warmup_steps: int | None, total_steps: int | None) -> int:
  """Returns warmup_steps or, if it is None, 5% of total_steps.

  The 5% are rounded down, to at least 1 and at most 1000 steps. A run of a
  single step has no warm-up: the result is 0.

  Raises:
    ValueError: both arguments are None, or total_steps is below 1.
  """
  if total_steps is not None and total_steps < 1:
    raise ValueError(
      f'A run has at least 1 step, got {total_steps}. Set STEPS.'
    )
  if warmup_steps is not None:
    return warmup_steps
  if total_steps is None:
    raise ValueError(
      'A schedule without an end needs a number of steps of warm-up. Set '
      'WARMUP_STEPS.'
    )
  return min(max(total_steps // 20, 1), 1000, total_steps - 1)


def _warm(warmup_steps, curve):
  """Returns a schedule: a linear ramp from 0 to 1, times a curve.

  Args:
    warmup_steps: step at which the ramp reaches 1; 0: no ramp.
    curve: float32 step -> rate. Before step `warmup_steps`, the value of this
      step is used.
  """
  if not warmup_steps:
    return lambda step: curve(jnp.asarray(step, jnp.float32))

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    ramp = jnp.minimum(step / warmup_steps, 1)
    return ramp * curve(jnp.maximum(step, warmup_steps))

  return schedule


def _cycle(first, middle, last, total_steps, warmup_steps):
  """Returns a schedule: a line from `first` to `middle`, then one to `last`."""
  _need_steps(total_steps, warmup_steps)
  _need(warmup_steps >= 2, 'warmup_steps', warmup_steps, 'at least 2')
  turn = warmup_steps - 1

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    before = first + (middle - first) * step / turn
    left = jnp.maximum(total_steps - 1 - step, 0) / (total_steps - 1 - turn)
    return jnp.where(step < turn, before, last + (middle - last) * left)

  return schedule


def _need_order(peak, final, total_steps, warmup_steps):
  _need(0 < peak < math.inf, 'peak', peak, 'a finite number above 0')
  _need(0 <= final <= peak, 'final', final, f'from 0 to peak, {peak}')
  _need_steps(total_steps, warmup_steps)


def _need_steps(total_steps, warmup_steps):
  _need(total_steps >= 1, 'total_steps', total_steps, 'at least 1')
  _need(
    0 <= warmup_steps < total_steps,
    'warmup_steps',
    warmup_steps,
    f'at least 0 and below total_steps, {total_steps}',
  )


# Macros of the gin files.
_SETTINGS = {
  'peak': 'LEARNING_RATE',
  'scale': 'LEARNING_RATE',
  'total_steps': 'STEPS',
  'last_steps': 'FINETUNE_STEPS',
  'warmup_steps': 'WARMUP_STEPS',
}


def _need(condition, name, value, needed):
  if not condition:
    raise ValueError(
      f'{name} of the schedule must be {needed}, got {value}. Set '
      f'{_SETTINGS.get(name, f"the argument {name} of the schedule")}.'
    )
