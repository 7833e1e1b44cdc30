"""A thread that notices when a run stands still, and reports where."""

import sys
import threading
import time
import traceback
from collections.abc import Callable


class Watchdog:
    """Calls ``tell(seconds, where)`` once when no beat has come for ``after_s``, and again only after the next beat.

    A stalled loop cannot report itself: it waits in a data loader, in a collective, for a device. ``where`` is the line
    in which the loop's thread waits. An exception from ``tell`` is lost, since nobody is there to catch it.
    """

    def __init__(self, after_s: float, tell: Callable[[float, str], None]) -> None:
        self._after_s = after_s
        self._tell = tell
        self._thread_of_loop = threading.get_ident()
        self._last = time.monotonic()
        self._told = True  # nothing is expected before the first beat: models compile, data is found
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sealegs-watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Note that the loop goes on."""
        self._last = time.monotonic()
        self._thread_of_loop = threading.get_ident()
        self._told = False

    def rest(self) -> None:
        """Expect nothing until the next beat: an evaluation, a checkpoint."""
        self._told = True

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._closed.wait(min(self._after_s / 4, 10.0)):
            still_s = time.monotonic() - self._last
            if not self._told and still_s > self._after_s:
                self._told = True
                try:
                    self._tell(still_s, self._where())
                except Exception:  # noqa: S112
                    continue

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread_of_loop)
        lines = traceback.format_stack(frame) if frame else []
        return lines[-1].strip().replace("\n", ": ", 1) if lines else "its thread has ended"
