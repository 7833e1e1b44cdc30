"""Lightning's loop when the guard goes back in it, tries a batch again, leaves batches out; and what it refuses."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.integrations import lightning_small as small
from tests.integrations.lightning_small import PER_EPOCH, fitted
from torch.utils.data import DataLoader, IterableDataset

import sealegs
from sealegs.errors import ConfigError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.integrations.lightning import HOMES, Guarded
from sealegs.record.requests import leave
from sealegs.recovery.ledger import read_ledger
from sealegs.recovery.requests import ASK_EVERY_S

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # importing it takes some seconds
    # of Lightning's own: it asks torch in a way that is going away, and advises on loaders that a test does not need
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:sealegs preflight"),  # is right: so few steps have no warm-up to speak of
]
HOME = HOMES[0]
DAMAGED, SAVED, LAST = 62, 75, 90
"""Two steps into an epoch, of which the newest healthy state is in the one before."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path, kind: str) -> list[Any]:
    return [event for event in sealegs.open_run(folder).events if event.kind == kind]


def trained_on(seen: Sequence[tuple[int, int, int]], probes: Sequence[Any]) -> list[tuple[int, int, int]]:
    """What a module has seen, without what was only tried again: so many batches before the step that a probe names."""
    places, left, trained = iter(seen), deque(probes), []
    for place in places:
        if left and place[0] == left[0].step:
            for _ in range(left.popleft().detail["tried"] - 1):
                next(places)
        else:
            trained.append(place)
    assert not left
    return trained


@pytest.mark.parametrize("way", ["automatic", "manual"])
@pytest.mark.integration("Lightning")
@pytest.mark.conforms("rollback")
def test_a_fit_goes_back_to_a_healthy_state_and_its_counters_with_it(way: str, tmp_path: Path) -> None:
    module = (small.module_class if way == "automatic" else small.manual_class)(HOME)()
    module.damaged = {DAMAGED}
    known: list[tuple[int, Any, list[int]]] = []

    class Keeping(import_module(HOME).Callback):  # type: ignore[misc]
        def on_train_start(self, *_: Any) -> None:
            guard: Any = guarded.guard
            suspect = [step for step, tag in guard.loop.checkpoints.tags().items() if tag == "suspect"]
            known.append((guard.number, guard.loop.recovery.bookkeeping(), suspect))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == SAVED:
                trainer.save_checkpoint(tmp_path / "kept.ckpt")

    options: dict[str, Any] = {
        "checkpoint_every": Checkpointing(every=45, snapshot_every=11),
        "telemetry": Telemetry(sample_every=0),
    }
    guarded = Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.standard(), **options)
    trainer = fitted(module, guarded, Keeping(), home=HOME, max_steps=LAST)
    (done,) = events_of(tmp_path / "a", "intervention")
    probes = events_of(tmp_path / "a", "probe")
    assert probes[0].step == DAMAGED + 1
    assert all(probe.detail["is_condemned"] for probe in probes)
    back = done.detail["to_step"]
    assert back < 5 * PER_EPOCH < DAMAGED <= done.step, "an epoch ends in between"
    rows = rows_of(tmp_path / "a")
    turn = next(place for place, row in enumerate(rows) if place and row["step"] != rows[place - 1]["step"] + 1)
    before, after = rows[:turn], rows[turn:]
    assert (before[-1]["step"], after[0]["step"]) == (done.step - 1, back)
    assert [row["step"] for row in after] == list(range(back, LAST))
    # exactly as it was until the batches that are left out
    names = ("step", "loss", "grad_norm", "lr", "batch_index", "batch_hash")
    again = [row for row in after if row["batch_index"] < DAMAGED - 2]
    assert len(again) >= 2
    then = {row["step"]: row for row in before}
    assert [[row[name] for name in names] for row in again] == [
        [then[row["step"]][name] for name in names] for row in again
    ]
    # the schedule, which Lightning or the module steps, follows the steps, not the batches
    assert [row["lr"] for row in rows] == [1e-2 * small.rate(row["step"]) for row in rows]
    assert trainer.global_step == LAST
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == LAST, "by which loggers count"
    assert trainer.fit_loop.total_batch_idx == rows[-1]["batch_index"]
    # Lightning's batch_idx is the place in the data
    assert [(step, epoch * PER_EPOCH + in_epoch) for step, epoch, in_epoch in trained_on(module.seen, probes)] == [
        (row["step"], row["batch_index"]) for row in rows
    ]
    ends = [epoch for kind, _, epoch in module.told if kind == "end"]
    validated = [epoch for kind, _, epoch in module.told if kind == "validation"]
    assert validated == [*range(done.step // PER_EPOCH), *range(back // PER_EPOCH, ends[-1])]
    assert ends[:-1] == validated, "the last epoch is cut off by max_steps"

    # a checkpoint from after the rollback: what was done is not forgotten, what comes after it is of another line
    ledger = read_ledger(tmp_path / "a")
    resumed = type(module)()
    guarded = Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.standard(), **options)
    fitted(resumed, guarded, Keeping(), home=HOME, max_steps=LAST, ckpt_path=tmp_path / "kept.ckpt")
    assert known[1] == (SAVED, ledger, [LAST])
    assert resumed.digests[LAST - 1] == module.digests[LAST - 1]
    assert resumed.seen == module.seen[-(LAST - SAVED) :]


@pytest.mark.parametrize(
    ("way", "first"),
    [
        pytest.param("automatic", 5 * PER_EPOCH - 3, id="over the end of an epoch"),
        pytest.param("manual", 5 * PER_EPOCH - 1, id="tried at the end of an epoch"),
        pytest.param("automatic", 5 * PER_EPOCH - 8, id="counted back at the end of an epoch"),
    ],
)
def test_bad_data_are_skipped_and_the_steps_they_took_counted_back(way: str, first: int, tmp_path: Path) -> None:
    """Seven gradients explode around the end of an epoch: a batch from before is tried, and nothing is undone."""
    bad = range(first, first + 7)

    class BadData((small.module_class if way == "automatic" else small.manual_class)(HOME)):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            _, epoch, place = self.seen[-1]
            number = epoch * PER_EPOCH + place
            if number in bad and not guarded.guard.loop.data.is_probe:
                small.spoil(self.net, 1e3 * 50.0 ** (number - first))

    module = BadData()
    guarded: Any = Guarded(
        run=tmp_path / "a",
        playbook=sealegs.Playbook.standard(),
        telemetry=Telemetry(sample_every=0),
        checkpoint_every=Checkpointing(snapshot_every=10),
    )
    trainer = fitted(module, guarded, home=HOME, max_steps=80, val_check_interval=2)
    (probe,) = events_of(tmp_path / "a", "probe")
    assert probe.step == bad[1], "after the first"
    assert not probe.detail["is_condemned"]
    (counted,) = events_of(tmp_path / "a", "counted-back")
    assert counted.detail["steps"] == 7
    rows = rows_of(tmp_path / "a")
    assert [row["batch_index"] for row in rows] == list(range(87)), "all of the data, in their order"
    turn = counted.step
    assert [row["step"] for row in rows] == [*range(turn), *range(turn - 7, 80)]
    assert [row["lr"] for row in rows] == [1e-2 * small.rate(row["step"]) for row in rows]
    assert trainer.global_step == 80
    told = [(step, epoch) for kind, step, epoch in module.told if kind == "validation"]
    following = [*(row["step"] for row in rows[1:]), 80]
    assert told == [(following[batch], batch // PER_EPOCH) for batch in range(87) if batch % 2], (
        "every other batch, once"
    )
    assert trainer.fit_loop.total_batch_idx == 86


def test_gradients_that_are_thrown_away_are_no_part_of_a_step(tmp_path: Path) -> None:
    given = []

    class Choosy(small.module_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            given.append(loss.item())
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx == 2:
                optimizer_closure()
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    fitted(Choosy(), Guarded(run=tmp_path / "a"), home=HOME, max_steps=6)
    assert [row["loss"] for row in rows_of(tmp_path / "a")] == [*given[:2], *given[3:6]]


def accumulating() -> Any:
    """A class of modules with two micro-batches a step, by manual optimization."""

    class Accumulating(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(small.module_class(HOME).training_step(self, batch, batch_idx) / 2)
            if batch_idx % 2:
                optimizers = self.optimizers()
                for optimizer in optimizers if self.several else [optimizers]:
                    optimizer.step()
                    optimizer.zero_grad()
                self.lr_schedulers().step()

    return Accumulating


ASKED: dict[str, tuple[int, dict[str, Any]]] = {
    "code": (40, {}),
    "code, within a step of two optimizers": (41, {"several": True}),
    "code, where every batch is validated": (40, {"val_check_interval": 1}),
    "code, at the end of an epoch": (36, {}),
    "a person, at the end of an epoch": (36, {}),
}
"""After how many batches, and what else is special."""


@pytest.mark.parametrize("who", ASKED)
def test_somebody_who_asks_for_it_takes_a_fit_back_with_accumulation(who: str, tmp_path: Path) -> None:
    """Two micro-batches a step, six steps an epoch: to the very beginning, since nothing is proven yet."""
    after, special = ASKED[who]
    is_manual = "several" in special
    calls = 1 + is_manual
    interval = special.get("val_check_interval", PER_EPOCH)

    class Asking(accumulating() if is_manual else small.module_class(HOME)):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            if "person" in who and len(self.seen) == after - 1:
                leave(tmp_path / "a", ("rollback", "10"))
                time.sleep(ASK_EVERY_S)  # after which the folder is looked at

        def on_train_batch_end(self, *_: Any) -> None:
            if "code" in who and len(self.seen) == after:
                guarded.guard.ask("rollback", "10")

    guarded: Any = Guarded(
        run=tmp_path / "a",
        playbook=sealegs.Playbook.standard(),
        telemetry=Telemetry(sample_every=0),
        checkpoint_every=Checkpointing(snapshot_every=10),
    )
    module = Asking(**({"several": True} if is_manual else {}))
    options = {
        "max_steps": 25 * calls,
        "accumulate_grad_batches": 1 if is_manual else 2,
        "val_check_interval": interval,
    }
    trainer = fitted(module, guarded, home=HOME, **options)
    (done,) = events_of(tmp_path / "a", "intervention")
    assert done.detail["to_step"] == 0
    ended = after // 2
    rows = rows_of(tmp_path / "a")
    assert [row["step"] for row in rows] == [*range(ended), *range(25)]
    batches = [*range(after), *range(50)]
    assert [(step // calls, epoch * PER_EPOCH + place) for step, epoch, place in module.seen] == [
        (batch // 2, batch) for batch in batches
    ]
    assert [row["lr"] for row in rows[ended : 2 * ended]] == [0.5 * row["lr"] for row in rows[:ended]], (
        "as the books say"
    )
    if after % interval or "person" in who:  # else a validation has drawn random numbers in between
        assert [row["batch_hash"] for row in rows[ended : 2 * ended]] == [row["batch_hash"] for row in rows[:ended]]
        assert (rows[ended]["loss"], rows[ended]["grad_norm"]) == (rows[0]["loss"], rows[0]["grad_norm"])
    at = [batch + 1 for batch in batches if (batch % PER_EPOCH + 1) % interval == 0]
    if "person" in who:
        at.remove(after)  # of what is given up
    assert [(step // calls, epoch) for kind, step, epoch in module.told if kind == "validation"] == [
        (batch // 2, (batch - 1) // PER_EPOCH) for batch in at
    ]
    assert trainer.global_step == 25 * calls
    assert trainer.fit_loop.total_batch_idx == 49


TURNS: dict[str, dict[str, Any]] = {
    "damage, back to the end of an epoch": {"snapshot_every": PER_EPOCH, "damaged": 62},
    "damage, back to one that a limit has ended": {"snapshot_every": 6, "damaged": 62, "limit": 6},
    "damage, and an epoch that is left out": {"snapshot_every": 12, "damaged": 58, "limit": 6},
    "asked for within an epoch": {"snapshot_every": PER_EPOCH, "asked": (62, "batch")},
    "asked for between two": {"snapshot_every": PER_EPOCH, "asked": (72, "epoch")},
}


@pytest.mark.parametrize("turn", TURNS)
def test_an_epoch_that_is_gone_back_to_ends_as_it_should(turn: str, tmp_path: Path) -> None:
    """Once more, with its validation and the schedule that waits for that; and each batch is what it was."""
    settings = TURNS[turn]
    asked, where = settings.get("asked", (None, ""))
    stepped = []

    class Turning(small.module_class(HOME)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("held_out", small.loss_of(self.net, batch))

        def on_train_batch_end(self, *_: Any) -> None:
            self._ask("batch")

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self._ask("epoch")

        def _ask(self, here: str) -> None:
            nonlocal asked
            if here == where and self.trainer.global_step == asked:
                asked = None
                guarded.guard.ask("rollback", "5")

        def configure_optimizers(self) -> Any:
            optimizer = small.optimizer_of(self.net)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=99)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held_out"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            stepped.append((self.trainer.global_step, self.trainer.current_epoch))
            scheduler.step(metric)

    module = Turning()
    module.damaged = {settings["damaged"]} if "damaged" in settings else set()
    per_epoch = settings.get("limit", PER_EPOCH)
    options: dict[str, Any] = {"telemetry": Telemetry(sample_every=0)}
    options["checkpoint_every"] = Checkpointing(snapshot_every=settings["snapshot_every"])
    guarded: Any = Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.standard(), **options)
    trainer = fitted(module, guarded, home=HOME, max_steps=LAST, limit_train_batches=per_epoch)
    (done,) = events_of(tmp_path / "a", "intervention")
    rows = rows_of(tmp_path / "a")
    back = done.detail["to_step"]
    assert back % per_epoch == 0
    seen = trained_on(module.seen, events_of(tmp_path / "a", "probe"))
    assert [(step, epoch * per_epoch + place) for step, epoch, place in seen] == [
        (row["step"], row["batch_index"]) for row in rows
    ]
    contents = {(row["batch_index"], row["batch_hash"]) for row in rows}
    assert len(contents) == len({number for number, _ in contents}), "what is left out is what was bad"
    validated = [(step, epoch) for kind, step, epoch in module.told if kind == "validation"]
    gone = done.step // per_epoch
    assert [epoch for _, epoch in validated] == [
        *range(gone),
        *range(back // per_epoch - 1, (rows[-1]["batch_index"] + 1) // per_epoch),
    ]
    assert stepped == validated
    assert (trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped) == (LAST, LAST)
    assert trainer.fit_loop.total_batch_idx == rows[-1]["batch_index"]


def test_a_batch_that_is_tried_where_an_epoch_begins_leaves_the_epochs_their_number(tmp_path: Path) -> None:
    """Damage at the end of an epoch, noticed in the next, before its first batch. Then another process goes on."""
    module = small.module_class(HOME)()
    module.damaged = {5 * PER_EPOCH - 1}

    class Keeping(import_module(HOME).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 50:  # for the second time after it went back
                trainer.save_checkpoint(tmp_path / "kept.ckpt")

    options: dict[str, Any] = {
        "playbook": sealegs.Playbook.standard(),
        "checkpoint_every": Checkpointing(snapshot_every=10),
    }
    epochs = {"max_steps": -1, "max_epochs": 8}
    fitted(module, Guarded(run=tmp_path / "a", **options), Keeping(), home=HOME, **epochs)
    (done,) = events_of(tmp_path / "a", "intervention")
    assert events_of(tmp_path / "a", "probe")[0].step == 5 * PER_EPOCH
    assert done.detail["to_step"] == 30
    rows = rows_of(tmp_path / "a")
    assert rows[-1]["batch_index"] == 8 * PER_EPOCH - 1
    ended = [epoch for kind, _, epoch in module.told if kind == "end"]
    assert ended == [*range((done.step - 1) // PER_EPOCH), *range(2, 8)]
    resumed = small.module_class(HOME)()
    fitted(resumed, Guarded(run=tmp_path / "a", **options), home=HOME, ckpt_path=tmp_path / "kept.ckpt", **epochs)
    assert [row["batch_hash"] for row in rows_of(tmp_path / "a")[len(rows) :]] == [
        row["batch_hash"] for row in rows[-len(resumed.seen) :]
    ]
    assert resumed.digests == {step: digest for step, digest in module.digests.items() if step >= 50}


def test_a_batch_that_is_left_out_takes_its_place_in_the_epoch(tmp_path: Path) -> None:
    """Two within an epoch; then the last three of one, and all of the next: what ends an epoch is done all the same."""
    stepped: list[int] = []

    class EpochSchedule(small.module_class(HOME)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = small.optimizer_of(self.net)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            stepped.append(self.trainer.global_step)
            scheduler.step()

    module = EpochSchedule()
    guarded = Guarded(run=tmp_path / "a", skip=((3, 5), (2 * PER_EPOCH - 3, 3 * PER_EPOCH)))
    trainer = fitted(module, guarded, home=HOME, max_steps=-1, max_epochs=4)
    places = [epoch * PER_EPOCH + place for _, epoch, place in module.seen]
    assert places == [each for each in range(4 * PER_EPOCH) if each not in (3, 4, *range(21, 36))]
    assert [row["batch_index"] for row in rows_of(tmp_path / "a")] == places
    steps = [PER_EPOCH - 2, 2 * PER_EPOCH - 5, 2 * PER_EPOCH - 5, 3 * PER_EPOCH - 5]
    assert module.told == [(kind, step, epoch) for epoch, step in enumerate(steps) for kind in ("validation", "end")]
    assert stepped == steps
    loop = trainer.fit_loop.epoch_loop
    assert (trainer.global_step, trainer.current_epoch, loop.total_batch_idx) == (steps[-1], 4, 4 * PER_EPOCH - 1)
    assert loop._batches_that_stepped == steps[-1], "by which loggers count"


class Streamed(IterableDataset[Any]):
    """Of which nobody knows how long it is."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(80):
            yield torch.randn(8, generator=generator), torch.randn((), generator=generator)


@pytest.mark.parametrize("interval", [None, 5])
def test_a_loader_without_a_length_is_not_read_ahead(interval: int | None, tmp_path: Path) -> None:
    found = []
    for callbacks in ((), (Guarded(run=tmp_path / "a", act=False),)):  # noise may have a spike
        module = small.module_class(HOME)()
        loader = DataLoader(Streamed(), small.BATCH)
        options = {"max_steps": -1, "max_epochs": 2, "val_check_interval": interval}
        trainer = fitted(module, *callbacks, home=HOME, loaders=loader, **options)
        counted = (
            trainer.current_epoch,
            trainer.fit_loop.total_batch_idx,
            trainer.fit_loop.epoch_loop._batches_that_stepped,
        )
        found.append((small.digest(module.net, *trainer.optimizers), module.seen, module.told, counted))
    assert found[0] == found[1]
    assert len(found[0][2]) == (4 if interval is None else 6)
    rows = rows_of(tmp_path / "a")
    assert [row["batch_hash"] for row in rows[:10]] == [row["batch_hash"] for row in rows[10:]], (
        "an epoch after the other"
    )


def test_several_loaders_at_once_are_only_not_gone_back_in(tmp_path: Path) -> None:
    class Paired(small.module_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.seen) == 40:
                watched.guard.ask("rollback", "2")

    both = {"a": small.loader(), "b": small.loader()}
    watched: Any = Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.observe(), checkpoint_every=10)
    trainer = fitted(Paired(), watched, home=HOME, loaders=both, max_steps=45)
    (done,) = events_of(tmp_path / "a", "intervention")
    back = done.detail["to_step"]
    assert 0 < back < 40
    assert [row["step"] for row in rows_of(tmp_path / "a")] == [*range(40), *range(back, 45)], "the weights went back"
    assert (trainer.global_step, trainer.fit_loop.total_batch_idx) == (45, 84 - back), "the data went on"
    guarded = Guarded(run=tmp_path / "b", playbook=sealegs.Playbook.standard())
    with pytest.raises(ConfigError, match="2 train loaders at once"):
        fitted(Paired(), guarded, home=HOME, loaders=both)


def test_optimizers_with_losses_of_their_own_are_refused(tmp_path: Path) -> None:
    class Adversarial(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(small.loss_of(self.net, batch))
                optimizer.step()

    with pytest.raises(ConfigError, match="2 optimizers with losses of their own"):
        fitted(Adversarial(several=True), Guarded(run=tmp_path / "a"), home=HOME)


def test_several_updates_of_a_batch_are_guarded_and_not_gone_back_in(tmp_path: Path) -> None:
    class Again(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    fitted(Again(), Guarded(run=tmp_path / "a", playbook=sealegs.Playbook.observe()), home=HOME, max_steps=8)
    assert [row["step"] for row in rows_of(tmp_path / "a")] == list(range(8))
    with pytest.raises(ConfigError, match="several updates of one batch"):
        fitted(Again(), Guarded(run=tmp_path / "b", playbook=sealegs.Playbook.standard()), home=HOME)


def test_what_lightning_has_to_say_is_not_an_option() -> None:
    for option, cure in {"resume": "ckpt_path", "scaler": "precision"}.items():
        with pytest.raises(ConfigError, match=cure):
            Guarded(run=None, **cast(Any, {option: 1}))
    with pytest.raises(ConfigError, match="snapshots=3: a guard has no such option; there are act, "):
        Guarded(run=None, **cast(Any, {"snapshots": 3}))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")  # which is refused
def test_what_cannot_be_guarded_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    class Iterating(small.module_class(HOME)):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            return small.loss_of(self.net, next(dataloader_iter)[0])

    class Unscored(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            small.loss_of(self.net, batch).backward()
            self.optimizers().step()

    class Speaking(small.manual_class(HOME)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(small.loss_of(self.net, batch))
            self.optimizers().step(gently=True)

    class Unoptimized(small.module_class(HOME)):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    class Searching(small.module_class(HOME)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.net.parameters())

    class Updating(import_module(HOME).plugins.Precision):  # type: ignore[misc]
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **_: Any) -> Any:
            return optimizer.step(closure=closure)

    several = small.manual_class(HOME)(several=True)
    scaled = import_module(HOME).plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    for module, options, says in (
        (Iterating(), {}, r"training_step\(dataloader_iter\)"),
        (Searching(), {}, "optimizer=LBFGS: it evaluates the model several times"),
        (small.module_class(HOME)(), {"plugins": [Updating()]}, "precision=Updating: it updates in a way of its own"),
        (several, {"plugins": [scaled]}, "2 optimizers with a loss scale: use precision='bf16-mixed'"),
    ):
        with pytest.raises(ConfigError, match=says):
            fitted(module, Guarded(run=tmp_path / "a"), home=HOME, **options)
    with (
        pytest.warns(UserWarning, match="returned `None`"),
        pytest.raises(ConfigError, match="configure_optimizers: it gives no optimizer"),
    ):
        fitted(Unoptimized(), Guarded(run=tmp_path / "a"), home=HOME)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"no loss is known; call self\.manual_backward"):
        fitted(Unscored(), Guarded(run=tmp_path / "a"), home=HOME)
    with pytest.raises(ConfigError, match=r"optimizer\.step\(gently=\.\.\.\): the guard calls it without arguments"):
        fitted(Speaking(), Guarded(run=tmp_path / "b"), home=HOME)
