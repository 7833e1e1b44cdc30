"""What must hold of a run folder whatever happened to the disk: a folder in, complaints out."""

import contextlib
import hashlib
import io
import json
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench.disk.layer import KILLED
from bench.disk.scenarios import BAD, RUN, Scenario

from sealegs.state import checkpoint_files
from sealegs.state.checkpoints import Checkpoints, read_state


@dataclass
class Outcome:
    """What a process told while it ran, and how it ended."""

    status: int
    steps: list[int] = field(default_factory=list)
    """Steps that were done."""
    began: int | None = None
    """The step that it went on at."""
    stderr: str = ""

    @classmethod
    def of(cls, status: int, told: str, stderr: str) -> "Outcome":
        """From the lines that it wrote."""
        lines = [line.split() for line in told.splitlines() if " " in line]
        return cls(
            status,
            [int(value) for word, value in lines if word == "step"],
            next((int(value) for word, value in lines if word == "from"), None),
            stderr,
        )


def rows_of(run: Path) -> dict[int, float]:
    """Loss by step, of the lines that are whole."""
    rows: dict[int, float] = {}
    for line in whole_lines(run / "metrics.jsonl"):
        row = json.loads(line)
        if "loss" in row:
            rows[int(row["step"])] = float(row["loss"])
    return rows


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that are JSON."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            json.loads(line)
            if line.endswith(b"\n"):
                found.append(line.decode())
    return found


@dataclass(frozen=True)
class Reference:
    """What the same run comes to on a disk that is well."""

    rows: dict[int, float]
    """Loss by step."""
    last: int
    """The step of its last checkpoint."""
    weights: str
    """A digest of those in it."""

    @classmethod
    def of(cls, folder: Path) -> "Reference":
        """From the folder of a run that is over."""
        last = max(Checkpoints(folder / RUN / "checkpoints").steps())
        return cls(rows_of(folder / RUN), last, weights_in(folder / RUN, last))


def weights_in(run: Path, step: int) -> str:
    """A digest of the weights in a checkpoint; empty where there is none."""
    folder = run / "checkpoints" / str(step)
    if not folder.exists():
        return ""
    of_all = hashlib.sha256()
    for name, tensor in sorted(read_state(folder, step).tensors.items()):
        if name.startswith("model/"):
            of_all.update(tensor.numpy().tobytes())
    return of_all.hexdigest()


def after_fault(scenario: Scenario, folder: Path, outcome: Outcome, reference: Reference) -> list[str]:
    """What is wrong with a folder, as a process has left it on a bad disk."""
    run = folder / RUN
    wrong = []
    if "Traceback" in outcome.stderr:
        last = outcome.stderr.strip().splitlines()[-1]
        wrong.append(f"a traceback: {last}")
    if outcome.status not in (0, 1, 2, KILLED):
        wrong.append(f"status {outcome.status}")
    if outcome.status in (1, 2) and not outcome.stderr.strip():
        wrong.append(f"status {outcome.status} without a word")
    if run.exists() and not (run / "manifest.json").exists():
        wrong.append("a run folder without a manifest")
    found = rows_of(run)
    if lost := [step for step in outcome.steps if step not in found]:
        wrong.append(f"rows lost: {lost}")
    wrong += other_losses(scenario, found, reference)
    wrong += damaged_files(run)
    if outcome.status == 0:
        wrong += missing(run, found, reference)
        if scenario.is_exact and weights_in(run, reference.last) != reference.weights:
            wrong.append("status 0, and other weights")
    return wrong


def other_losses(scenario: Scenario, found: dict[int, float], reference: Reference) -> list[str]:
    """Rows that are not what they should be."""
    known = reference.rows
    other = [step for step, loss in found.items() if step in known and repr(known[step]) != repr(loss)]
    return [f"rows with another loss: {other}"] if other and scenario.is_exact else []


def damaged_files(run: Path) -> list[str]:
    """Files under their final names that are not whole."""
    wrong = []
    for path in sorted(run.rglob("*.json")):
        if any(part.endswith(".partial") for part in path.parts):
            continue
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            wrong.append(f"{path.relative_to(run)} is torn: {error}")
    checkpoints = run / "checkpoints"
    states = [checkpoints / str(step) for step in Checkpoints(checkpoints).steps()]
    for state in (*states, *run.glob("incidents/*/capsule/state")):
        if fault := checkpoint_files.fault_in(state):
            wrong.append(f"{state.relative_to(run)}: {fault}")
    return wrong


def missing(run: Path, found: dict[int, float], reference: Reference) -> list[str]:
    """What a run that ended with status 0 has not left behind."""
    wrong = []
    if gone := [step for step in reference.rows if step not in found]:
        wrong.append(f"status 0 without rows {gone}")
    if reference.last not in (saved := Checkpoints(run / "checkpoints").steps()):
        wrong.append(f"status 0 without a checkpoint of step {reference.last}: there are {saved}")
    incidents = {json.loads(line).get("incident") for line in whole_lines(run / "events.jsonl")} - {None}
    return wrong + [f"status 0 without {name}" for name in missing_of_incidents(run, incidents)]


def missing_of_incidents(run: Path, incidents: Iterable[int]) -> list[str]:
    """Files that belong to incidents and are not there."""
    names = ["incident.json", "capsule/capsule.json", "capsule/metrics.jsonl", "capsule/batches-0.jsonl"]
    names += ["capsule/state/digests.json", "postmortem.md"]
    wanted = [Path("incidents") / str(incident) / name for incident in sorted(incidents) for name in names]
    return [str(path) for path in wanted if not (run / path).exists()]


def to_resume_from(folder: Path) -> int:
    """The step that a resume goes on at, or at a later one: that of the newest checkpoint that is proven."""
    return Checkpoints(folder / RUN / "checkpoints").newest_healthy()[0] or 0


def once_it_is_well(
    scenario: Scenario, folder: Path, before: Outcome, again: Outcome, reference: Reference, trusted: int = 0
) -> list[str]:
    """What is wrong after the run was started again on a disk that is well: ``again`` is how that went.

    ``trusted`` is the step that it had to go on at.
    """
    run = folder / RUN
    wrong = []
    is_halted = not scenario.is_exact and "the run is halted" in again.stderr  # with no state to go back to
    if is_halted:
        return damaged_files(run)
    if again.status != 0:
        wrong.append(f"resume: status {again.status}: {again.stderr.strip()[-300:]}")
        return wrong
    if again.began is not None and again.began < trusted:
        wrong.append(f"resume: at step {again.began}, and there was a checkpoint of step {trusted}")
    if scenario.is_exact and weights_in(run, reference.last) != reference.weights:
        wrong.append("resume: other weights in the end")
    found = rows_of(run)
    wrong += [f"resume: {text}" for text in other_losses(scenario, found, reference)]
    if lost := [step for step in before.steps if step not in found]:
        wrong.append(f"resume: rows lost: {lost}")
    wrong += [f"resume: {text}" for text in damaged_files(run)]
    if gone := [step for step in reference.rows if step not in found]:
        wrong.append(f"resume: rows missing: {gone}")
    if scenario.is_exact and again.began is not None and again.began <= BAD[0]:
        wrong += [f"resume: no {name}" for name in missing_of_incidents(run, {1})]
    if left := sorted(str(path.relative_to(folder)) for path in run.rglob(".*.partial")):
        wrong.append(f"resume: left over: {', '.join(left)}")
    return wrong + checked(run)


def checked(run: Path) -> list[str]:
    """What ``sealegs check`` does with the folder, where it is installed."""
    if any(find_spec(name) is None for name in ("msgspec", "tyro")):
        return []
    from sealegs.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["check", str(run)])
    except BaseException:
        return [f"check: {traceback.format_exc().splitlines()[-1]}"]
    told = err.getvalue().strip().splitlines()
    is_one_sentence = status == 2 and len(told) == 1
    return [] if status in (0, 1) or is_one_sentence else [f"check: status {status}: {' '.join(told)[-300:]}"]
