"""The runs of an incident in, what came out of it: with the numbers and sentences that its page shows."""

import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from sealegs.diagnosis.contract import Diagnosis
from sealegs.drills.score import done_in
from sealegs.gallery.definitions import Incident
from sealegs.printable import counted
from sealegs.record.run import Run, open_run
from sealegs.report.commands.gallery import Found, Outcome, Rerun, RunShown, Weighed
from sealegs.report.commands.interventions import interventions
from sealegs.report.commands.replay import Replayed
from sealegs.report.postmortem.events import steps_spent

POINTS = 120
"""Most points of a curve."""
HYPOTHESES, EVIDENCE = 4, 3
DOES = {
    "skip_batches": "passes over data",
    "rollback": "goes back",
}


def outcome_of(
    incident: Incident,
    folder: Path,
    losses: Sequence[float],
    diagnosis: Diagnosis,
    replayed: Replayed | None,
    because: str,
    postmortem: str,
    files: Sequence[str],
    seconds: float,
) -> Outcome:
    """Everything about the runs in a folder, whose final losses are those of the clean, unguarded and guarded one."""
    runs = [open_run(folder / name) for name in ("unguarded", "guarded")]
    shown = next((each.cause for each in diagnosis.hypotheses if each.grade in ("established", "supported")), None)
    tested = None if replayed is None or (replayed.is_by_exclusion and shown != replayed.cause) else replayed.cause
    cause = tested or shown
    guard, seen, done = _guarded(incident, runs[1])
    return Outcome(
        name=incident.name,
        seed=incident.seed,
        versions=_versions(),
        clean_loss=_rounded(losses[0]),
        unguarded=_shown(runs[0], losses[1]),
        guarded=_shown(runs[1], losses[2]),
        verdict=diagnosis.findings.verdict,
        because=_here(diagnosis.findings.because, folder),
        weighed=[
            Weighed(
                cause=each.cause,
                grade=each.grade,
                evidence=[_here(text, folder) for text in each.evidence_for[:EVIDENCE]],
            )
            for each in diagnosis.hypotheses[:HYPOTHESES]
            if each.grade != "ruled out"
        ],
        first_action=_here(diagnosis.first_action, folder),
        log_next_time=list(diagnosis.log_next_time),
        reruns=[]
        if replayed is None
        else [
            Rerun(name=arm.name, kind=arm.kind, does=arm.does, shows=arm.shows, left=_rounded(arm.left))
            for arm in replayed.arms
        ],
        replay=_here(because, folder),
        cause=cause,
        tested=tested is not None,
        found=_found(incident, cause, diagnosis.findings.verdict),
        seen=seen,
        guard=guard,
        done=list(done),
        postmortem=_here(postmortem, folder),
        files=list(files),
        seconds=round(seconds),
    )


def _found(incident: Incident, cause: str | None, verdict: str) -> Found:
    """Whether the cause was found. Where nothing is wrong, no cause may be named, and nobody told to act."""
    if cause is not None:
        return "found" if cause in incident.cards else "wrong"
    if incident.practice.is_benign:
        return "nothing wrong" if verdict != "act" else "wrong"
    return "not found"


def _guarded(incident: Incident, run: Run) -> tuple[str, int | None, list[str]]:
    """What the guard did in a few words, at which step it saw something first, and in sentences."""
    events = run.events
    since = 0 if not incident.practice.faults else incident.at
    struck = [event for event in events if event.kind in ("skip", "alarm", "halt") and event.step is not None]
    seen = next((event.step for event in struck if event.step >= since), None)
    skipped, again = steps_spent({"kind": each.kind, "step": each.step, **each.detail} for each in events)
    is_halted = any(event.kind == "end" and event.detail["reason"] == "halted" for event in events)
    actions = [
        action["action"]
        for each in interventions(events)
        for action in each.decided.detail["actions"]
        if action["action"] != "continue"
    ]
    words = [
        *(["halts"] if is_halted else []),
        *(["skips"] if skipped else []),
        *dict.fromkeys(DOES.get(action, action.replace("_", " ")) for action in actions),
    ]
    if not words:
        words = ["alarms"] if seen is not None else ["nothing"]
    told = [
        *([f"{counted(skipped, 'step')} skipped"] if skipped else []),
        *([f"{counted(again, 'step')} done again"] if again else []),
        *done_in(events),
    ]
    return ", ".join(words), seen, told


def _shown(run: Run, loss: float) -> RunShown:
    """The loss of a run: of each few steps the highest, or one that is not finite."""
    steps, values = run.series("loss")
    width = max(math.ceil(len(steps) / POINTS), 1)
    at, curve = [], []
    for begin in range(0, len(steps), width):
        part = values[begin : begin + width]
        place = begin + (int(np.argmax(part)) if np.isfinite(part).all() else int(np.argmin(np.isfinite(part))))
        at.append(int(steps[place]))
        curve.append(_rounded(float(values[place])))
    return RunShown(loss=_rounded(loss), steps=at, curve=curve)


def _rounded(value: float | str) -> float | str:
    """Four digits, since it is to be read."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _here(text: str, folder: Path) -> str:
    """A text in which the folder is called FOLDER, wherever it lay."""
    return text.replace(str(folder), "FOLDER")


def _versions() -> dict[str, str]:
    of_packages = {name: metadata.version(name) for name in ("sealegs", "torch")}
    return {"python": ".".join(map(str, sys.version_info[:2])), **of_packages}
