"""Reports the pre-flight check of a framework's run: one warning and one event."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

from sealegs.printable import printable
from sealegs.report.commands.preflight import Advised
from sealegs.watch import Watch


class PreflightWarning(UserWarning):
    """Something is likely to go wrong in a run that is about to begin."""


class PreflightAdvice(NamedTuple):
    """The report of the check, or why it failed: observing fails open, and says so."""

    advised: Advised | None
    failure: str = ""

    def warn(self, *, stacklevel: int) -> None:
        """Give one warning about everything that is more than a note. Call it on one rank."""
        grave = [each for each in self.advised.findings if each.grade != "note"] if self.advised is not None else []
        if grave:
            shown = printable(grave)
            lines = [f"{each.code} {each.title}: {each.found}; set {each.knob} to {each.value}" for each in shown]
            text = "\n  ".join(["sealegs preflight:", *lines])
            warnings.warn(
                f"{text}\n(the attribute 'advice' has the reasons)", PreflightWarning, stacklevel=stacklevel + 1
            )

    def note(self, watch: Watch, *, step: int) -> None:
        """Write all of it into the record."""
        if self.advised is None:
            watch.note("preflight-failed", step=step, reason=self.failure)
        else:
            findings = [f"{each.code} {each.grade}: {each.title}; {each.found}" for each in self.advised.findings]
            watch.note("preflight", step=step, asked=self.advised.asked, findings=findings)


def advice(ask: Callable[[], Advised]) -> PreflightAdvice:
    """Run the check."""
    try:
        return PreflightAdvice(ask())
    except Exception as error:
        return PreflightAdvice(None, f"{type(error).__name__}: {error}")
