"""What a checkpoint holds, and what came back of it: through a real guard, and in files that others wrote."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import sealegs
from sealegs.cli.main import main
from sealegs.errors import SourceError
from sealegs.report.commands.audit import Audited, Held, page
from sealegs.state.checkpoint_audit import holdings, open_checkpoint

BATCHES = torch.randn(30, 8, 4, generator=torch.Generator().manual_seed(0))


def parts() -> tuple[nn.Module, torch.optim.AdamW, LRScheduler]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(
    folder: Path, steps: int, *, resume: bool = False, meddle: Any = lambda *parts: None, loader: Any = BATCHES
) -> sealegs.Guard:
    model, optimizer, scheduler = parts()
    with sealegs.Guard(model, optimizer, run=folder, scheduler=scheduler, checkpoint_every=25, resume=resume) as guard:
        meddle(optimizer, model)
        for batch in guard.batches(loader):
            loss = model(batch).square().mean()
            loss.backward()
            guard.step(loss)
            if guard.number == steps:
                break
        if not resume:
            guard.checkpoint(wait=True)
    return guard


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "mine"
    trained(folder, 25)
    return folder


def audit_of(folder: Path) -> dict[str, Any]:
    [event] = [event for event in sealegs.open_run(folder).events if event.kind == "resume-audit"]
    return {"step": event.step, **event.detail}


PARTS = [
    *("weights", "moments", "random state", "data position", "loss scale", "learning rate", "betas"),
    *("optimizer settings", "parameter groups", "schedule"),
]


def test_every_resume_is_audited(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    trained(tmp_path / "a", 27, resume=True)
    told = audit_of(tmp_path / "a")
    assert (told["step"], told["checkpoint"], told["as_saved"]) == (25, 25, PARTS)
    assert (told["not_as_saved"], told["changed"]) == ({}, [])

    shutil.copytree(run, tmp_path / "b")

    def meddle(optimizer: torch.optim.AdamW, model: nn.Module) -> None:
        optimizer.param_groups[0].update(lr=0.5)  # as a loop that knows better
        optimizer.state.clear()

    trained(tmp_path / "b", 27, resume=True, meddle=meddle)
    changed = audit_of(tmp_path / "b")["changed"]
    assert [sentence.split(" was ")[0] for sentence in changed] == ["lr of group 0", "moments of optimizer 0"]
    assert changed[0].endswith("and is 0.5")


def _zero(*keys: str) -> Any:
    return lambda optimizer, model: [state[key].zero_() for state in optimizer.state.values() for key in keys]


@pytest.mark.parametrize(
    ("meddle", "changed"),
    [
        (_zero("exp_avg"), ["exp_avg of optimizer 0: 2 of 2 tensors have been set to 0"]),
        (
            _zero("exp_avg_sq", "step"),
            [
                "step of optimizer 0: 2 of 2 tensors have been set to 0",
                "exp_avg_sq of optimizer 0: 2 of 2 tensors have been set to 0",
            ],
        ),
        (
            lambda optimizer, model: model.weight.data.mul_(1.5),
            ["weights: 1 of 2 tensors have been set to other values (weight)"],
        ),
        (lambda *parts: torch.manual_seed(99), ["random state: torch on cpu drew or was seeded"]),
    ],
    ids=["first moments", "second moments", "weights", "seed"],
)
def test_what_the_loop_overwrites_in_place_is_told(meddle: Any, changed: list[str], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    trained(tmp_path / "a", 26, resume=True, meddle=meddle)
    assert audit_of(tmp_path / "a")["changed"] == changed


class Stream:
    """A loader that says where it is, and goes elsewhere by some batches; ``off`` is None for one that stays."""

    def __init__(self, off: int | None = 0) -> None:
        self.off, self.place = off, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(BATCHES):
            self.place += 1
            yield BATCHES[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seed": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = self.place if self.off is None else state["place"] + self.off


@pytest.mark.parametrize(("off", "told"), [(0, None), (3, "place was 25 and is 28"), (None, "place was 25 and is 0")])
def test_a_loader_that_is_not_where_it_was_brought_is_told(off: int | None, told: str | None, tmp_path: Path) -> None:
    trained(tmp_path / "a", 25, loader=Stream())
    trained(tmp_path / "a", 26, resume=True, loader=Stream(off))
    audit = audit_of(tmp_path / "a")
    assert audit["not_as_saved"] == ({} if told is None else {"data position": told})
    assert ("data position" in audit["as_saved"]) == (told is None)
    events = [
        event.detail["text"] for event in sealegs.open_run(tmp_path / "a").events if event.kind == "data-misplaced"
    ]
    assert [text.endswith(str(told)) for text in events] == [True] * (told is not None)


def test_what_does_not_come_back_is_told(run: Path) -> None:
    from sealegs.state.checkpoints import Checkpoints
    from sealegs.state.resume_audit import came_back
    from sealegs.state.training_state import TrainingState

    model, optimizer, scheduler = parts()
    saved = Checkpoints(run / "checkpoints").load(25)
    training = TrainingState(model=model, optimizers=[optimizer], schedulers=[scheduler])
    training.restore(saved)
    right = came_back(saved, training.capture())
    assert {name for name, told in right.items() if told != "as saved"} == {"data position"}, "there are no data"

    with torch.no_grad():
        model.weight[0, 0] += 1e-6  # type: ignore[operator, index]
    optimizer.state[model.bias]["exp_avg"].zero_()  # type: ignore[index]
    optimizer.param_groups[0].update(lr=1.0, betas=(0.9, 0.5), eps=1e-3)
    scheduler.last_epoch = 3
    torch.rand(1)
    wrong = came_back(saved, training.capture())
    assert {name for name, told in wrong.items() if told == "as saved"} == {"loss scale", "parameter groups"}
    assert wrong["weights"] == "weight has other values"
    assert wrong["moments"] == "0/bias.exp_avg has other values"
    assert wrong["learning rate"].endswith("and is 1.0")
    assert wrong["schedule"] == "was 25 and is 3"


def test_of_a_place_in_the_data_only_what_differs_is_told(run: Path) -> None:
    """As of a run with spoilt batches that is resumed without the fault."""
    from sealegs.state.checkpoints import Checkpoints, StoredState
    from sealegs.state.resume_audit import came_back

    stored = Checkpoints(run / "checkpoints").load(25)

    def at(**loader: int) -> StoredState:
        return replace(stored, own={**stored.own, "data": {"next": 4, "loader": {"seed": 0, **loader}}})

    told = came_back(at(place=4, spoilt_next_batch=4), at(place=5))["data position"]
    assert told == "loader.place was 4 and is 5; loader.spoilt_next_batch was 4 and is not there"


def problems(path: Path) -> dict[str, str | None]:
    return {each.name: each.problem for each in holdings(open_checkpoint(path)) if each.problem}


def test_ours_holds_everything(run: Path) -> None:
    found = {each.name: each.what for each in holdings(open_checkpoint(run / "checkpoints" / "25"))}
    assert problems(run / "checkpoints" / "25") == {}
    assert (found["weights"], found["step"]) == ("2 tensors (2 float32), 10 numbers", "25")
    assert found["moments"] == "of 2 of 2 parameters (float32)"
    assert (found["schedule"], found["data position"]) == ("at step 25", "batch 25 comes next")
    assert "torch on cpu" in str(found["random state"])


def test_damage_and_nan_are_seen(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "25", tmp_path / "25")
    with (tmp_path / "25" / "plain.json").open("ab") as file:
        file.write(b" ")
    assert problems(tmp_path / "25") == {"files": "plain.json is not what was written: use an older checkpoint"}
    model, optimizer, _ = parts()
    with torch.no_grad():
        model.weight[1, 1] = torch.nan  # type: ignore[operator]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "nan.pt")
    assert str(problems(tmp_path / "nan.pt")["weights"]).startswith("not finite: weight")


def saved_file(folder: Path, **changes: Any) -> Path:
    model, optimizer, scheduler = parts()
    for _ in range(50):
        model(BATCHES[0]).square().mean().backward()
        optimizer.step()
        scheduler.step()
    content = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "step": 50, "rng": torch.get_rng_state(), "loader": {"batch": 50},
        "versions": {"torch": str(torch.__version__)},
    } | changes  # fmt: skip
    content = {key: value for key, value in content.items() if value is not None}
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, set()),
        ({"optimizer": None}, {"optimizer"}),
        ({"scheduler": None}, {"schedule"}),
        ({"rng": None, "loader": None}, {"random state", "data position"}),
        ({"model": None}, {"weights"}),
        ({"step": 900}, {"step", "schedule"}),
        ({"scheduler": {"last_epoch": 0}}, {"schedule"}),
        ({"scaler": {"scale": 0.5, "growth_factor": 2.0}}, {"loss scale"}),
        ({"versions": {"torch": "1.0"}}, {"versions"}),
    ],
)
def test_a_file_of_anybodys_is_looked_through(changes: dict[str, Any], wrong: set[str], tmp_path: Path) -> None:
    assert set(problems(saved_file(tmp_path, **changes))) == wrong


@pytest.mark.parametrize(
    ("first", "schedule", "is_wrong"),
    [
        (1e-3, {"last_epoch": 50}, False),
        (1e-3, {"last_epoch": 50, "T_max": 50}, False),
        (1e-3, {"last_epoch": 50, "T_max": 5000}, True),
        (1e-3, {"last_epoch": 50, "total_steps": 51}, False),
        (None, {"last_epoch": 50}, True),
        (0.0, {"last_epoch": 50}, True),
    ],
)
def test_a_rate_of_0_is_sound_where_its_schedule_ends(
    first: float | None, schedule: dict[str, Any], is_wrong: bool, tmp_path: Path
) -> None:
    state = torch.load(saved_file(tmp_path), weights_only=True)["optimizer"]
    for group in state["param_groups"]:
        group["lr"] = 0.0
        group.pop("initial_lr", None)
        group |= {} if first is None else {"initial_lr": first}
    found = problems(saved_file(tmp_path, optimizer=state, scheduler=schedule))
    assert ("learning rate" in found) is is_wrong


def test_moments_that_are_missing_are_counted(tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    fresh = saved_file(tmp_path, optimizer=optimizer.state_dict())
    assert "moments" in problems(fresh)
    state = torch.load(saved_file(tmp_path), weights_only=True)["optimizer"]
    del state["state"][0]
    assert str(problems(saved_file(tmp_path, optimizer=state))["moments"]).startswith("of 1 of 2 parameters only")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert set(problems(tmp_path / "weights.pt")) == {
        "optimizer", "step", "schedule", "random state", "data position",
    }  # fmt: skip


def test_a_checkpoint_of_the_trainer_is_read(tmp_path: Path) -> None:
    content = torch.load(saved_file(tmp_path), weights_only=True)
    folder = tmp_path / "checkpoint-50"
    folder.mkdir()
    save_file(content["model"], folder / "model.safetensors")
    torch.save(content["optimizer"], folder / "optimizer.pt")
    torch.save(content["scheduler"], folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 50}))
    assert set(problems(folder)) == {"random state"}
    (folder / "rng_state.pth").write_bytes(b"")
    assert problems(folder) == {}
    (folder / "optimizer.pt").unlink()
    assert set(problems(folder)) == {"optimizer"}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(SourceError, match=r"cannot be read without running what is in it"):
        open_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0, "the newest of the run"
    assert capsys.readouterr().out.endswith("A run goes on from it as if nothing had been.\n")
    assert main(["audit", str(saved_file(tmp_path, scheduler=None)), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["holds"] if each["problem"]] == ["schedule"]
    for words in ("nowhere", str(tmp_path)):
        assert main(["audit", words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    promised = json.loads((Path(__file__).parents[2] / "docs" / "audit.schema.json").read_text())
    assert promised == msgspec.json.schema(Audited)


def test_what_the_last_resume_brought_back_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(path: Path) -> dict[str, Any]:
        status = main(["audit", str(path), "--json"])
        shown: dict[str, Any] = json.loads(capsys.readouterr().out) | {"status": status}
        return shown

    shutil.copytree(run, tmp_path / "a")
    assert told(tmp_path / "a")["resume"] is None, "it was not resumed"
    trained(tmp_path / "a", 27, resume=True)
    sound = told(tmp_path / "a")
    assert (sound["resume"]["checkpoint"], sound["resume"]["as_saved"], sound["status"]) == (25, PARTS, 0)
    trained(tmp_path / "a", 29, resume=True, meddle=_zero("exp_avg"))
    broken = told(tmp_path / "a")
    assert broken["resume"]["changed"] == ["exp_avg of optimizer 0: 2 of 2 tensors have been set to 0"]
    assert (broken["complete"], broken["status"]) == (True, 1)
    checkpoints = tmp_path / "a" / "checkpoints"
    assert told(checkpoints / "25")["resume"] == broken["resume"], "the last resume from it"
    shutil.copytree(checkpoints / "25", checkpoints / "24")
    assert told(checkpoints / "24")["resume"] is None, "nothing was resumed from that one"
    assert main(["audit", str(tmp_path / "a")]) == 1
    assert "\n! changed since    exp_avg of optimizer 0: 2 of 2" in capsys.readouterr().out


def test_the_page() -> None:
    holds = [Held(name="weights", what="2 tensors", problem=None), Held(name="schedule", what=None, problem="again")]
    assert (
        page(Audited(source="a.pt", kind="file of torch.save", holds=holds, complete=False))
        == """\
a.pt: file of torch.save

  weights          2 tensors
! schedule         -
                   again

1 to mend or to know of."""
    )
