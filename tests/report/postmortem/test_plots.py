"""The pictures that there are numbers for."""

from pathlib import Path
from typing import Any

import pytest

from sealegs.report.postmortem.numbers import met
from sealegs.report.postmortem.plots import draw

INCIDENT = {"number": 1, "kind": "spike", "start": 60, "peak": 62, "peak_loss": 9.0, "end": 80, "trajectory": "fast"}


@pytest.mark.parametrize("told", ["17=40 3=12", "", "written by somebody"], ids=["ours", "none", "strange"])
def test_tokens_are_drawn_from_the_record_where_no_rerun_has_looked_at_them(told: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "loss": 9.0 if 60 <= step < 65 else 2.0} for step in range(100)]
    for row in rows[::10]:
        row |= {"token_frequencies": told} if told else {}
    drawn = draw(met(INCIDENT, rows), (), None, tmp_path)
    names = [Path(picture.file).name for picture in drawn]
    assert names == ["course.png", *(["token-frequencies.png"] if told.startswith("17") else [])]
