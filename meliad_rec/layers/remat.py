"""What the backward pass keeps of a call; the rest it computes again."""

from collections.abc import Callable

from flax import linen as nn
import jax

from meliad_rec.kernels import memory_attention
from meliad_rec.kernels import window_attention

# Names that layer.py gives to what its sublayers add to.
SUMS = 'layer_attended', 'layer_output'
# Names of what kernels of attention give.
_ATTENTION = *window_attention.SAVED, *memory_attention.SAVED
POLICIES = {
  'none': None,
  'dots': jax.checkpoint_policies.dots_saveable,
  'projections': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'attention': jax.checkpoint_policies.save_only_these_names(*_ATTENTION),
  # In a scan, where whatever is kept is copied, this is often the fastest.
  'sublayers': jax.checkpoint_policies.save_only_these_names(
    *_ATTENTION, *SUMS
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
  known = kept(policy)
  if known is None:
    return body
  return nn.remat(body, policy=known, prevent_cse=not in_scan)


def kept(policy: str) -> Callable | None:
  """What a policy keeps, as jax.checkpoint takes it; None: all.

  Raises:
    ValueError: it is no name in POLICIES.
  """
  if policy not in POLICIES:
    raise ValueError(
      f'remat is {policy!r}; it must be one of {", ".join(POLICIES)}.'
    )
  return POLICIES[policy]
