"""Shows the progress of a run on the terminal: a live bar, or plain lines."""

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from sealegs.record.interventions import JUDGED
from sealegs.report.event_text import remarkable
from sealegs.vocabulary import Event, Row, Sink

FIRST = 5
"""Rejected steps in a row that are each told."""


def progress(steps: int, stream: TextIO | None = None) -> Sink:
    """A live display on a terminal, otherwise plain lines."""
    stream = stream or sys.stderr
    return LiveProgress(steps, stream) if stream.isatty() else PlainProgress(steps, stream)


class ProgressText:
    """Turns rows into the text of a progress line; remembers the signals that are not in every row."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: tuple[int, float] | None = None
        self._speed = ""
        self._skips = 0
        self._rejected = (-1, 0)
        """The last step that was rejected, and how many were in a row up to it."""

    def told(self, event: Event) -> str | None:
        """What a person should read of an event. Of steps rejected in a row, the first few, then ever fewer."""
        if event.kind not in JUDGED:
            return remarkable(event)
        self._skips += bool(event.detail.get("acted"))
        last, row = self._rejected
        row = row + 1 if event.step == last + 1 else 1
        self._rejected = event.step, row
        is_news = row <= FIRST or row.bit_count() == 1 or event.kind == "halt"
        return remarkable(event) if is_news else None

    def line(self, row: Row) -> str:
        """``step 41/400  ok  loss 2.1034  grad norm 0.56  lr 3.0e-03  10.2k tokens/s  0:01:12 left``"""
        step = int(row["step"])
        now = time.monotonic()
        began_step, began = self._began = self._began or (step, now)
        if "tokens_per_s" in row:
            self._speed = f"  {readable(float(row['tokens_per_s']))} tokens/s"
        left = ""
        if step > began_step:
            left_s = (now - began) / (step - began_step) * (self._steps - 1 - step)
            left = f"  {timedelta(seconds=round(left_s))} left"
        return (
            f"step {step}/{self._steps}  {health(row, self._skips)}  loss {row['loss']:.4f}"
            f"  grad norm {row['grad_norm']:.3g}  lr {row['lr']:.1e}{self._speed}{left}"
        )


def health(row: Row, skips: int = 0) -> str:
    """The state of the run: ``ok`` or the signal that is not finite, and how many steps were skipped so far.

    >>> health({"loss": 2.5, "grad_norm": float("nan")}), health({"loss": 2.5, "grad_norm": 0.5}, skips=2)
    ('grad_norm is nan', 'ok, 2 skipped')
    """
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(float(row[name]))]
    word = f"{broken[0]} is {row[broken[0]]}" if broken else "ok"
    return f"{word}, {skips} skipped" if skips else word


def readable(number: float) -> str:
    """A large number in three or four digits.

    >>> readable(123), readable(10_240), readable(1_260_000)
    ('123', '10.2k', '1.26M')
    """
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


class PlainProgress:
    """A line every few seconds, for logs and pipes."""

    name = "terminal"

    def __init__(self, steps: int, stream: TextIO, *, every_s: float = 5.0) -> None:
        self._steps = steps
        self._stream = stream
        self._every_s = every_s
        self._last = -math.inf
        self._pace = ProgressText(steps)

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Nothing to get ready."""

    def row(self, row: Row) -> None:
        """Write a line, if the last one is old enough or this is the end."""
        if "loss" not in row:
            return
        line = self._pace.line(row)
        now = time.monotonic()
        if now - self._last >= self._every_s or row["step"] == self._steps - 1:
            self._last = now
            self._write(line)

    def event(self, event: Event) -> None:
        """Write the event if a person should read it."""
        if sentence := self._pace.told(event):
            self._write(sentence)

    def close(self) -> None:
        """There is nothing to release."""

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveProgress:
    """A bar that stays on one line, with the events that a person should read above it."""

    name = "terminal"

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._pace = ProgressText(steps)
        console = Console(file=stream)
        bar = [BarColumn(bar_width=24)] if console.width >= 120 else []  # text comes before the bar
        self._bar = Progress(
            *bar,
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=4,  # each refresh takes time from the training thread
        )
        self._task = self._bar.add_task("", total=steps)

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Show the bar."""
        self._bar.start()

    def row(self, row: Row) -> None:
        """Move the bar."""
        if "loss" in row:
            self._bar.update(self._task, completed=int(row["step"]) + 1, description=self._pace.line(row))

    def event(self, event: Event) -> None:
        """Write the event if a person should read it."""
        if sentence := self._pace.told(event):
            self._bar.console.print(sentence, markup=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()
