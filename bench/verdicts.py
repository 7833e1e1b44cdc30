"""What `sealegs check` says of public logs of many kinds of run, against what a person said who looked at every column.

    python bench/verdicts.py FOLDER [--half tune|report|both] [--each]

The labels are in bench/labels/kinds.csv, which names the repository and the path of each log; the logs themselves are
their authors', so fetch them into FOLDER under the name in `file`. Halves are by repository: rules were made with the
first in view, the second was looked at once, when they were done.
"""

import argparse
import csv
from collections import Counter
from pathlib import Path

from sealegs.cli.check import check
from sealegs.errors import SealegsError

LABELS = Path(__file__).with_name("labels") / "kinds.csv"
SAID = ("healthy", "watch", "act", "unknown", "refused")


def main() -> None:
    """Print the table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=Path)
    words.add_argument("--half", choices=("tune", "report", "both"), default="both")
    words.add_argument("--each", action="store_true", help="a line for each log whose verdict is another")
    chosen = words.parse_args()
    with LABELS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if chosen.half in ("both", row["half"])]
    found: Counter[tuple[str, str]] = Counter()
    kinds = missing = 0
    for row in rows:
        path = next(iter(sorted(chosen.folder.rglob(row["file"]))), None)
        if path is None:
            missing += 1
            continue
        kind, verdict, why = said_of(path)
        kinds += kind == row["kind"]
        found[row["verdict"], verdict] += 1
        if chosen.each and verdict != row["verdict"]:
            print(f"{row['file']}: {row['verdict']} ({row['cause']}, {row['confidence']}), said {verdict}: {why}")
    total = found.total()
    print(f"{total} logs, {missing} not there; kind as labelled: {kinds}")
    print(f"{'labelled':<10}" + "".join(f"{word:>9}" for word in SAID))
    for label in SAID[:4]:
        print(f"{label:<10}" + "".join(f"{found[label, word]:>9}" for word in SAID))
    right = sum(count for (label, word), count in found.items() if label == word)
    print(f"the same verdict: {right} of {total}")


def said_of(path: Path) -> tuple[str, str, str]:
    """Kind, verdict and reason."""
    try:
        findings = check(str(path), metrics={}, pattern=None, rules="calibrated").findings
    except SealegsError as error:
        return "", "refused", str(error)
    return "+".join((findings.kind.name, *findings.kind.traits)), findings.verdict, findings.because


if __name__ == "__main__":
    main()
