"""What a loop keeps of its own: in snapshots, rollbacks, checkpoints and a resume, and left alone where a batch is only
tried again."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs import Guard, Playbook
from sealegs.errors import ConfigError, SourceError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.state.extra_state import copied

STANDARD: dict[str, Any] = {"playbook": Playbook.standard(), "telemetry": Telemetry(sample_every=0)}


class Ema:
    """As people write theirs; it also counts."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, weight in model.named_parameters():
            self.shadow[name].lerp_(weight.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shadow, self.updates = dict(state["shadow"]), state["updates"]


def data(count: int = 900) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def small() -> tuple[nn.Module, torch.optim.Optimizer, Ema]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), Ema(model)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 1
    return loss


def train(guard: Guard, model: nn.Module, ema: Ema, until: int, bad: Any = lambda guard: 1.0) -> None:
    """Up to a step, with a look at every new batch: as many updates of the EMA as there were steps."""
    for batch in guard.batches(data()):
        assert ema.updates == guard.number
        loss = loss_of(model, batch) * bad(guard)
        loss.backward()
        guard.step(loss)
        ema.update(model)
        if guard.number >= until:
            break


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in sealegs.open_run(folder).events if e.kind in kinds]


@pytest.mark.parametrize("memory", [None, 0], ids=["from memory", "from disk"])
def test_it_goes_back_with_the_run(memory: float | None, tmp_path: Path) -> None:
    model, optimizer, ema = small()
    seen: dict[int, dict[str, Any]] = {}
    words = STANDARD | {"checkpoint_every": Checkpointing(every=50, snapshot_memory=memory, also={"ema": ema})}
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        left = {130, 131, 132}
        for batch in guard.batches(data()):
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()
            if guard.number in seen and guard.number not in (130, 131, 132):
                assert ema.updates == guard.number
                assert all(torch.equal(seen[guard.number][name], ema.shadow[name]) for name in ema.shadow)
            seen.setdefault(guard.number, copy.deepcopy(ema.shadow))
            is_bad = guard.number in left
            left.discard(guard.number)
            loss = loss_of(model, batch) * (float("nan") if is_bad else 1.0)
            loss.backward()
            guard.step(loss)
            ema.update(model)
            if guard.number >= 128 and not left:
                break
    (done,) = events(tmp_path / "a", "intervention")
    assert done["to_step"] == 100


def test_a_resumed_run_is_that_of_one_that_went_on(tmp_path: Path) -> None:
    model, optimizer, ema = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(every=20, also={"ema": ema})
    ) as guard:
        train(guard, model, ema, 60)
    whole, updates = copy.deepcopy(ema.shadow), ema.updates
    model, optimizer, ema = small()
    with Guard(
        model, optimizer, run=tmp_path / "b", checkpoint_every=Checkpointing(every=20, also={"ema": ema})
    ) as guard:
        train(guard, model, ema, 40)
    model, optimizer, ema = small()
    with Guard(
        model, optimizer, run=tmp_path / "b", resume=True, checkpoint_every=Checkpointing(every=20, also={"ema": ema})
    ) as guard:
        assert guard.number == 40
        train(guard, model, ema, 60)
    assert ema.updates == updates == 60
    assert all(torch.equal(whole[name], ema.shadow[name]) for name in whole)
    (audit,) = events(tmp_path / "b", "resume-audit")
    assert "also ema" in audit["as_saved"]
    assert not audit["not_as_saved"]


def test_what_a_checkpoint_lacks_or_has_too_much_is_said(tmp_path: Path) -> None:
    model, optimizer, ema = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(every=20, also={"ema": ema})
    ) as guard:
        train(guard, model, ema, 20)
    model, optimizer, ema = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", resume=True, checkpoint_every=Checkpointing(every=20, also={"other": ema})
    ) as guard:
        assert guard.resumed is not None
        told = " ".join(guard.resumed.remarks)
    assert "also['other'] is as the loop has made it" in told
    assert "also['ema'] of the checkpoint is not used" in told


class Unwilling(Ema):
    """Which does not take back what it gave."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["updates"] != self.updates:
            raise KeyError("decay")


def test_what_is_not_taken_back_ends_nothing_by_halves(tmp_path: Path) -> None:
    model, optimizer, _ = small()
    ema = Unwilling(model)
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(also={"ema": ema}), **STANDARD
    ) as guard:
        train(guard, model, ema, 120)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ConfigError, match=r"also\['ema'\] does not take its state back"):
            guard.ask("rollback")
        assert guard.number == 120
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert issubclass(SourceError, Exception)


def test_a_batch_that_is_tried_again_leaves_no_trace(tmp_path: Path) -> None:
    """Buffers, random state and what the loop counts are what they were, though the loop does all it ever does."""
    model, optimizer, ema = small()
    probes, before = 0, None

    def now() -> tuple[dict[str, Any], Tensor, int]:
        return copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state(), ema.updates

    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(also={"ema": ema}), **STANDARD
    ) as guard:
        for batch in guard.batches(data()):
            if guard.is_probe:
                probes += 1
                before = before or now()
            elif before is not None:
                buffers, rng, updates = now()
                assert all(torch.equal(before[0][name], buffer) for name, buffer in buffers.items())
                assert torch.equal(before[1], rng)
                assert before[2] == updates
                break
            is_bad = 220 <= guard.number < 232 and not guard.is_probe
            loss = loss_of(model, batch) * (1000 * 20.0 ** (guard.number - 220) if is_bad else 1.0)
            loss.backward()
            guard.step(loss)
            ema.update(model)
    assert probes == 3
    assert not events(tmp_path / "a", "probe")[0]["is_condemned"]


@pytest.mark.parametrize(
    ("also", "told"),
    [
        ({"ema": [1]}, r"also\['ema'\]: a list has no state_dict and no load_state_dict"),
        ({"ema": nn.Linear(1, 1).state_dict}, r"also\['ema'\]: a \w+ has no"),
        ({3: nn.Linear(1, 1)}, "also has the key 3"),
        ([nn.Linear(1, 1)], "also=list: give a dict"),
    ],
)
def test_what_cannot_go_along_is_refused_at_the_start(also: Any, told: str, tmp_path: Path) -> None:
    model, optimizer, _ = small()
    with pytest.raises(ConfigError, match=told):
        Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(also=also))
    assert not (tmp_path / "a").exists()


class Strange(Ema):
    """With a state that no file can have."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": object()}


def test_a_copy_of_a_state_is_of_the_same_kind() -> None:
    state: dict[str, Any] = {"seen": Counter(a=2), "moves": [OrderedDict(b=torch.ones(2))]}
    mine = copied(state)
    assert (mine["seen"], type(mine["seen"]), type(mine["moves"][0])) == (Counter(a=2), Counter, OrderedDict)
    mine["seen"]["a"] += 1
    mine["moves"][0]["b"][0] = 5.0
    assert (state["seen"], state["moves"][0]["b"].tolist()) == (Counter(a=2), [1.0, 1.0])


def test_a_state_that_cannot_be_kept_is_refused_at_the_start(tmp_path: Path) -> None:
    model, optimizer, _ = small()
    with pytest.raises(ConfigError, match="also/ema"):
        Guard(
            model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(every=10, also={"ema": Strange(model)})
        )
    assert not (tmp_path / "a").exists()
