"""Against a real MLflow server on loopback, and against the embedded store."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sealegs.errors import SinkFailed
from sealegs.sinks.background import BackgroundSink
from sealegs.sinks.mlflow import MlflowSink
from sealegs.vocabulary import Event, Sink

pytestmark = [
    pytest.mark.xdist_group("mlflow"),
    # MLflow 3.17 still uses what SQLAlchemy 2.1 deprecates, at import of its SQL store.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

PATIENCE_S = 60.0
"""How long a process may take before a test calls it stuck. No test that passes waits for it."""

MANIFEST = {
    "run_id": "a1-0123",
    "seed": 7,
    "dtype": "bf16",
    "settings": {
        "model": {"width": 64, "tied": True},
        "data": {"mix": ["prose", "code"], "note": "n" * 7000},
        "optimizer": {"lr": 0.001},
    },
    "versions": {"torch": "2.9.0"},
    "tracker": None,
}


@dataclass
class Place:
    """Where the runs of a test go, and how to read them there."""

    uri: str
    """Empty for the embedded store."""
    store: Path

    def manifest(self, run_name: str = "a1", **changes: Any) -> dict[str, Any]:
        return MANIFEST | {"folder": str(self.store / run_name)} | changes

    @property
    def reader(self) -> Any:
        from mlflow.tracking import MlflowClient  # two seconds, which every worker would spend to collect

        return MlflowClient(self.uri or f"sqlite:///{self.store}/mlflow.db")

    def history(self, run_id: str, name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in self.reader.get_metric_history(run_id, name)]


@dataclass
class Server:
    uri: str
    process: subprocess.Popen[bytes]
    is_stopped: bool = False

    def send(self, what: signal.Signals) -> None:
        os.killpg(self.process.pid, what)

    def stop(self) -> None:
        if not self.is_stopped:  # a second kill could meet someone else under that number
            self.is_stopped = True
            with suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | quiet, stdout=output, stderr=output, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_for(lambda: is_healthy(server), lambda: log.read_text())
        yield server
    finally:
        server.stop()


def is_healthy(server: Server) -> bool:
    assert server.process.poll() is None, "the server ended before it was ready"
    try:
        with urllib.request.urlopen(f"{server.uri}/health", timeout=5) as answer:  # noqa: S310 - our own server
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_for(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s\n{explain()}"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        for variable in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[variable]
        yield


@pytest.fixture(scope="module")
def embedded_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a store")  # with a space, as folders have


@pytest.fixture
def embedded(embedded_store: Path) -> Place:
    return Place("", embedded_store)


@pytest.fixture
def served(server: Server, tmp_path: Path) -> Place:
    os.environ["MLFLOW_TRACKING_URI"] = server.uri
    return Place(server.uri, tmp_path)


@pytest.fixture(params=["served", "embedded"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def happened(kind: str, step: int = 0, **detail: Any) -> Event:
    return Event(kind=kind, step=step, time=1.5, detail=detail)


def test_is_a_sink() -> None:
    sink: Sink = MlflowSink()
    assert sink.name == "mlflow"


def test_names_steps_times_and_values_arrive_through_the_queue(place: Place) -> None:
    sink = BackgroundSink(MlflowSink(), close_within_s=PATIENCE_S)
    started = sink.start(place.manifest())
    assert started is not None
    for step in range(700):  # two signals each: more than MLflow takes in one request
        sink.row({"step": step, "time": 1000.0 + step, "loss": 1 / (1 + step), "grad_norm/blocks[0]": step})
    sink.row({"step": 700, "loss": 2, "batch_hash": "9f", "sources": "prose=8"})
    sink.close()

    run_id = started["run_id"]
    assert place.history(run_id, "loss") == [*((step, 1 / (1 + step)) for step in range(700)), (700, 2.0)]
    assert place.history(run_id, "grad_norm/blocks_0_") == [(step, float(step)) for step in range(700)]
    assert place.reader.get_metric_history(run_id, "loss")[3].timestamp == 1_003_000
    assert set(place.reader.get_run(run_id).data.metrics) == {"loss", "grad_norm/blocks_0_"}


def test_what_is_not_finite_can_be_told_apart(place: Place) -> None:
    sink = MlflowSink()
    run_id = sink.start(place.manifest())["run_id"]
    sink.row({"step": 311, "loss": 1.0, "lr": 0.1, "grad_norm": 3.0})
    sink.rows([{"step": 312, "loss": math.inf, "grad_norm": math.nan}, {"step": 313, "loss": math.nan}])
    sink.row({"step": 314, "loss": -math.inf})

    (_, fine), (_, too_large), (_, not_a_number), (_, too_small) = place.history(run_id, "loss")
    assert fine == 1.0
    assert too_large > 1e308
    assert math.isnan(not_a_number)
    assert too_small < -1e308
    tags = place.reader.get_run(run_id).data.tags
    assert {name: text for name, text in tags.items() if name.startswith("nonfinite")} == {
        "nonfinite.loss": "step 312: Infinity",
        "nonfinite.loss.count": "3",
        "nonfinite.grad_norm": "step 312: NaN",
        "nonfinite.grad_norm.count": "1",
    }


def test_the_run_has_its_name_and_the_params_of_the_manifest(place: Place) -> None:
    run = place.reader.get_run(MlflowSink().start(place.manifest("first-try"))["run_id"])
    assert run.info.run_name == "first-try"
    assert place.reader.get_experiment(run.info.experiment_id).name == "sealegs"
    assert run.data.params == {
        "run_id": "a1-0123",
        "seed": "7",
        "dtype": "bf16",
        "model.width": "64",
        "model.tied": "True",
        "data.mix": '["prose", "code"]',
        "data.note": "n" * 6000,
        "optimizer.lr": "0.001",
        "versions.torch": "2.9.0",
    }


def test_the_address_of_a_run_on_a_server_is_its_page(served: Place) -> None:
    started = MlflowSink().start(served.manifest())
    run = served.reader.get_run(started["run_id"])
    assert started == {
        "name": "mlflow",
        "run_id": run.info.run_id,
        "uri": f"{served.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}",
        "tracking_uri": served.uri,
    }


def test_the_embedded_store_is_one_file_with_the_artifacts_beside_it(embedded: Place) -> None:
    started = MlflowSink().start(embedded.manifest())
    assert started["uri"] == f"mlflow:{started['run_id']}"
    assert started["tracking_uri"] == f"sqlite:///{embedded.store}/mlflow.db"
    assert (embedded.store / "mlflow.db").is_file()
    artifacts = embedded.reader.get_run(started["run_id"]).info.artifact_uri
    assert artifacts.startswith((embedded.store / "artifacts").as_uri())


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (None, "FINISHED"),
        ("finished", "FINISHED"),
        ("interrupted", "KILLED"),
        ("failed", "FAILED"),
        ("something new", "FAILED"),
    ],
)
def test_the_status_is_what_the_end_event_told(embedded: Place, end: str | None, status: str) -> None:
    sink = MlflowSink()
    run_id = sink.start(embedded.manifest())["run_id"]
    assert embedded.reader.get_run(run_id).info.status == "RUNNING"
    if end:
        sink.event(happened("end", reason=end))
    sink.close()
    info = embedded.reader.get_run(run_id).info
    assert (info.status, info.end_time is not None) == (status, True)


def test_names_and_texts_of_others_can_be_seen(embedded: Place) -> None:
    sink = MlflowSink()
    manifest = {**embedded.manifest(), "settings": {"a\x1b[2J": "b\n\u202e"}, "dtype": "c\0"}
    run_id = sink.start(manifest)["run_id"]
    sink.rows([{"step": 1, "loss\x1b": 2.0}])
    sink.event(happened("skip", 1, text="d\x1b[2J\n", **{"e\r": ["f\x07"]}))
    data = embedded.reader.get_run(run_id).data
    assert data.tags["event.001"] == r'step 1 skip text=d\x1b[2J\n e\r=["f\u0007"]'
    assert (data.params["a_x1b_2J"], data.params["dtype"]) == (r"b\n\u202e", r"c\x00")
    assert list(data.metrics) == ["loss_x1b"]


def test_events_are_tags_bounded_in_number(embedded: Place) -> None:
    sink = MlflowSink()
    run_id = sink.start(embedded.manifest())["run_id"]
    sink.event(happened("checkpoint", 200, path="checkpoints/200", sizes={"model": 3}))
    for step in range(201, 303):
        sink.event(happened("skip", step, why="x" * 9000))
    tags = {name: text for name, text in embedded.reader.get_run(run_id).data.tags.items() if "event" in name}
    assert tags["event.001"] == 'step 200 checkpoint path=checkpoints/200 sizes={"model": 3}'
    assert tags["event.newest"].startswith("step 302 skip why=xxx")
    assert tags["event.count"] == "103"
    assert len(tags) == 102
    assert max(map(len, tags.values())) <= 500


def test_a_resumed_run_goes_on_with_the_same_mlflow_run(place: Place) -> None:
    first = MlflowSink()
    tracker = first.start(place.manifest())
    first.row({"step": 0, "loss": math.nan})
    first.event(happened("end", reason="interrupted"))
    first.close()

    slower = MANIFEST["settings"] | {"optimizer": {"lr": 0.0005}, "new": True}  # type: ignore[operator]
    second = MlflowSink()
    assert second.start(place.manifest(settings=slower, tracker=tracker)) == tracker
    run = place.reader.get_run(tracker["run_id"])
    assert run.info.status == "RUNNING"
    assert (run.data.params["optimizer.lr"], run.data.tags["changed.optimizer.lr"]) == ("0.001", "0.0005")
    assert run.data.params["new"] == "True"
    assert [tag for tag in run.data.tags if tag.startswith("changed.")] == ["changed.optimizer.lr"]

    second.row({"step": 1, "loss": math.inf})
    second.event(happened("end", 1, reason="finished"))
    second.close()
    run = place.reader.get_run(tracker["run_id"])
    assert [step for step, _ in place.history(tracker["run_id"], "loss")] == [0, 1]
    assert (run.data.tags["nonfinite.loss"], run.data.tags["nonfinite.loss.count"]) == ("step 0: NaN", "2")
    assert (run.data.tags["event.001"], run.data.tags["event.002"]) == (
        "step 0 end reason=interrupted",
        "step 1 end reason=finished",
    )
    assert run.info.status == "FINISHED"

    MlflowSink().start(place.manifest(tracker=tracker))
    assert place.reader.get_run(tracker["run_id"]).data.tags["changed.optimizer.lr"] == "0.001", "changed back"


@pytest.mark.parametrize("gone", ["never there", "deleted", "another tracker's"])
def test_a_run_that_is_not_in_this_store_is_begun_anew(place: Place, gone: str) -> None:
    tracker = dict(MlflowSink().start(place.manifest()))
    if gone == "never there":
        tracker["run_id"] = "0" * 32
    elif gone == "deleted":
        place.reader.delete_run(tracker["run_id"])
    else:
        tracker["name"] = "wandb"
    assert MlflowSink().start(place.manifest(tracker=tracker))["run_id"] != tracker["run_id"]


def test_another_run_may_make_the_experiment_first(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    MlflowSink().start(served.manifest())
    look = MlflowClient.get_experiment_by_name
    answers = iter([None])
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda client, name: next(answers, look(client, name)))
    assert MlflowSink().start(served.manifest())["run_id"]
    assert next(answers, "used") == "used"


@pytest.mark.long
def test_two_runs_may_make_the_embedded_store_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, mlflow.store.tracking.sqlalchemy_store; from sealegs.sinks.mlflow import MlflowSink\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "MlflowSink().start({'folder': sys.argv[1]})"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "a1")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("\n")
        other.stdin.flush()
        MlflowSink().start(MANIFEST | {"folder": str(tmp_path / "a2")})
        _, complaint = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 0, complaint


def test_without_mlflow_the_sentence_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['mlflow'] = None\n"
        "from sealegs.sinks.mlflow import MlflowSink, MissingExtra\n"
        "try: MlflowSink().start({})\n"
        "except MissingExtra as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "the tracker mlflow needs mlflow, which is not installed: pip install 'sealegs[mlflow]'\n"


def test_no_password_in_what_is_returned_or_printed(served: Place, capfd: pytest.CaptureFixture[str]) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = served.uri.replace("//", "//ann:secret@")
    sink = MlflowSink()
    started = sink.start(served.manifest())
    sink.close()
    assert started["tracking_uri"] == served.uri
    assert started["uri"].startswith(f"{served.uri}/#/")
    assert "secret" not in str(started)
    assert "secret" not in "".join(capfd.readouterr())


def test_what_the_user_set_is_left_as_it_is(embedded: Place) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "77"
    MlflowSink().start(embedded.manifest())
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"


def test_a_server_that_hangs_holds_neither_rows_nor_the_end_of_the_run(server: Server, served: Place) -> None:
    sink = BackgroundSink(MlflowSink(), close_within_s=0.2)
    sink.start(served.manifest())
    server.send(signal.SIGSTOP)
    try:
        for step in range(1000):
            sink.row({"step": step, "loss": 1.0})
        with pytest.raises(
            SinkFailed, match=r"mlflow: not done within 0\.2 s .* 0 rows and events delivered, 1000 not"
        ):
            sink.close()
    finally:
        server.send(signal.SIGCONT)


# The last one, because it takes the server away.
def test_a_killed_server_costs_one_failure_and_no_row_waits_for_it(server: Server, served: Place) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = served.uri.replace("//", "//ann:secret@")
    sink = BackgroundSink(MlflowSink())
    started = sink.start(served.manifest())
    assert started is not None
    sink.row({"step": 0, "loss": 1.0})
    wait_for(lambda: sink._delivered == 1)  # else the answer to this row could be what the server's end takes away
    assert served.history(started["run_id"], "loss") == [(0, 1.0)]

    server.stop()
    failures: list[str] = []

    def one_more_row_fails() -> bool:
        try:
            sink.row({"step": 1, "loss": 1.0})
        except SinkFailed as told:
            failures.append(str(told))
        return bool(failures)

    assert not one_more_row_fails(), "that the server is gone is not known yet: the row was queued"
    wait_for(one_more_row_fails)
    assert failures[0].startswith(f"mlflow: MlflowException: API request to {served.uri}/api/")
    assert "; 1 rows and events delivered, " in failures[0]
    assert "secret" not in failures[0]
    for step in range(2, 100):
        sink.row({"step": step, "loss": 1.0})
    sink.event(happened("end", reason="finished"))
    sink.close()
