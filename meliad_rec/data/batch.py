"""One training or evaluation batch: a segment of the document of each row."""

import flax.struct
import jax
import numpy as np


class Batch(flax.struct.PyTreeNode):
  """The next segment of each row, and its targets.

  B rows have T tokens each. A document d_0 .. d_{n-1} is read as inputs 0, d_0
  .. d_{n-2} with targets d_0 .. d_{n-1}: id 0 is padding and also precedes the
  first token. The first input of a later segment is the last token of the
  segment before it, so every token is a target exactly once.

  If tokens have labels, the inputs are d_0 .. d_{n-1}, and the targets are
  their labels. A label of 0 marks a token that is not scored.

  If a document is a pair of sequences, the first half of the segment holds
  tokens of the first sequence, and the second half holds tokens of the second.
  A sequence that ends within its half is followed by padding. The only target
  is the label of the pair. It is at the last position of the segment in which
  the longer sequence ends, whether or not that position is padding.

  If a document is a source and its target, the tokens and targets are those of
  the target, which is read as text.

  Attributes:
    tokens_BT: int32 inputs; 0 at padding, and before the first token of a text.
    targets_BT: int32 targets; 0 at positions without a target.
    mask_BT: bool, False at padding, which models ignore. True elsewhere, also
      at the input 0 before the first token of a text.
    scored_BT: bool, True where the target counts in loss and metrics; equals
      mask_BT for text.
    start_B: bool, True where the row begins to read a document. In the first
      batch of a run, rows that share a document may begin in its middle.
    document_B: int32 index of the row's document; -1 for a row without one.
    offset_B: int32 number of tokens of the document that come before this
      segment; for pairs, the number in each of the two sequences.
    source_BS: int32 sources, 0 at padding; None if documents have no sources.
  """

  tokens_BT: np.ndarray | jax.Array
  targets_BT: np.ndarray | jax.Array
  mask_BT: np.ndarray | jax.Array
  scored_BT: np.ndarray | jax.Array
  start_B: np.ndarray | jax.Array
  document_B: np.ndarray | jax.Array
  offset_B: np.ndarray | jax.Array
  source_BS: np.ndarray | jax.Array | None = None

  @property
  def inputs(self) -> tuple:
    """The arguments of models.model.Model after the state."""
    return self.tokens_BT, self.start_B, self.mask_BT, self.source_BS
