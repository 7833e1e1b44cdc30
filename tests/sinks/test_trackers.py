"""W&B, TensorBoard and Trackio: one contract, read back with our readers and with each tracker's own."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sealegs
from sealegs.errors import ConfigError, MissingExtra, SinkFailed
from sealegs.sinks.background import BackgroundSink
from sealegs.sinks.tensorboard import TensorboardSink
from sealegs.sinks.trackers import TRACKERS, tracker
from sealegs.sinks.trackio import TrackioSink
from sealegs.sinks.wandb import WandbSink
from sealegs.vocabulary import Event, Row, Sink

# One process for all of them: each takes a second or more to import.
pytestmark = pytest.mark.xdist_group("mlflow")

SINKS: dict[str, Callable[[], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorboardSink,
    "trackio": TrackioSink,
}
PATIENCE_S = 60.0

MANIFEST = {
    "run_id": "a1-0123",
    "seed": 7,
    "dtype": "bf16",
    "settings": {"model": {"width": 64, "tied": True}, "mix": ["prose", "a|b"], "clip": math.inf},
    "versions": {"torch": "2.13.0"},
    "tracker": None,
    "trackers": (),
}
ROWS: list[Row] = [
    {"step": 0, "loss": 3.0, "grad_norm/blocks.0": 0.5, "batch_hash": "9f"},
    {"step": 1, "loss": math.nan, "grad_norm/blocks.0": math.inf, "culprit": "embedding.weight"},
    {"step": 2, "loss": -math.inf},
    {"step": 3, "loss": 9.0},
    {"step": 3, "loss": 2.5, "grad_norm/blocks.0": 0.25},  # the run was resumed, and did this step again
    {"step": 4, "loss": 2.25, "eval_loss": 2.0},
]
RESUMED = 4
NAME = "<!channel> @here ![x](y)\n\x1b[2J\u202e"
"""The name that somebody has given a module."""
SHOWN = "<!channel> @here ![x](y)\\n\\x1b[2J\\u202e"
EVENTS = [
    Event(kind="checkpoint", step=0, time=1.5, detail={"checkpoint": 0}),
    Event(kind="skip", step=1, time=1.5, detail={"text": "step 1  SKIP  loss is not finite", "skipped_in_all": 1}),
    Event(kind="alarm", step=2, time=1.5, detail={"text": f"ALARM in {NAME}", "skipped_in_all": 2, "incident": 1}),
    Event(
        kind="intervention",
        step=2,
        time=1.5,
        detail={"number": 1, "text": "go back", "evidence": "why", "changed": "all", "acted": True},
    ),
    Event(kind="halt", step=2, time=1.5, detail={"text": "step 2  HALT", "incident": 1}),
    Event(kind="halt", step=3, time=1.5, detail={"text": "step 3  HALT", "incident": 1}),  # nobody acts on it
]


@dataclass
class Written:
    """What a sink was given, through its queue, in two processes' worth of life."""

    name: str
    started: list[dict[str, Any]]
    said: str
    """On stdout."""


@pytest.fixture(scope="module", params=SINKS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("a store") / "a1"  # with a space, as folders have
    capture = request.config.pluginmanager.getplugin("capturemanager")
    before = capture.read_global_capture().out
    started = []
    manifest: dict[str, Any] = {**MANIFEST, "folder": str(folder)}
    for rows, events in ((ROWS[:RESUMED], EVENTS), (ROWS[RESUMED:], [])):
        sink = BackgroundSink(SINKS[request.param](), close_within_s=PATIENCE_S)
        entry = sink.start(manifest)
        assert entry is not None
        started.append(dict(entry))
        for row in rows:
            for event in events:
                if event.step == row["step"]:
                    sink.event(event)
            sink.row(row)
        sink.event(Event(kind="end", step=2, time=1.5, detail={"reason": "failed", "error": "OSError: no"}))
        sink.close()
        manifest |= {"trackers": started, "settings": {**manifest["settings"], "lr": 0.5}}
    return Written(request.param, started, (before + capture.read_global_capture().out)[len(before) :])


def test_the_suite_has_every_tracker() -> None:
    assert {*SINKS, "mlflow"} == set(TRACKERS), "MLflow has a suite of its own"


def test_names_steps_and_values_are_read_back_as_they_were(written: Written) -> None:
    first, last = (sealegs.open_run(entry["uri"]) for entry in written.started)
    loss = first.column("loss")
    assert (loss[0], math.isnan(loss[1]), loss[2]) == (3.0, True, -math.inf)
    assert first.column("grad_norm/blocks.0")[1] == math.inf
    # each part of a W&B run that is not online is a folder of its own; `wandb sync` brings them together
    assert last.steps.tolist() == ([3, 4] if written.name == "wandb" else [0, 1, 2, 3, 4])
    assert last.column("loss")[-2:].tolist() == [2.5, 2.25], "the newest row of a step counts"
    assert last.column("eval_loss")[-1] == 2.0
    assert not {"batch_hash", "culprit"} & set(last.signals)


def test_what_charts_leave_out_is_marked(written: Written) -> None:
    run = sealegs.open_run(written.started[0]["uri"])
    for signal_name, steps in (("nonfinite/loss", [1, 2]), ("nonfinite/grad_norm/blocks.0", [1])):
        logged = run.logged(signal_name)
        assert run.steps[logged].tolist() == steps
        assert set(run.column(signal_name)[logged]) == {1.0}


def test_what_happened_is_counted_beside_the_loss(written: Written) -> None:
    run = sealegs.open_run(written.started[0]["uri"])
    for name, steps, values in (("skips", [1, 2], [1, 2]), ("incidents", [2], [1]), ("interventions", [2], [1])):
        logged = run.logged(name)
        assert (run.steps[logged].tolist(), run.column(name)[logged].tolist()) == (steps, values)


def test_a_resumed_run_goes_on_with_the_same_run_of_the_tracker(written: Written) -> None:
    first, second = written.started
    assert first["run_id"] == second["run_id"]
    if written.name != "wandb":
        assert first == second


def test_nothing_is_said_on_stdout(written: Written) -> None:
    assert written.said == ""


def wandb_has_alerts_a_summary_and_the_config(written: Written) -> None:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = Path(written.started[0]["uri"]).glob("*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    records = []
    while (data := store.scan_data()) is not None:
        records.append(Record.FromString(data))
    store.close()
    axes = [(record.metric.glob_name, record.metric.step_metric) for record in records if record.HasField("metric")]
    assert axes[0] == ("*", "step"), "W&B's own step only goes up"
    alerts = [(record.alert.level, record.alert.title) for record in records if record.HasField("alert")]
    once = [("WARN", "alarm at step 2"), ("WARN", "intervention at step 2"), ("ERROR", "halt at step 2")]
    assert alerts == [*once, ("ERROR", "the run is failed")]
    texts = [record.alert.text for record in records if record.HasField("alert")]
    wide = SHOWN.replace("<", "\N{FULLWIDTH LESS-THAN SIGN}").replace("@", "\N{FULLWIDTH COMMERCIAL AT}")
    assert texts[0] == f"ALARM in {wide.replace('](', '] (')}", "W&B passes it on to Slack"
    summary = {
        item.key or "/".join(item.nested_key): item.value_json
        for record in records
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summary["event/00000001 skip"] == '"step 1  SKIP  loss is not finite"'
    assert summary["event/00000002 end"] == '"failed: OSError: no"'
    assert not any("checkpoint" in name for name in summary)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
    settings = sealegs.open_run(written.started[1]["uri"]).manifest.settings
    assert settings["model"] == {"width": 64, "tied": True}
    assert (settings["clip"], settings["lr"], settings["seed"]) == ("Infinity", 0.5, 7)


def tensorboard_has_texts_and_hparams(written: Written) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    logdir = written.started[0]["uri"]
    assert len(list(Path(logdir).iterdir())) == 2, "a file for each process"
    seen = EventAccumulator(logdir)
    seen.Reload()
    texts = {tag: seen.Tensors(tag)[0] for tag in seen.PluginTagToContent("text")}
    assert set(texts) == {"settings", "events/skip", "events/alarm", "events/halt", "events/intervention", "events/end"}
    assert (texts["events/skip"].step, texts["events/skip"].tensor_proto.string_val[0]) == (
        1,
        b"step 1 SKIP loss is not finite",
    )
    alarm = texts["events/alarm"].tensor_proto.string_val[0].decode()
    assert alarm == r"ALARM in \<!channel> @here !\[x\](y)\n\x1b\[2J\u202e", "it is read as Markdown"
    assert b'| mix | \\["prose", "a\\|b"\\] |' in texts["settings"].tensor_proto.string_val[0]
    hparams = seen.PluginTagToContent("hparams")
    started = metadata.parse_session_start_info_plugin_data(hparams[metadata.SESSION_START_INFO_TAG]).hparams
    assert started["model.width"].number_value == 64
    assert started["model.tied"].bool_value is True
    assert started["clip"].number_value == math.inf
    ended = metadata.parse_session_end_info_plugin_data(hparams[metadata.SESSION_END_INFO_TAG])
    assert ended.status == 2, "failed"


def trackio_has_alerts_and_the_config(written: Written) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    alerts = SQLiteStorage.get_alerts("sealegs", run_name="a1-0123")
    assert sorted((alert["step"], alert["level"], alert["title"]) for alert in alerts) == [
        (1, "info", "skip at step 1"),
        (2, "error", "halt at step 2"),
        (2, "error", "the run is failed"),
        (2, "error", "the run is failed"),
        (2, "warn", "alarm at step 2"),
        (2, "warn", "intervention at step 2"),
        (3, "error", "halt at step 3"),
    ]
    assert f"ALARM in {SHOWN}" in [alert["text"] for alert in alerts]
    settings = sealegs.open_run(written.started[1]["uri"]).manifest.settings
    assert (settings["model"], settings["lr"], settings["clip"]) == ({"width": 64, "tied": True}, 0.5, "Infinity")


def test_each_shows_what_happened_and_the_settings_in_its_own_way(written: Written) -> None:
    {
        "wandb": wandb_has_alerts_a_summary_and_the_config,
        "tensorboard": tensorboard_has_texts_and_hparams,
        "trackio": trackio_has_alerts_and_the_config,
    }[written.name](written)


def test_a_wandb_run_of_the_users_own_stays_as_it_is(tmp_path: Path) -> None:
    import wandb

    own = wandb.init(mode="disabled")
    sink = WandbSink()
    sink.start({**MANIFEST, "folder": str(tmp_path / "a1")})
    assert wandb.run is own
    sink.close()
    assert wandb.run is own
    own.finish()


def test_a_damaged_store_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_PROJECT", "damaged")
    sink = BackgroundSink(TrackioSink(), gather_s=0.0, close_within_s=PATIENCE_S)
    sink.start({**MANIFEST, "folder": str(tmp_path / "a1")})
    (Path(os.environ["TRACKIO_DIR"]) / "damaged.db").write_bytes(b"not a database, and long enough to be read" * 100)
    sink.row({"step": 0, "loss": 1.0})
    with pytest.raises(SinkFailed, match=r"^trackio: DatabaseError: .*; 0 rows and events delivered, 1 not"):
        sink.close()


def test_a_folder_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with sealegs.Watch(tmp_path / "a", sinks=[tracker("tensorboard")]) as watch:
        watch.see(0, loss=1.0)
    run = sealegs.open_run(tmp_path / "a")
    (event,) = run.events
    assert (event.kind, event.detail["sink"]) == ("sink-failed", "tensorboard")
    assert run.manifest.tracker is None


@pytest.mark.parametrize("name", TRACKERS)
def test_without_its_library_a_tracker_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as told:
        tracker(name)
    assert str(told.value) == f"the tracker {name} needs {name}, which is not installed: pip install 'sealegs[{name}]'"


def test_a_name_that_is_none_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"tracker 'wandbb': there is none of that name; did you mean wandb\?"):
        tracker("wandbb")


class Hanging:
    """A tracker whose server took the connection and never answers."""

    name = "hanging"

    def start(self, manifest: Any) -> None: ...

    def row(self, row: Row) -> None:
        time.sleep(PATIENCE_S)

    def event(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Dying(Hanging):
    name = "dying"

    def row(self, row: Row) -> None:
        raise ConnectionResetError("gone")


class Slow(Hanging):
    name = "slow"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def row(self, row: Row) -> None:
        time.sleep(0.002)
        self.steps.append(int(row["step"]))


def test_several_at_once_and_none_holds_a_step(tmp_path: Path) -> None:
    """One hangs, one dies, one is slow, two work: the loop is as fast as ever, and each failure is one event."""
    slow = Slow()
    sinks = [
        BackgroundSink(Hanging(), close_within_s=0.1),
        BackgroundSink(Dying(), gather_s=0.0),
        BackgroundSink(slow, gather_s=0.0),
        tracker("tensorboard"),
        tracker("trackio"),
    ]
    with sealegs.Watch(tmp_path / "a", sinks=sinks) as watch:
        began = time.monotonic()
        for step in range(300):
            watch.see(step, loss=1.0)
        took_s = time.monotonic() - began
    assert took_s < PATIENCE_S / 4, "one row of the sink that hangs takes longer than that"
    run = sealegs.open_run(tmp_path / "a")
    failed = [event.detail["sink"] for event in run.events if event.kind == "sink-failed"]
    assert sorted(failed) == ["dying", "hanging"]
    assert slow.steps == list(range(300))
    assert [entry["name"] for entry in run.manifest.trackers] == ["tensorboard", "trackio"]
    assert run.manifest.tracker == run.manifest.trackers[0]
    for entry in run.manifest.trackers:
        assert sealegs.open_run(entry["uri"]).column("loss").tolist() == [1.0] * 300


KILLS_CORE = """
import contextlib, os, pathlib, signal, sys, time
from sealegs.errors import SinkFailed
from sealegs.sinks.background import BackgroundSink
from sealegs.sinks.wandb import WandbSink

sink = BackgroundSink(WandbSink(), gather_s=0.0)
sink.start({"folder": sys.argv[1], "run_id": "a1"})
for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it may end while we look
        name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        if name.startswith("wandb-core") and int(rest.split()[1]) == os.getpid():
            os.kill(int(status.parent.name), signal.SIGKILL)
            print("killed")
failed_at = None
for step in range(3000):
    try:
        sink.row({"step": step, "loss": 1.0})
    except SinkFailed as failure:
        print(failure)
        failed_at = step
    if failed_at is not None and step > failed_at + 10:
        break
    time.sleep(0.01)
sink.close()
"""


def test_a_wandb_whose_process_is_killed_is_one_failure_and_nothing_else_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS_CORE, str(tmp_path / "a")],
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},  # that one is ours
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    killed, failure = done.stdout.splitlines()
    assert killed == "killed"
    assert failure.startswith("wandb: ")
    assert " rows and events delivered, " in failure
