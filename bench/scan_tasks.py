"""What the scan in tasks costs beside the pool of one machine, and how much memory its merge and the forecast take.

    python bench/scan_tasks.py [--megabytes 250] [--jobs 2] [--documents 100000000] [--rows 1000000000]

Text: the sources and documents of this interpreter's packages and of this system, in many languages (Python, C, C++,
JavaScript, Markdown and others), each file once before any comes again, with a number in front. The merge: counts of a
hundred bundles, made up, a tenth of the documents equal to others. The forecast: 50,000 rare tokens in nine rows each,
as rows lie and by an order in a file. CPU seconds are of all processes; those by the clock count where nothing else
runs.
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

PROGRAM = "from sealegs.cli.main import main\nif __name__ == '__main__': raise SystemExit(main({words!r}))\n"
LANGUAGES = (
    "py",
    "pyi",
    "md",
    "rst",
    "txt",
    "h",
    "hpp",
    "cpp",
    "c",
    "cu",
    "js",
    "ts",
    "css",
    "html",
    "json",
    "sh",
    "pyx",
)
ENDINGS = frozenset(["." + each for each in LANGUAGES])
LARGEST = 1 << 20
MERGE = """
import sys, resource, shutil
import numpy as np
from sealegs.scan.blocks import Part, Ways
from sealegs.scan.counts import Counts, SourceSizes, document_key, merged, source_key
from sealegs.scan.summary import CorpusSummary
from sealegs.scan.work_folder import WorkFolder
step, bundles, documents = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
parts = [Part(number, f"{number}.jsonl", "all", "lines", size=1) for number in range(bundles)]
if step == "write":
    draw = np.random.default_rng(0)
    work = WorkFolder.prepared("work", ["corpus"], parts, Ways())
    for bundle in range(bundles):
        each = documents // bundles
        digests = draw.integers(0, 1 << 63, each).astype(np.uint64)
        digests[: each // 10] = np.arange(each // 10, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        work.keep(bundle, Counts(
            tokens=draw.integers(10, 1 << 30, 50_000), digests=digests, documents=document_key(bundle, np.arange(each)),
            origins=np.full(each, source_key("all"), np.uint32), sources={"all": SourceSizes.of(np.full(each, 300), 1)},
            parts={bundle: each}, units=frozenset(["tokens"])))
else:
    work = WorkFolder.opened("work")
    if step == "read":
        summary = CorpusSummary(merged(work.kept()), parts, Ways(), tables=work.tables)
        print(sum(summary.counts.found.values()), "duplicates,", len(summary.counts.findings), "of them listed")
"""
FORECAST = """
import sys, time
import numpy as np
from sealegs.batching.stratified import RareRows
from sealegs.scan.forecast import ahead
how, rows = sys.argv[1], int(sys.argv[2])
draw = np.random.default_rng(0)
rare = RareRows(rows, draw.integers(0, rows, 450_000), np.arange(450_000) % 50_000)
if how == "write":
    order = np.lib.format.open_memmap("order.npy", "w+", np.int64, (rows,))
    for first in range(0, rows, 1 << 24):
        size = min(1 << 24, rows - first)
        order[first:first + size] = first + draw.permutation(size)
else:
    order = range(rows) if how == "range" else np.lib.format.open_memmap("order.npy", "r")
    found = ahead(order, rare, 1024)
    print(found.batches, "batches,", found.meeting, "meet,", found.crowded, "crowded")
"""


def documents(megabytes: float) -> Iterator[str]:
    """Real text, each file once before any comes again."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "/usr/share/doc", "/usr/include"]
    files = [path for place in places for path in sorted(Path(place).rglob("*")) if path.suffix in ENDINGS]
    files = [path for path in files if path.is_file() and 0 < path.stat().st_size < LARGEST]
    number = written = 0
    while written < megabytes * 1e6:
        text = f"# {number}\n" + files[number % len(files)].read_text("utf-8", errors="replace")
        number += 1
        written += len(text)
        yield text


def run(scratch: Path, program: str, *words: str) -> tuple[str, float, float]:
    """A program in a process of its own: what it said, CPU seconds with its children, its largest memory."""
    (scratch / "run.py").write_text(program)
    with (scratch / "told").open("wb") as told_to, (scratch / "progress").open("wb") as progress:
        made = subprocess.Popen([sys.executable, "run.py", *words], cwd=scratch, stdout=told_to, stderr=progress)
        _, status, used = os.wait4(made.pid, 0)
    error = (scratch / "progress").read_text()
    if os.waitstatus_to_exitcode(status) not in (0, 1) or "Traceback" in error:
        raise SystemExit(error)
    return (scratch / "told").read_text(), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def scans(scratch: Path, megabytes: float, jobs: int) -> None:
    """The pool and 1, 2 and 200 tasks, on files of about a megabyte."""
    (scratch / "corpus").mkdir()
    lines: list[str] = []
    size = number = 0
    for text in documents(megabytes):
        lines.append(json.dumps({"text": text}) + "\n")
        size += len(lines[-1])
        if size > 1 << 20:
            (scratch / "corpus" / f"{number:05d}.jsonl").write_text("".join(lines))
            lines, size, number = [], 0, number + 1
    total = sum(path.stat().st_size for path in (scratch / "corpus").iterdir()) / 1e6
    print(f"{total:,.0f} MB in {number:,} files, {jobs} processes at a time\n")
    print("| | CPU | by the clock | largest process | report |\n|---|---|---|---|---|")
    wanted = ""
    for tasks in (0, 1, 2, 200):
        asked = ["--on", "local", "--tasks", str(tasks), "--work", f"work{tasks}"] if tasks else []
        words = ["scan", "corpus", "--json", "--jobs", str(jobs), *asked]
        began = time.monotonic()
        said, seconds, memory = run(scratch, PROGRAM.format(words=words))
        took = time.monotonic() - began
        wanted = wanted or said
        same = "the same bytes" if said == wanted else "ANOTHER"
        name = f"{tasks} task{'s' * (tasks > 1)}" if tasks else "the pool"
        print(f"| {name} | {seconds:.1f} s | {took:.1f} s | {memory:,.0f} MiB | {same} |", flush=True)


def main() -> None:
    """Run all, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=250)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--rows", type=int, default=1_000_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.megabytes:
            scans(scratch, options.megabytes, options.jobs)
        print("\n| | CPU | largest memory | said |\n|---|---|---|---|")
        if options.documents:
            run(scratch, MERGE, "write", "100", str(options.documents))
            for step, name in (("nothing", "the plan alone"), ("read", "merge and report")):
                said, seconds, memory = run(scratch, MERGE, step, "100", str(options.documents))
                what = f"{name}, {options.documents:,} documents"
                print(f"| {what} | {seconds:.1f} s | {memory:,.0f} MiB | {said.strip()} |", flush=True)
        if options.rows:
            run(scratch, FORECAST, "write", str(options.rows // 10))
            for how, rows in (("range", options.rows), ("file", options.rows // 10)):
                said, seconds, memory = run(scratch, FORECAST, how, str(rows))
                what = f"forecast, {rows:,} rows {'as they lie' if how == 'range' else 'in the order of a file'}"
                print(f"| {what} | {seconds:.1f} s | {memory:,.0f} MiB | {said.strip()} |", flush=True)


if __name__ == "__main__":
    main()
