"""``health.json`` in a run's folder: what a launcher should know before it starts the job again. Standard library only.

Launchers restart what has failed, from the newest checkpoint. This file says which one is healthy, who was at fault,
and when a restart would only fail again. It is one JSON object, replaced as a whole, to be read without Sealegs.
"""

import json
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from sealegs.errors import RestartRefused, SourceError
from sealegs.record.checkpoint_tags import HEALTHY_AFTER, TAGS, Tag, Tags
from sealegs.record.doubt import BadStretch, stretches_of
from sealegs.record.events import load_events, plain_events
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import is_number, open_file, parse_json, read_bytes
from sealegs.record.rows import read_row
from sealegs.record.schema import EVENTS, METRICS
from sealegs.record.typed import fits
from sealegs.vocabulary import Event, Row

HEALTH = "health.json"
CHECKPOINTS = "checkpoints"
Advice: TypeAlias = Literal["go on", "restart from healthy", "restart without this host", "do not restart"]
"""What to do when the job is not running."""
ADVICE: tuple[Advice, ...] = get_args(Advice)
State: TypeAlias = Literal["healthy", "incident", "halted", "failed", "ended badly", "finished"]

AGAIN = 100
"""Steps beyond a halt within which the next one is the same again."""
BY_CHANCE = 0.01
"""Chance up to which incidents that are all one rank's are that rank's doing."""
REFRESH_S, AT_MOST_EVERY_S = 10.0, 0.2
"""How long the file may be behind the rows; and behind the tags of checkpoints and steps that are rejected."""
_TAIL_BYTES = 1 << 20
"""What is read of the rows to find the last: one of a large model takes a hundred thousand bytes."""
REMEMBERED = 20_000
"""Events that are kept to judge by."""
STOPS = (
    "guard",
    "silent-corruption",
    "ranks-refused",
    "checkpoint",
    "checkpoint-kept",
    "intervention",
    "incident-closed",
    "end",
)
"""Kinds of events after which it is written at once."""
CORRUPTION = "silent-corruption"
"""The kind of events that say which rank has computed a batch otherwise than two others."""
SURE_OF = 2
"""Times from which that is a part that fails, and no particle that came by."""
JUDGED = ("skip", "alarm", "halt")
_SLOW = re.compile(r"(rank (\d+) takes \d+% longer than the others, over \d+ steps)")
_RANK = re.compile(r"(?:^|\bon )rank (\d+)(?: \([^()]*\))?$")


class SavedState(NamedTuple):
    """A checkpoint, and how it is known to be healthy."""

    step: int
    path: str
    """From the run's folder on."""
    proof: str = ""


class Fault(NamedTuple):
    """The rank whose doing it was, where it runs, and how that is known."""

    rank: int
    host: str
    device: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a run stands, for a launcher."""

    schema: int = 1
    run: str = ""
    updated: str = ""
    step: int | None = None
    """The last step that is known of."""
    verdict: State = "healthy"
    because: str = ""
    advice: Advice = "go on"
    newest_healthy: SavedState | None = None
    newest: SavedState | None = None
    at_fault: Fault | None = None
    ranks: int | None = None
    """With how many ranks alone it may be started again, where its data cannot be divided among others."""
    pardoned: float = 0.0
    """Until when what happened does not count any more, in seconds since 1970: a person has said so."""

    def to_json(self) -> str:
        """As it is written."""
        saved = {name: None if (one := getattr(self, name)) is None else one._asdict() for name in _PARTS}
        return json.dumps(asdict(self) | saved, indent=1)

    @property
    def told(self) -> Sequence[str]:
        """The same in sentences."""
        at = "" if self.step is None else f" at step {self.step}"
        lines = [f"{self.advice}: {self.because if self.verdict == 'halted' else self.verdict + at}"]
        lines[0] += f", {self.because}" if self.because and self.verdict != "halted" else ""
        for name, one in (("newest healthy checkpoint", self.newest_healthy), ("newest checkpoint", self.newest)):
            how = f" ({one.proof})" if one is not None and one.proof else ""
            lines.append(f"{name}: {'none' if one is None else f'step {one.step}, {one.path}{how}'}")
        if (fault := self.at_fault) is not None:
            lines.append(f"at fault: rank {fault.rank} ({fault.device} of {fault.host}): {fault.evidence}")
        return lines


_PARTS = ("newest_healthy", "newest", "at_fault")


class HealthFile:
    """Keeps the file of a run that is under way: a sink, to which rows and events go."""

    name = HEALTH

    def __init__(self, folder: Path, *, lost: Callable[[], str] = lambda: "") -> None:
        """``lost`` says why the folder is not the run's any more: then nothing is written to it."""
        self._folder = folder
        self._lost = lost
        self._events: deque[Mapping[str, Any]] = deque(maxlen=REMEMBERED)
        self._step: int | None = None
        self._run, self._pardoned = "", 0.0
        self._looked_at = self._asked_at = -math.inf
        self._tags: tuple[int, int] | None = None
        self._written: Health | None = None

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Take in what the processes before have left."""
        self._run = str(manifest.get("run_id", ""))
        self._pardoned = pardoned_until(self._folder)
        self._events.extend(_kept(plain_events(load_events(self._folder / EVENTS))))

    def row(self, row: Row) -> None:
        """Follow the steps: a checkpoint is proven by those that come of it."""
        self._step = int(row["step"])
        now = time.monotonic()
        if now - self._looked_at > REFRESH_S or (now - self._asked_at > AT_MOST_EVERY_S and self._are_tags_new()):
            self.write()

    def event(self, event: Event) -> None:
        """Follow what happens."""
        self._events.extend(_kept(plain_events([event])))
        is_due = event.kind in JUDGED and time.monotonic() - self._looked_at > AT_MOST_EVERY_S
        if is_due or event.kind in STOPS:
            self.write()

    def close(self) -> None:
        """Write it for the last time."""
        self.write()

    def _are_tags_new(self) -> bool:
        """Whether a checkpoint has another tag than when the file was written: a kill may come before the next look."""
        self._asked_at = time.monotonic()
        return self._tags != _tags_file_of(self._folder)

    def write(self) -> None:
        """Write the file, if it is not as it should be."""
        self._looked_at = time.monotonic()
        self._tags = _tags_file_of(self._folder)  # before they are read
        now = health_of(list(self._events), tags_of(self._folder), self._step, pardoned=self._pardoned)
        now = replace(now, run=self._run)
        if now != self._written and not self._lost():
            _write(self._folder, now)
            self._written = now


def read_health(folder: Path) -> Health:
    """The health of a run, from its record: whether or not its file was written to the end."""
    events = list(_kept(plain_events(load_events(folder / EVENTS))))
    known = _known(folder)
    last = _last_step(folder)
    if last is None:  # nothing was logged, or the rows are not there any more
        last = known["step"] if fits(known.get("step"), int) else max((event["step"] for event in events), default=None)
    health = health_of(events, tags_of(folder), last, pardoned=pardoned_until(folder))
    return replace(health, run=str(known.get("run", "")), updated=str(known.get("updated", "")))


def refuse_restart(folder: Path, ranks: int = 1) -> None:
    """Raise an error where the file says that a restart would only fail again, with so many ranks."""
    known = _known(folder)
    if known.get("advice") == "do not restart" and known.get("ranks") != ranks:
        raise RestartRefused(
            f"{folder}: not started again: {known.get('because', '')}; what to do about it says `sealegs check "
            f"{folder}`, and `sealegs health {folder} --clear` lets it start"
        )


def clear(folder: Path) -> Health:
    """What happened until now does not count any more: a person has seen to it."""
    now = replace(read_health(folder), pardoned=time.time())
    cleared = replace(
        health_of(
            list(_kept(plain_events(load_events(folder / EVENTS)))), tags_of(folder), now.step, pardoned=now.pardoned
        ),
        run=str(_known(folder).get("run", "")),
    )
    _write(folder, cleared)
    return cleared


def health_of(
    events: Sequence[Mapping[str, Any]],
    tags: Mapping[int, tuple[Tag, str]],
    last: int | None,
    *,
    pardoned: float = 0.0,
) -> Health:
    """How a run stands by its events, the tags of its checkpoints, and the last step that it has come to.

    >>> begun = {"kind": "guard", "time": 1.0, "step": 0, "act": True, "playbook": "standard"}
    >>> alarm = {"kind": "alarm", "time": 2.0, "step": 250, "incident": 1, "text": "step 250  ALARM", "findings": []}
    >>> tags = {100: ("healthy", ""), 200: ("healthy", ""), 300: ("candidate", "")}
    >>> health = health_of([begun, alarm], tags, 320)
    >>> health.verdict, health.advice, health.newest_healthy.step, health.newest.step
    ('incident', 'restart from healthy', 200, 300)
    """
    guarded: Mapping[str, Any] = next((event for event in reversed(events) if event["kind"] == "guard"), {})
    stretches = stretches_of(events)
    open_now = next(
        (one for one in reversed(stretches) if one.end is None or (last is not None and last < one.end)), None
    )
    healthy = _newest_healthy(tags, stretches, last, has_playbook=guarded.get("playbook") is not None)
    newest = max(tags, default=None)
    fault = _at_fault(events, guarded, pardoned)
    known = Health(
        step=last,
        newest_healthy=healthy,
        newest=None if newest is None else SavedState(newest, f"{CHECKPOINTS}/{newest}"),
        at_fault=None if fault is None else fault[0],
        pardoned=pardoned,
    )
    advice: Advice
    halts = _halts(events, pardoned)
    verdict, because = _state(events, open_now, has_playbook=guarded.get("playbook") is not None)
    if (refused := _refused(events, pardoned)) is not None:
        advice, because = "do not restart", str(refused.get("text", ""))
        ranks = refused.get("ranks")
        known = replace(known, ranks=ranks if isinstance(ranks, int) else None)
        return replace(known, verdict="failed", because=because, advice=advice)
    is_well = verdict in ("healthy", "finished") or healthy is None
    advice = "go on" if is_well else "restart from healthy"
    if verdict == "halted" and (again := _would_happen_again(halts)):
        advice, because = "do not restart", again
    elif fault is not None and fault[1]:
        advice = "restart without this host"
    return replace(known, verdict=verdict, because=because, advice=advice)


def _state(
    events: Sequence[Mapping[str, Any]], open_now: BadStretch | None, *, has_playbook: bool
) -> tuple[State, str]:
    """How it stands after its last event that says so, and why."""
    incident = "" if open_now is None else f"incident {open_now.number} is open since step {open_now.onset}"
    for event in reversed(events):
        kind, reason = event["kind"], str(event.get("reason", ""))
        if kind == "guard":
            break
        if kind == "end" and reason == "failed":
            return "failed", str(event.get("error", ""))
        if kind == "end" and reason in ("finished", "ended-badly"):
            badly = reason == "ended-badly"
            return ("ended badly", str(event.get("why", ""))) if badly else ("finished", "")
        if _is_halt(event, has_playbook=has_playbook) and (kind != "end" or has_playbook):
            return "halted", str(event.get("text") or event.get("error", ""))
    return ("incident", incident) if incident else ("healthy", "")


def _refused(events: Sequence[Mapping[str, Any]], pardoned: float) -> Mapping[str, Any] | None:
    """What was said against this number of ranks, if that is how the last process has ended."""
    for event in reversed(events):
        if event["kind"] == "guard":
            return None
        if event["kind"] == "ranks-refused":
            return event if event["time"] > pardoned else None
    return None


def _newest_healthy(
    tags: Mapping[int, tuple[Tag, str]], stretches: Sequence[BadStretch], last: int | None, *, has_playbook: bool
) -> SavedState | None:
    """The newest checkpoint that is from no incident, and is proven: by the guard, or by the steps that came of it."""
    for step in sorted(tags, reverse=True):
        tag, why = tags[step]
        if tag == "suspect" or any(one.casts_doubt_on(step) for one in stretches):
            continue
        steps = min([one.onset for one in stretches if one.onset >= step] + [last or 0]) - step
        if tag == "healthy":
            proof = why or (f"{HEALTHY_AFTER} healthy steps came of it or led to it" if step else "the beginning")
        elif not has_playbook and steps >= HEALTHY_AFTER:
            proof = f"{steps} steps came of it without an incident, and it is from none"
        else:
            continue
        return SavedState(step, f"{CHECKPOINTS}/{step}", proof)
    return None


class _Halt(NamedTuple):
    step: int
    text: str


def _halts(events: Iterable[Mapping[str, Any]], pardoned: float) -> list[_Halt]:
    """The halts of a run, one for each process that was ended by one."""
    found: list[_Halt] = []
    is_new, has_playbook = True, False
    for event in events:
        if event["kind"] == "guard":
            is_new, has_playbook = True, event.get("playbook") is not None
        elif _is_halt(event, has_playbook=has_playbook) and event["time"] > pardoned:
            found += [_Halt(event["step"], str(event.get("text", "")))] if is_new else []
            is_new = False
    return found


def _is_halt(event: Mapping[str, Any], *, has_playbook: bool) -> bool:
    """Whether an event has ended the process. A playbook answers a verdict that is HALT, with a halt or otherwise."""
    if event["kind"] == "end":
        return event.get("reason") == "halted"
    actions = event.get("actions")
    listed = actions if isinstance(actions, list | tuple) else ()
    named = [action.get("action") for action in listed if isinstance(action, Mapping)]
    is_told = event["kind"] == "halt" and not has_playbook
    return bool(event.get("acted")) and (is_told or (event["kind"] == "intervention" and "halt" in named))


def _would_happen_again(halts: Sequence[_Halt]) -> str:
    """Why a restart would be halted, too; empty where that is not known."""
    if len(halts) > 1 and halts[-1].step - halts[-2].step <= AGAIN:
        one, two = halts[-2].step, halts[-1].step
        return f"halted at step {one}, and again at step {two} after a restart: {halts[-1].text}"
    return ""


def _at_fault(
    events: Sequence[Mapping[str, Any]], guarded: Mapping[str, Any], pardoned: float
) -> tuple[Fault, bool] | None:
    """The rank that incidents point at, and whether they are so many that it is no chance."""
    ranks = guarded.get("ranks")
    if not isinstance(ranks, int) or ranks < 2:
        return None
    if (found := _corrupt(events, guarded, ranks, pardoned)) is not None:
        return found
    seen: dict[Any, tuple[int, str]] = {}
    for event in events:
        rank = _rank_in(str(event.get("culprit", ""))) if event["kind"] in JUDGED else None
        if rank is not None and rank < ranks and event["time"] > pardoned:
            seen.setdefault(event.get("incident") or event["step"], (rank, str(event.get("text", ""))))
    counted = Counter(rank for rank, _ in seen.values())
    if not counted:
        return _slow(events, guarded, pardoned)
    ((rank, times),) = counted.most_common(1)
    text = [text for one, text in seen.values() if one == rank][-1]
    is_sure = len(counted) == 1 and ranks ** (1 - times) <= BY_CHANCE
    evidence = text if times == 1 else f"{times} of {len(seen)} incidents are its, the last: {text}"
    return Fault(rank, *_where(rank, guarded), evidence), is_sure


def _corrupt(
    events: Sequence[Mapping[str, Any]], guarded: Mapping[str, Any], ranks: int, pardoned: float
) -> tuple[Fault, bool] | None:
    """The rank that computed wrongly most often: its host is left out if it did so again."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        rank = event.get("rank") if event["kind"] == CORRUPTION and event["time"] > pardoned else None
        if isinstance(rank, int) and 0 <= rank < ranks:
            found.setdefault(rank, []).append(event)
    if not found:
        return None
    rank = max(found, key=lambda one: len(found[one]))
    times = len(found[rank]) + sum(event.get("is_lasting") is True for event in found[rank])
    text = f"step {found[rank][-1]['step']}: {found[rank][-1].get('text', '')}"
    return Fault(rank, *_where(rank, guarded), text), times >= SURE_OF


def _slow(
    events: Sequence[Mapping[str, Any]], guarded: Mapping[str, Any], pardoned: float
) -> tuple[Fault, bool] | None:
    """The rank that was slow last, where no incident points at any: no reason to leave its host out."""
    for event in reversed(events):
        if event["kind"] == "remark" and event["time"] > pardoned:
            found = _SLOW.search(str(event.get("text", "")))
            if found and int(found[2]) < int(guarded["ranks"]):
                return Fault(int(found[2]), *_where(int(found[2]), guarded), found[1]), False
    return None


def _where(rank: int, guarded: Mapping[str, Any]) -> tuple[str, str]:
    """Host and device of a rank."""
    hosts = guarded.get("hosts")
    where = hosts[rank] if isinstance(hosts, list | tuple) and rank < len(hosts) else {}
    told = where if isinstance(where, Mapping) else {}
    return str(told.get("host", "a host that is not known")), str(told.get("device", "its device"))


def _rank_in(culprit: str) -> int | None:
    """
    >>> _rank_in("emb.weight on rank 3"), _rank_in("rank 0 (dp 0, tp 0)"), _rank_in("emb.weight of rank 1")
    (3, 0, None)
    """
    found = _RANK.search(culprit)
    return int(found[1]) if found else None


def tags_of(folder: Path) -> dict[int, tuple[Tag, str]]:
    """The tags of a run's checkpoints by step; where they cannot be read, nothing is known of any."""
    place = folder / CHECKPOINTS
    try:
        steps = sorted(int(entry.name) for entry in place.iterdir() if is_number(entry.name))
    except OSError:
        return {}
    try:
        return Tags(place).of(steps)
    except SourceError:
        return dict.fromkeys(steps, ("candidate", ""))


def _tags_file_of(folder: Path) -> tuple[int, int] | None:
    """What tells the file of the tags from the one before it, which it has replaced; None where there is none."""
    try:
        found = (folder / CHECKPOINTS / TAGS).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _last_step(folder: Path) -> int | None:
    """The step of the row that was logged last; None where there is none, or it cannot be read."""
    try:
        with open_file(folder / METRICS, folder) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).splitlines()
    except (OSError, SourceError):
        return None
    rows = (read_row(line) for line in reversed(lines))  # the last may be torn by a kill
    return next((int(row["step"]) for row in rows if row is not None), None)


def pardoned_until(folder: Path) -> float:
    """Until when what happened does not count."""
    time_s = _known(folder).get("pardoned")
    return float(time_s) if isinstance(time_s, int | float) and math.isfinite(time_s) else 0.0


def _known(folder: Path) -> Mapping[str, Any]:
    """What the file says; nothing, where there is none or it cannot be read."""
    try:
        known = parse_json(read_bytes(folder / HEALTH, folder))
    except (OSError, ValueError, SourceError):
        return {}
    return known if isinstance(known, dict) and known.get("advice") in ADVICE else {}


def _write(folder: Path, health: Health) -> None:
    dated = replace(health, updated=datetime.now(UTC).isoformat(timespec="seconds"))
    path = folder / HEALTH
    with writing(path), whole_file(path, durable=False) as file:
        file.write(dated.to_json().encode())


def _kept(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    kinds = (*JUDGED, *STOPS)
    return (event for event in events if event["kind"] in kinds or _is_of_slow_rank(event))


def _is_of_slow_rank(event: Mapping[str, Any]) -> bool:
    return event["kind"] == "remark" and _SLOW.search(str(event.get("text", ""))) is not None
