"""The table of verdicts: what is right for a person who was sure and for one who was not, and what it counts."""

import csv
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.verdicts import (
    LABELS,
    SAID,
    Scored,
    live,
    live_report,
    main,
    ranges_of,
    recall_report,
    report,
    rows_of,
    scored,
)


def label(verdict: str, *, confidence: str = "high", ranges: str = "", name: str = "healthy") -> dict[str, str]:
    return {"verdict": verdict, "confidence": confidence, "ranges": ranges, "class": name, "kind": "supervised"}


@pytest.mark.parametrize(
    ("labelled", "confidence", "said", "is_right"),
    [
        ("healthy", "high", "healthy", True),
        ("healthy", "high", "watch", False),
        ("healthy", "low", "watch", True),
        ("act", "low", "watch", True),
        ("act", "low", "healthy", False),
        ("unknown", "low", "refused", False),
    ],
)
def test_a_person_who_was_not_sure_allows_the_neighbour(
    labelled: str, confidence: str, said: str, is_right: bool
) -> None:
    assert Scored(label=label(labelled, confidence=confidence), verdict=said, why="").is_right is is_right


def test_a_log_is_asked_and_its_range_found(tmp_path: Path) -> None:
    rows = [f"{step},{12.0 if 300 <= step < 304 else 2 + 0.01 * (step % 7)}" for step in range(600)]
    (tmp_path / "a.csv").write_text("step,loss\n" + "\n".join(rows) + "\n")
    (tmp_path / "b.csv").write_text("step,name\n1,x\n")
    found = scored(tmp_path / "a.csv", label("watch", ranges="300-303;500-510", name="spikes"))
    refused = scored(tmp_path / "b.csv", label("healthy", ranges="3-4"))
    assert (found.found, found.points) == ((True, False), 600)
    assert (refused.verdict, refused.found) == ("refused", (False,))
    text = report([found, refused])
    assert "ranges found: 1 of 3 (33%)" in text
    assert "healthy called healthy: 0 of 1 (0%)" in text
    assert "unreadable: 1" in text


def fine_tune(folder: Path, norms: list[float]) -> dict[str, str]:
    """A healthy fine-tune with these gradient norms after two hundred of 0.5, and its label."""
    folder.mkdir()
    rows = [
        {"step": step, "loss": 1 + 1 / step, "grad_norm": norm * (1 + 0.1 * (step % 5))}
        for step, norm in enumerate([0.5] * 200 + norms, 1)
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": len(rows)}))
    return label("healthy") | {"file": folder.name}


def test_a_healthy_log_is_shown_to_the_live_detectors(tmp_path: Path) -> None:
    calm, broken, gross = (
        live(tmp_path / name, fine_tune(tmp_path / name, norms))
        for name, norms in (("calm", [0.5]), ("broken", [float("nan"), 0.5]), ("gross", [5000.0, 0.5]))
    )
    assert (calm.stride, calm.rows, calm.skips) == (1, 201, ())
    assert (broken.skips, broken.nonfinite) == ((201,), 1)
    assert (gross.skips, gross.nonfinite) == ((201,), 0)
    assert "| every step logged | 3 | 605 | 1 |" in live_report([calm, broken, gross])


def test_what_is_done_to_a_healthy_run_is_found_or_not(tmp_path: Path) -> None:
    fine_tune(tmp_path / "calm", [0.5])
    text = recall_report([rows_of(tmp_path / "calm")])
    assert "| gradient x1000 once: skipped | 21 of 21 (100%) | 7 of 7 (100%) |" in text
    assert "| control: nothing, skip or alarm | 0 of 21 (0%) | 0 of 7 (0%) |" in text
    assert "| gradient x10 once: skipped, clipped at 1 | 0 of 21 (0%) | 0 of 7 (0%) |" in text


def labelled(name: str) -> list[dict[str, str]]:
    with (LABELS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("name", "at_least"), [("logs", 200), ("fresh", 130), ("finetunes", 80)])
def test_every_label_can_be_scored_and_a_repository_is_in_one_half(name: str, at_least: int) -> None:
    rows = labelled(name)
    assert len(rows) == len({row["file"] for row in rows}) >= at_least
    assert all(row["verdict"] in SAID[:4] and row["confidence"] in ("high", "medium", "low") for row in rows)
    assert all(first <= last for row in rows for first, last in ranges_of(row))
    halves = {(row["source"].partition(":")[0], row["half"]) for row in rows}
    assert len(halves) == len({repository for repository, _ in halves})


def test_the_fresh_labels_are_of_repositories_that_no_rule_before_was_made_with() -> None:
    fresh = Counter(row["source"].partition(":")[0] for row in labelled("fresh"))
    others = {row["source"].partition(":")[0] for name in ("kinds", "logs") for row in labelled(name)}
    assert fresh.keys().isdisjoint(others)
    assert max(fresh.values()) <= 2
    halves = {(row["source"].partition(":")[0], row["half"]) for row in labelled("fresh")}
    assert len(halves) == len(fresh), "a repository is in one half"
    assert {half for _, half in halves} == {"tune", "report"}


@pytest.mark.parametrize("name", ["kinds", "logs", "fresh"])
def test_the_logs_that_are_there_are_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in labelled(name) if row["half"] == "report"]
    of_csv = next(row for row in rows if row["file"].endswith(".csv"))
    made = "step,loss\n" + "\n".join(f"{step},{2 + 0.01 * (step % 7)}" for step in range(50)) + "\n"
    (tmp_path / of_csv["file"]).write_text(made)
    monkeypatch.setattr(sys, "argv", ["verdicts.py", str(tmp_path), "--labels", name, "--half", "report"])
    main()
    assert f"1 logs, {len(rows) - 1} not there" in capsys.readouterr().out
