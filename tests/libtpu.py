"""Tests that compile for TPUs, and are left out where libtpu is not there."""

import pytest

from meliad_rec.planning import environment

needs_libtpu = pytest.mark.skipif(
  not environment.installed(),
  reason='compiling for TPUs needs libtpu: pip install meliad_rec[tpu]',
)
