"""What a notebook shows of a run, a diagnosis and a verdict: tables and a curve, and text of strangers as text."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.diagnosis.streams import CASES, read_case
from tests.diagnosis.test_cases import diagnosis_of

from sealegs import Finding, Run, Severity, Verdict, open_run

ROOT = Path(__file__).parents[1]
HOSTILE = "<script>alert(1)</script><img src=x onerror=y>\x1b[2J"


class Tags(HTMLParser):
    """The tags of a piece of HTML, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(value: Run | Verdict) -> Tags:
    text = value._repr_html_()
    found = Tags(text)
    assert set(found.tags) <= {"table", "tr", "th", "td", "code", "svg", "rect", "title", "polyline", "text"}
    ElementTree.fromstring(f"<div>{text}</div>")  # noqa: S314 - our own; each tag that opens closes
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "run_id": f"mine {HOSTILE}"}))
    rows = [
        {"step": step, "loss": "NaN" if step == 30 else 4 - step / 50, "lr": 1e-3, HOSTILE: 1} for step in range(60)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    events = [{"kind": "skip", "step": 30, "time": 1.0}, {"kind": HOSTILE, "step": 31, "time": 2.0}]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return tmp_path


def test_a_run_shows_its_curves_and_what_happened(folder: Path) -> None:
    found = shown(open_run(folder))
    assert found.tags.count("svg") == 1
    assert found.tags.count("title") == 2, "the skip, in the panel of the loss and in that of the rate"
    assert "skip at step 30" in found.text
    assert "\u00d7" in found.text, "where the loss is not finite"
    assert "0 to 59, 60 rows" in found.text
    assert "skip 1" in found.text
    assert "alert(1)" in found.text
    assert "\x1b" not in found.text


def test_a_run_without_rows_shows_its_table(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")
    found = shown(open_run(folder))
    assert "svg" not in found.tags
    assert "none yet" in found.text


def test_a_diagnosis_shows_verdict_action_and_causes(tmp_path: Path) -> None:
    (path,) = (each for each in CASES if each.stem == "lr-jump")
    diagnosis = diagnosis_of(read_case(path), tmp_path)
    found = Tags(diagnosis._repr_html_())
    assert f"act: {diagnosis.findings.because}" in found.text
    assert diagnosis.first_action in found.text
    assert "lr discontinuity (established)" in found.text
    assert {"svg", "polyline", "table"} <= set(found.tags)
    assert found.tags.count("title") == 3 * len(diagnosis.findings.incidents), "a band in each of three panels"


def test_the_snippet_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "check.md").read_text(), re.DOTALL)
    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{step},{4 - step / 100}\n" for step in range(80)))
    monkeypatch.chdir(tmp_path)
    *lines, last = snippet.strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)  # noqa: S102 our own docs
    found = Tags(eval(last, names)._repr_html_())  # noqa: S307 as a notebook does
    assert {"svg", "table"} <= set(found.tags)
    assert "verdict" in found.text


def test_a_verdict_shows_its_findings() -> None:
    spike = Finding(detector="d", step=30, severity=Severity.GATE, signal=HOSTILE, value=793.4, limit=17.47, p=2e-9)
    broken = Finding(detector="f", step=30, severity=Severity.GATE, signal="loss", value=math.nan, limit=math.inf)
    found = shown(Verdict(step=30, findings=(spike, broken), skips_in_a_row=1, skip_limit=10, culprit=HOSTILE))
    assert found.text.startswith("step 30  SKIP")
    assert all(text in found.text for text in ("793.4", "17.47", "2e-09", "nan", "inf"))
    assert found.tags.count("tr") == 3
    assert shown(Verdict(step=3)).tags == ["code"]
