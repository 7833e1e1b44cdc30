"""What an order leaves out of the data."""

import pytest

from sealegs.recovery.evidence import LATELY, Anomaly
from sealegs.recovery.playbook_runner import bad_stretch
from sealegs.recovery.recurrence import Trigger


@pytest.mark.parametrize("batches_a_step", [1, 4])
def test_bad_data_that_passed_are_left_out_whole(batches_a_step: int) -> None:
    """Their end is seen once most of the newest losses are low again, so it is dated too early by the others."""
    bad = range(230 * batches_a_step, 250 * batches_a_step)
    at_the_onset = bad.start + batches_a_step - 1
    dated = 20 - (LATELY // 2 - 1)
    anomaly = Anomaly(trigger=Trigger.SPOILT, onset=230, batch=at_the_onset, text="", lasted=dated)
    first, count = bad_stretch(anomaly, 10, batches_a_step)
    assert first == bad.start - batches_a_step
    assert first + count == bad.stop
