"""``sealegs train --tracker mlflow``, with the real MLflow."""

import json
from pathlib import Path

import pytest

from sealegs.cli.main import main
from sealegs.record.run import open_run

pytestmark = [
    pytest.mark.xdist_group("mlflow"),
    # MLflow 3.17 still uses what SQLAlchemy 2.1 deprecates, at import of its SQL store.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

WORDS = ("--size", "nano", "--threads", "1", "--run", "a", "--tracker", "mlflow", "--cadence.evaluate-batches", "1")


def test_a_run_and_its_resume_are_one_run_in_the_embedded_store(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    assert main(["train", *WORDS, "--steps", "6", "--data.sources", str(tokens_file)]) == 0
    assert main(["train", *WORDS, "--steps", "9", "--resume"]) == 0
    run = open_run(tmp_path / "experiments" / "a")
    assert [event for event in run.events if event.kind == "sink-failed"] == []
    tracker = run.manifest.tracker
    assert tracker is not None
    assert tracker["uri"] == f"mlflow:{tracker['run_id']}"

    client = MlflowClient(f"sqlite:///{tmp_path}/experiments/mlflow.db")
    tracked = client.get_run(tracker["run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["model.width"] == "48"
    assert tracked.data.tags["changed.steps"] == "9"
    history = {point.step: point.value for point in client.get_metric_history(tracker["run_id"], "loss")}
    logged = run.logged("loss")
    assert history == dict(zip(run.steps[logged].tolist(), run.column("loss")[logged].tolist(), strict=True))


def test_a_server_that_is_not_there_costs_one_event_and_no_step(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["train", *WORDS, "--steps", "5", "--data.sources", str(tokens_file)]) == 0
    said = capsys.readouterr()
    assert "mlflow is off from here on, the run goes on" in said.err
    run = open_run(tmp_path / "experiments" / "a")
    assert run.steps.tolist() == list(range(6))
    assert [event.detail["sink"] for event in run.events if event.kind == "sink-failed"] == ["mlflow"]
    everything = [path.read_text(errors="replace") for path in (tmp_path / "experiments").rglob("*.json*")]
    assert "secret" not in json.dumps([*everything, said.err, said.out])
