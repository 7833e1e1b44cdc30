"""Somebody behind a watch who acts on its verdicts, as a guard does, for tests that need no model."""

from sealegs.watch import Observer


class Acting(Observer):
    """Skips and halts, or only says so."""

    def __init__(self, acts: bool = True) -> None:
        self._acts = acts

    @property
    def acts(self) -> bool:
        """Whether it does."""
        return self._acts

    @property
    def instead_of_halt(self) -> str:
        """A halt ends the run."""
        return ""
