"""Runs the conformance suite against the oldest and the newest version of each framework; writes down what it found.

    python -m tests.matrix [PACKAGE ...]     runs them, and writes a dated report into docs/benchmarks
    python -m tests.matrix --table           writes the table of docs/versions.md, from all reports

Each version is installed into an environment of its own, which finds everything else in the one that runs this. torch
is never installed. What is oldest and newest follows from the ranges in pyproject.toml and from what the registry has.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests import conformance

PAGE = conformance.ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by make matrix -->", "<!-- end -->"
PLACE = conformance.ROOT / ".venv-matrix"
PROJECT = tomllib.loads((conformance.ROOT / "pyproject.toml").read_text())["project"]
PATIENT = {"SEALEGS_TEST_PATIENCE_S": "1200"}
"""Nobody waits for it, and a stuck rank is rare."""
ONE_BUILD = "the registry has one build of torch without CUDA libraries for this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A package whose versions are tried."""

    package: str
    extra: str
    """Where pyproject.toml gives its range."""
    with_it: tuple[str, ...] = ()
    """Installed in the same version."""
    at_their_floor: tuple[str, ...] = ()
    """Also at the lowest version of the same extra, where the package is."""
    to_build: tuple[str, ...] = ()
    """What has to be installed before, where it is built in the environment itself."""
    environment: dict[str, str] = field(default_factory=dict)


FRAMEWORKS = (
    Framework(package="torch", extra="torch"),
    Framework(package="transformers", extra="huggingface", at_their_floor=("accelerate",)),
    Framework(package="accelerate", extra="accelerate"),
    Framework(package="lightning", extra="lightning", with_it=("pytorch-lightning",)),
    Framework(package="trl", extra="test"),
    Framework(
        package="deepspeed",
        extra="deepspeed",
        to_build=("setuptools", "wheel"),
        environment={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    ),
)


def accepted(package: str, extra: str) -> SpecifierSet:
    """The range of a package in an extra of pyproject.toml.

    >>> Version("5.3.0") in accepted("transformers", "huggingface")
    True
    """
    named = [Requirement(words) for words in PROJECT["optional-dependencies"][extra]]
    return next(each.specifier for each in named if each.name == package)


def spelt(within: SpecifierSet) -> str:
    """A range from its lower end on.

    >>> spelt(SpecifierSet("<0.20,>=0.19.8"))
    '>=0.19.8,<0.20'
    """
    return ",".join(sorted(map(str, within), reverse=True))


def ends(offered: Iterable[str], within: SpecifierSet) -> tuple[str, str]:
    """The oldest and the newest of the versions that are accepted.

    >>> ends(["2.7.0", "2.6.0", "2.5.1", "2.4.0"], SpecifierSet(">=2.5"))
    ('2.5.1', '2.7.0')
    """
    fitting = sorted((each for each in offered if each in within and not Version(each).is_prerelease), key=Version)
    assert fitting, f"no version is within {spelt(within)}"
    return fitting[0], fitting[-1]


def offered(package: str) -> list[str]:
    """The versions that the registry has for this machine."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("Available versions: ")]
    return line.removeprefix("Available versions: ").split(", ")


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter with one framework in a version of its own."""

    python: Path
    installed: tuple[str, ...]
    """Everything in it that is not in the one that runs this."""
    trouble: str = ""
    """Why it could not be made."""


def environment(framework: Framework, version: str, *, oldest: bool) -> Environment:
    """The one that runs this, if it has that version; else another, made beside it."""
    wanted = [f"{name}=={version}" for name in (framework.package, *framework.with_it)]
    if oldest:
        wanted += at_their_floor(framework)
    if all(_has(words) for words in wanted):
        return Environment(Path(sys.executable), ())
    folder = PLACE / wanted[0].replace("==", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    own = next(folder.glob("lib/python*/site-packages"))
    # also what .pth files in there name, such as these sources; what is installed here goes before it
    shared = sysconfig.get_path("purelib")
    (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    torch = folder / "torch.txt"
    torch.write_text(f"torch=={metadata.version('torch')}\n")
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--constraint", torch]
    commands = [[*pip, "--upgrade", *framework.to_build], [*pip, "--no-build-isolation", *wanted]]
    for command in commands if framework.to_build else [[*pip, *wanted]]:
        made = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | framework.environment, cwd=conformance.ROOT
        )
        if made.returncode:
            return Environment(python, tuple(wanted), made.stderr.strip().splitlines()[-1])
    return Environment(python, tuple(sorted(_names_in(own))))


def at_their_floor(framework: Framework) -> list[str]:
    """What its oldest version is tried with."""
    return [f"{name}=={ends(offered(name), accepted(name, framework.extra))[0]}" for name in framework.at_their_floor]


def _has(words: str) -> bool:
    name, _, version = words.partition("==")
    try:
        return Version(metadata.version(name)) == Version(version)
    except metadata.PackageNotFoundError:
        return False


def _names_in(folder: Path) -> Iterable[str]:
    for each in metadata.distributions(path=[str(folder)]):
        if each.name not in ("pip", "setuptools", "wheel"):
            yield f"{each.name}=={each.version}"


def files_of(package: str) -> list[str]:
    """The files with tests of a framework, by the last run of the whole suite."""
    names = {one.name for one in conformance.INTEGRATIONS if one.package == package}
    results = [result for report in conformance.stored() for result in report["results"]]
    return sorted({result["test"].partition("::")[0] for result in results if result["integration"] in names})


def run(framework: Framework, version: str, which: str) -> dict[str, Any]:
    """What the suite found with that version."""
    place = environment(framework, version, oldest=which == "oldest")
    told = {
        "package": framework.package,
        "accepted": spelt(accepted(framework.package, framework.extra)),
        "which": which,
        "version": version,
        "with": at_their_floor(framework) if which == "oldest" else [],
        "installed": list(place.installed),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }
    if place.trouble:
        return told | {"trouble": place.trouble}
    report = PLACE / f"{framework.package}-{version}.json"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    extensions = PLACE / "extensions"
    for lock in extensions.rglob("lock"):  # of a build that was killed: torch would wait for it for ever
        lock.unlink()
    paths = [str(conformance.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command: list[str | Path] = [
        place.python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conformance",
    ]
    if which == "oldest":  # it may use what newer libraries deprecate, which is no fault of ours
        command += ["-W", "default"]
    command += ["-m", "conforms", "--of", framework.package, "--conformance", report, *files_of(framework.package)]
    done = subprocess.run(
        command,
        cwd=conformance.ROOT,
        env=PATIENT
        | os.environ
        | framework.environment
        | {"PYTHONPATH": os.pathsep.join(paths), "TORCH_EXTENSIONS_DIR": str(extensions)},
    )
    if not report.exists() or done.returncode not in (0, 1):
        return told | {"trouble": f"pytest ended with {done.returncode} before it had run the tests"}
    found = json.loads(report.read_text())
    failed = [result["test"] for result in found["results"] if result["outcome"] == "failed"]
    skipped = {
        one["test"]: one.get("reason", "").removeprefix("Skipped: ")
        for one in found["results"]
        if one["outcome"] == "skipped"
    }
    return told | {"counts": found["counts"], "failed": failed, "skipped": skipped}


def report_of_today() -> Path:
    """Where today's results are kept."""
    return conformance.REPORTS / f"{datetime.now(UTC).date()}-versions.json"


def stored() -> list[dict[str, Any]]:
    """The newest result of each version that was tried."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(conformance.REPORTS.glob("*-versions.json")):
        for result in json.loads(path.read_text())["results"]:
            newest[result["package"], result["version"]] = result
    return [*newest.values()]


def keep(result: dict[str, Any]) -> None:
    """Add a result to today's report, in place of an earlier one of the same version."""
    path = report_of_today()
    results = json.loads(path.read_text())["results"] if path.exists() else []
    same = (result["package"], result["version"])
    others = [one for one in results if (one["package"], one["version"]) != same]
    path.write_text(json.dumps({"results": [*others, result]}, indent=1) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """What was accepted, tried and found, as a table of Markdown."""
    lines = ["| package | accepted | oldest | newest |", "|---|---|---|---|"]
    reasons: dict[str, int] = {}
    for framework in FRAMEWORKS:
        within = accepted(framework.package, framework.extra)
        own = [one for one in results if one["package"] == framework.package and one["version"] in within]
        own.sort(key=lambda one: Version(one["version"]))
        cells = [spelt(within).replace("<", "\\<"), *(_told(own, which, reasons) for which in ("oldest", "newest"))]
        lines.append(f"| {framework.package} | {' | '.join(cells)} |")
    days = ", ".join(sorted({one["date"][:10] for one in results}))
    pythons = ", ".join(sorted({one["python"] for one in results}))
    torches = ", ".join(sorted({one["torch"] for one in results}))
    notes = "".join(f" [{number}] {reason}." for reason, number in reasons.items())
    made = f"Run on {days}, with Python {pythons} and torch {torches}, on CPU: {ONE_BUILD}.{notes}"
    return "\n".join([*lines, "", made])


def _told(own: Sequence[dict[str, Any]], which: str, reasons: dict[str, int]) -> str:
    """A cell: a version, what else it was run with, and how many tests passed; ``reasons`` takes what is said below."""
    found = [one for one in own if which in one["which"]]
    if not found:
        return "not run"
    one = found[0 if which == "oldest" else -1]
    others = [each.replace("==", " ") for each in one["with"]]
    name = " with ".join([one["version"], *([", ".join(others)] if others else [])])
    if "trouble" in one:
        return f"{name}: **not run** [{reasons.setdefault(one['trouble'], len(reasons) + 1)}]"
    counts = one["counts"]
    cell = f"{name}: {counts['passed']} passed"
    cell += f", **{counts['failed']} failed**" if counts["failed"] else ""
    for reason in sorted(set(one["skipped"].values())):
        cell += f", {[*one['skipped'].values()].count(reason)} skipped"
        cell += f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
    return cell


def page_with(text: str, made: str) -> str:
    """The page with another table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(words: Sequence[str] | None = None) -> int:
    """Run what is named, or everything, and write report and table."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="*", metavar="PACKAGE", help=", ".join(one.package for one in FRAMEWORKS))
    parser.add_argument("--table", action="store_true", help="only write the table")
    asked = parser.parse_args(words)
    if unknown := set(asked.package) - {one.package for one in FRAMEWORKS}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(one.package for one in FRAMEWORKS)}")
    bad = 0
    for framework in FRAMEWORKS:
        if asked.table or (asked.package and framework.package not in asked.package):
            continue
        within = accepted(framework.package, framework.extra)
        # any other torch would bring its CUDA libraries, several gigabytes
        has = [metadata.version("torch")] if framework.package == "torch" else offered(framework.package)
        oldest, newest = ends(has, within)
        tried = {oldest: "oldest", newest: "newest"} if oldest != newest else {newest: "oldest and newest"}
        for version, which in tried.items():
            sys.stdout.write(f"== {framework.package} {version}, the {which} within {spelt(within)}\n")
            sys.stdout.flush()
            result = run(framework, version, which)
            keep(result)
            bad += bool(result.get("trouble") or result.get("failed"))
    PAGE.write_text(page_with(PAGE.read_text(), table(stored())))
    sys.stdout.write(f"{PAGE.relative_to(conformance.ROOT)} has the table\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
