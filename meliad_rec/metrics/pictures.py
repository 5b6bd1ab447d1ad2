"""Pictures: arrays that show what happens inside a model, for exploration.

Modules sow attention weights, gates, and the outputs of steps in depth into the
collection COLLECTION. They compute them only if a caller makes this collection
mutable, so pictures cost nothing in training and evaluation.
evaluation/observer.py reads them, one document and one block at a time.

Letter of this file: n chunks.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax

COLLECTION = 'pictures'
# Collection of the number of steps in depth of each unit, which costs nothing.
DEPTHS = 'depths'
# Axes of both that nn.scan stacks the arrays along.
STACKED = {COLLECTION: 0, DEPTHS: 0}

# The axes of each picture after its rows, as modules sow it. Pictures of
# attention are weights after the softmax. A query has weights that add up to 1,
# or to 0 if it sees no key.
AXES = {
  # 'back' 0 is the nearest key that a token may see: itself or the one before.
  'token_to_token': ('token', 'head', 'back'),
  'token_to_state': ('token', 'head', 'slot'),
  'token_to_source': ('token', 'head', 'source'),
  'state_to_state': ('slot', 'head', 'other_slot'),
  # The keys are the tokens that a state vector sees, oldest first.
  'state_to_token': ('slot', 'head', 'key'),
  # Keys that a Memorizing Transformer recalls: the weight of each, how many
  # tokens it is back, and the share of these keys in the result of attention.
  'recall_weight': ('token', 'head', 'neighbor'),
  'recall_back': ('token', 'head', 'neighbor'),
  'recall_share': ('token', 'head'),
  # Weights of the old value and of the new one, for each element.
  'state_keep': ('slot', 'feature'),
  'state_write': ('slot', 'feature'),
  'token_keep': ('token', 'feature'),
  'token_write': ('token', 'feature'),
  'token_output': ('token', 'feature'),
  # Outputs that the model would have if this step or pass were its last.
  'lens': ('token', 'feature'),
}
ATTENTION = tuple(name for name in AXES if '_to_' in name or 'recall' in name)
GATES = tuple(n for n in AXES if n.endswith(('_keep', '_write', '_output')))


def wanted(module: nn.Module) -> bool:
  """Returns whether the caller of `apply` asks for pictures."""
  is_mutable = module.is_mutable_collection(COLLECTION)
  return is_mutable and not module.is_initializing()


def sow(module: nn.Module, name: str, picture: Callable[[], jax.Array]) -> None:
  """Sows a picture if pictures are wanted.

  Args:
    module: a bound module.
    name: a name in AXES.
    picture: function that computes the array. Its axes are the rows and
      the axes in AXES; others, such as steps in depth, may precede them.
  """
  if wanted(module):
    module.sow(COLLECTION, name, picture())


def join_chunks(body: Callable) -> Callable:
  """Returns a lifted scan over chunks of tokens, with joined pictures.

  The scan stacks the pictures of chunks along axis 0: [n, B, C, ...]. They
  become [B, n C, ...].
  """

  def join(a):
    a = a.swapaxes(0, 1)
    return a.reshape(len(a), -1, *a.shape[3:])

  join_all = functools.partial(jax.tree.map, join)
  return nn.map_variables(body, COLLECTION, trans_out_fn=join_all, mutable=True)
