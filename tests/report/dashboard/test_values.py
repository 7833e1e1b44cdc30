"""Runs in, what is drawn out."""

import math
from pathlib import Path

import numpy as np
import pytest
from tests.report.runs import BACK_FROM, BACK_TO, GAP, HISTOGRAM, NAN, SPIKE, STEPS, events, rows, troubled, write

from sealegs.record.run import open_run
from sealegs.report.dashboard import values
from sealegs.report.dashboard.batches import cells_of, quantiles_of
from sealegs.report.dashboard.columns import columns_of
from sealegs.report.dashboard.marks import MOST, PanelMark, marks_of, thinned
from sealegs.report.dashboard.subjects import SUBJECTS
from sealegs.report.dashboard.summary import MOST_INCIDENTS, described, told, wanted
from sealegs.report.dashboard.values import ALL_POINTS, MOST_SOURCES, Page, page_of, see


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = troubled(tmp_path_factory.mktemp("runs") / "night")
    return page_of([see(str(folder), "night")])


def test_the_panels_are_the_ten_that_post_mortems_cite(page: Page) -> None:
    titles = [panel.subject.title.lower() for panel in page.panels]
    words = "loss|learning rate|gradient norm before clipping|activations per layer|parameter norm|optimizer moments|"
    words += "loss of single tokens|throughput|loss scale|batch composition"
    assert titles == words.split("|")
    assert [panel.subject.number for panel in page.panels] == list(range(1, 11))
    assert not any(panel.is_empty for panel in page.panels)


def test_each_panel_has_its_lines(page: Page) -> None:
    labels = {panel.subject.number: [each.label for each in panel.series] for panel in page.panels}
    assert labels[1] == ["loss", "evaluation loss"]
    assert labels[4] == [f"blocks.{layer}" for layer in range(12)]  # and not 0, 1, 10, 11, 2
    assert labels[5] == ["all", "blocks.0", "embedding"]
    assert labels[6] == ["first moment", "second moment"]
    assert labels[10] == ["token entropy", "source grammar", "source code"]
    assert page.panels[6].cells is not None


def test_what_the_run_went_back_behind_is_a_line_of_its_own(page: Page) -> None:
    loss = page.panels[0].series[0]
    assert loss.left_behind is not None
    assert loss.left_behind.steps.tolist() == list(range(BACK_TO, BACK_FROM))
    assert loss.left_behind.values.max() > 6
    assert np.nanmax(loss.line.values[loss.line.steps > 100]) < 3


def test_nan_and_gaps_are_in_the_values(page: Page) -> None:
    loss = page.panels[0].series[0].line
    assert [(mark.first, mark.last, mark.rows, mark.what) for mark in loss.broken] == [(NAN[0], NAN[-1], 3, "NaN")]
    assert not set(GAP) & set(loss.steps.tolist())
    breaks = loss.steps[np.isnan(loss.values)].tolist()
    assert breaks == [GAP[-1] + 1, NAN[-1] + 1]
    assert page.panels[2].series[0].line.broken[0].what == "Infinity"


def test_batches_that_came_twice_are_found(page: Page) -> None:
    (_, mark), *others = page.panels[9].repeats
    assert (mark.first, others) == (250, [])
    assert "came at step 30 already" in mark.text


def test_everything_that_happened_is_marked(page: Page) -> None:
    counts = {
        kind: sum(mark.kind == kind for mark in page.all_marks[0]) for kind in ("incident", "intervention", "skip")
    }
    assert counts["intervention"] == 1
    assert counts["skip"] == 5  # the alarm skipped its step, too
    live = next(mark for mark in page.all_marks[0] if mark.kind == "incident" and mark.number == 1)
    assert (live.first, live.last, live.text) == (SPIKE, 250, "incident 1: spike")
    assert any("lr-spike" in mark.text for mark in page.all_marks[0] if mark.kind == "other")


def test_an_incident_that_only_hindsight_sees_is_marked_too(page: Page) -> None:
    (nan,) = [mark for mark in page.all_marks[0] if mark.kind == "incident" and mark.first <= NAN[0] <= mark.last]
    assert nan.number == 2
    assert "nonfinite" in nan.text


def test_a_post_mortem_is_linked_only_where_there_is_one(tmp_path: Path) -> None:
    folder = troubled(tmp_path / "night")
    (folder / "incidents" / "1").mkdir(parents=True)
    assert marks_of(open_run(folder), None)[0].page is None
    (folder / "incidents" / "1" / "postmortem.md").write_text("")
    assert marks_of(open_run(folder), None)[0].page == folder / "incidents" / "1" / "postmortem.md"
    (folder / "incidents" / "1" / "postmortem.html").write_text("")
    assert marks_of(open_run(folder), None)[0].page == folder / "incidents" / "1" / "postmortem.html"


def test_many_marks_become_few_and_say_how_many_they_are() -> None:
    skips = [PanelMark(kind="skip", first=step, last=step, text=f"skip at {step}") for step in range(0, 1_000_000, 100)]
    incident = PanelMark(kind="incident", first=5, last=6, text="incident 3", number=3)
    few = thinned([*skips, incident], 1_000_000)
    assert len(few) <= MOST + 2
    assert few[0].text == "40 skips, steps 0 to 3900; the first: skip at 0"
    assert incident in few


def test_an_empty_panel_says_which_signal_would_fill_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", ({"step": step, "loss": 2.0 + 1 / (step + 1)} for step in range(50)))
    page = page_of([see(str(folder), "a")])
    for panel, subject in zip(page.panels[1:], SUBJECTS[1:], strict=True):
        assert panel.is_empty
        for name in subject.wanted:
            assert f"`{name}`" in wanted(panel)
        assert described(panel, page) == wanted(panel)


def test_a_run_without_rows_is_a_page_without_lines(tmp_path: Path) -> None:
    page = page_of([see(str(write(tmp_path / "a")), "a")])
    assert all(panel.is_empty for panel in page.panels)
    assert told(page)[0].verdict == "CANNOT TELL"


def test_seconds_a_step_stand_in_for_tokens_a_second(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", ({"step": step, "loss": 2.0, "step_s": 0.5} for step in range(50)))
    panel = page_of([see(str(folder), "a")]).panels[7]
    assert (panel.unit, [each.signal for each in panel.series]) == ("seconds a step", ["step_s"])


def test_the_summary_says_verdict_incidents_and_interventions(page: Page) -> None:
    (said,) = told(page)
    assert said.verdict in ("ACT", "WATCH")
    assert [mark.number for mark in said.incidents] == [1, 2]
    assert said.done[0].startswith("Skipped 5 of 285 steps (spike/loss 5), 1.8%, the first at step 201")
    assert "by playbook standard, rung 3" in said.interventions[0][1][0]
    assert "   outcome   helped" in said.interventions[0][1]
    assert "Causes, the likeliest first" in said.everything
    assert f"steps 0 to {STEPS - 1}" in said.extent


@pytest.mark.parametrize(
    ("act", "heading"), [(True, "Skipped steps: 5"), (False, "Steps that would have been skipped: 5")]
)
def test_a_shadow_run_skips_nothing(act: bool, heading: str, tmp_path: Path) -> None:
    guarded = {"time": 1.7e9, "step": 0, "kind": "guard", "act": act}
    (said,) = told(page_of([see(str(write(tmp_path / "a", rows(), [guarded, *events()])), "a")]))
    assert heading in [each[1] for each in said.lists]


def test_a_shadow_run_counts_the_steps_it_would_have_halted_at_as_check_does(tmp_path: Path) -> None:
    guarded = {"time": 1.7e9, "step": 0, "kind": "guard", "act": False}
    broken = {"detector": "nonfinite", "severity": "HALT", "signal": "loss", "value": math.nan, "spoils_update": True}
    halts = [
        {"time": 1.7e9, "step": at, "kind": "halt", "acted": False, "text": "told", "findings": [broken | {"step": at}]}
        for at in range(201, 240)
    ]
    (said,) = told(page_of([see(str(write(tmp_path / "a", rows(), [guarded, *halts])), "a")]))
    assert "Steps that would have been skipped: 39" in [each[1] for each in said.lists]
    assert said.done[0].startswith("39 steps were rejected")


def test_a_panel_in_words_has_its_extremes_and_what_is_not_finite(page: Page) -> None:
    text = described(page.panels[0], page)
    assert "loss: 6 at step 0, 2.0" in text
    assert "3 rows are not finite, the first at step 140." in text


def test_several_runs_share_the_points(tmp_path: Path) -> None:
    long = write(tmp_path / "long", ({"step": step, "loss": 2.0, **_layers(step)} for step in range(3000)))
    seen = see(str(long), "long")
    pages = [page_of([seen] * number) for number in (1, 8)]
    points = [sum(len(each.line.steps) for panel in page.panels for each in panel.series) for page in pages]
    assert points[0] < points[1] <= 2 * ALL_POINTS


def test_many_runs_share_the_lines_the_marks_and_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page holds of each run is less where there are many: of layers some, of what happened the beginning."""
    monkeypatch.setattr(values, "MOST_LINES", 500)
    folder = troubled(tmp_path / "night")
    pages = [page_of([see(str(folder), f"night {n}", runs) for n in range(runs)]) for runs in (1, 40)]
    lines = [sum(len(panel.series) for panel in page.panels if panel.subject.groups) for page in pages]
    assert lines[0] == 15
    assert 40 <= lines[1] < 15 * 20
    assert not any(each.left_behind for panel in pages[1].panels for each in panel.series)
    of_layers = pages[1].panels[3]
    assert of_layers.not_drawn == 12 * 40 - len(of_layers.series) > 0
    assert [each.label for each in of_layers.series if each.run == 7][:1] == ["blocks.0"]
    assert f"{of_layers.not_drawn} more lines are not drawn." in wanted(of_layers)
    assert not any(panel.not_drawn for panel in pages[0].panels)
    (alone,), among = told(pages[0]), told(pages[1])
    assert alone.everything
    assert not any(each.everything for each in among)
    assert {each.verdict for each in among} == {alone.verdict}
    assert all(len(texts) <= 6 for each in among for _, _, texts in each.lists)
    assert not any(name.endswith(("/means", "/left")) for name in columns_of(pages[1], [{}] * 40))


def test_thousands_of_incidents_are_marked_and_listed_in_part(tmp_path: Path) -> None:
    closed = [
        {"time": 1.7e9, "step": 10 * n, "kind": "incident-closed", "number": n, "start": 10 * n - 5, "text": f"{n}."}
        for n in range(1, 5001)
    ]
    losses = ({"step": step, "loss": 2.0 + step % 3 / 100} for step in range(0, 50_000, 25))
    page = page_of([see(str(write(tmp_path / "a", losses, closed)), "a")])
    assert len(page.marks[0]) <= MOST + 1
    assert page.marks[0][0].text == "20 incidents, steps 5 to 200; the first: 1."
    (said,) = told(page)
    assert (len(said.incidents), said.more_incidents) == (MOST_INCIDENTS, 5000 - MOST_INCIDENTS)


def test_of_very_many_sources_the_largest_are_drawn(tmp_path: Path) -> None:
    sources = ({"step": step, "loss": 2.0, "sources": f"wiki=6 document-{step}=2"} for step in range(500))
    panel = page_of([see(str(write(tmp_path / "a", sources)), "a")]).panels[9]
    assert len(panel.series) == MOST_SOURCES
    assert panel.series[0].label == "source wiki"
    assert panel.not_drawn == 501 - MOST_SOURCES


def _layers(step: int) -> dict[str, float]:
    return {f"activation_norm/{layer}": float(step % 7) for layer in range(30)}


def test_histograms_become_boxes_and_quantiles() -> None:
    steps = np.array([0, 100, 200])
    cells = cells_of(steps, [HISTOGRAM, HISTOGRAM, "torn"])
    assert cells is not None
    assert set(cells.left.tolist()) == {0.0, 100.0}
    assert cells.share[cells.left == 0].sum() == pytest.approx(1.0)
    assert cells.top.max() == 16.0
    median, high = quantiles_of(steps[:2], [HISTOGRAM] * 2)
    assert (median[2].tolist(), high[2].tolist()) == ([3.5, 3.5], [5.0, 5.0])
    assert cells_of(np.empty(0, np.int64), []) is None
