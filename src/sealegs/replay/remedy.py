"""Reruns an incident with remedies, and further than the incident went."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sealegs.batching.stratified import RareRows, spread
from sealegs.errors import ConfigError
from sealegs.replay.arms import arms, groups_of, set_beta2, tail_of
from sealegs.replay.experiment import Change, Experiment
from sealegs.report.fixes import Fix

Batches: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the steps of a rerun showed, by signal and step."""

    values: dict[str, dict[int, float]] = field(
        default_factory=lambda: {"loss": {}, "grad_norm": {}, "clipped_norm": {}}
    )

    def see(self, step: int, **signals: float) -> None:
        """Add a step."""
        for name, value in signals.items():
            self.values[name][step] = value


def rerun(
    experiment: Experiment,
    fixes: Sequence[Fix],
    planned: dict[int, Batches],
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> Shown:
    """Run from the state of the capsule with the remedies, every update applied from the onset on.

    ``planned`` gives the batches of each step. Remedies that change settings must already be in the subject.
    """
    loop, shown, row = experiment.loop, Shown(), experiment.rows
    given = {fix.name: fix for fix in fixes}
    gated = given["gate"].steps if "gate" in given else range(0)
    rate = _rate(experiment, given.get("lr"))
    experiment.go_to(experiment.oldest)
    with ExitStack() as stack:
        if "clip" in given:
            loop.clip = given["clip"].number
        if "beta2" in given:
            if not any("betas" in group for group in groups_of(experiment)):
                raise ConfigError(f"--fix {given['beta2']}: the optimizer has no betas; give another change")
            set_beta2(loop.subject.optimizers, given["beta2"].number)
        if "dtype" in given:
            if loop.subject.precision is None:
                raise ConfigError(f"--fix {given['dtype']}: the subject has no precision=; give it one in build()")
            stack.enter_context(loop.subject.precision(given["dtype"].value))
        for step, batches in planned.items():
            logged = float(row[step]["lr"]) if step in row else None
            if logged is None and not loop.subject.schedulers:
                logged = float(row[max(row)]["lr"])
            is_applied = step not in gated and (step >= experiment.onset or bool(row[step]["applied"]))
            norms: list[float] = []
            seen = loop.step(
                batches,
                lr=rate(step, loop.subject.optimizers[0].param_groups[0]["lr"] if logged is None else logged),
                applied=is_applied,
                qk_clip=experiment.qk_clip_at(step) if step in row else None,
                before_update=lambda subject, norms=norms: norms.append(norm_of(subject.optimizers)),  # type: ignore[misc]
            )
            shown.see(step, loss=seen.loss, grad_norm=seen.grad_norm)
            if is_applied:
                shown.see(step, clipped_norm=norms[0])
            if step % 10 == 0:
                tell(f"step {step} of {max(planned)}: loss {seen.loss:.4g}, grad norm {seen.grad_norm:.3g}")
    experiment.steps_run += len(planned)
    return shown


def plan(experiment: Experiment, fixes: Sequence[Fix], last: int, more: Iterator[Batches]) -> dict[int, Batches]:
    """The batches of each step up to ``last``, with the remedies applied.

    Later batches take the place of those that a remedy leaves out. ``more`` gives batches from the capsule's end on.
    """
    recorded = experiment.capsule.steps()

    def following() -> Iterator[tuple[int, Batches]]:
        yield from ((step, experiment.batches_of(step)) for step in recorded)
        yield from enumerate(more, recorded.stop)

    given = {fix.name: fix for fix in fixes}
    out = set(given["skip"].steps) if "skip" in given else set()
    if "repeated" in given:
        out |= experiment.repeated & set(recorded)
    steps = range(experiment.oldest, last + 1)
    kept = (batches for number, batches in following() if number not in out)
    planned = dict(zip(steps, islice(kept, len(steps)), strict=True))
    if "rare" not in given:
        return planned
    fixed = [step for step in steps if step >= experiment.onset]
    how = _spread if given["rare"].value == "spread" else _masked
    return planned | dict(zip(fixed, how(experiment, [planned[step] for step in fixed]), strict=True))


def borrowed(experiment: Experiment) -> Iterator[Batches]:
    """Batches from before the onset, in turn and without end, where no other batches are available."""
    before = experiment.before() or [experiment.batches_of(experiment.first)]
    while True:
        yield from before


def norm_of(optimizers: Sequence[Optimizer]) -> float:
    """The norm of the present gradients."""
    parameters = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))


def _rate(experiment: Experiment, fix: Fix | None) -> Callable[[int, float], float]:
    if fix is None or fix.is_as_recorded:
        return lambda step, lr: lr
    if fix.value != "before":
        return lambda step, lr: lr * fix.number
    change = _of_arm(experiment, "lr-discontinuity")
    if change is None or change.first is None:
        raise ConfigError(f"--fix {fix}: the learning rate has no jump in the capsule; give a factor such as lr=0.5")
    first = change.first
    return lambda step, lr: change.lr(step, lr) if step >= first else lr


def _of_arm(experiment: Experiment, cause: str) -> Change | None:
    """The change of the arm that takes a cause away, if there is one."""
    found = (arm.change for arm in arms(experiment) if arm.kind == "without" and arm.cause == cause)
    return next(found, None)


# Rare tokens


def _masked(experiment: Experiment, batches: Sequence[Batches]) -> list[Batches]:
    text, tail = experiment.loop.subject.text, tail_of(experiment)
    if text is None or tail is None:
        raise ConfigError("--fix rare=masked: batches are no text here; give the Subject text=sealegs.Text(...)")
    return [tuple(tail.masked(text, batch) for batch in each) for each in batches]


def _spread(experiment: Experiment, batches: Sequence[Batches]) -> list[Batches]:
    """The same rows in another order, so that no batch has a rare token in two rows where that is possible."""
    text, tail = experiment.loop.subject.text, tail_of(experiment)
    if text is None or tail is None:
        raise ConfigError("--fix rare=spread: batches are no text here; give the Subject text=sealegs.Text(...)")
    flat = [batch for each in batches for batch in each]
    targets = [row for batch in flat for row in text.targets(batch)]
    rows = len(targets) // len(flat)
    if any(len(text.targets(batch)) != rows for batch in flat):
        raise ConfigError("--fix rare=spread: the batches have different numbers of rows; give rare=masked")
    rare = [row[tail.are_rare(row)].unique().numpy().astype(np.int64) for row in targets]
    order = spread(np.arange(len(rare)), RareRows.of(rare), rows)
    whole = _joined(flat)
    made = iter([_taken(whole, order[place : place + rows].tolist()) for place in range(0, len(order), rows)])
    return [tuple(islice(made, len(each))) for each in batches]


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of all batches, concatenated."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list):
        return [row for part in parts for row in part]
    raise ConfigError(f"--fix rare=spread: rows of a {type(first).__name__} cannot be told apart; give rare=masked")


def _taken(whole: Any, rows: Sequence[int]) -> Any:
    if isinstance(whole, dict):
        return {name: _taken(part, rows) for name, part in whole.items()}
    return [whole[row] for row in rows] if isinstance(whole, list) else whole[list(rows)]
