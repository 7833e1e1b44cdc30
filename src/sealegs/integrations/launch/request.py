"""What ``sealegs run`` asks of the processes that it starts, and what they report to it: a variable and a file."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

T = TypeVar("T")

VARIABLE = "SEALEGS_RUN"
STARTUP = Path(__file__).with_name("startup")
"""The folder whose sitecustomize waits for a framework."""


OWN_LOOP = "the program's loop"
"""What has a guard or a watch that the program made, or that was made to join it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for."""

    folder: str
    """Of the run, absolute: the program may go elsewhere."""
    act: bool
    playbook: str | None
    reports: str
    """The file to report into."""

    @classmethod
    def here(cls) -> Self:
        """What was asked of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The environment of the command."""
        paths = [str(STARTUP), *filter(None, [before.get("PYTHONPATH")])]
        return {**before, VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True, slots=True)
class Report:
    """What a process has to say of one loop."""

    kind: Literal["guarded", "refused", "own"]
    """A guard joined it; none could; the program has brought its own."""
    what: str
    """The loop, in words."""
    text: str
    """The folder, or the reason."""


def report(kind: Literal["guarded", "refused", "own"], what: str, text: object = "") -> None:
    """Tell the command; nothing here may fail."""
    try:
        with Path(Request.here().reports).open("a") as file:
            file.write(json.dumps(asdict(Report(kind, what, str(text)))) + "\n")
    except Exception:  # noqa: S110 -- the file is gone: the command was killed
        pass


def attempt(what: str, make: Callable[[], T]) -> T | None:
    """The result, or None and a report of why there is none: a loop that cannot be guarded runs on as it is."""
    try:
        return make()
    except Exception as error:
        report(
            "refused",
            what,
            f"{error}" if type(error).__module__.startswith("sealegs.") else f"{type(error).__name__}: {error}",
        )
        return None


def reports_in(file: Path) -> list[Report]:
    """What was reported, each thing once: every rank says the same. A line that is being written is left out."""
    lines = file.read_text().rpartition("\n")[0].splitlines()
    return list(dict.fromkeys(Report(**json.loads(line)) for line in lines))
