"""A stranger's checkpoint: its table leads to its own files, promises no more than they hold, and changes nothing."""

import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from sealegs.cli.main import main
from sealegs.errors import SourceError
from sealegs.state import checkpoint_files
from sealegs.state.checkpoint_table import TABLE, TableUnpickler, read_table
from sealegs.state.checkpoints import Checkpoints, StoredState, read_state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    Checkpoints(folder).save(1, StoredState({"model/w": torch.ones(40, 5), "model/b": torch.ones(7)}, {}, {}))
    return folder / "1"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "1"
    shutil.copytree(written, copy)
    return copy


def first(table: Metadata) -> _StorageInfo:
    place: _StorageInfo = next(iter(table.storage_data.values()))
    return place


def rename(path: Any) -> Callable[[Metadata], None]:
    return lambda table: setattr(first(table), "relative_path", path)


def resize(*size: int) -> Callable[[Metadata], None]:
    return lambda table: setattr(table.state_dict_metadata["model/w"], "size", torch.Size(size))


def drop_places(table: Metadata) -> None:
    table.storage_data.clear()


def other_chunk(table: Metadata) -> None:
    entry: Any = table.state_dict_metadata["model/w"]
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size([2**40, 5]))


CHANGES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "up": (rename("../secret"), "leads out of"),
    "absolute": (rename("/etc/passwd"), "leads out of"),
    "link": (rename("link"), "leads out of"),
    "zero byte": (rename("a\0b"), "not a name of a file"),
    "no text": (rename(5), "is no file"),
    "itself": (rename("."), "a folder, not a file"),
    "missing": (rename("nowhere"), "No such file"),
    "offset": (lambda table: setattr(first(table), "offset", 2**40), "does not lie within"),
    "length": (lambda table: setattr(first(table), "length", 2**70), "does not lie within"),
    "negative": (lambda table: setattr(first(table), "offset", -1), "does not lie within"),
    "unpacked": (lambda table: setattr(first(table), "transform_descriptors", ["zstd"]), "is no file"),
    "terabytes": (resize(2**20, 2**20), "larger than its files"),
    "a size that is none": (lambda table: setattr(table.state_dict_metadata["model/w"], "size", "x"), "has no size"),
    "a part outside": (other_chunk, "has a part outside it"),
    "no places": (drop_places, "has a part that is nowhere"),
    "a type that is none": (
        lambda table: setattr(table.state_dict_metadata["model/w"].properties, "dtype", "float32"),  # type: ignore[union-attr]
        "no dense tensor",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_table_that_its_files_do_not_bear_out_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    change, why = CHANGES[name]
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    table = TableUnpickler(io.BytesIO((folder / TABLE).read_bytes())).load()
    change(table)
    (folder / TABLE).write_bytes(pickle.dumps(table))
    with pytest.raises(SourceError, match=why):
        read_state(folder, 1)


@pytest.mark.parametrize("value", [5, {"a": 1}, Metadata({}, None, None), Metadata([], None, {})], ids=str)  # type: ignore[arg-type]
def test_what_is_no_table_is_refused(value: Any, folder: Path) -> None:
    (folder / TABLE).write_bytes(pickle.dumps(value))
    with pytest.raises(SourceError, match="not a checkpoint that Sealegs wrote"):
        read_state(folder, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04\x8c\xff",
        b"\x80\x02N" + b"r" + struct.pack("<I", 2**31) + b".",  # asks C's unpickler for 32 GiB
        b"\x80\x04\x95" + struct.pack("<Q", 2**60),
        b"\x80\x04" + b"(" * 100_000,
        b"cos\nsystem\n(S'touch evil'\ntR.",
        b"\x80\x04c" + b"torch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    ],
    ids=["empty", "torn", "text", "memo", "frame", "marks", "call", "class"],
)
def test_a_pickle_of_a_stranger_is_refused(content: bytes, folder: Path) -> None:
    (folder / TABLE).write_bytes(content)
    with pytest.raises(SourceError, match="not a checkpoint that Sealegs wrote"):
        read_table(folder)
    assert not hasattr(Metadata, "a")


def test_only_tensors_are_read(folder: Path) -> None:
    table = TableUnpickler(io.BytesIO((folder / TABLE).read_bytes())).load()
    table.state_dict_metadata["evil"] = BytesStorageMetadata()
    (folder / TABLE).write_bytes(pickle.dumps(table))
    checkpoint_files.expect_to_be_alone()
    assert read_state(folder, 1).tensors.keys() == {"model/w", "model/b"}


def test_tensors_of_megabytes_are_read(tmp_path: Path) -> None:
    """Archives are larger than what zipfile looks through for their end, and lie one after the other in a file."""
    tensors = {f"model/{name}": torch.full((1 << 20,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    Checkpoints(tmp_path).save(1, StoredState(tensors, {}, {}))
    read = read_state(tmp_path / "1", 1).tensors
    assert {name: tensor.unique().tolist() for name, tensor in read.items()} == {"model/a": [1.0], "model/b": [2.0]}


def test_a_tensor_that_is_compressed_is_refused(folder: Path) -> None:
    """Else a small file would fill the memory."""
    [file] = folder.glob("*.distcp")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"\0" * (1 << 20))
    table = TableUnpickler(io.BytesIO((folder / TABLE).read_bytes())).load()
    place = first(table)
    place.offset, place.length = file.stat().st_size, len(packed.getvalue())
    with file.open("ab") as opened:
        opened.write(packed.getvalue())
    (folder / TABLE).write_bytes(pickle.dumps(table))
    with pytest.raises(SourceError, match="is compressed, which torch never does"):
        read_state(folder, 1)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link", "x" * 200, "a\nb", "plain"])
def test_names_of_digests_stay_in_the_folder(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    digests = json.loads((folder / "digests.json").read_bytes())
    (folder / "digests.json").write_text(json.dumps({name: "0" * 64, **digests}))
    fault = checkpoint_files.fault_in(folder)
    assert fault is not None
    assert "leads out of" in fault or "none of its files" in fault or "a folder, not a file" in fault


TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (lambda: torch.zeros(1).expand(2**40), "comes to"),
    "overlapping": (lambda: torch.zeros(2**10).as_strided((2**20, 2**20), (0, 0)), "comes to"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "save dense ones"),
    "meta": (lambda: torch.zeros(3, device="meta"), "save dense ones"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_audit_refuses_tensors_that_cannot_be_looked_at(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, why = TENSORS[name]
    torch.save({"model": {"w": make()}, "step": 3}, tmp_path / "a.pt")
    assert main(["audit", str(tmp_path / "a.pt")]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.bfloat16, torch.int8])
def test_an_audit_looks_at_tensors_of_every_type(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(3).to(dtype), "e": torch.ones(1).expand(5)}, tmp_path / "a.pt")
    assert main(["audit", str(tmp_path / "a.pt")]) == 1
    assert "2 tensors" in capsys.readouterr().out


WRONG = [None, True, "x", 10**400, [], {}, [[1]], {"a": 1}, float("nan")]


@pytest.mark.parametrize("lost", ["", "exp_avg_sq", "exp_avg"])
def test_an_audit_finds_a_second_moment_that_is_lost(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its square root every update is divided. Of the first moment a dozen steps make another."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        if lost:
            state[lost].zero_()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 250}, tmp_path / "a.pt")
    main(["audit", str(tmp_path / "a.pt")])
    assert ("exp_avg_sq is 0 throughout" in capsys.readouterr().out) is (lost == "exp_avg_sq")


@pytest.mark.parametrize("wrong", WRONG, ids=ascii)
@pytest.mark.parametrize("key", ["model", "optimizer", "scheduler", "scaler", "step", "versions"])
def test_an_audit_of_a_checkpoint_with_other_values_ends_with_a_sentence(
    key: str, wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last_epoch": 3},
        "scaler": {"scale": 2.0, "growth_factor": 2.0},
        "step": 3,
        "versions": {"torch": "2.0"},
    }
    for part in (wrong, dict.fromkeys(whole[key], wrong) if isinstance(whole[key], dict) else wrong):
        torch.save({**whole, key: part}, tmp_path / "a.pt")
        assert main(["audit", str(tmp_path / "a.pt")]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err
