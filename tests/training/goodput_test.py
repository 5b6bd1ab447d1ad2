"""Goodput by a clock that the tests control."""

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.training.goodput import Goodput


class Clock:
  def __init__(self):
    self.now = self.compiled = 0.0

  def goodput(self):
    return Goodput(lambda: self.now, lambda: self.compiled)


def test_shares_by_part():
  clock = Clock()
  goodput = clock.goodput()
  for part, seconds in ('step', 5), ('checkpoint', 2), ('step', 1):
    with goodput.on(part):
      clock.now += seconds
  clock.now += 2
  assert goodput.sentence() == (
    'Time: 60.0% step, 0.0% compile, 0.0% data wait, 0.0% evaluation,'
    ' 20.0% checkpoint, 20.0% other, of 10 s.'
  )


def test_compilation_within_a_part_is_compile():
  clock = Clock()
  goodput = clock.goodput()
  for part in 'evaluation', 'compile':
    with goodput.on(part):
      clock.now += 5
      clock.compiled += 3
  assert goodput.seconds['evaluation'] == 2
  assert goodput.seconds['compile'] == 8


def test_a_failing_part_counts():
  clock = Clock()
  goodput = clock.goodput()
  with pytest.raises(KeyError), goodput.on('step'):
    clock.now += 4
    raise KeyError
  assert goodput.seconds['step'] == 4


def test_waiting_for_items_is_data_wait():
  clock, closed = Clock(), []

  def made():
    try:
      for item in range(3):
        clock.now += 1
        yield item
    finally:
      closed.append(True)

  goodput = clock.goodput()
  found = []
  for item in goodput.waiting(made()):
    clock.now += 10
    found.append(item)
  assert found == [0, 1, 2]
  assert goodput.seconds['data wait'] == 3
  items = clock.goodput().waiting(made())
  next(items)
  items.close()
  assert closed == [True, True]


def test_real_compilation_is_seen():
  goodput = Goodput()
  with goodput.on('evaluation'):
    jax.jit(lambda x: jnp.sin(x) * 7.125)(jnp.ones(3)).block_until_ready()
  assert 0 < goodput.seconds['compile'] < goodput.whole
