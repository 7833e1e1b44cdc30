"""Another global batch after a resume: kept by accumulation, or announced with the learning rate that goes with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

import sealegs
from sealegs.errors import ConfigError
from sealegs.recovery.global_batch import GlobalBatch, Rule

ROWS = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
LR = 0.01


def train(run: Path, rows: int, steps: int, *, resume: Any = "auto", accumulates: bool = False) -> sealegs.Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=LR)
    sampler: Any = DistributedSampler(ROWS, num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader: Any = DataLoader(ROWS, batch_size=rows, sampler=sampler)  # type: ignore[arg-type]
    with sealegs.Guard(model, optimizer, run=run, checkpoint_every=1000, resume=resume) as guard:
        count = guard.accumulation(loader) if accumulates else 1
        until, micro, total = guard.number + steps, 0, torch.zeros(())
        for batch in guard.batches(loader):
            micro += 1
            if micro % count:
                with guard.accumulate():
                    part = model(batch).square().mean() / count
                    part.backward()
                    total = total + part.detach()
                continue
            part = model(batch).square().mean() / count
            part.backward()
            guard.step(total + part.detach())
            total = torch.zeros(())
            if guard.number == until:
                break
        guard.checkpoint(wait=True)
    return sealegs.open_run(run)


def announced(run: sealegs.Run) -> list[str]:
    return [str(event.detail["change"]) for event in run.events if event.kind == "announced"]


@pytest.mark.parametrize(("rule", "factor"), [("keep", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_another_global_batch_is_announced_with_the_learning_rate_that_was_asked_for(
    tmp_path: Path, rule: Rule, factor: float
) -> None:
    resume = sealegs.Elastic(learning_rate=rule)
    train(tmp_path / "a", 8, 4, resume=resume)
    run = train(tmp_path / "a", 4, 4, resume=resume)
    text = "the global batch: 8 samples before, 4 now"
    assert announced(run) == [text if rule == "keep" else f"{text}; the learning rate times {factor:g}"]
    assert run.column("lr").tolist() == pytest.approx([LR] * 4 + [LR * factor] * 4)
    run = train(tmp_path / "a", 8, 2, resume=resume)
    assert announced(run)[1:] == [
        "the global batch: 4 samples before, 8 now" + ("" if rule == "keep" else "; the learning rate times 1")
    ]
    assert run.column("lr").tolist()[-2:] == pytest.approx([LR, LR]), "that of the beginning again"


def test_it_is_kept_by_accumulation_and_nothing_is_announced(tmp_path: Path) -> None:
    train(tmp_path / "a", 8, 4)
    run = train(tmp_path / "a", 2, 8, accumulates=True)
    assert announced(run) == []
    assert [event.detail["rows"] for event in run.events if event.kind == "data-recut"] == [[8, 2]]
    whole = train(tmp_path / "whole", 8, 12)
    assert run.column("loss").tolist() == pytest.approx(whole.column("loss").tolist()), "the same steps"
    assert run.column("grad_norm").tolist() == pytest.approx(whole.column("grad_norm").tolist())


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Elastic.learning_rate='cubic': \"keep\", \"linear\", or \"sqrt\""):
        sealegs.Elastic(learning_rate="cubic")  # type: ignore[arg-type]


def test_as_many_batches_as_planned_where_nothing_is_known_of_before() -> None:
    fresh = GlobalBatch()
    assert fresh.accumulation(8, planned=3) == 3
    fresh.look(8, 3)
    later = GlobalBatch()
    later.load_state_dict(fresh.state_dict())
    assert (later.accumulation(8), later.accumulation(5), later.accumulation(100)) == (3, 5, 1)
    of_an_older_version = GlobalBatch("linear")
    of_an_older_version.load_state_dict({})
    assert (of_an_older_version.look(8, 1), of_an_older_version.factor) == ("", 1.0)
