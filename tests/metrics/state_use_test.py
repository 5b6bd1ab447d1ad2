"""Metrics of recurrent states, against their definitions."""

from flax import linen as nn
import numpy as np
import pytest

from meliad_rec.metrics import metrics
from meliad_rec.metrics import state_use
from tests.cells import draw

B, N, S, D, H, T = 3, 4, 5, 6, 2, 7


class Sower(nn.Module):
  """Calls a function with itself."""

  def __call__(self, sow, *arrays):
    sow(self, *arrays)


def sown(sow, *arrays):
  """Returns the means that a function sows, by name."""
  apply = Sower().apply
  _, found = apply({}, sow, *arrays, mutable=[metrics.COLLECTION])
  means = metrics.collect(found.get(metrics.COLLECTION, {}))
  return {name: float(m.total / m.count) for name, m in means.items()}


def rms(a):
  return np.sqrt((np.asarray(a, np.float64) ** 2).mean())


def test_states_that_change_and_differ():
  s_BNSD = draw(B, N + 1, S, D)
  mask_BN = np.ones((B, N), bool)
  mask_BN[1, 2:] = False
  found = sown(state_use.sow_states, s_BNSD, mask_BN)
  change, slots = [], []
  for b, n in zip(*np.nonzero(mask_BN), strict=True):
    before, after = s_BNSD[b, n], s_BNSD[b, n + 1]
    change += [rms(a - b) / rms(a) for a, b in zip(after, before, strict=True)]
    unit = np.stack([a / rms(a) for a in after])
    slots.append(rms(unit - unit.mean(0)))
  assert found['state_change'] == pytest.approx(np.mean(change), rel=1e-5)
  assert found['slot_difference'] == pytest.approx(np.mean(slots), rel=1e-5)


def test_a_large_slot_hides_no_other():
  mask_BN = np.ones((B, N), bool)
  large = np.ones((S, 1))
  large[0] = 100
  first_B1SD = draw(B, 1, S, D)
  # One slot is large and never changes. The others change in every block.
  s_BNSD = np.array(draw(B, N + 1, S, D)) * 2
  s_BNSD[:, :, :1] = 100 * first_B1SD[:, :, :1]
  assert sown(state_use.sow_states, s_BNSD, mask_BN)['state_change'] > 0.5
  # All slots have one direction.
  s_BNSD = large * np.broadcast_to(first_B1SD[:, :, :1], s_BNSD.shape)
  found = sown(state_use.sow_states, s_BNSD, mask_BN)
  assert found['slot_difference'] == pytest.approx(0, abs=1e-5)


def test_one_slot_differs_from_no_other():
  s_BN1D = draw(B, N + 1, 1, D)
  found = sown(state_use.sow_states, s_BN1D, np.ones((B, N), bool))
  assert list(found) == ['state_change']


@pytest.mark.parametrize('shape', [(D,), (B, S, D)])
def test_gates(shape):
  gate = np.abs(draw(*shape))
  found = sown(state_use.sow_gate, gate)
  spread = gate.std() if gate.ndim == 1 else gate.std((1, 2)).mean()
  assert found['gate'] == pytest.approx(gate.mean(), rel=1e-5)
  assert found['gate_spread'] == pytest.approx(spread, rel=1e-5)


def test_gates_at_padding_do_not_count():
  gate_BSD, mask_BS = np.abs(draw(B, S, D)), np.ones((B, S), bool)
  mask_BS[0, 2:] = mask_BS[1] = False
  found = sown(state_use.sow_gate, gate_BSD, mask_BS)
  spread = (2 * gate_BSD[0, :2].std() + S * gate_BSD[2].std()) / (2 + S)
  assert found['gate'] == pytest.approx(gate_BSD[mask_BS].mean(), rel=1e-5)
  assert found['gate_spread'] == pytest.approx(spread, rel=1e-5)


def test_rows_of_padding_do_not_count():
  gate_BSD, real_B = np.abs(draw(B, S, D)), np.array([True, False, True])
  sow = state_use.of_real_rows(state_use.sow_gate, real_B)
  found = sown(sow, gate_BSD)
  assert found['gate'] == pytest.approx(gate_BSD[real_B].mean(), rel=1e-5)
  found = sown(sow, gate_BSD[0, 0])
  assert found['gate'] == pytest.approx(gate_BSD[0, 0].mean(), rel=1e-5)


def test_entropy_is_a_share_of_that_of_equal_weights():
  mask_BT = np.arange(T) < np.array([[T], [2], [0]])
  logits_BHTS = np.full((B, H, T, S), 3.0)
  sow = state_use.sow_attention
  assert sown(sow, logits_BHTS, mask_BT) == {'slot_entropy': pytest.approx(1)}
  # One slot takes all in the second head; padding does not count.
  logits_BHTS[:, 1, :, 2] = 100
  logits_BHTS[1, :, 2:, 0] = 50
  found = sown(sow, logits_BHTS, mask_BT)
  assert found == {'slot_entropy': pytest.approx(0.5)}
  assert not sown(sow, logits_BHTS[..., :1], mask_BT)


def test_rows_that_differ():
  s_BSD = draw(B, S, D)
  pair_B = np.array([False, True, True])
  found = state_use.row_difference(s_BSD, pair_B)
  by_hand = [
    np.mean(
      [rms(s_BSD[i, j] - s_BSD[i - 1, j]) / rms(s_BSD[i, j]) for j in range(S)]
    )
    for i in (1, 2)
  ]
  assert found.count == 2
  assert found.total == pytest.approx(sum(by_hand), rel=1e-5)
