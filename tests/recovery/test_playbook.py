"""A trigger and what was done before in, the next rung out."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import ConfigError, SourceError
from sealegs.recovery.actions import (
    Action,
    Continue,
    Halt,
    LowerLR,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
    TightenByEvidence,
)
from sealegs.recovery.playbook import ADVICE, HALTING, HEALS, OPT_IN, TRIGGERS, Decision, Playbook, Rung, choose
from sealegs.recovery.recurrence import PLACE, PastIntervention, Trigger

STANDARD = Playbook.standard()


def treated(decision: Decision, trigger: Trigger, onset: int, incident: int = 1) -> PastIntervention:
    return PastIntervention(
        incident=incident,
        onset=onset,
        step=onset + 50,
        trigger=trigger,
        rung=decision.rung,
        actions=decision.actions,
    )


def climbed(playbook: Playbook, anomalies: Sequence[tuple[Trigger, int]]) -> list[Decision]:
    """What is decided on one after the other, each of them carried out."""
    history: list[PastIntervention] = []
    decisions = []
    for trigger, onset in anomalies:
        decisions.append(choose(playbook, trigger, onset, history))
        history.append(treated(decisions[-1], trigger, onset))
    return decisions


def rungs(playbook: Playbook, *anomalies: tuple[Trigger, int]) -> list[int | None]:
    return [decision.rung for decision in climbed(playbook, anomalies)]


@pytest.mark.parametrize("trigger", sorted(TRIGGERS - HEALS - {Trigger.BAD_DATA, Trigger.BUDGET_SPENT}))
def test_trouble_that_comes_back_climbs_the_standard_ladder(trigger: Trigger) -> None:
    decisions = climbed(STANDARD, [(trigger, 5000)] * 5)
    assert [decision.actions for decision in decisions[:3]] == [
        (Rollback(back=0, skip=10),),
        (Rollback(back=100, skip=50), TightenByEvidence()),
        (Rollback(back=1000, skip=200), LowerLR(0.5), Tighten(clip=0.5), TightenByEvidence()),
    ]
    assert [decision.actions for decision in decisions[3:]] == [(Halt(ADVICE[trigger]),)] * 2
    assert [decision.rung for decision in decisions] == [3, 4, 5, 6, None]
    assert [decision.halts for decision in decisions] == [False, False, False, True, True]


def test_a_bad_source_is_taken_out_once() -> None:
    decisions = climbed(STANDARD, [(Trigger.BAD_DATA, 5000)] * 3)
    assert [decision.actions for decision in decisions] == [
        (SwapSource(),),
        (Continue(),),
        (Halt(ADVICE[Trigger.BAD_DATA]),),
    ]
    assert rungs(STANDARD, (Trigger.BUDGET_SPENT, 5000), (Trigger.BUDGET_SPENT, 5000)) == [1, 6]


@pytest.mark.parametrize("onset", [5000, 5900, 50_000])
def test_what_heals_by_itself_is_undone_once_in_a_run(onset: int) -> None:
    """However far away it comes again, it is neither undone again nor the end."""
    decisions = climbed(STANDARD, [(Trigger.SPOILT, 5000), (Trigger.SPOILT, onset), (Trigger.SPOILT, onset)])
    assert [decision.actions for decision in decisions] == [(Rollback(back=0, skip=10),), (Continue(),), (Continue(),)]
    assert [decision.rung for decision in decisions] == [7, None, None]
    assert decisions[1].reason == f"spoilt at step {onset}: it was undone once, and has come again: such are these data"
    assert rungs(STANDARD, (Trigger.SPOILT, 5000), (Trigger.DAMAGED, 5010)) == [7, 3], "damage has a ladder of its own"


def test_what_heals_by_itself_halts_no_run_that_has_no_rollback_left() -> None:
    none_left = choose(replace(STANDARD, rollbacks=0), Trigger.SPOILT, 5000, ())
    assert (none_left.rung, none_left.actions) == (None, (Continue(),))
    assert none_left.reason == "spoilt at step 5000: 0 rollbacks have been made, and 0 are allowed in all"
    shared = Playbook(name="mine", rungs=(Rung({Trigger.SPOILT, Trigger.DAMAGED}, (Rollback(),)),))
    damaged, spoilt = climbed(shared, [(Trigger.DAMAGED, 5000), (Trigger.SPOILT, 5100)])
    assert (damaged.rung, spoilt.rung, spoilt.actions) == (1, None, (Continue(),))
    assert choose(shared, Trigger.DAMAGED, 5100, [treated(damaged, Trigger.DAMAGED, 5000)]).halts
    mine = Playbook(name="mine", rungs=(Rung({Trigger.SPOILT}, (Halt("ring me"),)),))
    assert choose(mine, Trigger.SPOILT, 5000, ()).actions == (Halt("ring me"),), "unless that is asked for"


def test_palm() -> None:
    decisions = climbed(Playbook.palm(), [(Trigger.DAMAGED, 5000)] * 3)
    assert [decision.actions for decision in decisions] == [
        (Rollback(back=100, skip=200),),
        (Rollback(back=100, skip=500),),
        (Halt(ADVICE[Trigger.DAMAGED]),),
    ]


@pytest.mark.parametrize("trigger", sorted(Trigger))
def test_to_observe_is_to_skip_and_to_halt_only(trigger: Trigger) -> None:
    decision = choose(Playbook.observe(), trigger, 5000, ())
    assert decision.rung is None
    assert decision.actions == ((Halt(ADVICE[trigger]),) if trigger in HALTING else (Continue(),))
    assert decision.reason == f"{trigger} at step 5000: playbook observe has no rung for it"


@pytest.mark.parametrize(
    ("onset", "rung"), [(6000, 4), (6001, 3), (5000, 4), (4000, 4), (10, 4)], ids=lambda value: str(value)
)
def test_what_comes_back_within_a_thousand_steps_is_the_same_trouble(onset: int, rung: int) -> None:
    """At or before the last onset too: the run has been there before."""
    assert rungs(STANDARD, (Trigger.DAMAGED, 5000), (Trigger.DAMAGED, onset)) == [3, rung]
    wider = replace(STANDARD, again_within=2000)
    assert rungs(wider, (Trigger.DAMAGED, 5000), (Trigger.DAMAGED, 6001)) == [3, 4]


def test_trouble_goes_on_from_treatment_to_treatment() -> None:
    """Each within a thousand steps of the one before, though the last is not within a thousand of the first."""
    assert rungs(STANDARD, *((Trigger.DAMAGED, 5000 + 900 * i) for i in range(4))) == [3, 4, 5, 6]


def test_another_trigger_goes_on_after_the_rungs_that_were_for_it_too() -> None:
    assert rungs(STANDARD, (Trigger.DAMAGED, 5000), (Trigger.NONFINITE_WEIGHTS, 5100)) == [3, 4]
    assert rungs(STANDARD, (Trigger.DAMAGED, 5000), (Trigger.BAD_DATA, 5100), (Trigger.DAMAGED, 5200)) == [3, 1, 4]


def test_what_a_person_asked_for_is_neither_a_rung_nor_a_rollback_of_the_playbook() -> None:
    asked = PastIntervention(
        incident=0, onset=5900, step=5900, trigger=Trigger.ASKED, rung=None, actions=(Rollback(back=0, skip=0),)
    )
    once = replace(STANDARD, rollbacks=1)
    assert choose(once, Trigger.DAMAGED, 6000, [asked] * 5).rung == 3
    first = treated(choose(STANDARD, Trigger.DAMAGED, 5000, ()), Trigger.DAMAGED, 5000)
    assert choose(STANDARD, Trigger.DAMAGED, 6500, [first, asked]).rung == 3, "5900 links nothing"
    assert choose(STANDARD, Trigger.DAMAGED, 5950, [first, asked]).rung == 4


def test_rollbacks_are_counted_over_the_whole_run() -> None:
    """Far apart, so that each is new trouble: the eleventh rollback is not made."""
    decisions = climbed(STANDARD, [(Trigger.DAMAGED, 5000 * i) for i in range(1, 12)])
    assert [decision.rung for decision in decisions] == [3] * 10 + [None]
    assert decisions[-1].actions == (Halt(ADVICE[Trigger.DAMAGED]),)
    assert decisions[-1].reason == "damaged at step 55000: 10 rollbacks have been made, and 10 are allowed in all"
    assert rungs(replace(STANDARD, rollbacks=0), (Trigger.DAMAGED, 5000), (Trigger.BAD_DATA, 9000)) == [None, 1]


def test_reasons() -> None:
    reasons = [decision.reason for decision in climbed(Playbook.palm(), [(Trigger.DAMAGED, 700)] * 4)]
    assert reasons == [
        "damaged at step 700: rung 1 is the first for it",
        "damaged at step 700: rung 2 comes after rung 1",
        "damaged at step 700: rung 3 comes after rung 2",
        "damaged at step 700: rung 3 was the last for it, and has not cured it",
    ]


def test_advice_of_ones_own_is_kept_and_every_trigger_has_some() -> None:
    mine = Playbook(name="mine", rungs=[Rung(on=["damaged"], actions=[Halt("ring me")])])  # type: ignore[arg-type]
    assert choose(mine, Trigger.DAMAGED, 5, ()).actions == (Halt("ring me"),)
    assert set(ADVICE) == TRIGGERS | OPT_IN
    assert all(text.count("fp16") == text.count("in fp16, ") for text in ADVICE.values()), "most runs have none"


def test_sets_and_lists_are_taken() -> None:
    rung = Rung(on={Trigger.DAMAGED}, actions=(Rollback(back=50, skip=20),))
    lists: Any = (["damaged"], [Rollback(back=50, skip=20)])
    assert rung == Rung(*lists)
    assert isinstance(rung.on, frozenset)
    assert isinstance(Rung(*lists).actions, tuple)
    rungs_in_a_list: Any = [rung]
    assert Playbook(name="mine", rungs=rungs_in_a_list) == Playbook(name="mine", rungs=(rung,))
    assert hash(rung)


@pytest.mark.parametrize(
    ("on", "actions", "says"),
    [
        (Trigger.DAMAGED, (Rollback(),), "Rung.on=<Trigger.DAMAGED: 'damaged'>: a set with one or more of bad-data, "),
        (set(), (Rollback(),), r"Rung.on=set\(\): "),
        ({"melted"}, (Rollback(),), "Rung.on={'melted'}: "),
        ([[]], (Rollback(),), r"Rung.on=\[\[\]\]: "),
        (3, (Rollback(),), "Rung.on=3: "),
        ({Trigger.ASKED}, (Rollback(),), "Rung.on={<Trigger.ASKED: 'asked'>}: "),
        ({Trigger.DAMAGED}, (), r"Rung.actions=\(\): one or more of Continue, Rollback, "),
        ({Trigger.DAMAGED}, Rollback(), "Rung.actions=Rollback.*: a tuple of actions"),
        ({Trigger.DAMAGED}, ("rollback",), r"Rung.actions=\('rollback',\): one or more of "),
        ({Trigger.DAMAGED}, (Rollback(), Rollback(100)), "Rung.actions=.*: each kind of action at most once"),
        ({Trigger.DAMAGED}, (Rollback(), Halt()), "Rung.actions=.*: Halt stands alone"),
        ({Trigger.DAMAGED}, (Continue(), LowerLR()), "Rung.actions=.*: Continue stands alone"),
    ],
)
def test_rungs_that_make_no_sense_are_refused(on: Any, actions: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        Rung(on, actions)


DAMAGED = Rung({Trigger.DAMAGED}, (Rollback(),))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "Playbook.name=''"),
        ({"rungs": DAMAGED}, "Playbook.rungs=Rung"),
        ({"rungs": (Rollback(),)}, "Playbook.rungs=Rollback.*: Rung"),
        ({"looks": ()}, r"Playbook.looks=\(\)"),
        ({"looks": (200, 50)}, r"Playbook.looks=\(200, 50\)"),
        ({"looks": (50, 50)}, r"Playbook.looks=\(50, 50\)"),
        ({"looks": (5, 50)}, r"Playbook.looks=\(5, 50\)"),
        ({"looks": (50, "200")}, r"Playbook.looks=\(50, '200'\)"),
        ({"probe_after": 0}, "Playbook.probe_after=0"),
        ({"again_within": 0}, "Playbook.again_within=0"),
        ({"nonfinite_in_a_row": 1.5}, "Playbook.nonfinite_in_a_row=1.5"),
        ({"nonfinite_share": 0.0}, "Playbook.nonfinite_share=0.0"),
        ({"nonfinite_share": 1.5}, "Playbook.nonfinite_share=1.5"),
        ({"rollbacks": -1}, "Playbook.rollbacks=-1"),
        ({"rungs": (DAMAGED, DAMAGED)}, "Playbook.rungs: rung 1 has done the same on damaged before rung 2"),
        (
            {"rungs": (Rung({Trigger.DAMAGED, Trigger.BAD_DATA}, (Halt(),)), DAMAGED)},
            "Playbook.rungs: rung 1 halts on damaged before rung 2",
        ),
    ],
)
def test_playbooks_that_make_no_sense_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}") as refused:
        Playbook(**{"name": "mine"} | options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("playbook", [Playbook.observe(), STANDARD, Playbook.palm()], ids=lambda p: p.name)
def test_a_table_fits_a_hundred_columns_and_has_every_rung_and_trigger(playbook: Playbook) -> None:
    lines = str(playbook).splitlines()
    assert max(map(len, lines)) <= 100
    assert [int(line[:4]) for line in lines if line[:4].strip().isdigit()] == list(range(1, len(playbook.rungs) + 1))
    assert all(line == line.rstrip() for line in lines)
    assert all(trigger in str(playbook) for trigger in TRIGGERS)


def test_a_treatment_comes_back_from_a_file() -> None:
    history = [
        treated(decision, trigger, 5000)
        for trigger in sorted(TRIGGERS)
        for decision in climbed(STANDARD, [(trigger, 5000)] * 6)
    ]
    written = json.dumps([intervention.to_plain() for intervention in history], allow_nan=False)
    assert [PastIntervention.from_plain(plain) for plain in json.loads(written)] == history
    assert {intervention.rung for intervention in history} == {None, 1, 2, 3, 4, 5, 6, 7}
    assert all(type(PastIntervention.from_plain(plain).trigger) is Trigger for plain in json.loads(written))


@pytest.mark.parametrize(
    "change",
    [{"trigger": "melted"}, {"rung": "3"}, {"onset": None}, {"step": 1.5}, {"actions": 7}, {"actions": None}],
    ids=str,
)
def test_a_file_with_something_else_is_refused_in_one_sentence(change: dict[str, Any]) -> None:
    plain = treated(choose(STANDARD, Trigger.DAMAGED, 5000, ()), Trigger.DAMAGED, 5000).to_plain()
    with pytest.raises(SourceError, match=r"^treatment {.*: it has no incident, onset") as refused:
        PastIntervention.from_plain(plain | change)
    assert "\n" not in str(refused.value)
    with pytest.raises(SourceError, match=r"^treatment "):
        PastIntervention.from_plain({})
    with pytest.raises(SourceError, match=r"^action 'pray'"):
        PastIntervention.from_plain(plain | {"actions": [{"action": "pray"}]})


actions = st.one_of(
    st.builds(Rollback, st.integers(0, 5), st.integers(0, 5)),
    st.just(LowerLR()),
    st.just(Stratify()),
    st.builds(SkipBatches, st.integers(1, 5)),
    st.just(SwapSource()),
)
some_actions: st.SearchStrategy[tuple[Action, ...]] = st.one_of(
    st.just((Continue(),)),
    st.just((Halt(),)),
    st.lists(actions, min_size=1, max_size=3, unique_by=type).map(tuple),
)


@st.composite
def playbooks(draw: st.DrawFn) -> Playbook:
    """Any ladder that is not refused."""
    ladder: list[Rung] = []
    for rung in draw(st.lists(st.builds(Rung, st.sets(st.sampled_from(sorted(TRIGGERS)), min_size=1), some_actions))):
        on = rung.on - {t for other in ladder if other.halts or other.actions == rung.actions for t in other.on}
        ladder += [Rung(on, rung.actions)] if on else []
    return Playbook(
        name="any",
        rungs=tuple(ladder),
        again_within=draw(st.integers(1, 100)),
        rollbacks=draw(st.integers(0, 4)),
    )


some_playbook = st.sampled_from([Playbook.observe(), STANDARD, Playbook.palm()]) | playbooks()
anomalies = st.lists(st.tuples(st.sampled_from(sorted(TRIGGERS)), st.integers(0, 400)), max_size=40)


@given(playbook=some_playbook, given_=anomalies)
def test_no_sequence_of_triggers_is_endless(playbook: Playbook, given_: list[tuple[Trigger, int]]) -> None:
    """Never a rung twice for one trouble, so no more treatments of it than rungs; never more rollbacks than allowed."""
    history: list[PastIntervention] = []
    used: set[int] = set()
    """Of this trouble."""
    for trigger, onset in given_:
        if history and onset - history[-1].onset > playbook.again_within:
            used = set()
        decision = choose(playbook, trigger, onset, history)
        assert decision.actions
        assert decision.reason
        if decision.rung is not None:
            assert trigger in playbook.rungs[decision.rung - 1].on
            assert decision.rung not in used
            used.add(decision.rung)
        else:
            assert decision.halts or decision.actions == (Continue(),)
            assert decision.halts == (trigger in HALTING or (playbook.has_rung_for(trigger) and trigger not in HEALS))
        history.append(treated(decision, trigger, onset))
    assert len(used) <= len(playbook.rungs)
    assert sum(isinstance(action, Rollback) for t in history for action in t.actions) <= playbook.rollbacks


@given(playbook=some_playbook, trigger=st.sampled_from(sorted(TRIGGERS)), others=anomalies)
def test_trouble_that_keeps_coming_back_is_halted(
    playbook: Playbook, trigger: Trigger, others: list[tuple[Trigger, int]]
) -> None:
    """Whatever happened before, and wherever it comes back: after as many treatments as it has rungs it is the end.

    What heals by itself is treated once at most, and then no more.
    """
    history = [treated(d, t, o) for d, (t, o) in zip(climbed(playbook, others), others, strict=True)]
    if not playbook.has_rung_for(trigger):
        return
    onset, decided = 500, []
    for _ in range(1 + sum(trigger in rung.on for rung in playbook.rungs)):
        decided.append(choose(playbook, trigger, onset, history))
        history.append(treated(decided[-1], trigger, onset))
        onset += playbook.again_within
    if trigger in HEALS:
        assert all(decision.actions == (Continue(),) and decision.rung is None for decision in decided[1:])
        return
    assert decided[-1].halts
    assert choose(playbook, trigger, onset, history).halts, "and stays so"


rollbacks_of_a_rung = st.lists(st.integers(0, 3000), min_size=1, max_size=5)


@given(
    backs=rollbacks_of_a_rung,
    onsets=st.lists(st.integers(1, 4000), min_size=5, max_size=5),
    every=st.integers(1, 1500),
    phases=st.lists(st.integers(0, 1500), min_size=5, max_size=5),
)
def test_a_rollback_never_goes_less_far_than_the_ones_before_it(
    backs: list[int], onsets: list[int], every: int, phases: list[int]
) -> None:
    """Whatever is asked for, and wherever trouble comes back and states were saved: nearer ones have not helped."""
    rungs_ = [Rung({Trigger.DAMAGED}, (Rollback(back=back, skip=skip),)) for skip, back in enumerate(backs)]
    playbook = Playbook(name="any", rungs=tuple(rungs_), again_within=4000)
    history: list[PastIntervention] = []
    for asked, onset, phase in zip(backs, onsets, phases, strict=False):
        decision = choose(playbook, Trigger.DAMAGED, onset, history)
        (rollback,) = decision.actions
        assert isinstance(rollback, Rollback)
        saved = {0, *range(phase, onset, every)}
        went_to = max(step for step in saved if step <= min(onset - 1, onset - rollback.back))
        for each in history:
            assert each.went_to is not None
            is_no_nearer = onset - went_to >= min(each.onset - each.went_to, onset)
            is_again = went_to <= each.went_to and abs(onset - each.onset) <= PLACE  # an onset is dated no better
            assert is_no_nearer or is_again
        assert onset - went_to >= asked or onset < asked, "as far as it says, where the run is that long"
        history.append(replace(treated(decision, Trigger.DAMAGED, onset), went_to=went_to))
    if onsets[len(backs) - 1] <= backs[-1]:
        assert history[-1].went_to == 0, "the last goes to the beginning of a run that is shorter than it asks"


@pytest.mark.parametrize(("onset", "backs"), [(600, [0, 170, 600]), (60, [0, 45, 60]), (5000, [0, 170, 1000])], ids=str)
def test_short_runs_go_back_by_shares_of_themselves(onset: int, backs: list[int]) -> None:
    """The first rollback has found no state within 170 steps, or 45, of the onset."""
    history: list[PastIntervention] = []
    decisions = []
    for went_back in (min(170, 3 * onset // 4), 200, 1000):
        decisions.append(choose(STANDARD, Trigger.DAMAGED, onset, history))
        went_to = max(onset - went_back, 0)
        history.append(replace(treated(decisions[-1], Trigger.DAMAGED, onset), went_to=went_to))
    found = [action.back for each in decisions for action in each.actions if isinstance(action, Rollback)]
    assert found[0] == 0
    assert found == sorted(found)
    assert found[2] == min(1000, onset)
    assert found[1] == backs[1]
    assert (
        choose(STANDARD, Trigger.DAMAGED, onset, [PastIntervention.from_plain(history[0].to_plain())]) == decisions[1]
    )


def test_no_torch_is_needed() -> None:
    check = "import sealegs.recovery.playbook, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
