"""A log that is small on disk and endless in memory is refused in one sentence, which says how to raise the bound."""

import gzip
import json
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from tests.readers.samples import KEPT, MAKE, rows

from sealegs.cli.main import main
from sealegs.errors import SourceError
from sealegs.readers.read import read


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "64KiB")


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("table.csv.gz", "step,loss\n1,2\n2,3\n"),
        ("lines.jsonl.gz", '{"step": 1, "loss": 2}\n'),
        ("log.gz", "step 1 loss 2\n"),
    ],
)
def test_an_archive_is_unpacked_up_to_the_bound(name: str, begins: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(begins.encode() * 20 + b"\n" * (1 << 20)))
    with pytest.raises(SourceError, match=r"comes to more than 65,536 bytes.*--read-up-to 8GiB"):
        read(str(tmp_path / name))


def test_the_flag_raises_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"".join(f"step {step} loss {3 - step / 1000}\n".encode() for step in range(1000))
    (tmp_path / "log.gz").write_bytes(gzip.compress(lines + b"\n" * 100_000))
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "64KiB")
    assert main(["check", str(tmp_path / "log.gz")]) == 2
    assert "--read-up-to" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "log.gz"), "--read-up-to", "1MiB"]) == 0
    assert main(["--read-up-to=1MiB", "check", str(tmp_path / "log.gz")]) == 0
    assert os.environ["SEALEGS_READ_UP_TO"] == "64KiB", "for this command alone"
    assert main(["check", str(tmp_path / "log.gz"), "--read-up-to", "much"]) == 2
    assert capsys.readouterr().err == "sealegs check: SEALEGS_READ_UP_TO=much: a size, such as 8GiB or 500MiB\n"


@pytest.mark.usefixtures("little")
def test_one_json_value_is_held_whole_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}] * 1000}))
    with pytest.raises(SourceError, match=r"one JSON value of more than 16,384 bytes"):
        read(str(tmp_path / "a.json"))


def test_a_record_that_says_it_is_endless_is_where_a_file_is_torn(tmp_path: Path) -> None:
    """TensorBoard would set aside as much memory as it says."""
    [folder] = [path for path in KEPT["tensorboard"] if path.is_dir()][:1] or [KEPT["tensorboard"][0].parent]
    whole = next(folder.glob("*tfevents*"))
    content = whole.read_bytes()
    at = 0
    for _ in range(3):
        at += int.from_bytes(content[at : at + 8], "little") + 16
    path = tmp_path / whole.name
    path.write_bytes(content[:at] + struct.pack("<Q", 2**62) + content[at + 8 :])
    try:
        assert any("is torn or damaged" in remark for remark in read(str(path)).remarks)
    except SourceError as error:
        assert "is torn or damaged" in str(error)  # noqa: PT017


def test_a_view_without_end_in_the_place_of_a_table_is_no_hang(tmp_path: Path) -> None:
    path = MAKE["trackio"](tmp_path, rows(range(5)))
    endless = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT x AS id, x AS run_name, x AS step"
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA writable_schema = ON")
        store.execute(
            "UPDATE sqlite_master SET rootpage = 0, sql = ? WHERE name = 'metrics'",
            (f"CREATE VIEW metrics AS {endless}, x AS metrics FROM t",),
        )
        store.commit()
    with pytest.raises(SourceError):
        read(str(path))


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trainer_state", "run_folder"])
def test_a_file_of_a_folder_that_leads_elsewhere_is_not_read(kind: str, tmp_path: Path) -> None:
    """Nor is a FIFO waited for."""
    names = {
        "tensorboard": "events.out.tfevents.1.x",
        "wandb": "run-1.wandb",
        "mlflow": "metrics/loss",
        "trainer_state": "trainer_state.json",
        "run_folder": "manifest.json",
    }
    (tmp_path / "secret").write_text('{"log_history": [{"loss": 1, "step": 1}], "schema": 1, "run_id": "a"}')
    for number, is_link in enumerate((False, True)):
        folder = tmp_path / f"run-{number}"
        file = folder / names[kind]
        file.parent.mkdir(parents=True)
        (folder / "meta.yaml").write_text("a: 1\n") if kind == "mlflow" else None
        if is_link:
            file.symlink_to(tmp_path / "secret")
        else:
            os.mkfifo(file)
        with pytest.raises(SourceError):
            read(str(folder))
