"""What a loss curve neither clears nor explains: live findings, batches that come again, and weight norms that change
too fast."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sealegs.detectors.overflow import Overflow, spelt
from sealegs.detectors.repeated_batch import BEFORE, FEW, RepeatedBatch
from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.curve.norm_changes import norm_changes
from sealegs.incidents import Incident
from sealegs.record.interventions import findings_in
from sealegs.record.run import Run
from sealegs.vocabulary import Event, Row, Severity, expected

JUDGED_AGAIN = ("loss", "grad_norm", "lr", "loss_scale", "skips", "step_s")
"""Signals of which the whole curve shows whether a live finding was an incident; and the pace, which harms no model."""
TOLD = ("alarm", "halt", "skip", "remark")
"""Kinds of events that hold findings."""
LAST = 10
"""Values at the end of a log that say whether what was noticed has passed."""


def standing(run: Run, incidents: Sequence[Incident], *, lead: int) -> tuple[Standing, ...]:
    """What stands, the first of each signal; what begins at most ``lead`` steps before an incident is part of it."""
    changes = [Standing(signal=change.signal, step=change.step, text=str(change)) for change in norm_changes(run)]
    found: dict[str, Standing] = {}
    others = (
        *_ranks_apart(run),
        *_computed_wrongly(run),
        *_told_live(run),
        *_repeated(run),
        *_underflows(run),
        *_not_restored(run),
    )
    for one in (*changes, *others):
        if one.is_grave or not any(
            it.start - lead <= one.step <= (math.inf if it.end is None else it.end) for it in incidents
        ):
            found.setdefault(one.signal, one)
    return tuple(found.values())


def _ranks_apart(run: Run) -> Iterator[Standing]:
    """Ranks that hold other weights than the rest when the record ends: they do not come together by themselves."""
    if "ranks_differ" not in run.signals or not run.has_numbers("ranks_differ"):
        return
    steps, differing = run.series("ranks_differ")
    alike = np.flatnonzero(differing == 0)
    first = int(alike[-1]) + 1 if len(alike) else 0
    if first < len(steps):
        text = f"ranks hold other weights than the rest since step {int(steps[first])}, to the end"
        yield Standing(signal="ranks_differ", step=int(steps[first]), text=text, is_grave=True)


def _computed_wrongly(run: Run) -> Iterator[Standing]:
    """Ranks that computed something else than others: one that did so once may have been hit by a particle, one that
    does so again is broken."""
    told = [event for event in run.events if event.kind == "silent-corruption"]
    if told:
        again = [event for event in told if event.detail.get("is_lasting") or event.detail.get("rank") is None]
        is_grave = bool(again) or len(told) > 1
        text = f"at step {told[-1].step}: {told[-1].detail.get('text', '')}"
        yield Standing(signal="silent-corruption", step=told[0].step, text=text, is_grave=is_grave)


def _not_restored(run: Run) -> Iterator[Standing]:
    """What the audit of a resume found not as it was saved. A learning rate alone may be meant: a longer schedule has
    others."""
    for event in run.events:
        if event.kind == "resume-audit":
            lost = [f"{name}: {how}" for name, how in dict(event.detail["not_as_saved"]).items()]
            lost += [str(how) for how in event.detail["changed"] if not str(how).startswith("lr ")]
            if lost:
                text = f"not as it was before the resume at step {event.step}: {'; '.join(lost[:4])}"
                yield Standing(signal="resume", step=event.step, text=text)


def _repeated(run: Run) -> Iterator[Standing]:
    """A loader that gave the same batches, as the live detector finds it: the run may be one that nobody watched."""
    signal = next((name for name in ("batch_hash", "batch_index") if name in run.signals), None)
    if signal is None:
        return
    logged = np.flatnonzero(run.logged(signal, copy=False))
    values = run.column(signal, copy=False) if run.has_numbers(signal) else run.undecoded(signal)
    steps, batches = run.steps[logged], values[logged]
    again = np.zeros(len(batches), np.bool_)
    for back in range(1, FEW + 1):
        again[back:] |= batches[back:] == batches[:-back]
    several = np.flatnonzero(again[2:] & again[1:-1] & again[:-2])
    detector, until = RepeatedBatch(), 0
    for place in several.tolist():
        if place < until:
            continue
        first, until = max(place - BEFORE, 0), place + BEFORE
        state = detector.init()
        for at in range(first, min(until, len(batches))):
            row: Row = {"step": int(steps[at]), "batch_hash": str(batches[at])}
            if (found := detector.look(state, row)) is not None:
                yield Standing(signal=signal, step=int(steps[at]), text=f"at step {int(steps[at])}: {found}")
                return
            state = detector.learn(state, row)


def _underflows(run: Run) -> Iterator[Standing]:
    """Gradients that fp16 loses, as the live detector finds them, if it loses them to the end."""
    detector = Overflow()
    if "underflow_share" not in run.signals or not run.has_numbers("underflow_share"):
        return
    steps, shares = run.series("underflow_share")
    is_thin = ~(shares <= detector.underflow)
    begins = np.flatnonzero(~is_thin)[-1:] + 1
    first = int(begins[0]) if len(begins) else 0
    if len(shares) - first >= detector.underflow_samples:
        step, share = int(steps[first]), float(np.median(shares[first:]))
        text = f"{share:.0%} of the gradients underflow in fp16 since step {step}, at most {detector.underflow:.0%} may"
        yield Standing(signal="underflow_share", step=step, text=text)


def constant_scale(run: Run) -> str | None:
    """A loss scale that stands still where a scaler would have doubled it, as the live detector tells it."""
    if "loss_scale" not in run.signals or not run.has_numbers("loss_scale"):
        return None
    steps, scales = run.series("loss_scale")
    at = np.flatnonzero(np.diff(scales, prepend=np.nan) != 0)
    ends = np.append(at[1:], len(scales)) - 1
    lasted = steps[ends] - steps[at]
    is_long = (lasted > 1.5 * Overflow().growth_interval) & (scales[at] > 1)  # 1 is none, as in bf16
    if not is_long.any():
        return None
    place = int(np.argmax(is_long))
    return (
        f"loss scale constant at {spelt(float(scales[at[place]]))} in steps {steps[at[place]]} to {steps[ends[place]]}"
    )


def stalls(run: Run) -> str | None:
    """A sentence if the loop stood still for longer than the watchdog waits: that harms no model, and costs time."""
    told = [event for event in run.events if event.kind == "stalled"]
    if not told:
        return None
    first = told[0]
    more = f", and {len(told) - 1} times more" if len(told) > 1 else ""
    where = f"waiting in {first.detail['where']}"
    return f"the loop stood still after step {first.step}: no step for {first.detail['seconds']:.3g} s, {where}{more}"


def _told_live(run: Run) -> Iterator[Standing]:
    """The live findings on the way that the run has taken in the end."""
    kept: list[tuple[int, Mapping[str, Any]]] = []
    for event in run.events:
        if (back_to := _back_to(event)) is not None:
            kept = [(step, finding) for step, finding in kept if step < back_to]
        if event.kind in TOLD:
            kept += [(event.step, finding) for finding in findings_in(event)]
    for step, finding in kept:
        signal, severity = str(finding.get("signal", "")), str(finding.get("severity", ""))
        if signal.partition("/")[0] not in JUDGED_AGAIN and not _has_passed(run, finding):
            word = "notice" if severity == Severity.WATCH.name else "alarm"
            yield Standing(signal=signal, step=step, text=f"live {word} at step {step}: {_words(finding)}")


def _back_to(event: Event) -> int | None:
    """The first step that is run again after an event."""
    if event.kind == "resume":
        return event.step
    step = event.detail.get("to_step")
    return step + 1 if event.kind == "intervention" and event.detail.get("acted") and isinstance(step, int) else None


def _has_passed(run: Run, finding: Mapping[str, Any]) -> bool:
    """Whether a notice is about numbers that are within their limit in the end."""
    signal, limit = str(finding.get("signal", "")), finding.get("limit")
    if finding.get("severity") != Severity.WATCH.name or not isinstance(limit, int | float):
        return False
    if signal not in run.signals or not run.has_numbers(signal):
        return False
    values = run.series(signal)[1][-LAST:]
    return bool(np.median(values) <= limit)


def _words(finding: Mapping[str, Any]) -> str:
    """The finding in words, as ``Finding`` spells it."""
    words, value, limit = (finding.get(name) for name in ("note", "value", "limit"))
    words = str(words or finding.get("detector", "unknown"))
    if not isinstance(value, int | float) or str(finding.get("signal", "")).endswith("_finite"):
        return words
    return f"{words}: {value:.4g}" + (f", {expected(value, limit)}" if isinstance(limit, int | float) else "")
