"""How fast a corpus is scanned, and in how much memory.

    python bench/scan.py [--megabytes 200] [--tokens 100000000] [--jobs 2]

Text: the source of this interpreter's standard library, with its tests, again and again, a number in front of each
document so that none is there twice. Tokens: 50,000 different ones, drawn as words fall in a text, and 5,000 rare ones;
rows of 1024. Each is scanned as `sealegs scan` does it, by processes of their own, in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from sealegs.lab import tokenizer

PROGRAM = "from sealegs.cli.main import main\nif __name__ == '__main__': raise SystemExit(main({words!r}))\n"
VOCABULARY, RARE = 50_000, 5_000


def documents(megabytes: float) -> Iterator[str]:
    """Real text."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    number = written = 0
    while written < megabytes * 1e6:
        text = f"# {number}\n" + files[number % len(files)].read_text("utf-8", errors="replace")
        number += 1
        written += len(text)
        yield text


def write_tokens(path: Path, count: int) -> None:
    """Ids as words fall in a text."""
    draw = np.random.default_rng(0)
    tokens = open_memmap(path, "w+", np.uint16, (count,))
    for first in range(0, count, 1 << 24):
        size = min(1 << 24, count - first)
        tokens[first : first + size] = (VOCABULARY ** draw.random(size) - 1).astype(np.uint16)
    places = draw.choice(count, RARE * 8, replace=False)
    tokens[places] = VOCABULARY + np.arange(RARE * 8) % RARE
    tokens.flush()


def measured(what: str, scratch: Path, size: float, unit: str, *words: str) -> None:
    """One scan, as a command."""
    (scratch / "run.py").write_text(PROGRAM.format(words=["scan", *words, "--json"]))
    began = time.perf_counter()
    with (scratch / "told").open("wb") as told_to, (scratch / "progress").open("wb") as progress:
        run = subprocess.Popen([sys.executable, "run.py"], cwd=scratch, stdout=told_to, stderr=progress)
        _, _, used = os.wait4(run.pid, 0)
    wall = time.perf_counter() - began
    told = json.loads((scratch / "told").read_text())
    print(
        f"| {what} | {size:,.0f} {unit} | {wall:.1f} s | {size / wall:,.1f} {unit}/s | "
        f"{used.ru_utime + used.ru_stime:.1f} s | {used.ru_maxrss / 1024:,.0f} MiB | {told['documents']:,} | "
        f"{told['to_drop'] + told['to_defer']:,} |",
        flush=True,
    )


def main() -> None:
    """Make the corpora, scan them, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    jobs = ("--jobs", str(options.jobs))
    print("| corpus | size | wall | a second | CPU | largest process | documents | listed |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "files").mkdir()
        with (scratch / "a.jsonl").open("w") as lines, (scratch / "a.txt").open("w") as text:
            for number, each in enumerate(documents(options.megabytes)):
                lines.write(json.dumps({"text": each}) + "\n")
                text.write("\n".join(line for line in each.splitlines() if line.strip()) + "\n\n")
                (scratch / "files" / f"{number}.py").write_text(each)
        sizes = {name: (scratch / name).stat().st_size / 1e6 for name in ("a.jsonl", "a.txt")}
        measured("JSON lines", scratch, sizes["a.jsonl"], "MB", "a.jsonl", *jobs)
        measured("text, parted by blank lines", scratch, sizes["a.txt"], "MB", "a.txt", *jobs)
        measured("a file a document", scratch, options.megabytes, "MB", "files", *jobs)
        some = list(documents(options.megabytes / 20))
        (scratch / "some.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in some))
        tokenizer.train(some[:200], 4096).save(scratch / "tokenizer.json")
        size = (scratch / "some.jsonl").stat().st_size / 1e6
        asked = ("some.jsonl", "--tokenizer", "tokenizer.json", *jobs)
        measured("JSON lines, with a tokenizer of 4096", scratch, size, "MB", *asked)
        write_tokens(scratch / "a.npy", options.tokens)
        measured("token ids", scratch, options.tokens / 1e6, "M", "a.npy", *jobs)
        measured("token ids, and a forecast", scratch, options.tokens / 1e6, "M", "a.npy", "--batch", "32", *jobs)


if __name__ == "__main__":
    main()
