"""How many edited copies `sealegs scan --near` finds, and how many of those it names are copies.

    python bench/near.py [--documents 2000] [--copies 150] [--jobs 2]

Documents: pieces of 150 to 600 words of the source of this interpreter's packages, shuffled. Of some, a copy is
planted in which each word is replaced, left out or followed by another one by chance: 1 to 20 % of them. What is
planted is known here alone; the scan is run as a command. Sources have pieces that are alike by themselves (licences,
tables): one that was named and was not planted is held against those that it is said to be like, and counts as alike
where it has half of its runs of five words in common with one of them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

PROGRAM = "from sealegs.cli.main import main\nif __name__ == '__main__': raise SystemExit(main({words!r}))\n"
RATES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
LIKE = 0.5
PARAMETERS = ((5, 14, 8), (5, 20, 5), (3, 20, 5), (2, 20, 5), (2, 30, 4))


def pieces(count: int, draw: random.Random) -> list[str]:
    """Real text."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    draw.shuffle(files)
    found: list[str] = []
    for path in files:
        words = path.read_text("utf-8", errors="replace").split(" ")
        size = draw.randint(150, 600)
        if len(words) > size:
            found.append(" ".join(words[:size]))
        if len(found) == count:
            break
    return found


def edited(text: str, rate: float, draw: random.Random, others: list[str]) -> str:
    """A copy with edits."""
    words: list[str] = []
    for word in text.split():
        kind = draw.randrange(3) if draw.random() < rate else 3
        words += [] if kind == 1 else [draw.choice(others)] if kind == 0 else [word]
        if kind == 2:
            words.append(draw.choice(others))
    return " ".join(words)


def shingles(text: str) -> set[tuple[str, ...]]:
    """Its runs of five words."""
    words = text.lower().split()
    return set(zip(*(words[start:] for start in range(5)), strict=False))


def likeness(one: str, two: str) -> float:
    """The share of runs that both have."""
    first, second = shingles(one), shingles(two)
    return len(first & second) / max(len(first | second), 1)


def place_of(file: str, document: int) -> int:
    """Of a document among all that were made: files hold a hundred each, and are named by their first."""
    return int(Path(file).stem) + document


def named(listed: list[dict[str, Any]]) -> dict[int, int]:
    """The documents that were named as copies, and the one that is kept."""
    found: dict[int, int] = {}
    for each in listed:
        for why in each["why"]:
            if why.startswith(("near-duplicate: as ", "duplicate: the same as ")):
                twin, _, number = why.partition("as ")[2].partition(", one of")[0].rpartition("#")
                found[place_of(each["file"], each["document"])] = place_of(twin, int(number))
    return found


def judged(made: list[tuple[str, int, float]], kept: dict[int, int]) -> tuple[Counter[float], Counter[str]]:
    """Copies that were found, by rate; and what those are that were named."""
    groups: dict[int, set[int]] = {}
    for one, other in kept.items():
        groups.setdefault(other, {other}).add(one)
    where = {place: group for group in groups.values() for place in group}
    original_at = {number: place for place, (_, number, rate) in enumerate(made) if rate == 0}
    recalled = Counter(
        rate for place, (_, number, rate) in enumerate(made) if rate and original_at[number] in where.get(place, ())
    )
    kinds: Counter[str] = Counter()
    for one, other in kept.items():
        if made[one][1] == made[other][1]:
            kinds["copies"] += 1
        elif max(likeness(made[one][0], made[each][0]) for each in where[one] - {one}) >= LIKE:
            kinds["alike"] += 1
        else:
            kinds["else"] += 1
    return recalled, kinds


def scanned(scratch: Path, jobs: int, parameters: tuple[int, int, int]) -> tuple[list[dict[str, Any]], float]:
    """The list of a scan, and the CPU seconds of all its processes."""
    words, buckets, hashes = map(str, parameters)
    output = f"o{words}-{buckets}-{hashes}"
    asked = ["--on", "local", "--tasks", "4", "--near", "--work", f"w{output}", "--jobs", str(jobs), "-o", output]
    asked += ["--near-words", words, "--near-buckets", buckets, "--near-hashes", hashes]
    (scratch / "run.py").write_text(PROGRAM.format(words=["scan", "corpus", *asked]))
    with (scratch / "told").open("wb") as told:
        run = subprocess.Popen([sys.executable, "run.py"], cwd=scratch, stdout=told, stderr=told)
        _, _, used = os.wait4(run.pid, 0)
    lines = (scratch / output / "documents.jsonl").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines], used.ru_utime + used.ru_stime


def main() -> None:
    """Plant, scan, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--copies", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - no secrets
    originals = pieces(options.documents, draw)
    vocabulary = sorted({word for text in originals[:200] for word in text.split()})
    made: list[tuple[str, int, float]] = [(text, number, 0.0) for number, text in enumerate(originals)]
    for place, number in enumerate(draw.sample(range(len(originals)), options.copies * len(RATES))):
        rate = RATES[place % len(RATES)]
        made.append((edited(originals[number], rate, draw, vocabulary), number, rate))
    draw.shuffle(made)
    size = sum(len(text) for text, *_ in made) / 1e6
    print(f"{len(originals):,} documents and {options.copies} copies at each rate, {size:.1f} MB")
    rates = " | ".join(f"{rate:.0%}" for rate in RATES)
    print(f"| words, buckets, hashes | {rates} | named | copies | alike | else | CPU |")
    print("|---|" + "---|" * (len(RATES) + 5))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "corpus").mkdir()
        for first in range(0, len(made), 100):
            lines = (json.dumps({"text": text}) + "\n" for text, *_ in made[first : first + 100])
            (scratch / "corpus" / f"{first:06d}.jsonl").write_text("".join(lines))
        for parameters in PARAMETERS:
            listed, seconds = scanned(scratch, options.jobs, parameters)
            kept = named(listed)
            recalled, kinds = judged(made, kept)
            row = " | ".join(f"{recalled[rate] / options.copies:.0%}" for rate in RATES)
            told = " | ".join(f"{kinds[kind]:,}" for kind in ("copies", "alike", "else"))
            print(
                f"| {', '.join(map(str, parameters))} | {row} | {len(kept):,} | {told} | {seconds:.0f} s |", flush=True
            )


if __name__ == "__main__":
    main()
