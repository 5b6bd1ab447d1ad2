"""Attention by Pallas kernels if they run and support the inputs, else by XLA.

The choice is made for the platform that a program is compiled for. The kernels
of a platform are imported only for programs that may run there, because
importing Pallas takes time.
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib
from types import ModuleType
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.distributed.per_shard import split_kv_heads
from meliad_rec.kernels import xla
from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MemoryInputs

# Values of LayerConfig.attention, and the platforms whose kernels each uses.
# Interpreted kernels, for tests, run on any platform.
IMPLEMENTATIONS = {
  'auto': ('tpu', 'cuda'),
  'xla': (),
  'gpu': ('tpu', 'cuda'),
  'tpu_interpreted': ('tpu',),
  'gpu_interpreted': ('cuda',),
}
# Modules of kernels, by platform.
WINDOW_KERNELS = {
  'tpu': 'meliad_rec.kernels.tpu.window_attention',
  'cuda': 'meliad_rec.kernels.gpu.window_attention',
}
MEMORY_KERNELS = {'tpu': 'meliad_rec.kernels.tpu.memory_attention'}
# Checkpoint names, for policies of remat: of the output, and of the logarithms
# of sums of exponentials. The backward pass reads both.
WINDOW_NAMES = 'window_attention_output', 'window_attention_sums'
MEMORY_NAMES = 'memory_attention_output', 'memory_attention_sums'


def window_attention(
  inputs: AttentionInputs,
  dropout: Dropout | None = None,
  implementation: str = 'auto',
):
  """Returns the outputs [B, T, H, K] of causal sliding-window attention.

  Args:
    inputs: see AttentionInputs.
    dropout: dropout of the probabilities; None means no dropout. All blocks of
      queries share one dropout mask, unless `dropout.first` is given, as in
      xla.window_attend.
    implementation: one of IMPLEMENTATIONS. 'auto' uses kernels on a TPU, and on
      a GPU that can run them; 'gpu' does too, but raises an error if the GPU
      cannot; 'xla' uses no kernels. With these three, XLA computes what kernels
      do not support. 'tpu_interpreted' and 'gpu_interpreted' interpret the
      kernels of one platform on any machine.

  Raises:
    ValueError: there are more keys than a window and the queries have; the
      implementation does not exist; interpreted kernels do not support the
      inputs; or the implementation is 'gpu', but this machine's GPU cannot run
      the kernels.
  """
  T, S, W = inputs.q_BTHK.shape[1], inputs.k_BSHK.shape[1], inputs.window
  if S > W + T:
    raise ValueError(
      f'There are {S} keys. There can be at most {W + T}, a window of {W} '
      f'before {T} queries. Leave out older keys.'
    )
  kernels = _kernels(implementation, WINDOW_KERNELS)
  supported = _supported(implementation, kernels, inputs, dropout)
  if 'cuda' in kernels and implementation in ('auto', 'gpu'):
    reason = kernels['cuda'].device_reason()
    if reason and implementation == 'gpu':
      raise ValueError(
        f'The attention kernels for GPU do not run on this machine: {reason}. '
        'Set layer_config.LayerConfig.attention to "auto".'
      )
    if reason:
      supported = tuple(each for each in supported if each[0] != 'cuda')
  by_xla = xla.window_attend, xla.window_gradients
  attend = Dispatch(supported, implementation, by_xla, WINDOW_NAMES)
  return attend(inputs, dropout)


def memory_attention(
  inputs: MemoryInputs,
  dropout: Dropout | None = None,
  implementation: str = 'auto',
):
  """Returns the outputs [B, T, H, K] of attention to memory slots.

  There are kernels for TPU only. The table shows the compiler's estimates for a
  TPU v5e, in thousands of cycles. In each column, the first entry is for the
  forward pass, and the second for forward and backward passes together. The
  queries are 512 state vectors and a block of 512 tokens of one row (8 heads of
  width 128, bfloat16). For kernels, the number before the plus sign is the
  time of their schedules, as if the chip never waited for its memory; the
  number after it is the time that XLA takes to prepare their inputs.

      slots    XLA          kernels
        512    54, 161      10 + 16, 34 + 44
      1,024    69, 233      19 + 16, 64 + 59
      2,048    94, 394      37 + 16, 125 + 89
      4,096    419, 1,216   75 + 16, 247 + 147

  Args:
    inputs: see MemoryInputs.
    dropout: dropout of the probabilities, with one dropout mask [H, T, S] for
      all rows, which depends on positions if `dropout.first` is given; None
      means no dropout.
    implementation: see window_attention.

  Raises:
    ValueError: the implementation does not exist, or interpreted kernels do not
      support the inputs.
  """
  (T, H), S = inputs.q_BTHK.shape[1:3], inputs.k_BSHK.shape[1]
  if dropout is None:
    keep_HTS = None
  elif dropout.first is None:
    keep_HTS = dropout.keep_mask((H, T, S))
  else:
    keep_HTS = dropout.keep_by_position(0, T, (H, S)).swapaxes(0, 1)
  kernels = _kernels(implementation, MEMORY_KERNELS)
  supported = _supported(implementation, kernels, inputs, keep_HTS)
  by_xla = xla.memory_attend, xla.memory_gradients
  attend = Dispatch(supported, implementation, by_xla, MEMORY_NAMES)
  return attend(inputs, keep_HTS)


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """Implementations of one call of attention: kernels, and XLA.

  The kernels that support the inputs are found when the call is traced. One of
  them, or XLA, is chosen when the traced program is compiled for a platform.
  The object is called with `inputs` and `dropout`, and returns the outputs
  [B, T, H, K]. `inputs` is AttentionInputs or MemoryInputs. `dropout` is a
  Dropout, an array of dropout factors of the probabilities, or None.

  Attributes:
    kernels: (platform, module) pairs of the kernels that may run.
    implementation: one of IMPLEMENTATIONS.
    by_xla: two functions in plain XLA, for outputs and for gradients, such as
      xla.window_attend and xla.window_gradients.
    names: two checkpoint names, for policies of remat: of the output, and of
      the logarithms of sums of exponentials.
  """

  kernels: tuple[tuple[str, ModuleType], ...]
  implementation: str
  by_xla: tuple[Callable, Callable]
  names: tuple[str, str]

  def __call__(self, inputs, dropout):
    if self.kernels:
      H = inputs.q_BTHK.shape[2]
      inputs = inputs.replace(
        k_BSHK=split_kv_heads(inputs.k_BSHK, H),
        v_BSHK=split_kv_heads(inputs.v_BSHK, H),
      )
    return _attend(inputs, dropout, self)

  @property
  def interpret(self) -> bool:
    """Whether kernels are interpreted, which needs no TPU or GPU."""
    return self.implementation.endswith('_interpreted')

  def run(self, by_kernels: Callable[[ModuleType], Callable], by_xla, *args):
    """Returns the result of one implementation: the platform's kernels, or XLA.

    Args:
      by_kernels: function that makes an implementation from a module of
        kernels.
      by_xla: implementation for platforms without kernels.
      *args: arguments of the implementation.
    """
    branches = {name: by_kernels(module) for name, module in self.kernels}
    if self.interpret:
      (branch,) = branches.values()
      return branch(*args)
    if not branches:
      # Traced once for all layers with the same shapes.
      return jax.jit(by_xla, inline=True)(*args)
    return jax.lax.platform_dependent(*args, **branches, default=by_xla)


def mesh_platform() -> str | None:
  """Returns 'cpu', 'tpu' or 'gpu', if there is a current mesh of devices."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else None


def _kernels(
  implementation: str, modules: dict[str, str]
) -> dict[str, ModuleType | None]:
  """Returns the kernels that may run, by platform; None where there are none.

  If there is a current mesh, kernels of other platforms are left out.

  Args:
    implementation: one of IMPLEMENTATIONS, which names the platforms.
    modules: names of the modules of kernels, by platform.

  Raises:
    ValueError: the implementation does not exist.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'implementation must be one of {", ".join(IMPLEMENTATIONS)}, got '
      f'{implementation!r}. Set layer_config.LayerConfig.attention.'
    )
  platforms = IMPLEMENTATIONS[implementation]
  mesh = mesh_platform()
  if mesh and not implementation.endswith('_interpreted'):
    name = 'cuda' if mesh == 'gpu' else mesh
    platforms = tuple(platform for platform in platforms if platform == name)
  return {
    platform: importlib.import_module(modules[platform])
    if platform in modules
    else None
    for platform in platforms
  }


def _supported(
  implementation: str,
  kernels: dict[str, ModuleType | None],
  inputs,
  dropout: Any,
) -> tuple[tuple[str, ModuleType], ...]:
  """Returns (platform, module) pairs of kernels that support the inputs.

  Args:
    implementation: one of IMPLEMENTATIONS.
    kernels: see _kernels.
    inputs: see Dispatch.
    dropout: see Dispatch.

  Raises:
    ValueError: interpreted kernels do not support the inputs.
  """
  reasons = {
    platform: module.unsupported_reason(inputs, dropout)
    if module
    else f'this kind of attention has no kernels for {platform}'
    for platform, module in kernels.items()
  }
  if implementation.endswith('_interpreted'):
    (reason,) = reasons.values()
    if reason:
      raise ValueError(
        f'The kernels of {implementation} do not support these inputs: '
        f'{reason}. Set layer_config.LayerConfig.attention to "auto".'
      )
  return tuple(
    (platform, kernels[platform])
    for platform, reason in reasons.items()
    if not reason
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(inputs, dropout, dispatch: Dispatch):
  return _forward(inputs, dropout, dispatch)[0]


def _forward(inputs, dropout, dispatch: Dispatch):
  def by_kernels(module):
    def attend(inputs, dropout):
      arguments = inputs, _keep_mask(inputs, dropout, module)
      call = functools.partial(module.attend, interpret=dispatch.interpret)
      kinds, results = (inputs.kinds(), 'H'), ('BTHK', 'BH')
      return per_shard(call, kinds, arguments, results)(*arguments)

    return attend

  attend, _ = dispatch.by_xla
  results = dispatch.run(by_kernels, attend, inputs, dropout)
  o, lse = map(checkpoint_name, results, dispatch.names)
  return o, (inputs, dropout, o, lse)


def _backward(dispatch: Dispatch, saved, do):
  """Returns the gradients of inputs and dropout.

  The gradients of the inputs' mask and of dropout are None.

  Args:
    dispatch: the implementations.
    saved: inputs, dropout, outputs, and logarithms of sums of exponentials.
    do: gradients of the outputs.
  """

  def by_kernels(module):
    def gradients(inputs, dropout, o, lse, do):
      arguments = inputs, _keep_mask(inputs, dropout, module), o, lse, do
      call = functools.partial(module.gradients, interpret=dispatch.interpret)
      kinds = inputs.kinds(), 'H', 'BTHK', 'BH', 'BTHK'
      return per_shard(call, kinds, arguments, kinds[0])(*arguments)

    return gradients

  _, gradients = dispatch.by_xla
  return dispatch.run(by_kernels, gradients, *saved, do), None


_attend.defvjp(_forward, _backward)


def _keep_mask(inputs, dropout, module: ModuleType):
  """Returns the factors by which probabilities are multiplied, or None.

  Args:
    inputs: AttentionInputs or MemoryInputs.
    dropout: a Dropout, from which factors are drawn; an array of factors, which
      is returned unchanged; or None for no dropout.
    module: module of kernels, which says the shape of the factors.
  """
  if not isinstance(dropout, Dropout):
    return dropout
  return dropout.keep_mask(module.dropout_shape(inputs))
