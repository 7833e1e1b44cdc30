"""Two replica groups under torchft 0.2, on gloo: each a process, and one of them is killed.

torchft is not among what `make test` installs: `make test-long` makes an environment with it.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs
from sealegs.errors import ConfigError

pytest.importorskip("torchft", reason="torchft is not installed: `make test-long` runs this in its own environment")
pytestmark = [pytest.mark.xdist_group("torchft"), pytest.mark.trains, pytest.mark.integration("torchft")]

PROGRAM = Path(__file__).with_name("torchft_groups.py")
STEPS, NAN, SPIKE, HALF = 60, 20, 45, 30
KILLED, AFTER_HEALING = 50, 120
ASKED, ASKED_ALONE, BACK_STEPS, POISONED = 45, 75, 160, 120
"""As in torchft_groups.py, which imports torchft."""
SCENARIOS = (
    *("plain", "plain accumulated", "guarded", "guarded accumulated", "resumed"),
    *("faulted", "killed", "killed, waiting for the quorum", "asked", "poisoned"),
)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torchft.coordination import LighthouseServer

    out = tmp_path_factory.mktemp("torchft")
    servers = {
        name: LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
        )
        for name in SCENARIOS
    }
    (out / "lighthouses.json").write_text(json.dumps({name: server.address() for name, server in servers.items()}))
    launch(PROGRAM, 2, str(out), framework="torchft")
    for server in servers.values():
        server.shutdown()
    return out


def saw(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((out / f"{group}-{name}.json").read_text()) for group in range(2)]


def events(out: Path, name: str, group: int, kind: str) -> list[Any]:
    run = sealegs.open_run(out / name.replace(" ", "-").replace(",", "") / f"group{group}")
    return [event for event in run.events if event.kind == kind]


def test_every_scenario_was_run(launched: Path) -> None:
    assert {path.stem.split("-", 1)[1] for path in launched.glob("[01]-*.json")} == set(SCENARIOS)


@pytest.mark.conforms("unchanged")
def test_nothing_changes_where_nothing_is_wrong(launched: Path) -> None:
    for plain, guarded in zip(saw(launched, "plain"), saw(launched, "guarded"), strict=True):
        assert (guarded["end"], guarded["lr"], guarded["step"]) == (plain["end"], plain["lr"], STEPS)
        assert guarded["unchanged"] == []
        assert set(guarded["participants"]) == {2}
        assert guarded["left alone"]


@pytest.mark.conforms("accumulation")
def test_micro_batches_make_one_step(launched: Path) -> None:
    plain, guarded = saw(launched, "plain accumulated"), saw(launched, "guarded accumulated")
    assert {each["end"] for each in (*plain, *guarded)} == {plain[0]["end"]}
    assert guarded[0]["numbers"][-1] == STEPS
    assert plain[0]["end"] != saw(launched, "plain")[0]["end"]


@pytest.mark.conforms("nan", "spike")
def test_a_fault_in_one_group_is_skipped_in_all(launched: Path) -> None:
    one, other = saw(launched, "faulted")
    for group in (one, other):
        assert group["unchanged"] == [NAN, SPIKE], "weights and moments, bit for bit"
        assert [" SKIP " in verdict for verdict in group["verdicts"]] == [True, True]
        assert group["step"] == STEPS, "torchft counts what was skipped"
    assert (one["end"], one["memory"], one["verdicts"]) == (other["end"], other["memory"], other["verdicts"])
    assert one["end"] != saw(launched, "plain")[0]["end"]


@pytest.mark.conforms("ranks")
def test_the_group_at_fault_is_named_in_each_group(launched: Path) -> None:
    for group in range(2):
        named = {event.step: event.detail["text"] for event in events(launched, "faulted", group, "group-at-fault")}
        assert named.keys() == {NAN, SPIKE}
        assert all(text.startswith("group 1: ") for text in named.values())
    assert events(launched, "guarded", 0, "group-at-fault") == [], "none is at fault in a healthy step"


@pytest.mark.parametrize("name", ["killed", "killed, waiting for the quorum"])
@pytest.mark.conforms("resume")
def test_a_group_that_was_killed_is_healed_and_judges_as_the_other(launched: Path, name: str) -> None:
    survivor, healed = saw(launched, name)
    assert 1 in survivor["participants"], "the other one went on alone"
    assert healed["memory"] == survivor["memory"], "what the detectors know of losses and norms"
    assert healed["began with"] != survivor["memory"]
    assert healed["end"] == survivor["end"]
    assert healed["numbers"][0] > KILLED, "it went on at the other one's step"
    assert healed["numbers"][-1] == survivor["numbers"][-1] == AFTER_HEALING
    (spike,) = survivor["unchanged"]
    assert healed["unchanged"] == [spike], "a spike in the other group"
    apart = [step for step, digest in healed["digests"].items() if digest != survivor["digests"][step]]
    assert apart == [], "after every step that both made"
    (told,) = events(launched, name, 1, "healed")[1:]  # at its first start torchft made the groups equal
    assert told.step >= KILLED
    assert events(launched, name, 0, "healed") == []
    assert events(launched, name, 0, "step-given-up"), "that in which the other was lost"


@pytest.mark.conforms("resume")
def test_groups_that_ended_go_on_from_their_checkpoints(launched: Path) -> None:
    for resumed, whole in zip(saw(launched, "resumed"), saw(launched, "guarded"), strict=True):
        assert resumed["began at"] == HALF
        assert (resumed["end"], resumed["memory"], resumed["lr"]) == (whole["end"], whole["memory"], whole["lr"])
        assert resumed["step"] == STEPS, "torchft's count, too"


@pytest.mark.conforms("rollback")
def test_all_groups_go_back_at_one_step(launched: Path) -> None:
    one, other = saw(launched, "asked")
    assert (one["end"], one["memory"], one["lr"]) == (other["end"], other["memory"], other["lr"])
    back = [after for before, after in pairwise(one["numbers"]) if after < before]
    assert len(back) == 2
    assert other["numbers"][: ASKED + 1] == one["numbers"][: ASKED + 1]
    for group in range(2):
        first = events(launched, "asked", group, "intervention")[0]
        assert (first.step, first.detail["to_step"]) == (ASKED, back[0])
    assert one["step"] == other["step"] > BACK_STEPS, "torchft's count goes on"


def test_a_group_that_did_not_go_back_with_the_others_is_healed(launched: Path) -> None:
    one, other = saw(launched, "asked")
    assert [event.step for event in events(launched, "asked", 1, "intervention")] == [ASKED]
    (alone,) = events(launched, "asked", 0, "intervention")[1:]
    assert alone.step == ASKED_ALONE
    told = [event.detail["text"] for event in events(launched, "asked", 1, "healed")][1:]
    assert told == [f"healed by another group: at step {alone.detail['to_step']}, from {ASKED_ALONE}"]
    for group, committed in ((0, True), (1, False)):
        (given_up,) = events(launched, "asked", group, "step-given-up")
        assert given_up.detail["committed"] == committed
        assert "group 1 at step 75" in given_up.detail["text"]
    same = [step for step, digest in one["digests"].items() if other["digests"].get(step) == digest]
    assert len(same) >= len(one["digests"]) - 3


@pytest.mark.conforms("rollback")
def test_weights_that_break_in_one_group_bring_all_groups_back(launched: Path) -> None:
    one, other = saw(launched, "poisoned")
    assert (one["end"], one["memory"]) == (other["end"], other["memory"])
    (done,) = events(launched, "poisoned", 1, "intervention")
    assert (done.detail["trigger"], done.detail["acted"]) == ("nonfinite-weights", True)
    assert done.detail["to_step"] < POISONED
    for group in (one, other):
        assert min(group["numbers"][POISONED:]) <= done.detail["to_step"] + 1
        assert group["numbers"][-1] == BACK_STEPS


@pytest.fixture
def made() -> Iterator[Callable[..., Any]]:
    """Makes managers of groups that nobody else is in."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    kept: list[Any] = []

    def make(world_size: int = 1) -> Any:
        store: Any = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # type: ignore[attr-defined]
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
        manager = Manager(
            pg=ProcessGroupGloo(), load_state_dict=lambda _: None, state_dict=dict, min_replica_size=1, rank=0,
            world_size=world_size, store_addr="127.0.0.1", store_port=store.port, hostname="localhost",
            lighthouse_addr=lighthouse.address(),
        )  # fmt: skip
        kept.append((manager, lighthouse, store))
        return manager

    yield make
    for manager, lighthouse, _ in kept:
        manager.shutdown(wait=False)
        lighthouse.shutdown()


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft's own
def test_what_would_part_the_groups_is_refused(made: Callable[..., Any]) -> None:
    import torch
    from torchft.optim import OptimizerWrapper

    from sealegs.integrations import torchft

    manager, model = made(), torch.nn.Linear(2, 1)
    adam = torch.optim.AdamW(model.parameters())
    optimizer = OptimizerWrapper(manager, adam)
    with pytest.raises(ConfigError, match="optimizer=AdamW: give torchft's OptimizerWrapper around yours"):
        torchft.attach(manager, model, adam, run=None)  # type: ignore[arg-type,unused-ignore]
    with pytest.raises(ConfigError, match="attention_logit=50: give clip=Clipping"):
        torchft.attach(manager, model, optimizer, run=None, attention_logit=50)
    of_two = made(world_size=2)
    with pytest.raises(ConfigError, match="its group has 2 processes, and only groups of one were tested"):
        torchft.attach(of_two, model, OptimizerWrapper(of_two, adam), run=None)
    guard = torchft.attach(manager, model, optimizer, run=None)
    with pytest.raises(ConfigError, match="a guard is attached to it already"):
        torchft.attach(manager, model, optimizer, run=None)
    with pytest.raises(ConfigError, match=r"call guard\.step"):
        optimizer.step()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    with pytest.raises(ConfigError, match="no quorum was asked for in this step"):
        guard.step(loss)
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="every group has a loss"):
        guard.step(None)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert guard.step(loss).go
    assert guard.is_committed
    with pytest.raises(ConfigError, match="no quorum"):
        guard.step(loss)
    guard.close()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert manager.current_step() == 2, "the manager and the optimizer are torchft's again"


@pytest.mark.parametrize("installed", ["0.1.1", "0.3.0", "0.3.0.dev1", "1.0"])
def test_other_releases_are_refused_in_one_sentence(installed: str) -> None:
    from sealegs.integrations.torchft import refuse_version

    with pytest.raises(ConfigError, match=rf"torchft {installed}: .* from 0.2 on, before 0.3; use one of these"):
        refuse_version(installed)
    refuse_version("0.2.0")
    refuse_version("0.2.7")


def test_what_it_goes_by_is_there() -> None:
    """Names of torchft's that are not promised to stay."""
    import inspect

    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper

    source = inspect.getsource(Manager)
    for name in ("_load_state_dict_fns", "_user_state_dicts", "_group_world_size", "_replica_id"):
        assert f"self.{name}" in source, name
    commit = inspect.getsource(Manager.should_commit)
    assert commit.index("_apply_pending_state_dict") < commit.index("_client.should_commit"), "it heals, then decides"
    assert "self.manager.start_quorum()" in inspect.getsource(OptimizerWrapper.zero_grad)
