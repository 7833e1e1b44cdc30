"""What happened to a run in, what a launcher should do about it out."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import RestartRefused
from sealegs.record.checkpoint_tags import DIGESTS, Tag, Tags
from sealegs.record.health import (
    ADVICE,
    AT_MOST_EVERY_S,
    HEALTH,
    Health,
    HealthFile,
    health_of,
    read_health,
    refuse_restart,
)
from sealegs.record.schema import EVENTS, METRICS
from sealegs.vocabulary import Event

TAGS: dict[int, tuple[Tag, str]] = {100: ("healthy", ""), 200: ("healthy", ""), 300: ("candidate", "")}


def begun(step: int = 0, *, playbook: str | None = "standard", **more: Any) -> dict[str, Any]:
    return {"kind": "guard", "time": 1.0, "step": step, "act": True, "playbook": playbook, **more}


def alarm(step: int, incident: int = 1, kind: str = "alarm", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "time": 2.0, "step": step, "incident": incident, "text": f"step {step}", **more}


def closed(step: int, start: int) -> dict[str, Any]:
    return {"kind": "incident-closed", "time": 3.0, "step": step, "number": 1, "start": start, "recovery_loss": 2.5}


def halted(step: int) -> dict[str, Any]:
    return alarm(step, kind="halt", acted=True)


def ended_by_playbook(step: int) -> dict[str, Any]:
    return alarm(step, kind="intervention", acted=True, actions=[{"action": "halt"}])


ALONE = begun(200, playbook=None)


@pytest.mark.parametrize(
    ("events", "verdict", "advice", "healthy"),
    [
        ([begun()], "healthy", "go on", 200),
        ([begun(), alarm(250)], "incident", "restart from healthy", 200),
        ([begun(), alarm(150)], "incident", "restart from healthy", 100),
        ([begun(), alarm(150), closed(190, 150)], "healthy", "go on", 200),
        ([begun(playbook=None), alarm(250)], "healthy", "go on", 300),  # ended 50 steps ago, and nothing since
        ([ALONE, halted(310)], "halted", "restart from healthy", 200),
        ([ALONE, halted(310), ALONE, halted(330)], "halted", "do not restart", 300),
        ([ALONE, halted(310), ALONE, halted(800)], "halted", "restart from healthy", 300),
        ([ALONE, halted(310), begun(200)], "healthy", "go on", 200),
        ([begun(), halted(310)], "incident", "restart from healthy", 200),  # the playbook has an answer
        ([begun(), ended_by_playbook(310)], "halted", "restart from healthy", 200),
        ([begun(), ended_by_playbook(310), begun(200), ended_by_playbook(320)], "halted", "do not restart", 200),
        ([begun(), {"kind": "end", "time": 4.0, "step": 320, "reason": "finished"}], "finished", "go on", 200),
        (
            [begun(), {"kind": "end", "time": 4.0, "step": 320, "reason": "failed", "error": "CUDA error"}],
            "failed",
            "restart from healthy",
            200,
        ),
    ],
)
def test_a_launcher_is_told_which_checkpoint_to_take_and_whether(
    events: list[dict[str, Any]], verdict: str, advice: str, healthy: int
) -> None:
    found = health_of(events, TAGS, 320)
    assert (found.verdict, found.advice) == (verdict, advice)
    assert found.newest_healthy is not None
    assert found.newest_healthy.step == healthy
    assert found.newest is not None
    assert found.newest.step == 300


def test_a_pardon_counts_from_its_time_on() -> None:
    events = [ALONE, halted(310), ALONE, halted(330)]
    assert health_of(events, TAGS, 330, pardoned=1.5).advice == "do not restart"
    assert health_of(events, TAGS, 330, pardoned=2.5).advice == "restart from healthy"


@pytest.mark.parametrize(("ranks", "sure_from"), [(2, 8), (8, 4), (64, 3), (1000, 2)])
def test_a_host_is_left_out_only_where_chance_would_hardly_name_it_so_often(ranks: int, sure_from: int) -> None:
    hosts = [{"host": f"node{rank // 8}", "device": f"cuda:{rank % 8}"} for rank in range(ranks)]
    for times in range(1, 10):
        met = [alarm(50 * number, number, culprit="head.weight on rank 1") for number in range(1, times + 1)]
        found = health_of([begun(ranks=ranks, hosts=hosts), *met], TAGS, 600)
        assert found.at_fault is not None
        assert (found.at_fault.rank, found.at_fault.host, found.at_fault.device) == (1, "node0", "cuda:1")
        assert (found.advice == "restart without this host") is (times >= sure_from)
    other = alarm(590, 99, culprit="rank 0")
    assert health_of([begun(ranks=ranks, hosts=hosts), *met, other], TAGS, 600).advice != "restart without this host"


@given(
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["guard", "alarm", "halt", "skip", "intervention", "incident-closed", "end"])},
            optional={
                name: st.none() | st.integers(-5, 500) | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
                for name in ("incident", "playbook", "ranks", "hosts", "culprit", "actions", "acted", "reason", "start")
            },
        ),
        max_size=8,
    )
)
def test_events_of_any_make_get_an_advice(made: list[dict[str, Any]]) -> None:
    events = [{"time": 1.0, "step": number, "findings": []} | event for number, event in enumerate(made)]
    found = health_of(events, TAGS, 320)
    assert found.advice in ADVICE
    assert json.loads(found.to_json())["advice"] == found.advice


def test_the_file_is_as_the_last_event_left_it_and_a_restart_obeys_it(tmp_path: Path) -> None:
    written = HealthFile(tmp_path)
    written.start({"run_id": "a7"})
    for step in (310, 330):
        for event in (dict(ALONE), halted(step)):
            written.event(Event(kind=event.pop("kind"), step=event.pop("step"), time=event.pop("time"), detail=event))
    written.close()
    told = json.loads((tmp_path / HEALTH).read_text())
    assert (told["run"], told["verdict"], told["advice"]) == ("a7", "halted", "do not restart")
    with pytest.raises(RestartRefused, match=r"halted at step 310, and again at step 330 .* --clear"):
        refuse_restart(tmp_path)
    (tmp_path / HEALTH).write_text(json.dumps(told | {"advice": "go on"}))
    refuse_restart(tmp_path)
    (tmp_path / HEALTH).write_text("{ torn")
    refuse_restart(tmp_path)


def test_the_last_step_is_that_of_the_last_row_and_not_of_an_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text(json.dumps(begun()) + "\n")
    assert read_health(tmp_path).step == 0
    rows = "".join(json.dumps({"step": step, "loss": 2.0}) + "\n" for step in (*range(300), 280))
    (tmp_path / METRICS).write_text(rows + '{"step": 281, "lo')  # torn by a kill
    assert read_health(tmp_path).step == 280, "the run went back"
    HealthFile(tmp_path).row({"step": 299, "loss": 2.0})
    (tmp_path / METRICS).unlink()
    assert read_health(tmp_path).step == 299, "as the file says"


def test_a_tag_that_changes_is_in_the_file_before_a_kill(tmp_path: Path) -> None:
    for step in (200, 250):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / DIGESTS).write_text("{}")
    tags, written = Tags(tmp_path / "checkpoints"), HealthFile(tmp_path)

    def named_after(step: int) -> int:
        time.sleep(1.1 * AT_MOST_EVERY_S)
        written.row({"step": step, "loss": 2.0})
        told = json.loads((tmp_path / HEALTH).read_text())["newest_healthy"]
        return told["step"] if told else -1

    tags.give(200, "healthy", "")
    assert named_after(260) == 200
    tags.give(250, "healthy", "")
    assert named_after(266) == 250
    tags.give(250, "suspect", "the run went back to step 200")
    assert named_after(267) == 200


def test_an_incident_that_is_over_casts_no_doubt_on_what_is_saved_later(tmp_path: Path) -> None:
    """An incident has a kind of its own, beside that of the event which says that it is over."""
    for step in (0, 200, 400):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / DIGESTS).write_text("{}")
        Tags(tmp_path / "checkpoints").give(step, "healthy", "")
    written = HealthFile(tmp_path)
    for event in (begun(), alarm(205), closed(251, 201)):
        kind, step, time = (event.pop(name) for name in ("kind", "step", "time"))
        of_incident = {"kind": "spike"} if kind == "incident-closed" else {}
        written.event(Event(kind=kind, step=step, time=time, detail=event | of_incident))
    told = json.loads((tmp_path / HEALTH).read_text())
    assert (told["verdict"], told["newest_healthy"]["step"]) == ("healthy", 400)


def test_a_folder_that_is_not_the_run_s_any_more_is_left_alone(tmp_path: Path) -> None:
    HealthFile(tmp_path, lost=lambda: "another run is there").close()
    assert not list(tmp_path.iterdir())


def test_health_in_words() -> None:
    told = health_of([begun(), alarm(250)], TAGS, 320).told
    assert told[0] == "restart from healthy: incident at step 320, incident 1 is open since step 250"
    assert told[1].startswith("newest healthy checkpoint: step 200, checkpoints/200 (16 healthy steps")
    assert told[2] == "newest checkpoint: step 300, checkpoints/300"
    assert Health().told[0] == "go on: healthy"


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        ([(2, False)], "go on"),
        ([(2, False), (2, False)], "restart without this host"),
        ([(2, True)], "restart without this host"),
        ([(None, True), (None, True)], "go on"),
    ],
)
def test_a_rank_that_computes_wrongly_again_is_left_out(told: list[tuple[int | None, bool]], advice: str) -> None:
    hosts = [{"host": f"node{rank}", "device": f"cuda:{rank}"} for rank in range(4)]
    guard = begun(playbook=None, ranks=4, hosts=hosts)
    wrong = [
        {"kind": "silent-corruption", "time": 2.0, "step": 500, "rank": rank, "is_lasting": lasts, "text": "rank 2 ..."}
        for rank, lasts in told
    ]
    found = health_of([guard, *wrong], TAGS, 600)
    assert (found.verdict, found.advice) == ("healthy", advice)
    if told[0][0] is None:
        assert found.at_fault is None
        return
    assert found.at_fault is not None
    assert (found.at_fault.rank, found.at_fault.host, found.at_fault.evidence) == (2, "node2", "step 500: rank 2 ...")
    assert health_of([guard, *wrong], TAGS, 600, pardoned=3.0).at_fault is None


def test_a_slow_rank_is_evidence_where_no_incident_points_at_any_and_no_reason_to_leave_its_host_out() -> None:
    hosts = [{"host": f"node{rank}", "device": f"cuda:{rank}"} for rank in range(4)]
    guard = begun(playbook=None, ranks=4, hosts=hosts)
    text = "step 75  GO  rank 2 takes 21% longer than the others, over 50 steps"
    slow = {"kind": "remark", "time": 2.0, "step": 75, "text": text}
    found = health_of([guard, slow], TAGS, 320)
    assert found.at_fault is not None
    assert (found.at_fault.rank, found.at_fault.host) == (2, "node2")
    assert found.at_fault.evidence == "rank 2 takes 21% longer than the others, over 50 steps"
    assert (found.verdict, found.advice) == ("healthy", "go on")
    accused = health_of([guard, slow, alarm(250, culprit="a.weight on rank 1 (dp 1)")], TAGS, 320)
    assert accused.at_fault is not None
    assert accused.at_fault.rank == 1
    assert health_of([guard, slow], TAGS, 320, pardoned=3.0).at_fault is None
