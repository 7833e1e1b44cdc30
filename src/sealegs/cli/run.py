"""``sealegs run``: starts a training command with a guard in its framework's loop."""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from typing import Annotated, Literal

import tyro

from sealegs.cli.output import tell
from sealegs.cli.run_names import named_folder
from sealegs.errors import ConfigError
from sealegs.integrations.launch.request import OWN_LOOP, Report, Request, reports_in

DESCRIPTION = """\
Start a training command with a guard in it, without a change of its code. The guard joins when the command, or a
process that it starts, trains with a Trainer of Hugging Face's (TRL, Axolotl, LLaMA-Factory and Unsloth derive from
it), with Lightning's, or in a loop of Accelerate's. What it sees and does is in experiments/NAME. Without --act and
--playbook it only watches.

The exit code is that of the command. Where nothing could be guarded, the command runs as ever; stderr says why as soon
as it is known, and at the end.

examples:
  sealegs run -- python train.py --lr 2e-5                    watch: what would be skipped, and why
  sealegs run --act -- trl sft --config mine.yaml             skip updates that would damage the weights
  sealegs run --playbook standard --run night -- torchrun --nproc-per-node 8 train.py      and go back where that helps
  sealegs run -- accelerate launch train.py                   then: sealegs check experiments/run-...
"""
NOTHING_TRAINED = (
    "no Trainer of transformers or Lightning trained, and no loop of Accelerate; for one of your own there is "
    "sealegs.Guard"
)
FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    run: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run, a folder in experiments/; or a path, with a slash. A training that begins where there is one
    already records into NAME-2 and so on. Default: run, and the time."""
    act: bool = False
    """Skip updates that would damage the weights, and halt a run that cannot go on."""
    playbook: Literal["standard"] | None = None
    """Act, and go by a playbook: roll back, leave data out, lower the learning rate (docs/recovery.md)."""


def main(arguments: Sequence[str]) -> int:
    """Parse, run the command, and say what became of the guard."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    mine, command = words[:end], words[end + 1 :]
    if not command and not {"-h", "--help"} & set(mine):
        raise ConfigError("there is no command; give it after two dashes: sealegs run -- python train.py")
    options = tyro.cli(Options, args=mine, prog="sealegs run", description=DESCRIPTION)
    name = options.run or f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{token_hex(2)}"
    with tempfile.TemporaryDirectory(prefix="sealegs-run-") as place:
        reports = Path(place) / "reports.jsonl"
        reports.touch()
        asked = Request(
            folder=str(named_folder(name).absolute()),
            act=options.act or options.playbook is not None,
            playbook=options.playbook,
            reports=str(reports),
        )
        with refusals_told(reports):
            code = carried_out(command, asked.environment(os.environ))
        tell(f"sealegs run: {told(reports_in(reports), is_acting=asked.act)}")
    return code


def carried_out(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a command, as a shell would give it; signals go through to it."""
    with forwarding() as processes:
        try:
            process = subprocess.Popen(command, env=environment)  # noqa: S603 -- which is what is asked for
        except OSError as error:
            raise ConfigError(f"{shlex.join(command)}: cannot be started ({error.strerror})") from None
        processes.append(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def refusals_told(reports: Path, *, every_s: float = 1.0) -> Iterator[None]:
    """Say while the command runs what could not be guarded, each thing once: the training may go on for days."""
    over, seen = Event(), set[Report]()

    def look() -> None:
        while not over.wait(every_s):
            for each in reports_in(reports):
                if each.kind == "refused" and each not in seen:
                    seen.add(each)
                    tell(f"sealegs run: the training goes on, but {each.what}: {each.text}")

    watcher = Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def forwarding() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Pass signals on to the processes in the list, while they run."""
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _is_in_foreground():
            return  # the terminal has sent it to the command, too
        for process in processes:
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    before = {
        number: signal.signal(number, forward) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield processes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and those that it has started."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def told(reports: Sequence[Report], *, is_acting: bool) -> str:
    """What became of the guard, in a sentence.

    >>> told([Report("guarded", "transformers.Trainer", "/data/experiments/a")], is_acting=False)
    'watched transformers.Trainer, recorded in /data/experiments/a'
    >>> told([], is_acting=False) == f"nothing was guarded: {NOTHING_TRAINED}"
    True
    >>> told([Report("own", "the program's loop", "/data/own")], is_acting=True)
    'nothing was added: the program has a guard or a watch of its own, recorded in /data/own'
    """
    folders: dict[str, list[str]] = {}
    for each in reports:
        if each.kind == "guarded":
            folders.setdefault(each.what, []).append(each.text)
    verb = "guarded" if is_acting else "watched"
    guarded = [f"{verb} {what}, recorded in {' and '.join(runs)}" for what, runs in folders.items()]
    others = [
        f"{each.what}: {each.text}" if each.kind == "refused" else f"{each.what} has a guard of the program's own"
        for each in reports
        if each.kind != "guarded" and each.what != OWN_LOOP
    ]
    if guarded:
        return "; ".join([*guarded, *others])
    own = [each.text for each in reports if each.what == OWN_LOOP]
    if own and not others:  # else it may be the guard that was to join what is named there
        where = " and ".join(filter(None, own))  # empty from ranks that write nothing, or with run=None
        return f"nothing was added: the program has a guard or a watch of its own{where and f', recorded in {where}'}"
    why = "; ".join(others) or NOTHING_TRAINED
    return f"nothing was guarded: {why}"
