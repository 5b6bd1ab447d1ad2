"""Data that tests of training share."""

import pytest


@pytest.fixture(scope='session')
def data(tmp_path_factory):
  """A store of short documents of random letters."""
  from tests import tiny_run  # JAX may only start after tests/conftest.py.

  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')
