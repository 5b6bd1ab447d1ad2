"""Where the time of a step goes, from a trace of this machine."""

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.benchmarks import trace


def test_kinds_of_a_step_are_found_in_its_trace():
  x = jnp.ones((128, 128))
  step = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile()
  run = lambda: step(x).block_until_ready()
  seconds = trace.measure(run, step.as_text())
  assert {label.kind for label in seconds} >= {'products', 'arithmetic'}
  assert min(seconds.values()) > 0
  first, *lines = trace.table('step', seconds, 'kind').splitlines()
  assert first == 'step: time of a step by kind'
  shares = [float(line.split()[2].removesuffix('%')) for line in lines]
  assert sum(shares) == pytest.approx(100, abs=0.5)
  other = 'HloModule other\n\nENTRY %main (x: f32[]) -> f32[] {\n}\n'
  with pytest.raises(ValueError, match='no operation of the compiled program'):
    trace.measure(run, other)
