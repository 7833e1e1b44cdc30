"""``sealegs train --tracker`` and ``--notify``, with the real trackers."""

import json
from pathlib import Path

import numpy as np
import pytest

from sealegs.cli.main import main
from sealegs.readers.read import open_run as open_any
from sealegs.record.run import open_run

pytestmark = [
    pytest.mark.xdist_group("mlflow"),
    # MLflow 3.17 still uses what SQLAlchemy 2.1 deprecates, at import of its SQL store.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

WORDS = ("--size", "nano", "--threads", "1", "--run", "a", "--cadence.evaluate-batches", "1")
MLFLOW = ("--tracker", "mlflow")
OTHERS = ("--tracker", "wandb", "--tracker", "tensorboard", "--tracker", "trackio")


@pytest.mark.long
def test_a_run_and_its_resume_are_one_run_in_each_tracker(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    assert main(["train", *WORDS, *MLFLOW, *OTHERS, "--steps", "6", "--data.sources", str(tokens_file)]) == 0
    assert main(["train", *WORDS, *MLFLOW, *OTHERS, "--steps", "9", "--resume"]) == 0
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

    assert [entry["name"] for entry in run.manifest.trackers] == ["mlflow", "wandb", "tensorboard", "trackio"]
    assert run.manifest.trackers[0] == tracker
    for entry in run.manifest.trackers[1:]:
        tracked = open_any(entry["uri"])
        # of W&B, while it is offline, the folder of the resumed part
        assert tracked.steps.tolist() == list(range(6 if entry["name"] == "wandb" else 0, 10))
        for signal in ("loss", "grad_norm", "lr"):
            ours, theirs = run.column(signal)[run.logged(signal)], tracked.column(signal)[tracked.logged(signal)]
            np.testing.assert_allclose(theirs, ours[-len(theirs) :], rtol=1e-6)


def test_a_file_names_trackers_and_who_is_told_and_no_secret_is_kept(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told.txt"
    monkeypatch.setenv("TELL_ME", f"sh -c 'cat >> {told}; echo x7secret' x7secret")
    file = tmp_path / "mine.toml"
    file.write_text(
        '[run]\ntracker = "tensorboard"\nnotify = "$TELL_ME"\nnotify_page = "https://runs.example.org/{run}"\n'
    )
    words = ["train", str(file), *WORDS, "--steps", "5", "--data.sources", str(tokens_file)]
    assert main([*words, "--inject", "nan-gradient@2"]) == 0
    message = told.read_text().splitlines()
    assert message[0] == "a: finished (step 5)"
    assert message[1].endswith(", skipped 1 of 5 steps (nonfinite 1), 20.0%, at step 2")
    assert message[3] == "page: https://runs.example.org/a"
    run = open_run(tmp_path / "experiments" / "a")
    assert [entry["name"] for entry in run.manifest.trackers] == ["tensorboard"]
    assert "run" not in run.manifest.settings
    assert main(["train", str(file), *WORDS, "--steps", "6", "--resume"]) == 0
    assert "a: finished (step 6)" in told.read_text()
    said = capsys.readouterr()
    files = [path for path in (tmp_path / "experiments").rglob("*") if path.is_file()]
    assert not [path for path in files if b"x7secret" in path.read_bytes()]
    assert "x7secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trackers = []", "no setting is called run.trackers; did you mean run.tracker?"),
        ('tracker = "wanbd"', "tracker 'wanbd': there is none of that name; did you mean wandb?"),
        ("tracker = 3", "run.tracker=3: "),
        ('notify = ["curl", "x7secret", 3]', "run.notify: an address, a command or $NAME as text, or a list of words"),
        ('notify = "$NO_SUCH_HOOK"', "notify=$NO_SUCH_HOOK: there is no such environment variable"),
    ],
)
def test_what_a_file_has_wrong_is_refused_before_anything_is_written(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(f"[run]\n{line}\n")
    assert main(["train", "mine.toml", *WORDS]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "x7secret" not in said
    assert not (tmp_path / "experiments").exists()


def test_a_server_that_is_not_there_costs_one_event_and_no_step(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["train", *WORDS, *MLFLOW, "--steps", "5", "--data.sources", str(tokens_file)]) == 0
    said = capsys.readouterr()
    assert "mlflow is off from here on, the run goes on" in said.err
    run = open_run(tmp_path / "experiments" / "a")
    assert run.steps.tolist() == list(range(6))
    assert [event.detail["sink"] for event in run.events if event.kind == "sink-failed"] == ["mlflow"]
    everything = [path.read_text(errors="replace") for path in (tmp_path / "experiments").rglob("*.json*")]
    assert "secret" not in json.dumps([*everything, said.err, said.out])
