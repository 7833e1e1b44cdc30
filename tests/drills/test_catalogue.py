"""The list of drills: what it has, how it is asked."""

import pytest

from sealegs.diagnosis.cause_cards import causes
from sealegs.drills.catalogue import DRILLS, FAMILIES, Drill, chosen
from sealegs.errors import ConfigError
from sealegs.faults.spec import KINDS


@pytest.mark.parametrize("drill", DRILLS.values(), ids=lambda drill: drill.name)
def test_every_drill_can_be_read_and_its_cause_be_named(drill: Drill) -> None:
    assert all(fault.step == 70 or "@" in text for fault, text in zip(drill.struck(70), drill.faults, strict=True))
    assert set(drill.causes) <= set(causes())
    assert drill.faults or drill.settings or drill.control
    assert not (drill.is_benign and drill.causes)


def test_every_kind_of_fault_has_a_drill() -> None:
    drilled = {fault.name for drill in DRILLS.values() for fault in drill.struck(70)}
    assert set(KINDS) - drilled == {"inf-gradient"}


def test_drills_are_asked_for_by_name_by_family_or_as_a_fault() -> None:
    assert [drill.name for drill in chosen(["nan-gradient", "lr-x30"], is_lab=True)] == ["lr-x30", "nan-gradient"]
    assert {drill.family for drill in chosen(["benign"], is_lab=True)} == {"benign"}
    [own] = chosen(["lr-spike:factor=3,steps=2@90"], is_lab=True)
    assert own.family == "your own"
    assert own.struck(70)[0].step == 90
    assert {drill.family for drill in chosen([], is_lab=True)} == set(FAMILIES)


def test_what_strikes_one_rank_is_done_on_several() -> None:
    of_ranks = [drill for drill in chosen([], is_lab=True) if drill.where == "ranks"]
    assert [drill.name for drill in of_ranks] == ["rank-nan", "rank-x1000", "replica-drift", "rank-skips-all-reduce"]
    assert {drill.rank for drill in of_ranks} == {1}
    [own] = chosen(["nan-gradient:rank=0"], is_lab=True)
    assert (own.where, own.rank) == ("ranks", 0)
    assert DRILLS["nan-gradient"].rank is None


def test_what_a_guard_can_only_observe_is_practised_where_it_can_be() -> None:
    observed = [drill for drill in DRILLS.values() if drill.shown]
    assert {drill.where for drill in observed} == {"the lab", "policy gradient"}
    assert not any(drill.causes for drill in observed)
    [own] = chosen(["constant-reward:value=1"], is_lab=True)
    assert own.where == "policy gradient"
    with pytest.raises(ConfigError, match="zero-spread: needs the lab's policy-gradient loop; leave out --build"):
        chosen(["zero-spread"], is_lab=False)


def test_in_a_loop_of_ones_own_only_what_needs_no_lab_is_done() -> None:
    assert all(drill.where in ("any loop", "text") for drill in chosen([], is_lab=False))
    assert [drill.name for drill in chosen(["benign"], is_lab=False)] == ["lr-decay"]
    with pytest.raises(ConfigError, match="wide-init: needs the lab's own model or data; leave out --build"):
        chosen(["wide-init"], is_lab=False)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("lr-x31", "did you mean lr-x3"),
        ("qqq", "see `sealegs drill --list`"),
        ("nan-gradient:speed=3", "'speed=3' is no option of nan-gradient"),
    ],
)
def test_what_there_is_not_is_refused_in_a_sentence(asked: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        chosen([asked], is_lab=True)
