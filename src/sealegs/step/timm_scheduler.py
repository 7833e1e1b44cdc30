"""Adapts timm's schedulers, whose steps need a number, to the guard, which calls ``step()`` without one.

timm's schedulers have ``step(epoch)`` and ``step_update(num_updates)``; each acts only on schedules made in its unit.
The guard calls ``step_update`` after every step. The loop may go on calling ``step(epoch)``; it does no harm.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from sealegs.errors import ConfigError


class TimmScheduler:
    """Calls ``step_update`` with the number of steps made; that number is part of its state."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.last_epoch = 0
        """Steps made, under torch's name for it."""

    def step(self) -> None:
        """Count one step more."""
        self.last_epoch += 1
        self._scheduler.step_update(num_updates=self.last_epoch)

    def begin_at(self, number: int) -> None:
        """Set the count for a run that resumes at a step without this scheduler's state: timm leaves the count to the
        loop."""
        self.last_epoch = min(self.last_epoch, number) or number

    def state_dict(self) -> dict[str, Any]:
        """The count, and the scheduler's own state."""
        return {"updates": self.last_epoch, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.last_epoch = state["updates"]
        self._scheduler.load_state_dict(state["scheduler"])


def counting(scheduler: Any, *, is_stepped: bool) -> Any:
    """A scheduler whose ``step`` takes no argument, or a ConfigError that says what to do instead."""
    if not _needs_argument(scheduler):
        return scheduler
    if callable(getattr(scheduler, "step_update", None)):
        return TimmScheduler(scheduler)
    if not is_stepped:
        return scheduler
    raise ConfigError(
        f"scheduler={type(scheduler).__name__}: its step() needs an argument that the guard does not know; give "
        "scheduler=sealegs.LoopScheduler(scheduler), and call it yourself after guard.step(loss)"
    )


def _needs_argument(scheduler: Any) -> bool:
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        return True
    except ValueError:  # its signature cannot be read
        return False
    return False
