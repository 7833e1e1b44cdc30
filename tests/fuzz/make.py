"""Makes ``run.tar.xz``, the run folder that is damaged: trained, struck, recovered, replayed, verified, resumed.

    python tests/fuzz/make.py

It is small: one layer of width 8, one checkpoint, one incident with its capsule. What names the machine is left out.
"""

import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from sealegs.cli.main import main

HERE = Path(__file__).resolve().parent
TOKENS = "tokens.npy"
SMALL = [
    *("--model.vocabulary", "32", "--model.context", "8", "--model.layers", "1", "--model.width", "8"),
    *("--model.heads", "1", "--model.hidden", "8", "--data.batch", "2", "--data.sources", TOKENS),
    *("--cadence.evaluate-steps", "100", "--cadence.checkpoint-steps", "100", "--threads", "1"),
]


def tokens() -> bytes:
    """The data of the run: a counter."""
    file = io.BytesIO()
    np.save(file, (np.arange(3000) % 31).astype(np.uint16))
    return file.getvalue()


def make(folder: Path) -> Path:
    """Train, and do to the run everything that leaves a file in its folder."""
    os.chdir(folder)
    (folder / TOKENS).write_bytes(tokens())
    struck = ["--playbook", "standard", "--inject", "bit-flip:in=weight@200"]
    for words in (
        ["train", "--run", "./run", "--size", "nano", "--steps", "300", *struck, *SMALL],
        ["train", "--run", "./run", "--resume", "--steps", "310"],
        ["replay", "./run"],
        ["verify", "./run"],
    ):
        code = main(words)
        assert code == 0, f"{' '.join(words)}: {code}"
    return folder / "run"


def pruned(run: Path) -> None:
    """Leave out what is there twice, and what names a machine."""
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.is_dir() and checkpoint.name != "310":
            shutil.rmtree(checkpoint)
    for folder in (run, run / "incidents" / "1" / "capsule"):
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest |= {"host": {"name": "host", "cpus": 1}, "git": None}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    incident = run / "incidents" / "1"
    shutil.rmtree(incident / "evidence", ignore_errors=True)
    for name in ("postmortem.md", "postmortem.html"):
        (incident / name).unlink(missing_ok=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        event |= {"host": {"name": "host"}, "git": None} if event["kind"] == "resume" else {}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        made = make(Path(temporary).resolve())
        pruned(made)
        with tarfile.open(HERE / "run.tar.xz", "w:xz", preset=9) as archive:
            for file in sorted(path for path in made.rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(str(file.relative_to(made)))
                entry.size = file.stat().st_size
                archive.addfile(entry, io.BytesIO(file.read_bytes()))
    sys.exit(0)
