"""What the backward pass keeps of a call; the rest it computes again."""

from collections.abc import Callable

from flax import linen as nn
import jax

from meliad_rec.kernels import memory_attention
from meliad_rec.kernels import window_attention

POLICIES = {
  'none': None,
  'dots': jax.checkpoint_policies.dots_saveable,
  'projections': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  # What kernels of attention give is not computed again.
  'attention': jax.checkpoint_policies.save_only_these_names(
    *window_attention.SAVED, *memory_attention.SAVED
  ),
  'full': jax.checkpoint_policies.nothing_saveable,
}


def remat(body: Callable, policy: str, in_scan: bool = False) -> Callable:
  """Body(module, ...) that recomputes in the backward pass what policy says.

  Args:
    body: a function of a module and arrays.
    policy: a name in POLICIES.
    in_scan: whether a scan calls it; elsewhere XLA must be kept from merging
      what is computed again with what was computed before.
  """
  if policy not in POLICIES:
    raise ValueError(
      f'remat is {policy!r}; it must be one of {", ".join(POLICIES)}.'
    )
  if policy == 'none':
    return body
  return nn.remat(body, policy=POLICIES[policy], prevent_cse=not in_scan)
