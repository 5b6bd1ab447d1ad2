"""Which implementation of attention runs where, and over a mesh."""

import jax
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels import dispatch
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import memory_attention
from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.dispatch import WINDOW_NAMES
from tests import attention_example as examples

WINDOW = {'T': 128, 'P': 128, 'W': 128}
MEMORY = {'T': 64, 'S': 128}
KINDS = {
  'window': (window_attention, examples.example, WINDOW),
  'memory': (memory_attention, examples.memory_example, MEMORY),
}
kinds = pytest.mark.parametrize('kind', KINDS)


@kinds
def test_on_a_cpu_xla_runs(kind):
  attend, make, sizes = KINDS[kind]
  inputs, dropout = make(**sizes), Dropout(jax.random.key(0), 0.5)
  if kind == 'window':
    expected = examples.both(examples.window_by_xla, inputs, dropout)
  else:
    keep = dropout.keep_mask((2, sizes['T'], sizes['S']))
    expected = examples.both(ref.memory_attention, inputs, keep)
  found = examples.both(attend, inputs, dropout)
  examples.assert_close(found, expected, 1e-5)


@kinds
@pytest.mark.parametrize('implementation', ['auto', 'tpu_interpreted'])
def test_under_a_mesh_it_is_the_same(kind, implementation):
  """On a mesh of CPUs, 'auto' is XLA only, which divides its work itself."""
  attend, make, sizes = KINDS[kind]
  dropout = Dropout(jax.random.key(0), 0.5)
  run = lambda: examples.both(
    attend, make(**sizes), dropout, implementation=implementation
  )
  expected = run()
  with jax.set_mesh(partition.make_mesh(2, 2, 2)):
    found = run()
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, found, expected)


def runs_kernels(platform, attend, inputs, implementation='auto'):
  traced = jax.jit(
    lambda inputs: attend(inputs, implementation=implementation)
  ).trace(inputs)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  return 'tpu_custom_call' in text


@kinds
def test_the_kernels_for_tpu_run_on_a_tpu_only(kind):
  attend, make, sizes = KINDS[kind]
  inputs = make(**sizes)
  assert runs_kernels('tpu', attend, inputs)
  assert runs_kernels('tpu', attend, inputs, 'gpu')
  for platform, implementation in (
    ('cpu', 'auto'),
    ('cuda', 'auto'),
    ('tpu', 'xla'),
  ):
    assert not runs_kernels(platform, attend, inputs, implementation)


@kinds
def test_no_kernels_are_imported_for_a_mesh_of_cpus(kind, monkeypatch):
  attend, make, sizes = KINDS[kind]
  traced = lambda: str(jax.make_jaxpr(lambda i: attend(i))(make(**sizes)))
  assert 'pallas_call' in traced()
  monkeypatch.setattr(dispatch, 'importlib', None)
  with jax.set_mesh(partition.make_mesh()):
    assert 'pallas_call' not in traced()


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
    attend(inputs, implementation='tpu_interpreted')


@pytest.mark.parametrize(
  ('kind', 'changes', 'implementation', 'message'),
  [
    ('window', {'P': 129}, 'tpu_interpreted', '257 keys'),
    ('window', {'P': 129}, 'auto', '257 keys.*at most 256'),
    ('memory', {}, 'gpu_interpreted', 'gpu_interpreted'),
    ('window', {}, 'fast', "'fast'"),
  ],
)
def test_forms_that_cannot_be(kind, changes, implementation, message):
  attend, make, sizes = KINDS[kind]
  with pytest.raises(ValueError, match=message):
    attend(make(**sizes | changes), implementation=implementation)


def test_what_the_backward_pass_reads_can_be_saved_by_name():
  def forwards(policy):
    attend = jax.checkpoint(window_attention, policy=policy)
    grad, arrays = examples.grad_of(attend, examples.example(**WINDOW))
    text = str(jax.make_jaxpr(grad)(arrays))
    return text.count('name=window_attention_forward')

  saved = jax.checkpoint_policies.save_only_these_names(*WINDOW_NAMES)
  # With and without a bound; again in the backward pass, or not.
  assert forwards(saved) == 2
  assert forwards(jax.checkpoint_policies.nothing_saveable) == 4
