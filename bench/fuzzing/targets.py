"""What is fuzzed: for each kind of input its seeds, how they are damaged, and the commands that read them."""

import io
import json
import os
import pickle
import tarfile
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from bench.fuzzing import damage, page
from bench.fuzzing.damage import BYTES, WRONG, Chance, json_value, toml_value
from bench.fuzzing.sample import SPECIALS, Content, Sample, sample_of

HERE = Path(__file__).resolve().parents[2]
SEEDS = HERE / "tests" / "fuzz"
LARGEST = 256 << 10
"""Bytes beyond which a damaged file is cut: nothing is learnt from long ones, only slowly."""

Words = tuple[str, ...]


class Target(NamedTuple):
    """One kind of input."""

    seeds: Callable[[], list[Sample]]
    damaged: Callable[[Chance, Sample, Sample], Sample]
    """A sample and another one, to take parts from."""
    commands: tuple[tuple[float, Words], ...]
    """Words of commands, each with how often it is called."""


# Logs of other programs


@cache
def logs() -> list[Sample]:
    """Of every format what its library made, what the tests make, and for text what programs print."""
    from tests.readers.samples import KEPT, MAKE, rows
    from tests.readers.test_text import CASES

    found = []
    with TemporaryDirectory() as folder:
        for name, make in MAKE.items():
            (Path(folder) / name).mkdir()
            found.append(sample_of(f"made-{name}", make(Path(folder) / name, rows([*range(10), *range(6, 40)]))))
    for name, paths in KEPT.items():
        found += [sample_of(f"kept-{name}-{place}", path) for place, path in enumerate(paths)]
    found += [Sample(f"text-{name}", {"": case[0].encode()}) for name, case in CASES.items()]
    return found


def damaged_log(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """One of the files changed, now and then by the end of another log."""
    files = dict(sample.files)
    name = chance.choice(list(files))
    content = files[name]
    data = content if isinstance(content, bytes) else b""
    is_framed = data.startswith(b":W&B") or b"brain.Event:" in data[:64]
    is_store = data.startswith(b"SQLite format 3")
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        kind = chance.random()
        if is_framed and kind < 0.5:
            data = damage.within_a_record(chance, data)
        elif is_store and kind < 0.5:
            data = damaged_store(chance, data)
        elif kind < 0.6 or data.lstrip()[:1] not in (b"{", b"["):
            data = chance.choice(BYTES)(chance, data)[:LARGEST]
        else:
            data = json_value(chance, data)[:LARGEST]
    if chance.random() < 0.1:
        end = chance.choice([end for end in other.files.values() if isinstance(end, bytes)] or [b""])
        data = damage.cut(chance, data) + end[chance.randrange(len(end) + 1) :]
    if chance.random() < 0.05:
        data = damage.zipped(chance, data)
    elif chance.random() < 0.005:
        data = damage.gzip_bomb(chance, data)
    files[name] = chance.choice(SPECIALS) if name and chance.random() < 0.04 else data
    return Sample(sample.seed, files)


def damaged_store(chance: Chance, data: bytes) -> bytes:
    """A SQLite file with other values, or with a view that never ends in the place of a table."""
    import sqlite3

    with TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        path.write_bytes(data)
        with suppress(sqlite3.Error):
            store = sqlite3.connect(path)
            tables = [name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = chance.choice(tables)
            columns = [row[1] for row in store.execute(f'PRAGMA table_info("{table}")')]
            value = chance.choice(WRONG)
            plain = value if isinstance(value, str | float) or value is None else json.dumps(value)
            match chance.randrange(5):
                case 0:
                    endless = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT "
                    named = ", ".join(f'x AS "{column}"' for column in columns)
                    store.execute("PRAGMA writable_schema = ON")
                    store.execute(
                        "UPDATE sqlite_master SET rootpage = 0, sql = ? WHERE name = ?",
                        (f'CREATE VIEW "{table}" AS {endless}{named} FROM t', table),
                    )
                case 1:
                    store.execute(f'DROP TABLE "{table}"')
                case _:
                    column = chance.choice(columns)
                    where = chance.choice(("", "WHERE rowid = 3", "WHERE rowid % 5 = 0"))
                    store.execute(f'UPDATE "{table}" SET "{column}" = ? {where}', (plain,))  # noqa: S608
            store.commit()
            store.close()
        return path.read_bytes()


# Run folders


@cache
def run_folders() -> list[Sample]:
    """The run that ``tests/fuzz/make.py`` made."""
    with tarfile.open(SEEDS / "run.tar.xz") as archive:
        files: dict[str, Content] = {}
        for entry in archive.getmembers():
            if (file := archive.extractfile(entry)) is not None:
                files[entry.name] = file.read()
    return [Sample("run", files)]


def beside() -> dict[str, bytes]:
    """The data of that run, so that it can be resumed."""
    from tests.fuzz.make import TOKENS, tokens

    return {TOKENS: tokens()}


def damaged_run(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Some of the files changed; digests made right again, as a stranger would."""
    files = dict(sample.files)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = chance.choice([name for name in files if not name.startswith("checkpoints") or chance.random() < 0.3])
        files[name] = damaged_file(chance, name, files[name], list(files.values()))
        if chance.random() < 0.03:
            del files[name]
    if chance.random() < 0.1:
        add_to_run(chance, files)
    if chance.random() < 0.8:
        seal(files)
    return Sample(sample.seed, files)


def add_to_run(chance: Chance, files: dict[str, Content]) -> None:
    """Something in the folder that was not there."""
    which = chance.randrange(5)
    if which == 0:
        number = chance.choice(("0", "2", "-1", "9" * 30, "9" * 200, "\u0663", "01", "x"))
        for name in [name for name in files if name.startswith("incidents/1/")]:
            files[name.replace("incidents/1/", f"incidents/{number}/")] = files[name]
    elif which == 1:
        files[f"checkpoints/{chance.choice(('999', '9' * 200, '-5', chr(0x663)))}"] = chance.choice(SPECIALS)
    elif which == 2:
        files["metrics.columns.npz"] = cache_of(chance, files)
    elif which == 3:
        files[f"requests/{chance.choice(('1', 'x' * 100))}.json"] = chance.choice((b"[" * 5000, *SPECIALS))
    else:
        files[f"incidents/1/{chance.choice(('postmortem.md', 'evidence', 'verified.json'))}"] = chance.choice(SPECIALS)


def cache_of(chance: Chance, files: dict[str, Content]) -> bytes:
    """A cache of columns that is right about the rows, or nearly, or a bomb."""
    from sealegs.record import columns

    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        rows = files.get("metrics.jsonl")
        path.write_bytes(rows if isinstance(rows, bytes) else b"")
        size, columns.CACHE_FROM_BYTES = columns.CACHE_FROM_BYTES, 1
        try:
            columns.read_columns(path)
        finally:
            columns.CACHE_FROM_BYTES = size
        made = path.with_name("metrics.columns.npz")
        if not made.exists():
            return b""
        with np.load(made) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in stored.files}
    name = chance.choice(list(arrays))
    if name == "about" or chance.random() < 0.4:
        about = json_value(chance, arrays["about"].tobytes())
        arrays["about"] = np.frombuffer(about, np.uint8)
    else:
        arrays[name] = chance.choice(
            (np.zeros(3), np.zeros((300, 2)), np.zeros(arrays[name].shape, "S5"), np.zeros(arrays[name].shape, complex))
        )
    file = io.BytesIO()
    (np.savez_compressed if chance.random() < 0.3 else np.savez)(file, **arrays)
    data = file.getvalue()
    return chance.choice(BYTES)(chance, data) if chance.random() < 0.3 else data


def damaged_file(chance: Chance, name: str, content: Content, others: Sequence[Content]) -> Content:
    """One file of a folder, damaged as its kind can be."""
    kind = chance.random()
    if kind < 0.08 or not isinstance(content, bytes):
        return chance.choice(SPECIALS)
    if kind < 0.12:
        return b""
    if kind < 0.16:
        return chance.choice([other for other in others if isinstance(other, bytes)])
    if PurePosixPath(name).name == ".metadata" and kind < 0.8:
        return damaged_table(chance, content)
    if "batches" in name and kind < 0.2:
        return bomb_batch(content)
    if name.endswith((".json", ".jsonl")) and kind < 0.85:
        return json_value(chance, content)
    return chance.choice(BYTES)(chance, content)[: 4 * LARGEST]


def bomb_batch(content: bytes) -> bytes:
    """A capsule's batches, the first of which unpacks to far more than it is."""
    with suppress(ValueError, IndexError):
        lines = content.splitlines()
        packed = b64encode(damage.zlib_bomb()).decode()
        first = json.loads(lines[0]) | {"batch": {"#tensor": ["uint8", [damage.BOMB_BYTES], packed]}}
        return b"\n".join([json.dumps(first).encode(), *lines[1:]]) + b"\n"
    return content


def damaged_table(chance: Chance, content: bytes) -> bytes:
    """Torch's table of contents with other places, sizes and types; or with a call in it."""
    import torch
    from torch.distributed.checkpoint import metadata as parts

    from sealegs.state.checkpoint_table import TableUnpickler

    if chance.random() < 0.05:
        return pickle.dumps(_Call())
    try:
        table = TableUnpickler(io.BytesIO(content)).load()
        name = chance.choice(list(table.state_dict_metadata))
        entry = table.state_dict_metadata[name]
        index = chance.choice(list(table.storage_data))
        info = table.storage_data[index]
        huge = chance.choice((2**40, 2**62, 2**70, -1, 0, "x", None))
        match chance.randrange(9):
            case 0:
                paths = ("../../../outside/secret", "/etc/passwd", "", ".", "x\0y", 5, None, "../310/__0_0.distcp")
                info.relative_path = chance.choice(paths)
            case 1:
                info.offset = huge
            case 2:
                info.length = huge
            case 3:
                entry.size = chance.choice((torch.Size([2**20, 2**20]), torch.Size([0]), torch.Size([3, 3]), 5, None))
            case 4:
                entry.properties.dtype = chance.choice((torch.float64, torch.complex128, torch.bool, torch.float16, 5))
            case 5:
                chunk = entry.chunks[0]
                entry.chunks[0] = replace(chunk, sizes=torch.Size([2**20, 2**20]), offsets=torch.Size([5, 5]))
            case 6:
                put: tuple[Any, ...] = (None, parts.BytesStorageMetadata(), 5, {}, "x")
                table.state_dict_metadata[name] = chance.choice(put)
            case 7:
                del table.state_dict_metadata[name]
            case _:
                table.state_dict_metadata[chance.choice(("model/x", "rng/0/x", "", "optimizer/0/y"))] = entry
        return pickle.dumps(chance.choice((table, table, table, table, {"a": 1}, table.storage_data)))
    except Exception:  # damaged before
        return damage.flip(chance, content)


class _Call:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def seal(files: dict[str, Content]) -> None:
    """Digests of what is there now, in every folder that has digests."""
    for name in [name for name in files if PurePosixPath(name).name == "digests.json"]:
        folder = str(PurePosixPath(name).parent)
        prefix = "" if folder == "." else f"{folder}/"
        content = files[name]
        with suppress(ValueError, AttributeError, TypeError):
            known = json.loads(content if isinstance(content, bytes) else b"")
            for inner in known:
                there = files.get(prefix + inner)
                if isinstance(there, bytes):
                    known[inner] = sha256(there).hexdigest()
            files[name] = json.dumps(known).encode()


# Checkpoints


@cache
def checkpoints() -> list[Sample]:
    """One of ours, one of the Trainer's, and files of torch.save."""
    import torch

    run = run_folders()[0]
    ours = {
        name.removeprefix("checkpoints/310/"): data for name, data in run.files.items() if "checkpoints/310" in name
    }
    found = [Sample("ours", ours)]
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
        "step": 1,
        "rng": torch.get_rng_state(),
        "versions": {"torch": "2.0"},
    }
    found.append(Sample("pt", {"": _saved(whole)}))
    found.append(Sample("pt-legacy", {"": _saved(whole, _use_new_zipfile_serialization=False)}))
    found.append(Sample("weights", {"": _saved(model.state_dict())}))
    trainer: dict[str, Content] = {
        "trainer_state.json": json.dumps({"global_step": 1, "log_history": [{"loss": 1.0, "step": 1}]}).encode(),
        "optimizer.pt": _saved(optimizer.state_dict()),
        "scheduler.pt": _saved(schedule.state_dict()),
        "scaler.pt": _saved(whole["scaler"]),
        "pytorch_model.bin": _saved(model.state_dict()),
        "rng_state.pth": b"",
    }
    with suppress(ImportError):
        from safetensors.torch import save

        trainer["model.safetensors"] = save(model.state_dict())
    return [*found, Sample("trainer", trainer)]


def _saved(value: Any, **how: Any) -> bytes:
    import torch

    torch.save(value, file := io.BytesIO(), **how)
    return file.getvalue()


def damaged_checkpoint(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """As a folder, or what is in a file of torch.save."""
    if sample.seed == "ours":
        return damaged_run(chance, sample, other)
    files = dict(sample.files)
    name = chance.choice(list(files))
    content = files[name]
    is_pickle = name in ("", "optimizer.pt", "scheduler.pt", "scaler.pt", "pytorch_model.bin")
    if is_pickle and isinstance(content, bytes) and chance.random() < 0.6:
        files[name] = damaged_tensors(chance, content)
    elif name.endswith(".safetensors") and isinstance(content, bytes) and chance.random() < 0.6:
        files[name] = damaged_header(chance, content)
    elif name:
        files[name] = damaged_file(chance, name, content, list(files.values()))
    elif isinstance(content, bytes):
        files[name] = chance.choice(BYTES)(chance, content)
    return Sample(sample.seed, files)


def damaged_tensors(chance: Chance, content: bytes) -> bytes:
    """A saved dict in which something is other than it was: a value, a tensor, the archive itself."""
    import torch

    try:
        value = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # damaged before
        return damage.flip(chance, content)
    tensor = chance.choice((
        torch.zeros(1).expand(2**40), torch.zeros(1).as_strided((2**20, 2**20), (0, 0)), torch.empty(0),
        torch.eye(3).to_sparse(), torch.tensor(float("nan")), torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.bool), torch.tensor(5),
        torch.zeros(3, device="meta"), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.uint16),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), torch.eye(3).to_sparse_csr(),
    ))  # fmt: skip
    put = tensor if chance.random() < 0.5 else chance.choice(WRONG)
    holder, key = value, None
    while isinstance(holder, dict | list) and holder:
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        if chance.random() < 0.4 or not isinstance(holder[key], dict | list) or not holder[key]:
            break
        holder = holder[key]
    if isinstance(holder, dict | list) and key is not None:
        if isinstance(holder, dict) and chance.random() < 0.15:
            del holder[key]
        else:
            holder[key] = put
    elif not isinstance(value, dict | list):
        value = put
    try:
        data = _saved(value if chance.random() < 0.95 else put)
    except Exception:  # not everything can be saved
        return content
    return recompressed(data) if chance.random() < 0.1 else data


def recompressed(content: bytes) -> bytes:
    """The archive with its members compressed, and one of zeros that is large."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, b"\0" * (200 << 20) if member.endswith("/data/0") else old.read(member))
    return file.getvalue()


def damaged_header(chance: Chance, content: bytes) -> bytes:
    """A safetensors file with another header, or another length of it."""
    length = int.from_bytes(content[:8], "little")
    header = json_value(chance, content[8 : 8 + length])
    said = chance.choice((len(header), len(header), len(header), 2**40, 2**63, 0))
    return said.to_bytes(8, "little") + header + content[8 + length :]


# Plans and settings


@cache
def plans() -> list[Sample]:
    """Settings of the lab, a plan, Hugging Face's files."""
    from dataclasses import asdict

    from sealegs.lab.settings import Settings

    def toml(table: dict[str, Any], prefix: str = "") -> str:
        plain = {name: value for name, value in table.items() if value is not None and not isinstance(value, dict)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
        for name, value in table.items():
            if isinstance(value, dict):
                lines += [f"[{prefix}{name}]", toml(value, f"{prefix}{name}.")]
        return "\n".join(lines)

    plan = '[plan.optimizer]\noptimizer = "adamw"\nlr = 1e-3\nbeta2 = 0.999\neps = 1e-8\nclip = 1.0\n[plan.schedule]\n'
    plan += 'schedule = "cosine"\nwarmup_steps = 100\nsteps = 1000\n[plan.model]\nwidth = 512\nlayers = 8\n'
    arguments = {
        "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6},
        "warmup_ratio": 0.1, "warmup_steps": 0, "max_steps": 1000, "fp16": True, "bf16": False, "optim": "adamw_torch",
        "save_strategy": "steps", "save_steps": 0.1, "logging_steps": 10, "per_device_train_batch_size": 8,
        "save_total_limit": 2, "logging_nan_inf_filter": True, "ignore_data_skip": False, "save_only_model": False,
    }  # fmt: skip
    config = {
        "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": None, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "hidden_act": "silu", "architectures": ["X"], "use_qk_norm": False,
    }  # fmt: skip
    return [
        Sample("settings", {"settings.toml": toml(asdict(Settings())).encode()}),
        Sample("plan", {"settings.toml": plan.encode()}),
        Sample("arguments", {"training_args.json": json.dumps(arguments).encode()}),
        Sample("config", {"config.json": json.dumps({"text_config": config, **config}).encode()}),
    ]


def damaged_plan(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Other values, other bytes."""
    [(name, content)] = sample.files.items()
    assert isinstance(content, bytes)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        is_tree = chance.random() < 0.85
        change = (toml_value if name.endswith("toml") else json_value) if is_tree else chance.choice(BYTES)
        content = change(chance, content)[:LARGEST]
    return Sample(sample.seed, {name: content})


# Tokens and text


@cache
def corpora() -> list[Sample]:
    """Token ids, and text in the forms that are scanned."""
    from tests.fuzz.make import tokens

    lines = b"".join(
        json.dumps({"text": f"line {place} of some text", "id": place}).encode() + b"\n" for place in range(40)
    )
    return [
        Sample("npy", {"data.npy": tokens()[:2128]}),
        Sample("bin", {"data.bin": bytes(range(256)) * 8}),
        Sample("jsonl", {"data.jsonl": lines}),
        Sample("txt", {"data.txt": b"some text\n\nand more of it\n" * 30}),
        Sample("gz", {"data.jsonl.gz": damage.zipped(Chance(0), lines)}),
    ]


def damaged_corpus(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Other bytes, other values, another name."""
    [(name, content)] = sample.files.items()
    assert isinstance(content, bytes)
    for _ in range(chance.choice((1, 1, 2, 4))):
        change = json_value if name.endswith("jsonl") and chance.random() < 0.5 else chance.choice(BYTES)
        content = change(chance, content)[:LARGEST]
    if chance.random() < 0.1:
        name = chance.choice(
            ("data.npy", "data.bin", "data.jsonl", "data.txt", "data.jsonl.gz", "data.parquet", "data")
        )
    return Sample(sample.seed, {name: content})


# Requests


def requests() -> list[Sample]:
    """What lies in the folder of requests."""
    words = (["lr", "0.5"], ["rollback", "100"], ["skip", "3"], ["clip", "0.5"], ["swap", "x"], ["halt"])
    files: dict[str, Content] = {
        f"requests/{place}-1.json": json.dumps({"id": f"{place}-1", "by": "ana", "words": said}).encode()
        for place, said in enumerate(words)
    }
    return [Sample("requests", files)]


def damaged_requests(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Some of the files changed or of another name."""
    files = dict(sample.files)
    for _ in range(chance.choice((1, 2, 4))):
        name = chance.choice(list(files))
        content = damaged_file(chance, name, files.pop(name), list(files.values()))
        if chance.random() < 0.3:
            name = f"requests/{chance.choice(('x' * 90, 'a b', chr(0x202E), chr(10), '..', '0', chr(0xDC80)))}.json"
        files[name] = content
    return Sample(sample.seed, files)


TARGETS: dict[str, Target] = {
    "logs": Target(
        logs,
        damaged_log,
        ((4, ("@log", "{}")), (4, ("check", "{}")), (1, ("check", "{}", "--json")), (1, ("diff", "{}", "{}"))),
    ),
    "runs": Target(
        run_folders,
        damaged_run,
        (
            (3, ("check", "{}", "--explain")),
            (2, ("check", "{}", "--json")),
            (2, ("diff", "{}", "{}")),
            (3, ("audit", "{}")),
            (4, ("postmortem", "{}")),
            (1, ("postmortem", "{}/incidents/1")),
            (2, ("dashboard", "{}")),
            (2, ("interventions", "{}")),
            (1, ("interventions", "{}", "--json")),
            (1, ("do", "{}", "lr", "0.5")),
            (1, ("preflight", "{}")),
            (2, ("@open_run", "{}")),
            (1, ("@ledger", "{}")),
            (0.3, ("train", "--run", "{}", "--resume", "--steps", "312")),
        ),
    ),
    "capsules": Target(
        run_folders,
        lambda chance, sample, other: damaged_capsule(chance, sample, other),
        (
            (3, ("@capsule", "{}")),
            (1, ("replay", "{}", "--minutes", "0.02")),
            (1, ("locate", "{}")),
            (1, ("locate", "{}@201")),
            (1, ("verify", "{}", "--fix", "clip=0.5")),
            (2, ("postmortem", "{}/incidents/1")),
        ),
    ),
    "checkpoints": Target(checkpoints, damaged_checkpoint, ((1, ("audit", "{}")), (0.3, ("audit", "{}", "--json")))),
    "plans": Target(plans, damaged_plan, ((1, ("@plan", "{}")),)),
    "corpora": Target(corpora, damaged_corpus, ((1, ("@batches", "{}")), (1, ("@scan", "{}")))),
    "requests": Target(requests, damaged_requests, ((1, ("@requests", "{}")),)),
}

if page.is_there():
    TARGETS["page"] = Target(page.seeds, page.damaged, ((1, ("@page", "{}")),))


def damaged_capsule(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Only what lies in the folder of the incident."""
    inside = {name: data for name, data in sample.files.items() if name.startswith("incidents/")}
    damaged = damaged_run(chance, Sample(sample.seed, inside), other).files
    outside = {name: data for name, data in sample.files.items() if name not in inside}
    return Sample(sample.seed, {**outside, **damaged})
