"""A run folder that a kill has left in, what is in it and what is wrong with it out. Reads files by itself.

``sealegs.open_run`` and ``sealegs check`` are asked as well, where what they need beside numpy is installed.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

NOT_REPEATED = frozenset({"time", "step_s", "tokens_per_s", "saving"})
"""Signals that the clock measures."""
OF_ONE_RANK = ("update_rms", "update_ratio")
"""Several ranks do not save the change by the last update, so that the first row after a resume lacks it."""
READERS = tuple(name for name in ("msgspec", "tyro", "rich") if find_spec(name) is None)
"""What is missing for Sealegs' own readers."""
if not READERS:
    import sealegs
    import sealegs.cli.check
    import sealegs.report.commands.check
    import sealegs.report.commands.explain  # whatever the command imports when it is called
    from sealegs.cli.main import main


class Problem(NamedTuple):
    """Something that should not be."""

    kind: str
    """``rows``, ``folder``, ``checkpoint``, ``start``, ``end``, ``error`` or ``hang``."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Written:
    """The whole lines of a file that only grows."""

    size: int = 0
    digest: str = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class Left:
    """What a run folder holds."""

    written: Mapping[str, Written] = field(default_factory=dict)
    tags: Mapping[int, str] = field(default_factory=dict)
    """Of the checkpoints that are intact."""
    has_gone_back: bool = False
    """Whether something was done to the run beside skips."""
    problems: Sequence[Problem] = ()
    """What is wrong."""

    @property
    def proven(self) -> list[int]:
        """The steps of intact checkpoints that are known to be healthy, without the beginning."""
        return [step for step, tag in self.tags.items() if tag == "healthy" and step]

    @property
    def unproven(self) -> list[int]:
        """Those of which nothing is known."""
        return [step for step, tag in self.tags.items() if tag == "candidate"]


def inspect(run: Path, before: Left, steps: Sequence[int], torn: int) -> Left:
    """Look at a folder after a life that has ended so many ``steps``; up to ``torn`` lines may be cut short."""
    if not run.exists():  # killed before there was one
        return before if not before.written else Left(problems=(Problem("folder", "it is gone"),))
    problems: list[Problem] = []
    try:
        json.loads((run / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        problems.append(Problem("folder", f"manifest.json: {error}"))
    written: dict[str, Written] = {}
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for name, parsed in (("metrics.jsonl", rows), ("events.jsonl", events)):
        content = (run / name).read_bytes() if (run / name).exists() else b""
        old = before.written.get(name, Written())
        if hashlib.sha256(content[: old.size]).hexdigest() != old.digest:
            problems.append(Problem("rows", f"what was in {name} is not in it any more"))
        whole = content[: content.rfind(b"\n") + 1]
        written[name] = Written(len(whole), hashlib.sha256(whole).hexdigest())
        parsed += _parsed(whole[old.size :], problems, torn, name)
    if lost := Counter(steps) - Counter(row["step"] for row in rows if "loss" in row):
        problems.append(Problem("rows", f"steps {sorted(lost.elements())} had ended and have no row"))
    went_to = [event.get("to_step", 0) for event in events if event["kind"] in ("intervention", "counted-back")]
    went_to += _given_up_after(run / "checkpoints" / "tags.json")
    tags = _tags(run / "checkpoints", problems)
    problems += _weaker(before, tags, min(went_to, default=None))
    problems += _read_by_sealegs(run)
    return Left(written, tags, before.has_gone_back or bool(went_to), problems)


def _parsed(lines: bytes, problems: list[Problem], torn: int, name: str) -> Iterator[dict[str, Any]]:
    bad = 0
    for line in lines.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            bad += 1
    if bad > torn:
        problems.append(Problem("folder", f"{bad} lines of {name} cannot be read"))


def _given_up_after(file: Path) -> list[int]:
    """Steps that the run went back to, as its tags say: they are written before the event."""
    try:
        reasons = [tag.get("why", "") for tag in json.loads(file.read_bytes()).values()]
    except (OSError, ValueError):
        return []
    return [int(found[1]) for why in reasons if (found := re.search(r"the run went back to step (\d+)", why))]


def _tags(folder: Path, problems: list[Problem]) -> dict[int, str]:
    """The tags of the intact checkpoints; one that has its name and is not intact is a problem."""
    if not folder.exists():
        return {}
    try:
        known = json.loads((folder / "tags.json").read_bytes()) if (folder / "tags.json").exists() else {}
    except ValueError as error:
        problems.append(Problem("checkpoint", f"tags.json: {error}"))
        known = {}
    tags = {}
    for entry in sorted(folder.iterdir()):
        if not entry.name.isdecimal():
            continue
        listed = entry / "digests.json"
        digests = json.loads(listed.read_bytes()) if listed.exists() else {}
        files = {name: entry / name for name in digests}
        is_whole = all(path.exists() and _digest(path) == digests[name] for name, path in files.items())
        if not is_whole or not digests:
            problems.append(Problem("checkpoint", f"{entry.name} has its name and is not whole"))
            continue
        tag = known.get(entry.name, {})
        tags[int(entry.name)] = tag["tag"] if tag.get("of") == _digest(listed) else "candidate"
    return tags


def _weaker(before: Left, tags: Mapping[int, str], went_to: int | None) -> Iterator[Problem]:
    """Proven checkpoints that are less than that now, where the run did not go back behind them."""
    newest = max((step for step, tag in tags.items() if tag == "healthy"), default=-1)
    for step in before.proven:
        if went_to is not None and step > went_to:
            continue
        if step in tags and tags[step] != "healthy":
            yield Problem("checkpoint", f"{step} was proven, and is {tags[step]} now")
        elif step not in tags and newest < step:
            yield Problem("checkpoint", f"{step} was proven, and is gone")


def _read_by_sealegs(run: Path) -> Iterator[Problem]:
    if READERS:
        return
    said = StringIO()
    try:
        sealegs.open_run(run).events  # noqa: B018 -- they are read when they are asked for
        with redirect_stdout(said), redirect_stderr(said):
            code = main(["check", str(run)])
    except BaseException as error:
        yield Problem("folder", f"{type(error).__name__}: {error}")
    else:
        has_rows = (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0
        if code not in (0, 1) and has_rows:
            yield Problem("folder", f"sealegs check ends with {code}: {said.getvalue().strip().splitlines()[-1:]}")


def differing(run: Path, reference: Path, ranks: int) -> Iterator[str]:
    """Steps and signals of a run that are not bit for bit those of another."""
    here, there = _newest(run, ranks), _newest(reference, ranks)
    if here.keys() != there.keys():
        yield f"steps {sorted(here.keys() ^ there.keys())[:5]}"
    for step in here.keys() & there.keys():
        if here[step] != there[step]:
            names = {name for name in here[step] | there[step] if here[step].get(name) != there[step].get(name)}
            yield f"step {step}: {sorted(names)[:5]}"


def _newest(run: Path, ranks: int) -> dict[int, dict[str, Any]]:
    newest = {}
    for line in (run / "metrics.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        left_out = [name for name in row if name in NOT_REPEATED or (ranks > 1 and name.startswith(OF_ONE_RANK))]
        newest[row["step"]] = {name: value for name, value in row.items() if name not in left_out}
    return newest


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
