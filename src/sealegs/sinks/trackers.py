"""Makes the sink of a tracker from its name, behind a queue."""

import difflib
from importlib import import_module
from importlib.util import find_spec

from sealegs.errors import ConfigError, MissingExtra
from sealegs.sinks.background import BackgroundSink
from sealegs.vocabulary import Sink

TRACKERS = {"mlflow": "MlflowSink", "wandb": "WandbSink", "tensorboard": "TensorboardSink", "trackio": "TrackioSink"}
"""Each is a module here, a library and an extra of the same name."""

_CLOSE_WITHIN_S = {"wandb": 60.0}  # it uploads the rest at the end


def tracker(name: str) -> Sink:
    """A tracker for ``Watch(sinks=[...])`` and ``Telemetry(sinks=[...])``: mlflow, wandb, tensorboard or trackio.

    It never holds a step: rows and events wait in a bounded queue, and a tracker that hangs or dies is one event.
    """
    if name not in TRACKERS:
        near = difflib.get_close_matches(str(name), TRACKERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(TRACKERS)}"
        raise ConfigError(f"tracker {name!r}: there is none of that name; {hint}")
    if find_spec(name) is None:
        raise MissingExtra(f"the tracker {name}", name, name)
    sink: Sink = getattr(import_module(f"sealegs.sinks.{name}"), TRACKERS[name])()
    return BackgroundSink(sink, close_within_s=_CLOSE_WITHIN_S.get(name, 10.0))
