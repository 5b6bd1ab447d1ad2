"""Rematerialization: what the backward pass keeps and what it recomputes."""

from collections.abc import Callable

from flax import linen as nn
import jax

from meliad_rec.kernels import dispatch

# Checkpoint names in layer.py: the residual stream after each sublayer.
SUMS = 'layer_attended', 'layer_output'
# Checkpoint names of the results of attention.
_ATTENTION = *dispatch.WINDOW_NAMES, *dispatch.MEMORY_NAMES
# {name: rule for which values are stored for the backward pass}.
POLICIES = {
  # All activations: most memory, and nothing is computed again.
  'none': None,
  # Results of all matrix products.
  'dots': jax.checkpoint_policies.dots_saveable,
  # Results of products with parameters.
  'projections': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  # Results of attention.
  'attention': jax.checkpoint_policies.save_only_these_names(*_ATTENTION),
  # Results of attention, and the residual stream after each sublayer. Often the
  # fastest in a scan, which copies everything that is kept.
  'sublayers': jax.checkpoint_policies.save_only_these_names(
    *_ATTENTION, *SUMS
  ),
  # Nothing: everything is computed again.
  'full': jax.checkpoint_policies.nothing_saveable,
}
# 'sublayers' on accelerators, but 'none' on a CPU.
AUTO = 'auto'


def remat(body: Callable, policy: str, in_scan: bool = False) -> Callable:
  """Returns `body` with a policy for the values that its backward pass keeps.

  Args:
    body: a function of a module and arrays.
    policy: a name in POLICIES, or AUTO.
    in_scan: whether a scan calls `body`. If False, XLA is kept from merging the
      recomputation with the first computation.
  """
  checkpoint_policy = kept(policy)
  if checkpoint_policy is None:
    return body
  return nn.remat(body, policy=checkpoint_policy, prevent_cse=not in_scan)


def kept(policy: str) -> Callable | None:
  """Returns the jax.checkpoint policy of this name.

  None means that the backward pass keeps everything.

  Raises:
    ValueError: `policy` is neither a name in POLICIES nor AUTO.
  """
  if policy == AUTO:
    on_cpu = (dispatch.mesh_platform() or jax.default_backend()) == 'cpu'
    policy = 'none' if on_cpu else 'sublayers'
  if policy not in POLICIES:
    raise ValueError(
      f'remat must be one of {", ".join((AUTO, *POLICIES))}, got {policy!r}. '
      "Set the remat of the model's cell, such as window.WindowLayer.remat."
    )
  return POLICIES[policy]
