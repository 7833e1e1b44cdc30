"""Lightning itself, of both names, with a guard in its loop."""

import json
import pickle
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import lightning_small as small
from tests.integrations.lightning_small import BATCH, BROKEN, NAN, PER_EPOCH, SPIKE, STEPS, fitted
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import sealegs
from sealegs.cli.main import main
from sealegs.errors import ConfigError, MissingExtra, RunExists, RunHalted
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.integrations.lightning import HOMES, Guarded, _made_for
from sealegs.integrations.preflight_advice import PreflightWarning

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # importing it takes some seconds
    # of Lightning's own: it asks torch in a way that is going away, and advises on loaders that a test does not need
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:sealegs preflight"),  # is right: thirty steps have no warm-up to speak of
]
HOME = HOMES[0]
SKIPS = [("skip", NAN), ("skip", SPIKE)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(folder: Path, *kinds: str) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in sealegs.open_run(folder).events if event.kind in kinds]


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.integration("Lightning")
@pytest.mark.conforms("nan", "spike")
def test_a_bad_update_is_left_out_bit_for_bit(home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = small.module_class(home)(BROKEN)
    guarded = Guarded(run=tmp_path / "a")
    trainer = fitted(module, guarded, home=home)
    assert trainer.global_step == STEPS, "a step that is skipped counts, as it does for the schedule"
    unchanged = [step for step in range(STEPS - 1) if module.digests[step] == module.digests[step + 1]]
    assert unchanged == [NAN, SPIKE]
    assert told(tmp_path / "a", "skip", "alarm", "end") == [*SKIPS, ("end", STEPS)]
    rows = rows_of(tmp_path / "a")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["batch_index"] for row in rows] == list(range(STEPS))
    assert [row["lr"] for row in rows] == [1e-2 * small.rate(step) for step in range(STEPS)]
    assert all(row["batch_hash"] for row in rows)
    kinds = [event.kind for event in sealegs.open_run(tmp_path / "a").events]
    assert kinds[:3] == ["guard", "framework", "preflight"]
    assert main(["check", str(tmp_path / "a")]) in (0, 1)
    assert "30 rows, steps 0 to 29" in " ".join(capsys.readouterr().out.split())
    for owner in (trainer.strategy, trainer.precision_plugin, trainer.fit_loop, trainer.fit_loop.epoch_loop):
        assert not [
            name for name, value in vars(owner).items() if getattr(value, "__module__", "").startswith("sealegs")
        ]
    assert type(trainer.train_dataloader) is DataLoader, "given back"


def test_verdicts_are_those_of_a_plain_loop_on_the_same_numbers(tmp_path: Path) -> None:
    module = small.module_class(HOME)(BROKEN)
    fitted(module, Guarded(run=tmp_path / "a"), home=HOME, limit_val_batches=0)
    torch.manual_seed(0)
    net = small.network()
    torch.manual_seed(1)
    optimizer = small.optimizer_of(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, small.rate)
    batches, stopped = small.loader(), False
    with sealegs.Guard(net, optimizer, run=tmp_path / "b", scheduler=schedule) as guard:
        while not stopped:
            for batch in guard.batches(batches):
                loss = small.loss_of(net, batch)
                loss.backward()
                if guard.number in BROKEN:
                    small.spoil(net, BROKEN[guard.number])
                guard.step(loss)
                if stopped := guard.number == STEPS:
                    break
    assert all(map(torch.equal, net.state_dict().values(), module.net.state_dict().values()))
    names = ("step", "loss", "grad_norm", "lr", "batch_index", "batch_hash")
    one, other = ([{name: row[name] for name in names} for row in rows_of(tmp_path / run)] for run in "ab")
    assert one == other
    texts = [
        [
            event.detail["text"].replace("net.", "")
            for event in sealegs.open_run(tmp_path / run).events
            if event.kind == "skip"
        ]
        for run in "ab"
    ]
    assert len(texts[0]) == 2
    assert texts[0] == texts[1]


def scaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return import_module(HOME).plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


def clipping() -> Any:
    """A module that clips by itself."""

    class Clipping(small.module_class(HOME)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    return Clipping()


def choosy() -> Any:
    """A module that gives no loss for one batch of each epoch."""

    class Choosy(small.module_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 5 else loss

    return Choosy()


def reloaded() -> Any:
    """Data of a module of their own, made anew for every epoch."""

    class Reloaded(import_module(HOME).LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return small.loader()

        def val_dataloader(self) -> Any:
            return small.held_out()

    return Reloaded()


WAYS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "clipped": lambda: (small.module_class(HOME)(), {"gradient_clip_val": 0.5}),
    "clipped by value": lambda: (
        small.module_class(HOME)(),
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "clipped by hand": lambda: (clipping(), {}),
    "choosy": lambda: (choosy(), {}),
    "accumulated": lambda: (small.module_class(HOME)(), {"accumulate_grad_batches": 5, "max_steps": 9}),
    "bf16": lambda: (small.module_class(HOME)(), {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    "fp16": lambda: (small.module_class(HOME)(), {"plugins": [scaled()], "gradient_clip_val": 0.5}),
    "manual": lambda: (small.manual_class(HOME)(), {}),
    "several": lambda: (small.manual_class(HOME)(several=True), {"max_steps": 2 * STEPS}),
    "validated": lambda: (
        small.module_class(HOME)(),
        {"loaders": small.loader(), "val_check_interval": 0.5, "max_steps": -1, "max_epochs": 2},
    ),
    "reloaded": lambda: (
        small.module_class(HOME)(),
        {"loaders": reloaded(), "reload_dataloaders_every_n_epochs": 1},
    ),
}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.integration("Lightning")
@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_everything_is_as_without_the_guard(way: str, tmp_path: Path) -> None:
    found = []
    for callbacks in ((), (Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.standard()),)):
        module, options = WAYS[way]()
        trainer = fitted(module, *callbacks, home=HOME, **options)
        hooks = module.seen, module.told, module.updated
        found.append((small.digest(module.net, *trainer.optimizers), trainer.global_step, hooks))
    assert found[0] == found[1]
    rows = rows_of(tmp_path / "a")
    assert len(rows) == {"accumulated": 9, "choosy": STEPS - 3}.get(way, len(module.seen))
    bound = {"clipped": 0.5, "bf16": 0.5, "fp16": 0.5, "manual": 1.0}.get(way)
    assert {row.get("clip_norm") for row in rows} == {bound}, "of all gradients together, where they have one"
    if way.startswith("clipped"):
        assert max(row["grad_norm"] for row in rows) > 1, "before it was clipped"


@pytest.mark.integration("Lightning")
@pytest.mark.conforms("accumulation")
def test_the_loss_of_a_step_is_that_of_all_its_micro_batches(tmp_path: Path) -> None:
    """12 batches an epoch, five a step: the last step of an epoch has two, each of which counts a fifth."""
    given: list[float] = []

    class Telling(small.module_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            given.append(loss.item() / 5)
            return loss

    fitted(Telling(), Guarded(run=tmp_path / "a"), home=HOME, accumulate_grad_batches=5, max_steps=3)
    sums = [sum(given[:5]), sum(given[5:10]), sum(given[10:12])]
    assert [row["loss"] for row in rows_of(tmp_path / "a")] == pytest.approx(sums, rel=1e-6)


def test_the_time_of_a_validation_is_not_that_of_a_step(tmp_path: Path, pass_hours: Callable[[], None]) -> None:
    class Slow(small.module_class(HOME)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass_hours()

    fitted(Slow(), Guarded(run=tmp_path / "a"), home=HOME, max_steps=PER_EPOCH + 1)
    assert rows_of(tmp_path / "a")[PER_EPOCH]["step_s"] < 3600


def test_a_loss_scale_falls_as_it_would_and_the_step_is_left_out(tmp_path: Path) -> None:
    scales = []
    for callbacks in ((), (Guarded(run=tmp_path / "a"),)):
        module = small.module_class(HOME)({NAN: float("inf")})
        trainer = fitted(module, *callbacks, home=HOME, plugins=[scaled()])
        scales.append((trainer.precision_plugin.scaler.get_scale(), small.digest(module.net, *trainer.optimizers)))
    assert scales[0] == scales[1]
    assert scales[0][0] == 2.0**9
    assert module.digests[NAN] == module.digests[NAN + 1]


@pytest.mark.parametrize("several", [False, True])
def test_manual_optimization_is_guarded_all_optimizers_at_once(several: bool, tmp_path: Path) -> None:
    module = small.manual_class(HOME)(BROKEN, several=several)
    calls = 2 if several else 1
    fitted(module, Guarded(run=tmp_path / "a"), home=HOME, max_steps=STEPS * calls)
    unchanged = [
        step for step in range(STEPS - 1) if module.digests[step * calls] == module.digests[(step + 1) * calls]
    ]
    assert unchanged == [NAN, SPIKE]
    rows = rows_of(tmp_path / "a")
    assert rows[SPIKE]["grad_norm"] > 1000, "before it was clipped"
    assert [row["step"] for row in rows] == list(range(STEPS))


def saving(folder: Path, every: int) -> Any:
    return import_module(HOME).callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=-1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    module = small.module_class(HOME)(BROKEN)
    fitted(module, Guarded(run=folder), home=HOME, limit_val_batches=0)
    return module, folder


@pytest.mark.parametrize("last", [7, PER_EPOCH, 22], ids=["within an epoch", "at its end", "after a skip"])
@pytest.mark.integration("Lightning")
@pytest.mark.conforms("resume")
def test_a_resumed_run_is_the_one_that_was_not_interrupted(last: int, whole: tuple[Any, Path], tmp_path: Path) -> None:
    kept, run, options = tmp_path / "kept", tmp_path / "run", {"limit_val_batches": 0}
    fitted(small.module_class(HOME)(BROKEN), Guarded(run=run), saving(kept, last), home=HOME, max_steps=last, **options)
    (checkpoint,) = kept.glob("*.ckpt")
    module = small.module_class(HOME)(BROKEN)
    guarded = Guarded(run=run)
    trainer = small.trainer(HOME, guarded, saving(kept, last), **options)
    torch.manual_seed(99)
    trainer.fit(module, small.loader(), ckpt_path=checkpoint)
    assert module.digests[STEPS - 1] == whole[0].digests[STEPS - 1]
    assert module.seen == whole[0].seen[last:]
    names = ("step", "loss", "grad_norm", "lr", "batch_index", "batch_hash")
    one, other = ([[row[name] for name in names] for row in rows_of(folder)] for folder in (whole[1], run))
    assert one == other
    assert told(run, "resumed", "skip") == [*(("skip", NAN),) * (last > NAN), ("resumed", last), *SKIPS[last > NAN :]]
    with pytest.raises(RunExists):  # another training does not go on from there
        fitted(small.module_class(HOME)(), guarded, home=HOME)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("limits", "saves", "kind"),
    [
        ({"limit_train_batches": 5, "limit_val_batches": 0}, {"every_n_train_steps": 10}, DataLoader),
        ({"limit_train_batches": 5}, {"every_n_epochs": 2}, DataLoader),
        ({"limit_train_batches": 5}, {"every_n_epochs": 2}, StatefulDataLoader),
        ({"overfit_batches": 5}, {"every_n_epochs": 2}, DataLoader),
    ],
    ids=["after the last batch", "after the validation", "stateful", "overfit"],
)
def test_a_resume_at_the_end_of_an_epoch_with_a_limit_begins_the_next(
    limits: dict[str, Any], saves: dict[str, Any], kind: Any, tmp_path: Path
) -> None:
    """Five batches are an epoch, of twelve that the loader has."""
    run, options = tmp_path / "run", limits | {"max_steps": 20}
    keep = partial(import_module(HOME).callbacks.ModelCheckpoint, tmp_path / "kept", save_top_k=-1, **saves)
    whole, resumed = small.module_class(HOME)(), small.module_class(HOME)()
    rows = small.loader().dataset
    fitted(whole, Guarded(run=run), keep(), home=HOME, loaders=kind(rows, BATCH, shuffle=True), **options)
    (kept,) = (each for each in (tmp_path / "kept").glob("*.ckpt") if "step=10" in each.name)
    trainer = small.trainer(HOME, Guarded(run=run), keep(), **options)
    torch.manual_seed(99)
    trainer.fit(resumed, kind(rows, BATCH, shuffle=True), ckpt_path=kept)
    assert resumed.seen == whole.seen[10:]
    assert resumed.digests == {step: digest for step, digest in whole.digests.items() if step >= 10}
    told = [[row[name] for name in ("step", "loss", "batch_index", "batch_hash")] for row in rows_of(run)]
    assert told[20:] == told[10:20]


def test_a_limit_that_is_less_than_what_an_epoch_has_had_ends_it_there(tmp_path: Path) -> None:
    run, module = tmp_path / "run", small.module_class(HOME)()
    fitted(small.module_class(HOME)(), Guarded(run=run), saving(tmp_path / "kept", 8), home=HOME, max_steps=8)
    (kept,) = (tmp_path / "kept").glob("*.ckpt")
    fitted(module, Guarded(run=run), saving(tmp_path / "kept", 8), home=HOME, ckpt_path=kept, limit_train_batches=5)
    assert [row["batch_index"] for row in rows_of(run)] == list(range(STEPS))
    assert min(place for *_, place in module.seen) == 0


def test_a_checkpoint_can_be_gone_on_with_when_the_guard_comes_or_goes(tmp_path: Path) -> None:
    for callbacks, name in (((Guarded(run=tmp_path / "a"),), "with"), ((), "without")):
        keep = saving(tmp_path / name, PER_EPOCH)
        fitted(small.module_class(HOME)(), *callbacks, keep, home=HOME, max_steps=PER_EPOCH)
    kept, module = next((tmp_path / "with").glob("*.ckpt")), small.module_class(HOME)()
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        left = fitted(module, saving(tmp_path / "with", PER_EPOCH), home=HOME, ckpt_path=kept)
    kept, module = next((tmp_path / "without").glob("*.ckpt")), small.module_class(HOME)()
    keep = saving(tmp_path / "without", PER_EPOCH)
    taken = fitted(module, Guarded(run=tmp_path / "b"), keep, home=HOME, ckpt_path=kept)
    assert left.global_step == taken.global_step == STEPS
    assert [row["step"] for row in rows_of(tmp_path / "b")] == list(range(PER_EPOCH, STEPS))
    several = fitted(small.manual_class(HOME)(several=True), home=HOME, max_steps=2 * 5)
    several.save_checkpoint(tmp_path / "several.ckpt")
    module, kept = small.manual_class(HOME)(several=True), tmp_path / "several.ckpt"
    fitted(module, Guarded(run=tmp_path / "c"), home=HOME, ckpt_path=kept, max_steps=2 * 8)
    assert [row["step"] for row in rows_of(tmp_path / "c")] == [5, 6, 7], "steps, not calls of optimizers"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (10, {}),
        (PER_EPOCH, {"batch_size": 12}),
        (10, {"batch_size": 12, "num_workers": 1, "persistent_workers": True}),
    ],
    ids=["the same loader", "another", "workers that stay"],
)
def test_a_second_fit_of_the_same_trainer_goes_on_in_the_same_run(
    first: int, second: dict[str, Any], tmp_path: Path
) -> None:
    """With a loader that Lightning begins anew, as it does without a guard."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True} | second
    digests = []
    for callbacks in ((), (Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.standard()),)):
        module = small.module_class(HOME)()
        workers = {name: value for name, value in options.items() if "workers" in name}
        trainer = fitted(module, *callbacks, home=HOME, loaders=small.loader(**workers), max_steps=first)
        trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(module, DataLoader(small.loader().dataset, **options))
        digests.append(module.digests)
    if "num_workers" not in second:  # workers that stay draw their seeds when they are made, not when they are asked
        assert digests[0] == digests[1]
    rows = rows_of(tmp_path / "a")
    assert [row["step"] for row in rows] == [row["batch_index"] for row in rows] == list(range(20))
    with pytest.raises(RunExists):
        fitted(small.module_class(HOME)(), *callbacks, home=HOME)


def test_a_checkpoint_that_is_only_validated_is_not_gone_on_from(tmp_path: Path) -> None:
    before = fitted(small.module_class(HOME)(), Guarded(run=tmp_path / "a"), home=HOME, max_steps=17)
    before.save_checkpoint(tmp_path / "a.ckpt")
    module, guarded = small.module_class(HOME)(), Guarded(run=tmp_path / "b")
    trainer = small.trainer(HOME, guarded, max_steps=-1, max_epochs=1)
    trainer.validate(module, small.held_out(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    trainer.fit(module, small.loader())
    assert [row["batch_index"] for row in rows_of(tmp_path / "b")] == list(range(PER_EPOCH))


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")  # of which there is none at first
def test_a_checkpoint_of_an_exception_is_gone_on_from_in_the_same_run(tmp_path: Path) -> None:
    keep = import_module(HOME).callbacks.OnExceptionCheckpoint(tmp_path)

    class Failing(small.module_class(HOME)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 5:
                raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        fitted(Failing(), Guarded(run=tmp_path / "a"), keep, home=HOME)
    (kept,) = tmp_path.glob("*.ckpt")
    fitted(small.module_class(HOME)(), Guarded(run=tmp_path / "a"), home=HOME, ckpt_path=kept, max_steps=10)
    assert [row["step"] for row in rows_of(tmp_path / "a")] == list(range(10))


def test_whoever_is_to_be_told_is_told(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    command = [sys.executable, "-c", f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read())"]
    module = small.module_class(HOME)(dict.fromkeys(range(10, STEPS), float("nan")))
    with pytest.raises(RunHalted):
        fitted(module, Guarded(run=tmp_path / "a", telemetry=Telemetry(notify=command)), home=HOME)
    assert "halted" in heard.read_text()


def test_gradients_that_are_thrown_away_by_hand_are_no_part_of_the_next_step(tmp_path: Path) -> None:
    class Careful(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                self.manual_backward(small.loss_of(self.net, batch) * float("nan"))
                self.optimizers().zero_grad()
            else:
                super().training_step(batch, batch_idx)

    fitted(Careful(), Guarded(run=tmp_path / "a"), home=HOME, max_steps=11)
    assert told(tmp_path / "a", "skip") == []


def test_a_run_that_is_halted_ends_the_fit_and_its_folder(tmp_path: Path) -> None:
    module = small.module_class(HOME)(dict.fromkeys(range(10, STEPS), float("nan")))
    with pytest.raises(RunHalted, match="the run is halted"):
        fitted(module, Guarded(run=tmp_path / "a"), home=HOME)
    (end,) = (event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "end")
    assert end.detail["reason"] == "halted"
    assert module.digests[10] == small.digest(module.net, *module.trainer.optimizers)


@pytest.mark.parametrize(
    ("error", "ends", "reason"), [(KeyboardInterrupt, SystemExit, "interrupted"), (ValueError, ValueError, "failed")]
)
def test_however_a_fit_ends_the_folder_says_so(
    error: type[BaseException], ends: type[BaseException], reason: str, tmp_path: Path
) -> None:
    class Stopped(small.module_class(HOME)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 5:
                raise error

    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ends):
            fitted(Stopped(), Guarded(run=tmp_path / "a"), home=HOME)
    finally:
        signal.signal(signal.SIGINT, on_interrupt)  # which Lightning has turned off
    (end,) = (event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "end")
    assert (end.step, end.detail["reason"]) == (5, reason)


def test_the_settings_are_looked_at_before_the_first_step(tmp_path: Path) -> None:
    class Frozen(small.module_class(HOME)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net[0].parameters(), lr=1e-2)

    guarded = Guarded(run=tmp_path / "a")
    with pytest.warns(PreflightWarning, match="STA1") as warned:
        fitted(Frozen(), guarded, home=HOME, max_steps=2)
    assert len([each for each in warned if each.category is PreflightWarning]) == 1
    (event,) = (event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "preflight")
    assert guarded.advice is not None
    assert len(event.detail["findings"]) == len(guarded.advice.findings)


def test_both_lightnings_know_the_callback_for_one_of_theirs() -> None:
    for home in HOMES:
        made = object.__new__(_made_for(Guarded, (home,)))
        assert isinstance(made, import_module(home).Callback)
    guarded = Guarded(run=None, checkpoint_every=Checkpointing(snapshot_every=7))
    copy = pickle.loads(pickle.dumps(guarded))  # noqa: S301 - as strategies do that spawn their processes
    assert (type(copy), copy._options) == (type(guarded), {"checkpoint_every": Checkpointing(snapshot_every=7)})


def test_without_lightning_there_is_one_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in HOMES:
        monkeypatch.setitem(sys.modules, home, None)
    with pytest.raises(
        MissingExtra, match=r"needs Lightning, which is not installed: pip install 'sealegs\[lightning\]'"
    ):
        Guarded(run=None)


def test_the_guard_clips_where_lightning_does_not(tmp_path: Path) -> None:
    """Which it refuses to for fused optimizers in mixed precision."""
    ends = []
    for run, options, clip in (("a", {"gradient_clip_val": 0.5}, None), ("b", {}, 0.5)):
        module = small.module_class(HOME)()
        fitted(module, Guarded(run=tmp_path / run, clip=clip), home=HOME, limit_val_batches=0, **options)
        ends.append((module.net[0].weight, [row["grad_norm"] for row in rows_of(tmp_path / run)]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1], "before it was clipped"
    assert max(ends[0][1]) > 1
    unclipped = small.module_class(HOME)()
    fitted(unclipped, Guarded(run=None), home=HOME, limit_val_batches=0)
    assert not torch.allclose(unclipped.net[0].weight, ends[1][0], atol=1e-4)


@pytest.mark.parametrize(
    ("module", "options", "told"),
    [
        (small.module_class, {"gradient_clip_val": 1.0}, "leave out one of it and Trainer"),
        (small.manual_class, {}, "the module clips already"),
    ],
)
def test_two_do_not_clip(module: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fitted(module(HOME)(), Guarded(run=None, clip=0.5), home=HOME, **options)


@pytest.mark.parametrize("averages", [False, True])
def test_lightnings_own_average_of_the_weights_is_named(averages: bool, tmp_path: Path) -> None:
    """The scores that its other callbacks keep follow nothing."""
    callbacks = import_module(HOME).callbacks
    others = [callbacks.ModelCheckpoint(dirpath=tmp_path, save_last=True)]
    if averages:
        others.append(callbacks.EMAWeightAveraging(decay=0.9))
    guarded = Guarded(run=tmp_path / "run")
    fitted(small.module_class(HOME)(), guarded, *others, home=HOME, max_steps=2)
    told = ["EMAWeightAveraging, which is called by the trainer at each step"] if averages else []
    (joined,) = [event.detail for event in sealegs.open_run(tmp_path / "run").events if event.kind == "guard"]
    assert joined["not_restored"] == told
    assert guarded.advice is not None
    advised = [each.found for each in guarded.advice.findings if each.code == "STA9"]
    assert advised == [f"in no state: {each}" for each in told]
