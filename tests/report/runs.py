"""Run folders to draw, written as a training run writes them."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sealegs.record import manifest
from sealegs.record.schema import EVENTS, METRICS, to_line
from sealegs.record.writer import RunWriter

GAP = range(60, 90)
NAN = range(140, 143)
SPIKE = 200
BACK_FROM, BACK_TO = 210, 195
STEPS = 300
HISTOGRAM = " ".join(["0"] * 2 + ["40"] * 8 + ["0"] * 21 + ["1", "0"])


def row(step: int, attempt: int = 0, **other: float | str) -> dict[str, Any]:
    """One step of a run that learns; the first attempt at the last third does not."""
    noise = 0.02 * math.sin(12.9898 * step)
    loss = 2.0 + 4.0 * math.exp(-step / 60) + noise
    if attempt == 0 and step >= SPIKE:
        loss += 5.0
    known: dict[str, Any] = {
        "step": step,
        "loss": math.nan if step in NAN else loss,
        "grad_norm": math.inf if step in NAN else 0.8 + noise + 20 * (attempt == 0 and step >= SPIKE),
        "lr": 1e-3 * min(1.0, step / 20),
        "loss_scale": 65536.0 / 2 ** (step // 100),
        "batch_hash": "5eed" if step in (30, 250) else f"{step:016x}",
        "sources": "grammar=6 code=2" if step % 2 else "grammar=8",
    }
    if step % 10 == 0:
        known |= {f"activation_norm/blocks.{layer}": 1.0 + layer + step / 100 for layer in range(12)}
        known |= {"param_norm": 40.0, "param_norm/embedding": 12.0, "param_norm/blocks.0": 21.0}
        known |= {"moment1_norm": 0.2, "moment2_norm": 2e-3, "tokens_per_s": 2e5, "token_entropy": 4.8 + noise}
        known |= {"eval_loss": loss + 0.1} if step % 50 == 0 else {}
    if step % 50 == 0:
        known["token_loss_histogram"] = HISTOGRAM
    return known | other


def rows() -> Iterable[dict[str, Any]]:
    """A gap, NaN, a spike, and the way back from it."""
    yield from (row(step) for step in range(BACK_FROM) if step not in GAP)
    yield from (row(step, attempt=1) for step in range(BACK_TO, STEPS))


def events() -> list[dict[str, Any]]:
    """What happened meanwhile."""
    decided = {"number": 1, "decided_by": "playbook standard, rung 3", "trigger": "damaged", "onset": SPIKE}
    decided |= {"evidence": "a batch from before has a loss of 7", "text": "roll back", "acted": True, "changed": "all"}
    finding = {"detector": "spike/loss", "signal": "loss", "severity": "GATE", "spoils_update": True}
    skipped = {"findings": [finding], "acted": True}
    skips = [
        {"step": step, "kind": "skip", "text": f"step {step}  SKIP  loss spike", **skipped} for step in range(201, 205)
    ]
    told = [
        {"step": 0, "kind": "start"},
        {"step": 100, "kind": "checkpoint", "checkpoint": 100},
        {"step": SPIKE, "kind": "fault", "text": f"step {SPIKE}: lr-spike struck"},
        *skips,
        {
            "step": 205,
            "kind": "alarm",
            "incident": 1,
            "text": "step 205  ALARM  loss stays high",
            "skipped_in_a_row": 5,
            **skipped,
        },
        {"step": BACK_FROM, "kind": "intervention", **decided},
        {"step": 250, "kind": "incident-closed", "number": 1, "start": SPIKE, "end": 250, "text": "incident 1: spike"},
        {"step": 250, "kind": "outcome", "intervention": 1, "text": "helped"},
    ]
    return [{"time": 1.7e9 + place, **event} for place, event in enumerate(told)]


def write(folder: Path, rows: Iterable[dict[str, Any]] = (), events: Iterable[dict[str, Any]] = ()) -> Path:
    """A run folder with these."""
    RunWriter.create(folder, manifest.describe(folder.name)).close()
    append(folder, rows)
    with (folder / EVENTS).open("ab") as file:
        file.writelines(map(to_line, events))
    return folder


def append(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """More rows of it."""
    with (folder / METRICS).open("ab") as file:
        file.writelines(to_line(each) for each in rows)


def troubled(folder: Path) -> Path:
    """A run that has everything that can be drawn."""
    return write(folder, rows(), events())
