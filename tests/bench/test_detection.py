"""What the detectors' benchmark counts is what it says, on flags and runs made by hand."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.detection import cells, measures, tables, turned
from bench.detection.contenders import (
    ALARM,
    ALONE,
    BARE,
    FLAG,
    SKIP,
    STATISTIC,
    TURNED,
    Peer,
    contenders,
    families,
    sealegs,
)
from bench.detection.data import Data, Lab, fingerprint, gather, read, recorded, refusal
from bench.detection.measures import NEVER, Recall, first_flag, higher_than, poisson, recall, wilson
from bench.streams import Stream

from bench import peers, streams
from sealegs import judge


def calm(steps: int, seed: int = 0) -> Stream:
    return streams.healthy("t5", "power law", steps, np.random.default_rng(seed), with_norm=True)


def flags_at(steps: int, *at: int) -> peers.Flags:
    flags = np.zeros(steps, dtype=bool)
    flags[list(at)] = True
    return flags


@pytest.mark.parametrize(
    ("steps", "columns", "why"),
    [
        (1500, "step,loss,grad_norm", "longest here has 1500"),
        (2900, "step,loss", "none with both"),
        (0, "step", "none"),
    ],
    ids=["short", "without norm", "no run"],
)
def test_runs_that_faults_cannot_be_put_into_are_refused(steps: int, columns: str, why: str, tmp_path: Path) -> None:
    row = ",".join(["1.0"] * len(columns.split(",")))
    (tmp_path / "a.csv").write_text("\n".join([columns, *[row] * steps]))
    assert why in refusal(read(tmp_path))
    assert not refusal([calm(2801)])
    assert gather([calm(2801)], [], 0).places == [1200]


def test_the_first_flag_is_counted_from_the_onset_and_not_before() -> None:
    event = replace(calm(50), onset=10)
    assert first_flag(flags_at(50, 3, 10), event) == 0
    assert first_flag(flags_at(50, 3, 12, 13), event) == 2
    assert first_flag(flags_at(50, 3), event) == NEVER


def test_recall_by_delay_latency_and_lead() -> None:
    own = recall([0, 1, 8, 9, 32, 33, 200, 201, NEVER, 2], [5] * 10)
    assert own.within == (1, 2, 4, 6, 8)
    assert own.n == 10
    assert own.latency == 8.5  # of 0 1 2 8 9 32 33 200
    assert own.before_peak == 3  # at 0, 1 and 2
    assert own.lead == 4
    assert own.share(8) == 0.4
    assert recall([NEVER, 5], [5, 5]) == Recall(2, (0, 0, 1, 1, 1), 5, None, 0)  # at the peak is not before it
    assert recall([0], [None]).before_peak is None


@pytest.mark.parametrize(
    ("count", "n", "low", "high"), [(0, 150, 0, 0.025), (75, 150, 0.421, 0.579), (9, 10, 0.596, 0.982)]
)
def test_intervals_of_wilson(count: int, n: int, low: float, high: float) -> None:
    assert wilson(count, n) == pytest.approx((low, high), abs=6e-4)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0, 3.689), (1, 0.025, 5.572), (13, 6.922, 22.230), (400, 361, 439)]
)
def test_intervals_of_poisson(count: int, low: float, high: float) -> None:
    assert poisson(count) == pytest.approx((low, high), abs=0.3 if count > 100 else 2e-3)


def test_higher_means_that_the_intervals_do_not_touch() -> None:
    ours = recall([0] * 75 + [NEVER] * 75, [None] * 150)
    for found, is_higher in ((84, False), (98, False), (99, True), (150, True)):
        assert higher_than(ours, recall([0] * found + [NEVER] * (150 - found), [None] * 150), 8) == is_higher, found


def test_of_what_lasts() -> None:
    event = replace(calm(200), bad=(0, 1, 2, 3))
    assert measures.caught(flags_at(200, 0, 3, 9), event) == 0.5
    assert measures.healthy_flagged(flags_at(200, 0, 3, 9), event) == 1
    assert measures.accepted_after(flags_at(200), event) == 0
    assert measures.accepted_after(flags_at(200, 0, 1, 40, 90), event) == 91
    assert measures.accepted_after(flags_at(200, *range(0, 200, 20)), event) == math.inf


@pytest.mark.parametrize("name", families())
def test_an_event_is_judged_as_at_the_end_of_the_run_before_it(name: str) -> None:
    rule, rows = families()[name]
    if isinstance(rule, peers.Chance | peers.InARow):
        pytest.skip("drawn, or measured, by the whole column")
    base = calm(2500)
    (contender,) = contenders(rule, rows)
    event = streams.FAULTS["loss +10 %, 30 steps"](base, 1800)
    for place, respond in contender.at(base, [1800, 1500], once=False):
        whole = Stream(
            name="",
            loss=np.concatenate([base.loss[:place], event.loss]),
            grad_norm=np.concatenate([base.part(0, place).grad_norm, event.grad_norm]),
        )
        for row, flags in contender.flags(whole).items():
            assert (respond(event)[row] == flags[place:]).all(), (row, place)


@pytest.mark.parametrize("who", ["Sealegs", STATISTIC, "DSPOT 1e-4, both signals"])
def test_asking_for_the_first_flag_alone_changes_nothing_before_it(who: str) -> None:
    base = calm(1800)
    rows = {"loose": 2.5, "strict": 5.0}
    rule = BARE if who == STATISTIC else families()[who][0] if who != "Sealegs" else None
    events = [injection(base, 1500) for injection in streams.EVENTS.values()]
    for contender in contenders(rule, rows) if rule else [sealegs(rows)]:
        ((_, first), (_, every)) = (next(iter(contender.at(base, [1500], once=once))) for once in (True, False))
        for event in events:
            answer = every(event)
            for name, flags in first(event).items():
                assert first_flag(flags, event) == first_flag(answer[name], event)


def test_sealegs_turned_to_its_own_chance_is_sealegs() -> None:
    (own,) = {d.gate for d in judge.standard() if d.name.startswith("spike/")}  # type: ignore[attr-defined]
    flagged = doubtful = 0
    for seed in range(16):  # few spikes a run, or the audit tightens the thresholds
        run = calm(1300, seed)
        assert run.grad_norm is not None
        run.loss[600] *= 1.06 + 0.005 * seed
        run.grad_norm[800] *= 2.0 + 0.2 * seed
        run.loss[1200:1220] *= 1.2
        run.loss[1250] = math.nan
        found = sealegs({"turned": -math.log10(own), "looser": -math.log10(10 * own)}).flags(run)
        assert (found["turned"] == found[FLAG]).all()
        assert not (found[ALARM] & ~found[FLAG]).any()
        assert np.flatnonzero(found[SKIP]).tolist() == [1250], "what is not finite; the others are only flagged"
        flagged += found["turned"].sum()
        doubtful += (found["looser"] & ~found["turned"])[:1000].sum()
    assert flagged > 100
    assert doubtful > 0


@pytest.mark.parametrize("signal", ALONE)
def test_sealegs_by_one_signal_alone_is_sealegs_given_nothing_else(signal: str) -> None:
    """To be given the loss alone is to have no norm; to be given the norm alone, a loss that says nothing."""
    (own,) = {d.gate for d in judge.standard() if d.name.startswith("spike/")}  # type: ignore[attr-defined]
    flagged = 0
    for seed in range(2):
        run = calm(1300, seed)
        assert run.grad_norm is not None
        run.loss[1100] *= 1.2
        run.loss[1200:1220] *= 1.2
        run.grad_norm[1150] *= 4.0
        run.grad_norm[1250] = math.nan
        found = sealegs({f"{signal}@": -math.log10(own)}).flags(run)
        quiet = replace(run, grad_norm=None) if signal == "loss" else replace(run, loss=np.full(1300, 3.0))
        alone = sealegs().flags(quiet)
        assert (found[f"{signal}@"] == alone[FLAG]).all()
        flagged += found[f"{signal}@"].sum()
    assert flagged >= 4


def test_with_as_many_false_flags_in_the_injected_run_as_a_peer_has() -> None:
    both = {"@10": {"threshold": 4.0, "flags_here": 2}, "@1": {"threshold": None, "words": "cannot"}}
    healthy = {
        "peer": {"turned": both},
        turned.SEALEGS: {
            "turned": both,
            "alone": {"loss": {"@10": {"threshold": 3.5, "flags_here": 5}}},
            "here": {"loss": [9.0, 8.0, 7.0, 6.0]},
        },
    }
    assert turned.asked_of(healthy, "peer") == {"@10": 4.0}
    assert turned.asked_of(healthy, turned.SEALEGS) == {"@10": 4.0, "loss@10": 3.5, "loss#2": 7.0}


def test_the_bare_statistic_is_the_same_by_scan_and_by_fold() -> None:
    run = calm(3000)
    run.loss[2000:2030] *= 1.1
    fold = BARE.fold("bare", 3.0)
    flags = replace(BARE, threshold=3.0).flags(run.loss, run.grad_norm)
    assert (fold.flags(run)["bare"] == flags).all()
    assert flags[2000:2030].any()


def test_thresholds_are_the_smallest_that_are_quiet_enough() -> None:
    rule, _ = families()["3 sigma / 100"]
    assert isinstance(rule, peers.Scored)
    runs = [calm(20_000, seed) for seed in range(2)]
    scores = np.sort(np.concatenate([rule.scores(run.loss, None) for run in runs]))
    found = turned.calibrate(rule, runs)
    for rate, allowed in (("@10", 4), ("@100", 40), ("@1000", 400)):
        assert found[rate]["flags"] == allowed
        assert found[rate]["threshold"] == pytest.approx(scores[-allowed - 1], abs=1e-6)
    assert turned.calibrate(replace(rule, bracket=(0.0, 3.0)), runs)["@10"]["threshold"] is None
    assert turned.calibrate(replace(rule, bracket=(90.0, 99.0)), runs)["@1"]["words"].startswith(
        "loosest: 90 (0 flags)"
    )


def test_rules_that_differ_by_their_threshold_alone_are_a_family() -> None:
    assert families()["llm.c z > 3 / 128"][1] == {"llm.c z > 3 / 128": 3, "llm.c z > 5 / 128": 5}
    assert sum(len(rows) for _, rows in families().values()) == len(peers.RULES)
    assert len(families()) == len(peers.RULES) - 4


# ---- recorded runs, and all of it


def recorded_file(path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = []
    for seed in range(4):
        loss = 3 * (1 + 0.01 * rng.standard_normal(400))
        norm = 0.3 * np.exp(0.1 * rng.standard_normal(400))
        lines.append({"name": f"clean seed {seed}", "fault": "none", "at": 0, "healthy": True})
        lines[-1] |= {"loss": loss.tolist(), "grad_norm": norm.tolist()}
        spiked = loss.copy()
        spiked[302:310] *= 2.0
        spiked[304] *= 1.5
        lines.append(
            {"name": f"lr-spike seed {seed}", "fault": f"lr-spike:seed={seed}@300", "at": 300, "healthy": False}
        )
        lines[-1] |= {"loss": spiked.tolist(), "grad_norm": norm.tolist()}
    broken = [*loss[:350].tolist(), None, *loss[351:].tolist()]
    lines.append({"name": "nan", "fault": "nan", "at": 350, "loss": broken, "grad_norm": None, "healthy": False})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_recorded_runs_are_read_with_onset_and_peak(tmp_path: Path) -> None:
    labs = list(recorded(recorded_file(tmp_path / "runs.jsonl")))
    assert [lab.healthy for lab in labs] == [True, False] * 4 + [False]
    assert {lab.fault for lab in labs} == {"", "lr-spike", "nan"}  # of whichever seed
    assert (labs[1].run.onset, labs[1].run.peak) == (300, 304)
    assert labs[-1].run.peak is None  # it begins with the NaN
    assert labs[-1].run.grad_norm is None
    assert math.isnan(labs[-1].run.loss[350])


def small(tmp_path: Path) -> Data:
    whole = gather([], list(recorded(recorded_file(tmp_path / "runs.jsonl"))), seed=0)
    short = [run.part(0, steps) for run, steps in zip(whole.healthy, (3000, 1000), strict=False)]
    labs: list[Lab] = [lab for lab in whole.labs if lab.source != "the worked example"]
    noise = {"Gaussian": [whole.noise["Gaussian"][0].part(0, 300)]}
    young = {"synthetic": [run.part(0, 300) for run in whole.young["synthetic"][:2]]}
    return Data(healthy=short, noise=noise, young=young, labs=labs, base=short[0], places=[1300, 1200])


@pytest.mark.long
def test_all_of_it_is_kept_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small(tmp_path)
    results = cells.run(data, tmp_path / "kept", workers=1)
    total = len(list((tmp_path / "kept").glob("*.json")))
    assert f"{total}/{total}" in capsys.readouterr().err

    next((tmp_path / "kept").glob("*-young-Sealegs.json")).unlink()
    assert cells.run(data, tmp_path / "kept", workers=1) == results
    assert capsys.readouterr().err.count(": kept") == total - 1
    assert fingerprint(replace(data, places=[1200])) != fingerprint(data)

    text = "\n\n".join(tables.report(results, data, "2 made runs"))
    found = [part for part in text.split("### ") if "| control: by chance |" in part]
    by_detector, flagged, finds_more = 1, 1, 2
    assert text.count("### ") == len(found) + by_detector + flagged + finds_more
    assert "| **Sealegs, flag** | 0 flags in 1,600 | 0 0 100 (51-100) 100 100; 2; 100 before the peak by 2 |" in text
    assert "than **Sealegs, turned**: of 15 faults" in text
    raw = json.loads(json.dumps(tables.raw(results, data), allow_nan=False))
    assert raw["found"]["defaults"]["NaN, 1 step"][SKIP]["within"] == [2] * 5
    assert list(raw["turned"])[:4] == [TURNED, *ALONE.values(), STATISTIC]

    from bench.detection import figure  # not in every worker: it imports matplotlib

    figure.write(results, tables.recalls_of(results, data), tmp_path / "drawn.svg")
    assert "Sealegs, turned" in (tmp_path / "drawn.svg").read_text()
    assert "NaN, 1 step" in (tmp_path / "drawn-by-fault.svg").read_text()


def test_a_peer_at_several_thresholds_is_the_peer_at_each() -> None:
    run = calm(1500)
    for rule in peers.RULES:
        both = Peer(rule, {"a": rule.threshold, "b": rule.threshold * 1.5}).flags(run)
        assert (both["a"] == rule.flags(run.loss, run.grad_norm)).all()
        assert (both["b"] == replace(rule, threshold=rule.threshold * 1.5).flags(run.loss, run.grad_norm)).all()
