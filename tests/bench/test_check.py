"""The accuracy tables count what they say they count."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.check import Labelled, half_of, is_found, labels_in, report, score

from sealegs.incidents import Incident


def incident(start: int, end: int | None) -> Incident:
    nan = float("nan")
    return Incident(
        number=1,
        start=start,
        kind="spike",
        pre_loss=nan,
        usual=nan,
        limit=nan,
        peak=start,
        peak_loss=nan,
        grad_norm_peak=nan,
        end=end,
    )


def folder_of(path: Path) -> Path:
    rng = np.random.default_rng(0)
    loss = 2 + 5 / (1 + np.arange(300) / 20) + 0.03 * rng.normal(size=300)
    loss[200:205] *= 2
    for name, values in {"calm.csv": loss[:190], "spiky.csv": loss}.items():
        lines = [f"{10 * row},{value:.6f}" for row, value in enumerate(values)]
        (path / name).write_text("\n".join(["step,loss", *lines]))
    (path / "broken.csv").write_text("")
    labels = ["calm.csv,csv,healthy,", "spiky.csv,csv,spikes,2000-2040;500-510", "broken.csv,csv,healthy,"]
    (path / "labels.csv").write_text("\n".join(["file,format,label,spike_steps", *labels]))
    return path


def test_a_file_is_always_in_the_same_half() -> None:
    halves = [half_of(f"{number}.csv") for number in range(100)]
    assert halves == [half_of(f"{number}.csv") for number in range(100)]
    assert 30 < halves.count("tune") < 70


@pytest.mark.parametrize(
    ("start", "end", "found"), [(90, 110, True), (50, 70, True), (50, 69, False), (50, None, True), (231, 300, False)]
)
def test_a_range_is_found_by_what_overlaps_it(start: int, end: int | None, found: bool) -> None:
    assert is_found((100, 200), [incident(start, end)], np.arange(0, 1000, 10)) == found


def test_ranges_of_a_log_that_goes_back_are_rows() -> None:
    steps = np.concatenate([np.arange(0, 500, 10), np.arange(300, 900, 10)])
    assert is_found((71, 72), [incident(500, 510)], steps)
    assert not is_found((500, 510), [incident(500, 510)], steps)


def test_the_tables_of_a_folder(tmp_path: Path) -> None:
    logs = labels_in(folder_of(tmp_path))
    assert logs[1] == Labelled(tmp_path / "spiky.csv", "csv", "spikes", ((2000, 2040), (500, 510)))
    scores = [score(log, "calibrated") for log in logs]
    assert [one.is_right for one in scores] == [True, True, False]
    assert scores[1].found == (True, False)
    text = report(scores)
    assert "| csv | 2 | 2 of 2 (100%) | 1 of 2 (50%) | 0 in 190 (0.0) |" in text
    assert "- missed: spiky.csv: 500-510" in text
    assert "- refused: broken.csv:" in text
