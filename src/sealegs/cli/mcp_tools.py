"""Arguments of an agent in, the object of a command's ``--json`` out: the tools of ``sealegs mcp``.

Each knows its schemas: that of its arguments, and the one that docs/*.schema.json has of what it finds. Nothing outside
the roots is read. Every refusal is one sentence.
"""

import functools
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import msgspec

from sealegs.cli import do
from sealegs.cli.check import check
from sealegs.cli.run_names import folder_of, place_of
from sealegs.diagnosis.diff import differ
from sealegs.diagnosis.diff_conclusions import conclude
from sealegs.errors import ConfigError, SealegsError, SourceError
from sealegs.printable import visible
from sealegs.readers.mlflow import SCHEME
from sealegs.readers.read import read
from sealegs.record import requests
from sealegs.record.health import read_health
from sealegs.record.reading import confined
from sealegs.record.run import open_run
from sealegs.record.schema import speakable
from sealegs.report.commands import check as checked
from sealegs.report.commands import diff as differing
from sealegs.report.commands import health as standing
from sealegs.report.commands import interventions as done
from sealegs.report.commands.check_schema import Checked


class Refused(Exception):
    """What was asked cannot be done: one sentence for the agent."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The folders that may be read."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folders: Iterable[Path]) -> "Roots":
        """Those folders, which must be there."""
        for folder in folders:
            if not folder.expanduser().is_dir():
                raise ConfigError(f"--root {folder}: no such folder; give one that has runs or logs in it")
        return cls(tuple(folder.expanduser().resolve() for folder in folders))

    def refuse_others(self, *paths: Path) -> None:
        """Refuse what leads elsewhere, links followed."""
        for path in paths:
            for folder in self.folders:
                with suppress(SourceError):
                    confined(path, folder)
                    break
            else:
                listed = " or ".join(map(str, self.folders))
                raise SourceError(f"{path}: not in {listed}, where alone this server reads; --root FOLDER allows more")

    def source(self, name: str) -> str:
        """A log or run that may be read, as ``check`` takes it."""
        if name.startswith(SCHEME):
            raise SourceError(f"{name}: a tracker is not read for an agent; give a file or a folder")
        place = place_of(name)
        meant = {place, place.rpartition("#")[0] or place}  # FILE#RUN names one run of several
        self.refuse_others(*(Path(os.path.expanduser(each)) for each in meant))  # noqa: PTH111 its own fails without a home
        return place

    def run(self, name: str) -> Path:
        """The folder of a run that may be read."""
        folder = folder_of(name)
        self.refuse_others(folder)
        return folder


Source = Annotated[str, msgspec.Meta(description="A training log of any common format, or the folder of a run.")]
RunFolder = Annotated[str, msgspec.Meta(description="The folder of a run, or its name in experiments/.")]


class OfCheck(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of ``check``."""

    source: Source
    metrics: Annotated[
        dict[str, str],
        msgspec.Meta(description='Which column is which signal, where names do not say: {"loss": "objective"}.'),
    ] = {}
    kind: Annotated[
        str | None,
        msgspec.Meta(
            description="The kind of run, where the log does not tell: pretraining, fine-tuning, preference, "
            "policy-gradient, diffusion, gan, vision or supervised, with +moe or +low-precision."
        ),
    ] = None
    pattern: Annotated[
        str | None,
        msgspec.Meta(description="For text like no other: a regular expression with a group for each signal."),
    ] = None
    rules: Literal["calibrated", "textbook"] = "calibrated"
    settings: Annotated[list[str], msgspec.Meta(description="Files with settings of the run: TOML, JSON or YAML.")] = []
    tried: Annotated[
        list[str],
        msgspec.Meta(
            description='What was tried, and what came of it: "halve the LR: helped", or no help, worse, unclear.'
        ),
    ] = []


class OfDiff(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of ``diff``."""

    a: Source
    b: Source


class OfRun(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of ``health`` and ``interventions``."""

    run: RunFolder


class OfDo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of ``do``."""

    run: RunFolder
    what: Annotated[
        list[str],
        msgspec.Meta(
            description='One of ["rollback"], ["rollback", STEPS], ["lr", FACTOR], ["skip", BATCHES], ["clip", NORM], '
            '["clip-qk", LOGIT], ["swap", SOURCE], ["halt"].',
            min_length=1,
        ),
    ]
    wait_s: Annotated[
        float,
        msgspec.Meta(description="How long to wait for it. After that the request is taken back.", gt=0, le=600),
    ] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One thing that an agent can ask for."""

    description: str
    takes: type[msgspec.Struct]
    gives: Any
    asked: Callable[[Any], Awaitable[dict[str, Any]]]
    only_reads: bool = True

    @property
    def input_schema(self) -> dict[str, Any]:
        """The schema of its arguments."""
        return _flat(msgspec.json.schema(self.takes))

    @property
    def output_schema(self) -> dict[str, Any]:
        """The schema of what it finds, as docs/*.schema.json has it."""
        return _flat(msgspec.json.schema(self.gives))

    async def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What it finds."""
        try:
            found = await self.asked(msgspec.convert(arguments, self.takes))
            msgspec.convert(found, self.gives)  # clients refuse what is not as the schema says, and say less of why
        except msgspec.ValidationError as error:
            raise Refused(f"{visible(str(error))}; the schema of this tool says what it takes and gives") from error
        except (SealegsError, OSError, MemoryError) as error:
            raise Refused(visible(str(error)) or "out of memory") from error
        return found


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with an object at its root, which the protocol asks for, in place of a reference to one."""
    root = schema.get("$ref", "").rpartition("/")[2]
    return {**schema["$defs"][root], "$defs": schema["$defs"]} if root else schema


def tools(roots: Roots, *, may_do: bool) -> dict[str, Tool]:
    """The tools by their names."""
    found = {
        "check": Tool(
            description="What is wrong with a training run, from its log: the verdict (healthy, watch, act, unknown), "
            "incidents, ranked causes with their evidence, and the first action.",
            takes=OfCheck,
            gives=Checked,
            asked=_in_thread(functools.partial(_check, roots)),
        ),
        "diff": Tool(
            description="Where two training runs part: settings, versions, signals, and what follows from that.",
            takes=OfDiff,
            gives=differing.Differing,
            asked=_in_thread(functools.partial(_diff, roots)),
        ),
        "health": Tool(
            description="Before a run is started again: its newest healthy checkpoint, the rank at fault, and "
            "whether to restart at all.",
            takes=OfRun,
            gives=standing.Standing,
            asked=_in_thread(functools.partial(_health, roots)),
        ),
        "interventions": Tool(
            description="What was done to a run, who or what decided it, on which evidence, and what came of it.",
            takes=OfRun,
            gives=done.Log,
            asked=_in_thread(functools.partial(_interventions, roots)),
        ),
    }
    if may_do:
        found["do"] = Tool(
            description="Intervene in a run that is under way: roll back, lower the learning rate, skip batches, clip, "
            "swap a source of data, halt. Waits until it is carried out, and gives its entry among the interventions.",
            takes=OfDo,
            gives=done.Entry,
            asked=functools.partial(_do, roots),
            only_reads=False,
        )
    return found


def _in_thread(work: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Awaitable[dict[str, Any]]]:
    """The same beside the loop that talks with the agent: reading a large log takes a while."""

    async def begun(asked: Any) -> dict[str, Any]:
        return await anyio.to_thread.run_sync(work, asked)

    return begun


def _check(roots: Roots, asked: OfCheck) -> dict[str, Any]:
    roots.source(asked.source)
    settings = [Path(name) for name in asked.settings]
    roots.refuse_others(*settings, *(Path(words) for words in asked.tried if words.endswith(".toml")))
    diagnosis = check(
        asked.source,
        metrics=asked.metrics,
        pattern=asked.pattern,
        rules=asked.rules,
        kind=asked.kind,
        settings=settings,
        tried=asked.tried,
    )
    return _plain(checked.contract(diagnosis))


def _diff(roots: Roots, asked: OfDiff) -> dict[str, Any]:
    a, b = (read(roots.source(name)).run for name in (asked.a, asked.b))
    difference = differ(a, b)
    return _plain(differing.contract(difference, (asked.a, asked.b), conclude(a, b, difference, ("A", "B"))))


def _health(roots: Roots, asked: OfRun) -> dict[str, Any]:
    return _plain(standing.contract(read_health(open_run(roots.run(asked.run)).folder)))


def _interventions(roots: Roots, asked: OfRun) -> dict[str, Any]:
    return _plain(done.contract(open_run(roots.run(asked.run))))


async def _do(roots: Roots, asked: OfDo) -> dict[str, Any]:
    folder = roots.run(asked.run)
    request = do.asked(folder, tuple(asked.what))
    try:
        deadline = time.monotonic() + asked.wait_s
        while time.monotonic() < deadline:
            answer = await anyio.to_thread.run_sync(do.answer_to, folder, request)
            if answer is not None:
                return _plain(answer.plain())
            await anyio.sleep(do.POLL_S)
        raise do.not_carried_out(folder, asked.wait_s)
    except BaseException:  # also where the agent is gone: nobody waits for it any more
        requests.remove(folder, request)
        raise


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    plain: dict[str, Any] = speakable(told)
    return plain
