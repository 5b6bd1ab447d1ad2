"""Marks tests that compile for TPUs, which are skipped without libtpu."""

import pytest

from meliad_rec.planning import environment

needs_libtpu = pytest.mark.skipif(
  not environment.installed(),
  reason='compiling for TPUs needs libtpu: pip install meliad_rec[tpu]',
)
