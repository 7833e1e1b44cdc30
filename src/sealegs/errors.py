"""The errors that Sealegs raises, each one for the user to fix.

    SealegsError
    ├── ConfigError         a setting: names the field, the value and the cure
    ├── SourceError         something to read: data, a tokenizer, a run folder, a checkpoint
    │   ├── RunExists       a run of that name is there already
    │   └── RunBusy         another process is writing that run
    ├── StorageError        something to write: full disk, read-only folder
    ├── RunHalted           the run is stopped rather than trained on garbage: carries the verdict
    ├── RestartRefused      the run's health.json says that a restart would only fail again
    │   └── RanksChanged    the place in the data cannot be divided among this number of ranks: says among which
    ├── RankMissing         a rank is missing at a step: names it
    ├── SinkFailed          a tracker did not take everything; the run goes on without it
    └── MissingExtra        a library that an extra installs: carries the install line

    UserWarning
    ├── RunEndedBadly       the loop is over in the middle of an incident; a warnings filter makes it an error
    └── FolderIncomplete    the run is over, and its folder lacks checkpoints, rows or capsules, or is gone

Our own mistakes are an ``assert`` instead. The command line prints any of these as one sentence and exits with 2. They
quote files and names, which is why each is one line of text that can be seen, whoever prints it.
"""

from sealegs.printable import visible
from sealegs.vocabulary import Verdict

_LONGEST = 2000
"""Characters of a sentence; what it quotes can be of any length."""


class SealegsError(Exception):
    """The root: catch this to catch all of them."""

    exit_code = 1
    """With which a loop should end that this ends: ``docs/launchers.md``."""
    page = ""
    """The page about it, where there is one. A traceback shows it below the sentence."""

    def __init__(self, *told: object) -> None:
        super().__init__(*told)
        if self.page:
            self.add_note(f"see {self.page}")

    def __str__(self) -> str:
        text = visible(super().__str__())
        return (
            text if len(text) <= _LONGEST else f"{text[: _LONGEST - 500]} ... {text[-500:]}"
        )  # the cure is at the end


class ConfigError(SealegsError):
    """A setting is misspelt, of the wrong type or impossible."""


class SourceError(SealegsError):
    """Something to read is missing, damaged or from a newer version."""


class RunExists(SourceError):
    """A new run has a name that is taken."""


class RunBusy(SourceError):
    """Another process is writing this run folder."""


class StorageError(SealegsError):
    """Something could not be written; half-written files were removed."""

    page = "docs/reliability.md"


class RunHalted(SealegsError):
    """The run is stopped: going on would train on nothing, or on garbage. ``verdict`` is the last one, ``incident``
    what led to it."""

    exit_code = 70
    page = "docs/recovery.md"

    def __init__(self, message: str, verdict: Verdict, incident: tuple[Verdict, ...] = ()) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.incident = incident


class RestartRefused(SealegsError):
    """A run is not started again: what ended it would end it again, and a launcher would start it until it gives up."""

    exit_code = 72
    page = "docs/launchers.md"


class RanksChanged(RestartRefused):
    """A run cannot go on with this number of ranks, because its data cannot. ``ranks`` is the number that it can."""

    page = "docs/elastic.md"

    def __init__(self, message: str, *, ranks: int | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks


class RunEndedBadly(UserWarning):
    """A run ended, without an error, in the middle of an incident: its weights are not to be trusted.

    It is a warning and no error, so that what comes after the loop, saving the results, can still be done. To end the
    process instead, say ``warnings.simplefilter("error", sealegs.RunEndedBadly)``.
    """

    def __str__(self) -> str:
        return visible(super().__str__())


class FolderIncomplete(UserWarning):
    """A run is over, and its folder does not have what it should: the disk was full, or somebody moved the folder.

    It is a warning and no error, for the same reason. ``guard.missing`` and ``watch.missing`` say the same.
    """


class RankMissing(SealegsError):
    """The ranks of a run could not exchange their signals in time: which rank is missing, and at which step."""

    exit_code = 71
    page = "docs/ranks.md"


class SinkFailed(SealegsError):
    """A sink did not take everything it was given: which one, why, and how much arrived.

    One that ``goes_on`` keeps its place: it has reported what it lost, and tries again with what comes.
    """

    page = "docs/trackers.md"

    def __init__(self, message: str, *, goes_on: bool = False) -> None:
        super().__init__(message)
        self.goes_on = goes_on


class MissingExtra(SealegsError):
    """A library is missing that one of the extras installs."""

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(f"{what} needs {library}, which is not installed: pip install 'sealegs[{extra}]'")
        self.extra = extra
