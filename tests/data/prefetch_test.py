"""Prefetching: the same items, their error, and a thread that ends."""

import threading
import time

import pytest

from meliad_rec.data.prefetch import prefetch


def threads():
  return [t for t in threading.enumerate() if t.name == 'prefetch']


@pytest.mark.parametrize('depth', [1, 2, 9])
def test_items_are_the_same_in_order(depth):
  assert list(prefetch(iter(range(7)), depth)) == list(range(7))
  assert not threads()


def test_at_most_depth_items_are_prepared():
  made = []

  def items():
    for i in range(9):
      made.append(i)
      yield i

  ahead = prefetch(items(), 2)
  assert next(ahead) == 0
  time.sleep(0.2)
  # One is taken, two wait, and the thread holds one more.
  assert made == [0, 1, 2, 3]
  ahead.close()


def test_an_error_is_raised_after_the_items_before_it():
  def items():
    yield 1
    raise KeyError('broken')

  ahead = prefetch(items(), 4)
  assert next(ahead) == 1
  with pytest.raises(KeyError, match='broken'):
    next(ahead)
  assert not threads()


def test_closing_ends_a_thread_that_is_blocked():
  ahead = prefetch(iter(range(10**9)), 1)
  next(ahead)
  time.sleep(0.05)
  assert len(threads()) == 1
  ahead.close()
  assert not threads()


def test_depth_is_at_least_one():
  with pytest.raises(ValueError, match='got 0'):
    prefetch(iter([]), 0)
