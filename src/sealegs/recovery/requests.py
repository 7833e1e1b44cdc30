"""A run's folder in, what people ask of the run out: looked for now and then, and told to all ranks."""

import time
from pathlib import Path

from sealegs.record import requests
from sealegs.record.requests import Request
from sealegs.signals.collective import Collective

ASK_EVERY_S = 0.5
"""How often the folder is looked at for a person's requests ..."""
ASK_STEPS = 100
"""... and how often the ranks tell each other of one."""


class RequestQueue:
    """Those who leave requests in the folder of a run."""

    def __init__(self, folder: Path | None, ranks: Collective) -> None:
        """``folder`` is the run's, where this rank is the one that writes it."""
        self._folder = folder
        self._ranks = ranks
        self._asked_at = time.monotonic()

    def request(self, number: int) -> Request | None:
        """The oldest one, which is taken: at steps that all ranks agree on; where there is one rank, as soon as there
        is something."""
        if self._ranks.world > 1 and number % ASK_STEPS:
            return None
        now = time.monotonic()
        if self._ranks.world == 1 and now - self._asked_at < ASK_EVERY_S:
            return None
        self._asked_at = now
        found = requests.waiting(self._folder)[:1] if self._folder is not None else []
        if self._ranks.world > 1:
            found = self._ranks.gather(found)[0]
        if not found:
            return None
        if self._folder is not None:
            requests.remove(self._folder, found[0])
        return found[0]
