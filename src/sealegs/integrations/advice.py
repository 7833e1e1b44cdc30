"""What the pre-flight check says of a framework's run in, one warning and one event out."""

import warnings
from collections.abc import Callable

from sealegs.report.advised import Advised
from sealegs.watch import Watch


class PreflightWarning(UserWarning):
    """What is likely to go wrong in a run that is about to begin."""


def advise(ask: Callable[[], Advised], watch: Watch, *, step: int, stacklevel: int = 2) -> Advised | None:
    """Ask, warn of what is more than a note, and put all of it into the record. A look fails open, and says why."""
    try:
        advised = ask()
    except Exception as error:
        watch.note("preflight-failed", step=step, reason=f"{type(error).__name__}: {error}")
        return None
    findings = [f"{each.code} {each.grade}: {each.title}; {each.found}" for each in advised.findings]
    watch.note("preflight", step=step, asked=advised.asked, findings=findings)
    grave = [each for each in advised.findings if each.grade != "note"]
    if grave and watch.record is not None:  # on one rank
        lines = [f"{each.code} {each.title}: {each.found}; set {each.knob} to {each.value}" for each in grave]
        warnings.warn("\n  ".join(["sealegs preflight:", *lines]), PreflightWarning, stacklevel=stacklevel + 1)
    return advised
