"""One conformance suite over every integration: which tests show which promise, what they found, and a matrix of it.

A test says what it shows by its marks, ``integration(NAME)`` and ``conforms(FEATURE, ...)``. To run them all:

    pytest -p tests.conformance -m conforms --conformance REPORT.json     what ran, with its outcome
    python -m tests.conformance                                           writes the matrix into docs/integrations.md

The matrix is made from all reports in docs/benchmarks, the newest result of each test, and from nothing else.
"""

import json
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "integrations.md"
REPORTS = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- made by python -m tests.conformance -->", "<!-- end -->"

FEATURES = {
    "unchanged": "nothing happens: bit for bit as without a guard",
    "nan": "a NaN is skipped exactly",
    "spike": "a spike is skipped exactly",
    "accumulation": "micro-batches make one step",
    "resume": "a resume goes on",
    "rollback": "a rollback",
    "ranks": "two ranks, the one at fault named",
}


@dataclass(frozen=True, slots=True)
class Integration:
    """A framework, or a part of one, whose loop is guarded."""

    name: str
    page: str
    package: str
    versions: str
    """Those that are accepted."""
    module: str = ""
    """In ``sealegs.integrations``; empty where the guard of one's own loop is used."""
    cannot: dict[str, str] = field(default_factory=dict)
    """Features that are not tested, and why."""


_OF_TRAINER = "the Trainer's, whose tests show it"
_NOT_BACK = "refused: the Trainer reads the data, and counts"
INTEGRATIONS = (
    Integration("a loop of one's own", "loops.md", "torch", ">=2.6"),
    Integration("Hugging Face Trainer", "huggingface.md", "transformers", ">=5.3", "hf"),
    Integration("Accelerate", "accelerate.md", "accelerate", ">=1.1", "accelerate"),
    Integration("Lightning", "lightning.md", "lightning", ">=2.5", "lightning"),
    Integration(
        "TRL",
        "trl.md",
        "trl",
        ">=1.16",
        cannot=dict.fromkeys(("spike", "accumulation", "resume", "rollback", "ranks"), _OF_TRAINER),
    ),
    Integration("DeepSpeed, ZeRO 0", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed",
                {"accumulation": "run in stages 2 and 3"}),
    Integration("DeepSpeed, ZeRO 1", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed",
                {"accumulation": "run in stages 2 and 3", "rollback": "run in stages 0, 2 and 3"}),
    Integration("DeepSpeed, ZeRO 2", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed"),
    Integration("DeepSpeed, ZeRO 3", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed"),
    Integration(
        "DeepSpeed under Accelerate", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed",
    ),
    Integration(
        "DeepSpeed in the Trainer", "deepspeed.md", "deepspeed", ">=0.19.8,<0.20", "deepspeed_trainer",
        {"accumulation": "the engine's own is run", "rollback": _NOT_BACK},
    ),
    Integration(
        "torchtitan", "torchtitan.md", "torchtitan", "==0.3.0",
        cannot=dict.fromkeys(
            ("accumulation", "resume", "rollback", "ranks"),
            "torchtitan's trainer needs CUDA: of it only the optimizers and the experts were run",
        ),
    ),
    Integration("torchft", "torchft.md", "torchft", ">=0.2,<0.3", "torchft"),
    Integration(
        "Fabric", "loops.md", "lightning", ">=2.5",
        cannot={
            "accumulation": "a loop of one's own does it", "resume": "a loop of one's own does it",
            "ranks": "Fabric's DDP is torch's, which is run in a loop of one's own",
        },
    ),
)  # fmt: skip


class Found(NamedTuple):
    """What the reports say of a feature of an integration."""

    passed: int
    failed: int
    skipped: int
    where: tuple[str, ...]


def found(reports: Iterable[dict[str, Any]], integration: str, feature: str) -> Found:
    """The newest result of each test, on each kind of machine."""
    newest: dict[tuple[str, str], str] = {}
    for report in sorted(reports, key=lambda one: str(one["date"])):
        for result in report["results"]:
            is_meant = result["integration"] == integration and feature in result["features"]
            key = result["test"], report["where"]
            if is_meant and not (result["outcome"] == "skipped" and key in newest):
                newest[key] = result["outcome"]
    outcomes = [*newest.values()]
    where = tuple(sorted({place for (_, place), outcome in newest.items() if outcome == "passed"}))
    return Found(outcomes.count("passed"), outcomes.count("failed"), outcomes.count("skipped"), where)


def stored() -> list[dict[str, Any]]:
    """All reports that are kept."""
    return [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*-conformance*.json"))]


def matrix(reports: list[dict[str, Any]]) -> str:
    """Integrations and features as a table of Markdown, with what was not tested and why."""
    lines = [f"| | versions accepted | tested | {' | '.join(FEATURES.values())} |", "|---" * (len(FEATURES) + 3) + "|"]
    reasons: dict[str, int] = {}
    for one in INTEGRATIONS:
        cells = []
        for feature in FEATURES:
            here = found(reports, one.name, feature)
            if here.failed:
                cells.append(f"**{here.failed} failed**")
            elif here.passed:
                cells.append(f"{', '.join(here.where)} ({here.passed})")
            else:
                reason = one.cannot.get(feature, "no test of it has run")
                cells.append(f"not tested [{reasons.setdefault(reason, len(reasons) + 1)}]")
        tried = {str(report["versions"][one.package]) for report in reports if one.package in report["versions"]}
        package = f"{one.package} {one.versions}".replace("<", "\\<")
        lines.append(f"| [{one.name}]({one.page}) | {package} | {', '.join(sorted(tried))} | {' | '.join(cells)} |")
    notes = "; ".join(f"[{number}] {reason}" for reason, number in reasons.items())
    count = len({result["test"] for report in reports for result in report["results"] if result["outcome"] == "passed"})
    days = ", ".join(sorted({str(report["date"])[:10] for report in reports}))
    return "\n".join(
        [*lines, "", f"In brackets how many tests show it, of {count} that ran on {days}. Not tested: {notes}."]
    )


def page_with(text: str, table: str) -> str:
    """The page with another matrix."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# As a plugin of pytest.


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--conformance", metavar="PATH", help="write to PATH what the tests with the mark conforms found")
    parser.addoption("--of", metavar="PACKAGE", help="of these tests run those alone whose loop is of PACKAGE")


def pytest_configure(config: Any) -> None:
    if config.getoption("--conformance") and not hasattr(config, "workerinput"):  # workers pass on what they find
        config.pluginmanager.register(_Report(Path(config.getoption("--conformance"))), "conformance-report")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    packages = {one.name: one.package for one in INTEGRATIONS}
    left_out = []
    for item in items:
        features = [name for mark in item.iter_markers("conforms") for name in mark.args]
        if features:
            integration = next(mark.args[0] for mark in item.iter_markers("integration"))
            assert integration in packages, f"{item.nodeid}: {integration}"
            assert set(features) <= FEATURES.keys(), f"{item.nodeid}: {features}"
            item.user_properties.append(("conforms", [integration, features]))
            if config.getoption("--of") not in (None, packages[integration]):
                left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


class _Report:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        told = dict(report.user_properties).get("conforms")
        if told is None or (report.when != "call" and report.outcome == "passed"):
            return
        reason = str(report.longrepr[2]) if report.outcome == "skipped" else ""
        self._results[report.nodeid] = {
            "integration": told[0],
            "features": told[1],
            "test": report.nodeid,
            "outcome": report.outcome,
            **({"reason": reason} if reason else {}),
        }

    def pytest_sessionfinish(self) -> None:
        results = [*self._results.values()]
        told = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "where": "one GPU" if any("/gpu/" in result["test"] for result in results) else "CPU",
            "python": platform.python_version(),
            "versions": dict(_versions(results)),
            "counts": {
                outcome: sum(result["outcome"] == outcome for result in results)
                for outcome in ("passed", "failed", "skipped")
            },
            "results": results,
        }
        self._path.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nconformance: {told['counts']}, written to {self._path}")


def _versions(results: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Of what has passed, and of torch."""
    passed = {result["integration"] for result in results if result["outcome"] == "passed"}
    for package in sorted({"torch", *(one.package for one in INTEGRATIONS if one.name in passed)}):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), matrix(stored())))
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} has the matrix of {len(stored())} reports\n")
