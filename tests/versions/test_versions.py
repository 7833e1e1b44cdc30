"""What earlier versions wrote is read by this one, and what was written against their schemas still works."""

import copy
import hashlib
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sealegs
from sealegs.cli.main import main

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "run.tar.gz").exists())


def test_there_is_a_folder_of_each_minor_version() -> None:
    assert VERSIONS == ["0.1"]


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run folder as that version wrote it."""
    with tarfile.open(HERE / request.param / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_folder_is_read_and_not_rewritten(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(stored)
    run = sealegs.open_run(stored)
    assert (run.manifest.schema, run.manifest.settings["optimizer"]["betas"]) == (1, [0.9, 0.95])
    assert (run.steps.tolist(), run.superseded_rows) == (list(range(141)), 46)
    assert run.column("loss")[50] == 4.148237228393555
    assert Counter(event.kind for event in run.events)["fault"] == 9
    said = {}
    for command in ("check", "interventions", "health"):
        assert main([command, str(stored), "--json"]) == 0
        said[command] = json.loads(capsys.readouterr().out)
    assert said["check"]["skips"]["reasons"] == {"nonfinite": 1}
    assert said["check"]["interventions"]["by_action"] == {"rollback": 1}
    assert [incident["start"] for incident in said["check"]["incidents"]] == [101]
    assert [entry["to_step"] for entry in said["interventions"]["interventions"]] == [80]
    assert (said["health"]["verdict"], said["health"]["newest_healthy"]["step"]) == ("finished", 80)
    assert said["health"]["run"] == run.manifest.run_id
    assert digests(stored) == before


def test_a_checkpoint_and_a_capsule_are_read(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sealegs.capsule.read import open_capsule

    assert main(["audit", str(stored / "checkpoints" / "80"), "--json"]) == 0
    holds = {part["name"]: part["what"] for part in json.loads(capsys.readouterr().out)["holds"]}
    assert (holds["step"], holds["data position"]) == ("80", "batch 80 comes next")
    capsule = open_capsule(stored / "incidents" / "1")
    assert (capsule.description.state, capsule.steps()) == (80, range(80, 126))


@pytest.mark.long
def test_a_run_goes_on(stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(stored)
    Path("experiments").mkdir()
    Path("experiments/old").symlink_to(stored)
    assert main(["train", "--run", "old", "--resume", "--steps", "150"]) == 0
    run = sealegs.open_run(stored)
    assert run.steps[-1] == 150
    assert [event.detail["checkpoint"] for event in run.events if event.kind == "resume"] == [80]


@pytest.mark.parametrize("command", ["check", "interventions", "health", "dashboard", "postmortem", "preflight"])
def test_a_newer_folder_is_refused_in_a_sentence(
    stored: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((stored / "manifest.json").read_text())
    (stored / "manifest.json").write_text(json.dumps(manifest | {"schema": manifest["schema"] + 1}))
    before = digests(stored)
    assert main([command, str(stored)]) == 2
    error = capsys.readouterr().err
    assert "schema 2, this Sealegs reads up to 1: pip install -U sealegs" in error
    assert len(error.splitlines()) == 1
    assert digests(stored) == before


def broken_promises(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Where a program that reads what the old schema promises would fail on what the new one allows."""
    return [*_broken(old, old, new, new, "")]


def _broken(old: Any, whole_old: Any, new: Any, whole_new: Any, at: str) -> Iterator[str]:
    for before in _choices(old, whole_old):
        kind = _kind(before)
        fitting = [each for each in _choices(new, whole_new) if _kind(each) == kind or kind is None]
        if not fitting:
            yield f"{at or 'the object'}: was {kind}"
            continue
        after = fitting[0]
        for name, inner in before.get("properties", {}).items():
            if name not in after.get("properties", {}):
                yield f"{at}.{name}: gone"
                continue
            if name in before.get("required", []) and name not in after.get("required", []):
                yield f"{at}.{name}: may be missing"
            yield from _broken(inner, whole_old, after["properties"][name], whole_new, f"{at}.{name}")
        for each in ("items", "additionalProperties"):
            if isinstance(before.get(each), dict) and isinstance(after.get(each), dict):
                yield from _broken(before[each], whole_old, after[each], whole_new, f"{at}[]")
    kinds = {_kind(each) for each in _choices(old, whole_old)}
    added = {_kind(each) for each in _choices(new, whole_new)} - kinds
    if added and None not in kinds:
        yield f"{at}: may be {', '.join(sorted(map(str, added)))}"


def _choices(schema: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in schema:
        return _choices(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    return [each for one in schema["anyOf"] for each in _choices(one, whole)] if "anyOf" in schema else [schema]


def _kind(schema: dict[str, Any]) -> str | None:
    """The type of a value; None where it can be anything."""
    if "enum" in schema:
        return "null" if schema["enum"] == [None] else "string" if isinstance(schema["enum"][0], str) else "integer"
    return schema.get("type")


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parts[-3]}-{path.name.partition('.')[0]}")
                                  for path in sorted(HERE.glob("*/schemas/*.json"))])  # fmt: skip
def test_schemas_keep_their_promises(path: Path) -> None:
    old, new = (json.loads(each.read_text()) for each in (path, ROOT / "docs" / path.name))
    assert broken_promises(old, new) == []


def test_what_counts_as_a_broken_promise() -> None:
    old = json.loads((HERE / "0.1" / "schemas" / "check.schema.json").read_text())
    new = copy.deepcopy(old)
    checked, incident = new["$defs"]["Checked"], new["$defs"]["Incident"]
    checked["properties"]["new"] = {"type": "string"}
    assert broken_promises(old, new) == [], "what is added breaks nothing"
    del checked["properties"]["verdict"]
    checked["properties"]["steps"] = {"type": "string"}
    checked["required"].remove("format")
    incident["properties"]["start"] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert sorted(broken_promises(old, new)) == [
        ".format: may be missing",
        ".incidents[].start: may be null",
        ".steps: may be string",
        ".steps: was integer",
        ".verdict: gone",
    ]
