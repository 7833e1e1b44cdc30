"""Sends rows and events to a W&B run: on the server that the user is logged in to, or in a folder to be synced."""

import os
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from sealegs.errors import MissingExtra
from sealegs.record.schema import speakable
from sealegs.sinks import tracker_values
from sealegs.sinks.chat_text import quiet
from sealegs.vocabulary import Event, Row

PROJECT = "sealegs"

_DEFAULTS = {"WANDB_ERROR_REPORTING": "false"}  # a training run reports to nobody its user did not name
_INIT_TIMEOUT_S = 30.0  # W&B's own 90 s are long to wait for a server that is not there
_SUMMARISED = 100
_LONGEST_TEXT = 500


class WandbSink:
    """One W&B run beside any runs of the user's, continued when the training run is resumed.

    Signals become metrics of the same name over ``step``, because W&B's own step only rises and drops the steps that a
    run repeats after a rollback. Events become entries of the summary; those that a person should know of become
    alerts.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None
        self._events = 0
        self._exit_code = 0
        self._halted: set[Any] = set()
        """Incidents whose halt has been reported: where nothing acts on a halt, it comes again at every step."""

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the W&B run, or continue the one that the manifest names, and return where it is."""
        for variable, value in _DEFAULTS.items():
            os.environ.setdefault(variable, value)
        try:  # not at the top: the import takes a second, and Sealegs works without it
            import wandb
        except ModuleNotFoundError as error:
            raise MissingExtra("the tracker wandb", "wandb", "wandb") from error
        folder = Path(manifest["folder"]).absolute()  # W&B's process may run in another folder than ours
        folder.parent.mkdir(parents=True, exist_ok=True)
        before = tracker_values.earlier(manifest, self.name)
        is_online = os.environ.get("WANDB_MODE", "online" if _is_logged_in() else "offline") == "online"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=before.get("run_id") or token_hex(4),
            dir=str(folder.parent),
            mode=None if "WANDB_MODE" in os.environ else "online" if is_online else "offline",
            resume="allow" if before and is_online else None,  # offline it has no effect, and W&B complains
            # `create_new`: a run of the user's own code stays as it is
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=_INIT_TIMEOUT_S, reinit="create_new", quiet=True
            ),
        )
        self._run.config.update(speakable(tracker_values.settings(manifest)), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")
        place = str(Path(self._run.dir).parent)
        return {
            "name": self.name,
            "run_id": self._run.id,
            "uri": self._run.url if is_online and self._run.url else place,
            "project": self._run.project,
        }

    def row(self, row: Row) -> None:
        """Send the numbers of one step."""
        self._run.log({**tracker_values.numbers(row), "step": int(row["step"])})

    def event(self, event: Event) -> None:
        """Write one event into the summary, the first hundred of a process one by one; raise an alert."""
        mark = tracker_values.mark(event)
        if event.kind == "end":
            self._exit_code = int(mark is not None and mark.level == "error")
        if numbers := tracker_values.counts(event):
            self._run.log({**numbers, "step": event.step})
        if mark is None:
            return
        self._events += 1
        entry = f"{event.step:08} {event.kind}" if self._events <= _SUMMARISED else "newest"
        self._run.summary[f"event/{entry}"] = mark.text[:_LONGEST_TEXT]
        if event.kind == "halt":
            if (incident := event.detail.get("incident")) in self._halted:
                return
            self._halted.add(incident)
        if mark.level != "info":
            text = quiet(mark.text[:_LONGEST_TEXT])  # W&B passes it on to Slack
            self._run.alert(title=quiet(mark.title), text=text, level=mark.level.upper(), wait_duration=0)

    def close(self) -> None:
        """End the W&B run; it succeeded unless the ``end`` event says otherwise."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


def _is_logged_in() -> bool:
    """Whether W&B has a key: without one it would ask for it, and the run would wait at a prompt that nobody sees."""
    import wandb

    return bool(wandb.api.api_key)
