"""Pictures of what a trained model does with a text, and the numbers in them.

Each function takes a run that meliad_rec.load_run opened. A function with a
parameter `runs` also takes {name: run} and draws all of them in one figure; for
the others, `compare` puts the figures of several runs side by side. A function
returns a Shown: arrays with named axes, and a figure. The functions use only
public methods of the run, so each is also an example of how to look at a model
in another way.
"""

from meliad_rec.explore.compare import compare
from meliad_rec.explore.forgetting import by_distance
from meliad_rec.explore.forgetting import by_position
from meliad_rec.explore.forgetting import forgetting
from meliad_rec.explore.forgetting import state_gradients
from meliad_rec.explore.gain import gain
from meliad_rec.explore.lens import lens
from meliad_rec.explore.probe import ablate
from meliad_rec.explore.probe import probe
from meliad_rec.explore.recalled import attention_map
from meliad_rec.explore.recalled import memory_sources
from meliad_rec.explore.recalled import recalled
from meliad_rec.explore.recalled import source_map
from meliad_rec.explore.shown import Shown
from meliad_rec.explore.state_map import gates_in_training
from meliad_rec.explore.state_map import state_map
from meliad_rec.explore.swap import ask
from meliad_rec.explore.swap import swap

__all__ = [
  'Shown',
  'ablate',
  'ask',
  'attention_map',
  'by_distance',
  'by_position',
  'compare',
  'forgetting',
  'gain',
  'gates_in_training',
  'lens',
  'memory_sources',
  'probe',
  'recalled',
  'source_map',
  'state_gradients',
  'state_map',
  'swap',
]
