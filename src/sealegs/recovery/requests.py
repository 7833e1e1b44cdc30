"""Takes people's requests from the run folder and hands the same one to all ranks."""

import time
from collections.abc import Callable
from pathlib import Path

from sealegs.record.requests import Inbox, RefusedRequest, Request
from sealegs.signals.collective import Collective

ASK_EVERY_S = 0.5
"""How often, in seconds, a run of one rank looks into the folder."""
ASK_STEPS = 100
"""How often, in steps, several ranks share a request."""


class RequestQueue:
    """The requests that people have left in a run folder."""

    def __init__(self, folder: Path | None, ranks: Collective, lost: Callable[[], str] = lambda: "") -> None:
        """``folder`` is the run's; None on ranks that do not write. ``lost`` says why it is not the run's any more."""
        self._inbox = None if folder is None else Inbox(folder)
        self._lost = lost
        self._ranks = ranks
        self._asked_at = time.monotonic()

    def request(self, number: int) -> tuple[Request | None, list[RefusedRequest]]:
        """Take the oldest request, and what this rank found that is none.

        One rank looks now and then; several ranks look at steps that they agree on.
        """
        if self._ranks.world > 1 and number % ASK_STEPS:
            return None, []
        now = time.monotonic()
        if self._ranks.world == 1 and now - self._asked_at < ASK_EVERY_S:
            return None, []
        self._asked_at = now
        found, refused = (None, []) if self._inbox is None or self._lost() else self._inbox.take()
        return self._ranks.gather(found)[0], refused
