"""Which implementation of attention runs where, and over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla
from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import memory_attention
from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.dispatch import WINDOW_NAMES
from tests.attention_example import both
from tests.attention_example import example
from tests.attention_example import grad_of
from tests.attention_example import memory_example

WINDOW = {'T': 128, 'P': 128, 'W': 128}
MEMORY = {'T': 64, 'S': 128}
KINDS = {
  'window': (window_attention, example, WINDOW),
  'memory': (memory_attention, memory_example, MEMORY),
}
kinds = pytest.mark.parametrize('kind', KINDS)


@kinds
@pytest.mark.parametrize('dropout', [None, Dropout(jax.random.key(0), 0.5)])
def test_on_a_cpu_xla_runs_bit_for_bit(kind, dropout):
  attend, make, sizes = KINDS[kind]
  inputs = make(**sizes)
  if kind == 'window':
    expected = both(xla.window_attention, inputs, dropout)
  else:
    keep = dropout and dropout.keep_mask((2, sizes['T'], sizes['S']))
    expected = both(ref.memory_attention, inputs, keep)
  jax.tree.map(
    np.testing.assert_array_equal, both(attend, inputs, dropout), expected
  )


@kinds
def test_under_a_mesh_it_is_the_same(kind):
  attend, make, sizes = KINDS[kind]
  expected = both(attend, make(**sizes))
  with jax.set_mesh(partition.make_mesh(2, 2, 2)):
    found = both(attend, make(**sizes))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, found, expected)


def runs_kernels(platform, attend, inputs, form='auto'):
  traced = jax.jit(lambda inputs: attend(inputs, form=form)).trace(inputs)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  return 'tpu_custom_call' in text


@kinds
def test_the_kernels_run_on_a_tpu_only(kind):
  attend, make, sizes = KINDS[kind]
  inputs = make(**sizes)
  assert runs_kernels('tpu', attend, inputs)
  assert runs_kernels('tpu', attend, inputs, 'gpu')
  for platform, form in ('cpu', 'auto'), ('cuda', 'auto'), ('tpu', 'xla'):
    assert not runs_kernels(platform, attend, inputs, form)


@pytest.mark.parametrize(
  ('kind', 'changes'),
  [
    *(('window', c) for c in ({'W': 96, 'P': 96}, {'K': 32}, {'T': 1})),
    *(('window', c) for c in ({'T': 40}, {'keys': True})),
    *(('memory', c) for c in ({'K': 32}, {'T': 1}, {'S': 40}, {'S': 4100})),
  ],
)
def test_what_the_kernels_do_not_support_runs_in_xla(kind, changes):
  attend, make, sizes = KINDS[kind]
  inputs = make(**sizes | changes)
  assert not runs_kernels('tpu', attend, inputs)
  with pytest.raises(ValueError, match='tpu_interpreted do not support'):
    attend(inputs, form='tpu_interpreted')


def test_more_keys_than_a_window_are_an_error_in_kernels():
  with pytest.raises(ValueError, match='257 keys'):
    window_attention(example(128, 129, 128), form='tpu_interpreted')


def test_there_are_no_kernels_for_memory_on_a_gpu():
  with pytest.raises(ValueError, match='gpu_interpreted'):
    memory_attention(memory_example(**MEMORY), form='gpu_interpreted')


def test_a_form_that_does_not_exist():
  with pytest.raises(ValueError, match="'fast'"):
    window_attention(example(**WINDOW), form='fast')


def test_what_the_backward_pass_reads_can_be_saved_by_name():
  def forwards(policy):
    attend = jax.checkpoint(window_attention, policy=policy)
    grad, arrays = grad_of(attend, example(**WINDOW))
    text = str(jax.make_jaxpr(grad)(arrays))
    return text.count('name=window_attention_forward')

  saved = jax.checkpoint_policies.save_only_these_names(*WINDOW_NAMES)
  # With and without a bound; again in the backward pass, or not.
  assert forwards(saved) == 2
  assert forwards(jax.checkpoint_policies.nothing_saveable) == 4


def test_gradients_are_those_of_the_inputs_with_gradients():
  inputs = example(**WINDOW, scale=None)
  grad, arrays = grad_of(window_attention, inputs)
  _, found = jax.jit(grad)(arrays)
  assert found.mask_BS is None and found.scale_H is None
  assert jnp.abs(found.bias_HW).max() > 0
