"""A guarded loop says at its end what it paid, and for what: the guard, the record and the commands agree."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs.cli.main import main
from sealegs.guard_options import Checkpointing
from sealegs.judge import Detection
from sealegs.record import manifest
from sealegs.record.stability_tax import StabilityTax, tax_of
from sealegs.recovery.actions import LowerLR, plain_actions
from sealegs.report.stability import told_of_tax

STEPS = 40
SLOW_S = 0.002


def slow(row: Any) -> None:
    """A detector that takes its time."""
    time.sleep(SLOW_S)


class Heavy:
    """State of the loop's own that is slow to write."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(10 * SLOW_S)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trained(folder: Path, steps: int, *, resume: bool = False, rolls_back_at: int | None = None) -> StabilityTax:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sealegs.Guard(
        model,
        optimizer,
        run=folder,
        clip=1.0,
        playbook=sealegs.Playbook.standard(),
        checkpoint_every=Checkpointing(every=10, snapshot_every=5, also={"heavy": Heavy()}),
        resume=resume,
        detection=Detection(detectors=(slow,)),
    ) as guard:
        for batch in guard.batches(list(inputs(STEPS + 5))):
            time.sleep(SLOW_S)  # a step's own work, without which nothing is left of it beside what is measured
            loss = model(batch).square().mean()
            loss.backward()
            guard.step(loss)
            if guard.number == rolls_back_at:
                rolls_back_at = None
                guard.ask("rollback", "5")
            if guard.number == steps:
                break
    tax = tax_of(sealegs.open_run(folder).events)
    assert tax is not None
    return tax


def inputs(count: int) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(1)
    for number in range(count):
        batch = torch.randn(8, 4, generator=draws)
        yield batch * float("nan") if number == 20 else batch


@pytest.fixture(scope="module")
def paid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StabilityTax, StabilityTax]:
    """A run that was ended, and went on later."""
    folder = tmp_path_factory.mktemp("tax") / "run"
    first = trained(folder, STEPS, rolls_back_at=30)
    time.sleep(0.3)
    return folder, first, trained(folder, STEPS + 5, resume=True)


def test_each_part_has_what_it_took(paid: tuple[Path, StabilityTax, StabilityTax]) -> None:
    _, tax, _ = paid
    assert tax.steps >= STEPS
    assert tax.parts["verdicts"] >= tax.steps * SLOW_S
    assert tax.parts["checkpoints"] >= 4 * 10 * SLOW_S
    assert tax.parts["signals"] > 0
    assert tax.parts["snapshots"] >= 4 * 10 * SLOW_S
    assert 0 < tax.parts["skipped"] < 3 * tax.whole_s / tax.steps
    assert tax.parts["repeated"] > 0
    assert tax.parts["recovery"] > 0
    assert tax.parts["downtime"] == 0
    assert tax.total_s < tax.whole_s


def test_a_price_makes_money_of_it_and_a_resume_keeps_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words: dict[str, Any] = {"run": tmp_path / "a", "playbook": sealegs.Playbook.observe(), "checkpoint_every": 5}
    for price, resume in ((3600.0, False), (None, True)):
        telemetry = sealegs.Telemetry(price_per_hour=price)
        with sealegs.Guard(model, optimizer, **words, telemetry=telemetry, resume=resume) as guard:
            for batch in guard.batches(list(inputs(15))):
                loss = model(batch).square().mean()
                loss.backward()
                guard.step(loss)
                if guard.number == 10 and not resume:
                    break
            guard.watch.note("end", step=guard.number, reason="finished")  # as the loop of a framework does
        assert manifest.load(tmp_path / "a").price_per_hour == 3600.0
        tax = tax_of(sealegs.open_run(tmp_path / "a").events)
        assert tax is not None
        assert tax.money == pytest.approx(tax.total_s)
        assert tax.parts["downtime"] == 0, "it had finished before it was given more steps"


def test_a_resume_goes_on_counting_and_adds_what_it_was_down(paid: tuple[Path, StabilityTax, StabilityTax]) -> None:
    _, first, both = paid
    assert both.parts["downtime"] >= 0.3
    assert both.steps > first.steps
    assert both.whole_s >= first.whole_s + 0.3


def test_commands_say_it(
    paid: tuple[Path, StabilityTax, StabilityTax], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _, tax = paid
    assert main(["interventions", str(folder)]) == 0
    assert str(tax) in " ".join(capsys.readouterr().out.split())
    assert main(["interventions", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stability_tax"] == tax.to_plain()
    assert main(["dashboard", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert str(tax) in (tmp_path / "page.html").read_text()


def test_a_watch_says_it_where_the_loop_says_that_it_has_ended(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "run", detection=Detection(detectors=(slow,))) as watch:
        for step in range(5):
            watch.see(step, loss=2.0, grad_norm=1.0)
        watch.note("end", reason="finished")
    tax = tax_of(sealegs.open_run(tmp_path / "run").events)
    assert tax is not None
    assert tax.parts["verdicts"] >= 5 * SLOW_S


def caution_of(folder: Path, rates: list[float], *events: dict[str, Any]) -> list[str]:
    """What is estimated of a run with these rates, and with a tax."""
    tax = {
        "step": 0,
        "kind": "stability-tax",
        "time": 1.0,
        "tax": StabilityTax(whole_s=1.0, steps=9, parts={}).to_plain(),
    }
    folder.mkdir()
    rows = "".join(json.dumps({"step": step, "loss": 1.0, "lr": lr}) + "\n" for step, lr in enumerate(rates))
    (folder / "metrics.jsonl").write_text(rows)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (*events, tax)))
    manifest.save(manifest.Manifest(run_id="a", created="2026-01-01T00:00:00Z"), folder)
    return told_of_tax(sealegs.open_run(folder))[1:]


def test_a_warm_up_is_over_when_the_rate_rises_no_more(tmp_path: Path) -> None:
    """A leap of the rate is no peak of the schedule."""
    rates = [0.1 * (step + 1) for step in range(10)] + [1.0] * 90
    (told,) = caution_of(tmp_path / "a", rates)
    assert told.endswith("the warm-up cost the learning of about 4 steps (4.5%)")
    assert caution_of(tmp_path / "b", rates[:60] + [30.0] * 10 + rates[70:]) == [told]
    assert caution_of(tmp_path / "c", [1.0] * 60 + [30.0] * 10 + [1.0] * 30) == []


def test_what_a_rate_that_recovery_lowered_cost_is_estimated(tmp_path: Path) -> None:
    lowered = {"acted": True, "actions": plain_actions([LowerLR(factor=0.25, rewarm_steps=0)])}
    rates = [1.0] * 60 + [0.25] * 40
    (told,) = caution_of(tmp_path / "a", rates, {"step": 60, "kind": "intervention", "time": 1.0, **lowered})
    assert told.endswith("rates that recovery lowered cost the learning of about 30 steps (30.0%)")


def test_a_rate_that_recovery_warms_up_again_is_no_warm_up(tmp_path: Path) -> None:
    """The schedule is flat; from the beginning on a quarter of it is left, reached over ten steps."""
    rates = [0.25 * min((step + 1) / 10, 1.0) for step in range(100)]
    lowered = {"step": 60, "to_step": 0, "kind": "intervention", "time": 1.0, "acted": True}
    older = lowered | {"actions": plain_actions([LowerLR(factor=0.25, rewarm_steps=10)])}
    newer = lowered | {"actions": [], "adjustments": {"lr": 0.25, "rewarm_from": 0, "rewarm_steps": 10}}
    told = caution_of(tmp_path / "a", rates, older)
    (text,) = told
    assert "warm-up" not in text
    assert text.endswith("rates that recovery lowered cost the learning of about 76 steps (76.1%)")
    assert caution_of(tmp_path / "b", rates, newer) == told


def test_what_starts_over_with_half_of_the_rate_costs_half(tmp_path: Path) -> None:
    """No action lowered it: a rollback to the beginning does, with whatever it is made."""
    over = {"step": 10, "to_step": 0, "kind": "intervention", "time": 1.0, "acted": True, "actions": []}
    over |= {"adjustments": {"lr": 0.5, "rewarm_from": 0, "rewarm_steps": 0}}
    (told,) = caution_of(tmp_path / "a", [0.5] * 100, over)
    assert told.endswith("rates that recovery lowered cost the learning of about 50 steps (50.0%)")
    rising = [0.5 * min(step / 20, 1.0) for step in range(100)]
    (told,) = caution_of(tmp_path / "b", rising, over)
    assert "the warm-up cost the learning of about 10 steps" in told
    assert told.endswith("rates that recovery lowered cost the learning of about 45 steps (44.8%)")


def test_a_rate_stays_lowered_where_the_run_goes_back_behind_it(tmp_path: Path) -> None:
    lowered = {"step": 60, "to_step": 60, "adjustments": {"lr": 0.5, "rewarm_from": 60, "rewarm_steps": 0}}
    back = {"step": 70, "to_step": 20, "adjustments": {"lr": 0.5, "rewarm_from": 60, "rewarm_steps": 0}}
    both = [{"kind": "intervention", "time": 1.0, "acted": True, "actions": [], **each} for each in (lowered, back)]
    (told,) = caution_of(tmp_path / "a", [1.0] * 20 + [0.5] * 80, *both)
    assert told.endswith("rates that recovery lowered cost the learning of about 40 steps (40.0%)")
