"""What a post-mortem says of remedies is checked against the run, as what `check` says is."""

from pathlib import Path

import pytest
from tests.diagnosis.streams import Case, run_from

from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.report.postmortem.causes import doubt_of_clip, remedies


@pytest.mark.parametrize(("norm", "clip", "is_doubted"), [(0.3, "0.5", False), (0.7, "0.7", True), (4.0, "4", True)])
def test_no_clip_is_proposed_that_would_clip_most_steps(
    norm: float, clip: str, is_doubted: bool, tmp_path: Path
) -> None:
    signals = {
        "loss": {"line": [[0, 6], [100, 3], [399, 2.6], [400, 5.6], [440, 3.6], [600, 3.4]], "noise": 0.01},
        "grad_norm": {"line": [[0, 3 * norm], [100, norm], [600, norm]], "noise": 0.05, "set": [[400, 404, 90.0]]},
    }
    facts = Facts(look(run_from(Case("clip", "", {"steps": 600, "signals": signals}, {}), tmp_path)))
    proposed = next(each for each in remedies(facts, "long-tail-token") if each.knob == "clip")
    assert proposed.value.startswith(clip)
    assert float(proposed.value) < 1.2 * max(norm, 0.5)
    assert ("clips one in 10" in doubt_of_clip(facts, 0.5)) is is_doubted
