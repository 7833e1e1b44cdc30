"""Reads people's requests from the run folder and hands the same one to all ranks."""

import time
from collections.abc import Callable
from pathlib import Path

from sealegs.record import requests
from sealegs.record.requests import Request
from sealegs.signals.collective import Collective

ASK_EVERY_S = 0.5
"""How often, in seconds, a run of one rank looks into the folder."""
ASK_STEPS = 100
"""How often, in steps, several ranks share a request."""


class RequestQueue:
    """The requests that people have left in a run folder."""

    def __init__(self, folder: Path | None, ranks: Collective, lost: Callable[[], str] = lambda: "") -> None:
        """``folder`` is the run's; None on ranks that do not write. ``lost`` says why it is not the run's any more."""
        self._folder = folder
        self._lost = lost
        self._ranks = ranks
        self._asked_at = time.monotonic()

    def request(self, number: int) -> Request | None:
        """Take the oldest request. One rank looks now and then; several ranks look at steps that they agree on."""
        if self._ranks.world > 1 and number % ASK_STEPS:
            return None
        now = time.monotonic()
        if self._ranks.world == 1 and now - self._asked_at < ASK_EVERY_S:
            return None
        self._asked_at = now
        found = self._taken()
        return self._ranks.gather(found)[0] if self._ranks.world > 1 else found

    def _taken(self) -> Request | None:
        """Take the oldest request out of the folder; None where that cannot be, or it would be carried out for ever."""
        if self._folder is None or self._lost():
            return None
        try:
            for request in requests.waiting(self._folder):
                requests.remove(self._folder, request)
                return request
        except OSError:
            return None
        return None
