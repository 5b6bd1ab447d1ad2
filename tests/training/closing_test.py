"""All is closed, and the first error is the one that is heard of."""

import pytest

from meliad_rec.training.trainer import closing


def failing(message):
  def close():
    raise OSError(message)

  return close


def test_all_are_closed_in_order():
  closed = []
  with closing(lambda: closed.append(1), lambda: closed.append(2)):
    assert closed == []
  assert closed == [1, 2]


def test_the_error_of_the_body_is_not_hidden(caplog):
  closed = []
  with (
    pytest.raises(ValueError, match='^first$'),
    closing(failing('second'), lambda: closed.append(1)),
  ):
    raise ValueError('first')
  assert closed == [1]
  assert 'While closing: second' in caplog.text


def test_an_error_of_closing_is_raised_and_the_rest_closed(caplog):
  closed = []
  with (
    pytest.raises(OSError, match='^one$'),
    closing(failing('one'), failing('two'), lambda: closed.append(1)),
  ):
    pass
  assert closed == [1]
  assert 'two' in caplog.text
