"""A stranger's capsule: its numbers are bounded before they are unpacked, and what is wrong with it is one sentence."""

import base64
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from bench.fuzzing.targets import run_folders

from sealegs.capsule.read import incident_folder, open_capsule
from sealegs.cli.main import main
from sealegs.errors import SourceError


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an incident that can be run again."""
    folder = tmp_path_factory.mktemp("seed") / "run"
    run_folders()[0].write(folder, folder)
    return folder


@pytest.fixture
def run(seed: Path, tmp_path: Path) -> Path:
    shutil.copytree(seed, tmp_path / "run")
    return tmp_path / "run"


def test_a_capsule_is_read(run: Path) -> None:
    capsule = open_capsule(run / "incidents" / "1")
    assert capsule.incident.start in capsule.steps()
    assert {"loss", "lr", "applied"} <= capsule.rows[0].keys()
    assert "model/embedding.weight" in capsule.state().tensors


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


WRONG: list[Any] = [None, "x", [], {}, 10**30, -1, True, [[1]]]
CAPSULE = ("version", "opened", "state", "clip", "ranks", "run", "without_state")
INCIDENT = ("number", "start", "kind", "peak", "peak_loss", "end", "trajectory", "recovery_loss")


@pytest.mark.parametrize(
    ("file", "name"), [*(("capsule/capsule", name) for name in CAPSULE), *(("incident", name) for name in INCIDENT)]
)
def test_a_field_of_another_type_is_named(file: str, name: str, run: Path) -> None:
    """Or it is as good as what was there."""
    incident = run / "incidents" / "1"
    refused = []
    for wrong in WRONG:
        change(incident / f"{file}.json", **{name: wrong})
        try:
            open_capsule(incident).steps()
        except SourceError as error:
            refused.append(wrong)
            assert "cannot be read" in str(error)  # noqa: PT017
    assert [wrong for wrong in WRONG if isinstance(wrong, list | dict)] == [
        wrong for wrong in refused if isinstance(wrong, list | dict)
    ]


@pytest.mark.parametrize(
    "packed",
    [
        {"#tensor": ["uint8", [1 << 30], base64.b64encode(zlib.compress(b"\0" * (8 << 20))).decode()]},
        {"#bytes": base64.b64encode(zlib.compress(b"\0" * (8 << 20))).decode()},
        {"#array": ["|u1", [1 << 30], base64.b64encode(zlib.compress(b"\0" * (8 << 20))).decode()]},
    ],
    ids=["tensor", "bytes", "array"],
)
def test_what_a_batch_unpacks_to_is_bounded_before_it_is_unpacked(
    packed: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "1MiB")
    file = run / "incidents" / "1" / "capsule" / "batches-0.jsonl"
    file.write_text(json.dumps({"step": 1, "index": 1, "batch": packed}) + "\n")
    with pytest.raises(SourceError, match=r"comes to more than 1 MiB.*--read-up-to"):
        open_capsule(run / "incidents" / "1")


@pytest.mark.parametrize(
    "packed",
    [
        {"#tensor": ["uint8", [3], "!"]},
        {"#tensor": ["os", [3], ""]},
        {"#tensor": ["uint8", [10**30], ""]},
        {"#tensor": ["uint8", "x", ""]},
        {"#array": ["O", [1], base64.b64encode(zlib.compress(b"\0" * 8)).decode()]},
        {"#array": ["(", [1], ""]},
        {"#array": ["<f8", [10**30], base64.b64encode(zlib.compress(b"\0" * 8)).decode()]},
        {"#mapping": [[{}, 1]]},
        {"#mapping": [[1]]},
        {"#bytes": 5},
        {"#tuple": 5},
    ],
    ids=str,
)
def test_a_batch_that_stands_for_nothing_is_a_sentence(packed: Any, run: Path) -> None:
    file = run / "incidents" / "1" / "capsule" / "batches-0.jsonl"
    file.write_text(json.dumps({"step": 1, "index": 1, "batch": packed}) + "\n")
    with pytest.raises(SourceError, match="cannot be read"):
        open_capsule(run / "incidents" / "1")


@pytest.mark.parametrize(
    "name", ["capsule/capsule.json", "capsule/metrics.jsonl", "capsule/batches-0.jsonl", "incident.json"]
)
def test_a_link_out_of_the_incident_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    file = run / "incidents" / "1" / name
    (tmp_path / "secret").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="leads out of"):
        open_capsule(run / "incidents" / "1")


def test_numbers_of_incidents_are_numbers(run: Path) -> None:
    for name in ("9" * 200, "\u0663", "-1", "x"):
        (run / "incidents" / name).mkdir()
    assert incident_folder(run, None).name == "1"


def test_a_batch_of_other_tokens_is_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "incidents" / "1" / "capsule" / "batches-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    packed = base64.b64encode(zlib.compress(b"\x63\0\0\0" * 16)).decode()
    for line in lines:
        line["batch"]["tokens"] = {"#array": ["<i4", [2, 8], packed]}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["locate", str(run)]) == 2
    assert "a token is none of 32" in capsys.readouterr().err
