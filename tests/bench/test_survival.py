"""Each rule does what its original does, and a cell is what it says: a benchmark against straw men proves nothing."""

import json
import math
import multiprocessing
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rescue.cases import CASES, CLEAN, CONTROLS, FAULTS, MOVED, PLACEBOS, Feed, Plan
from bench.rescue.loop import branch
from bench.rescue.report import Results, deeds, report
from bench.rescue.rules import PLAIN, RULES, SEALEGS, Restart, Rule
from bench.survival import Cell, all_done, cells_of, known, write_runs

from sealegs.lab.data import Batch

pytestmark = pytest.mark.xdist_group("survival")  # one beginning serves all

PLAN = Plan(fork=50, after=20, batch=2)
LATER = Plan(fork=200, after=40, batch=2)
"""The guard's statistic is in force from step 150 on. Batches of two do what batches of eight do, in half the time."""
NAN_GRADIENT, LR = "NaN gradient, 3 times", "LR x30, 10 steps"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beginnings")


def after_calm(name: str, steps: int = 200) -> Rule:
    """A rule that has seen a healthy run: loss 3.0 and norm 0.5, a hundredth up and down."""
    rule = RULES[name]()
    for step in range(steps):
        wave = 1 + 0.01 * math.sin(step)
        rule.seen(3.0 * wave, 0.5 * wave)
    return rule


def limits(name: str, *steps: tuple[float, float]) -> list[float | None]:
    rule = after_calm(name)
    return [rule.limit(loss, norm) for loss, norm in steps]


CALM, SPIKE, NAN = (3.0, 0.5), (9.0, 50.0), (3.0, math.nan)


@pytest.mark.parametrize(
    ("name", "spike", "nan", "calm_after_nan"),
    [
        ("nothing", math.inf, math.inf, math.inf),
        ("clip 1.0", 1.0, 1.0, 1.0),
        ("PyTorch NaN skip", 1.0, None, 1.0),
        ("OLMo 6 sigma skip", None, None, None),  # frozen by its own statistics
        ("llm.c z > 3 skip", None, 1.0, 1.0),  # a NaN goes through
        ("Lightning stop and restart", 1.0, 1.0, 1.0),  # looks after the update
        ("PaLM restart and skip", 1.0, 1.0, 1.0),
    ],
)
def test_before_the_update(name: str, spike: float | None, nan: float | None, calm_after_nan: float | None) -> None:
    assert limits(name, CALM) == limits("clip 1.0", CALM) or name == "nothing"
    assert limits(name, SPIKE) == [spike]
    assert limits(name, NAN, CALM) == [nan, calm_after_nan]


def test_of_forty_bad_batches_the_window_rules_let_most_through() -> None:
    skipped = {name: limits(name, *[(6.0, 0.5)] * 40).count(None) for name in RULES if "skip" in name}
    assert (skipped["OLMo 6 sigma skip"], skipped["llm.c z > 3 skip"]) == (4, 12)


def test_zclip_scales_down_to_what_is_usual_and_is_off_after_a_nan() -> None:
    [usual] = limits("ZClip 2.5", SPIKE)
    assert usual is not None
    assert usual == pytest.approx(0.5, abs=0.01)
    assert limits("ZClip 2.5", CALM) == [1.0]
    assert limits("ZClip 2.5", NAN, SPIKE) == [1.0, 1.0]


def test_lightning_stops_at_three_times_the_mean_or_nan_and_leaves_two_batches_out() -> None:
    def asked(loss: float) -> Restart | None:
        rule = RULES["Lightning stop and restart"]()
        for step in range(20):
            assert rule.after(step, 100 + step, 3.0 + 0.01 * step) is None
        return rule.after(20, 120, loss)

    stop = Restart(before=20, without=(119, 120))
    assert [asked(8.9), asked(9.6), asked(math.nan)] == [None, stop, stop]


def test_a_person_restarts_20_steps_later_a_hundred_steps_before_and_passes_over_200_batches() -> None:
    rule = RULES["PaLM restart and skip"]()
    assert rule.after(229, 229, math.nan) is None
    rule.struck(230)
    rule.struck(231)
    asked = {step: rule.after(step, step, 3.0) for step in range(230, 260)}
    assert {step: restart for step, restart in asked.items() if restart} == {250: Restart(before=130, skip=200)}


@cache
def done(place: Path, case: str, rule: str, plan: Plan = PLAN) -> dict[str, Any]:
    return branch(plan, 501, case, rule, place)


@pytest.mark.long
def test_a_clean_run_is_the_clean_twin_bit_for_bit_under_rules_that_do_nothing(place: Path) -> None:
    twin = done(place, CLEAN.name, PLAIN)
    assert (twin["wasted"], twin["skips"], twin["lost"], len(twin["loss"])) == (0, 0, False, PLAN.steps)
    for rule in ("PyTorch NaN skip", "Lightning stop and restart", "PaLM restart and skip"):
        assert done(place, CLEAN.name, rule)["losses"] == twin["losses"]
    guarded = done(place, CLEAN.name, SEALEGS)  # clips in another order of operations
    assert guarded["final"] == pytest.approx(twin["final"], abs=1e-5)
    assert (guarded["skips"], guarded["rollbacks"], guarded["wasted"]) == (0, 0, 0)


def test_a_nan_is_skipped_goes_through_or_is_multiplied_by_zero(place: Path) -> None:
    skipped = done(place, NAN_GRADIENT, "PyTorch NaN skip")
    assert (skipped["skips"], skipped["wasted"], skipped["lost"]) == (1, 1, False)
    for rule in ("nothing", PLAIN, "llm.c z > 3 skip", "OLMo 6 sigma skip"):
        assert done(place, NAN_GRADIENT, rule)["lost"], rule
    restarted = done(place, NAN_GRADIENT, "Lightning stop and restart")
    # struck at 80, seen at 81, back to 50: 32 steps for nothing
    assert (restarted["rollbacks"], restarted["wasted"], restarted["lost"]) == (1, 32, False)
    guarded = done(place, NAN_GRADIENT, SEALEGS)
    assert (guarded["skips"], guarded["rollbacks"], guarded["lost"]) == (1, 0, False)


@pytest.mark.long
def test_what_palm_wastes_is_what_it_goes_back(place: Path) -> None:
    ended = done(place, LR, "PaLM restart and skip", LATER)
    # struck at 230, seen at 250; the checkpoint of 100 is the newest that is a hundred steps before
    assert (ended["rollbacks"], ended["wasted"]) == (1, 151)


def test_the_guard_goes_back_and_says_so(place: Path) -> None:
    ended = done(place, "bit flip in a weight", SEALEGS, LATER)
    assert ended["rollbacks"] == 1
    assert any("went back" in word for word in ended["events"])
    assert ended["wasted"] >= 30  # struck at 230, back to 200


def test_a_placebo_passes_healthy_batches_over() -> None:
    class Numbers:
        def batch(self, number: int) -> Batch:
            tokens = np.full((8, 4), number)
            return Batch(number, tokens, tokens, ())

    feed = Feed(Numbers(), MOVED[0], PLAN, 501, 512)  # type: ignore[arg-type]
    assert [feed.batch(number).tokens[0, 0] for number in (79, 80, 81)] == [79, 90, 91]
    assert feed.batch(80).index == 80


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # no other thread computes
def test_an_interrupted_run_goes_on_from_its_beginning_and_ends_as_if_nothing_had_been(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # to import torch in a new process would take longer than both runs
    monkeypatch.setattr("bench.survival.get_context", lambda method: multiprocessing.get_context("fork"))
    cells = [Cell(501, CLEAN.name, PLAIN), Cell(501, NAN_GRADIENT, SEALEGS)]
    uninterrupted = {cell: done(place, cell.case, cell.rule) for cell in cells}
    states = (place / PLAN.beginning(501) / "states.pt").stat()
    file = tmp_path / "cells.jsonl"
    other = uninterrupted[cells[0]] | {"beginning": "lost with its machine"}
    more = other | {"case": LR}
    file.write_text(f'{json.dumps(other)}\n{json.dumps(more)}\n{{"plan": "cut sho')
    assert known(file, PLAN) == {cells[0]: other, Cell(501, LR, PLAIN): more}

    resumed = all_done(PLAN, cells, tmp_path, place, 1, 1e9)

    assert known(file, PLAN) == resumed
    again = (place / PLAN.beginning(501) / "states.pt").stat()
    assert (again.st_ino, again.st_mtime_ns) == (states.st_ino, states.st_mtime_ns)
    for cell in cells:
        assert resumed[cell] | {"seconds": 0} == uninterrupted[cell] | {"seconds": 0}
    monkeypatch.setattr("bench.survival.branch", None)  # would fail
    assert all_done(PLAN, cells, tmp_path, place, 1, 1e9) == resumed
    assert all_done(PLAN, [*cells, Cell(501, LR, PLAIN)], tmp_path, place, 1, 0.0) == resumed  # none is begun
    assert known(file, replace(PLAN, after=21)) == {}
    write_runs(resumed, PLAN, tmp_path / "runs.jsonl")
    [line] = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert (line["healthy"], line["fault"], len(line["loss"])) == (True, None, PLAN.steps)


def test_the_report_counts_in_units_of_the_placebos() -> None:
    def cell(case: str, rule: str, final: float, **other: Any) -> dict[str, Any]:
        own = {"case": case, "rule": rule, "seed": 501, "losses": {"40": final}, "lost": False, "ended_early": False}
        return own | {"wasted": 0, "skips": 0, "softened": 0, "rollbacks": 0, "events": []} | other

    cells = [cell(CLEAN.name, PLAIN, 3.0)]
    cells += [cell(case.name, PLAIN, 3.0 + 0.01 * (-1) ** i) for i, case in enumerate((*PLACEBOS, *MOVED))]
    cells += [cell(case.name, SEALEGS, 3.015) for case in FAULTS]
    cells += [cell(case.name, "nothing", 3.3) for case in FAULTS[1:]]
    cells.append(cell(FAULTS[0].name, "nothing", math.nan, lost=True, ended_early=True))
    results = Results(cells, 40)
    assert results.unit(40) == pytest.approx(0.01)
    assert (results.within(SEALEGS, 0.01), results.within("nothing", 0.01)) == ((6, 6), (0, 6))
    text = report(cells, 40)
    assert "| Sealegs | +1.5 | +1.5 | +1.5 | +1.5 | +1.5 | +1.5 | 6 of 6 | 0 |" in text
    assert "| nothing | (1 of 1 lost) | +30.0 |" in text


def test_what_the_guard_did_to_a_healthy_run_is_in_units_only_where_these_are_of_the_same_time() -> None:
    def told(after: int) -> str:
        rest = {"lost": False, "ended_early": False, "wasted": 0, "skips": 1, "softened": 0, "rollbacks": 0}
        ends = [(CLEAN.name, PLAIN, 3.0), (MOVED[0].name, PLAIN, 3.01)]
        ends += [(CONTROLS[0].name, PLAIN, 4.0), (CONTROLS[0].name, SEALEGS, 4.02)]
        cells = [
            {"case": case, "rule": rule, "seed": 501, "losses": {"100": end, "200": end, str(after): end}} | rest
            for case, rule, end in ends
        ]
        return "\n".join(deeds(Results([cell | {"events": []} for cell in cells], after)))

    assert told(200) == "- a hard batch\n  - seed 501: +0.0200 (+2.0); 1 skipped"
    assert told(1000) == "- a hard batch\n  - seed 501: +0.0200; 1 skipped"


def test_every_rule_meets_every_fault() -> None:
    cells = list(cells_of([501], [*RULES, SEALEGS]))
    assert len(set(cells)) == len(cells)
    assert len([cell for cell in cells if cell.case in {case.name for case in FAULTS}]) == 6 * 9
    assert {cell.case for cell in cells} == set(CASES)
