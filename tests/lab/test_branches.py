"""What a branch of a run is: a copy that begins where it was made."""

from pathlib import Path

import pytest

from sealegs.lab.branches import fork
from sealegs.record import manifest as manifests
from sealegs.record.writer import RunWriter


def test_a_branch_was_not_down_while_it_waited_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill makes one beginning, and its twins go on from it one after the other."""
    beginning = RunWriter.create(tmp_path / "beginning", manifests.describe("beginning"))
    beginning.event("end", 10)
    beginning.close()
    monkeypatch.setattr(manifests, "now", lambda: "2999-01-01T00:00:00+00:00")
    fork(tmp_path / "beginning", tmp_path / "branch")
    assert RunWriter.reopen(tmp_path / "branch").left_off_at is None
    assert RunWriter.reopen(tmp_path / "beginning").left_off_at is not None, "which was left, and is gone on with"
