"""Every row of the mission has commands in docs/mission.md that show it, and what they name exists."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from sealegs.cli.main import COMMANDS
from sealegs.drills.catalogue import DRILLS
from sealegs.faults.spec import parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "mission.md").read_text()
ROWS = dict(re.findall(r"^\| ([PDREX]\d+b?) \|(.*)\|$", PAGE, flags=re.MULTILINE))
SET_UP = PAGE.split("```")[1].strip().splitlines()
MISSION = [
    *(f"P{n}" for n in range(1, 6)),
    *(f"D{n}" for n in range(1, 8)),
    *(f"R{n}" for n in range(1, 8)),
    "R5b",
    *(f"E{n}" for n in range(1, 9)),
    *(f"X{n}" for n in range(1, 9)),
]
RUNS = {found[1] for line in PAGE.splitlines() for found in re.finditer(r"train .*?--run (\w+)", line)}


def commands_of(row: str) -> list[list[str]]:
    return [shlex.split(code) for code in re.findall(r"`([^`]+)`", ROWS[row]) if " " in code]


def test_there_is_every_row() -> None:
    assert len(MISSION) == 36
    assert sorted(ROWS) == sorted(MISSION)


@pytest.mark.parametrize("row", MISSION)
def test_a_row_has_commands_and_what_they_name_exists(row: str) -> None:
    commands = commands_of(row)
    assert commands
    for words in commands:
        check(words)


@pytest.mark.parametrize("line", SET_UP, ids=range(len(SET_UP)))
def test_what_is_made_first_can_be_made(line: str) -> None:
    if line.startswith("sealegs "):
        check(shlex.split(line))


def check(words: list[str]) -> None:
    match words:
        case ["sealegs", command, *rest]:
            assert command in COMMANDS
            check_words(command, rest)
        case ["pytest", *places]:
            for place in places:
                file, _, name = place.partition("::")
                assert (ROOT / file).exists(), file
                assert not name or f"def {name}(" in (ROOT / file).read_text(), place
        case ["python", file, *_]:
            assert (ROOT / file).exists(), file
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case _:
            pytest.fail(f"no command that is known: {words}")


def check_words(command: str, words: list[str]) -> None:
    """Faults, drills, files and runs that a command of sealegs names; its options are the concern of its own tests."""
    for option, value in pairwise(words):
        if option == "--inject":
            parse(value)
        if option == "--build":
            file, _, name = value.partition(":")
            assert f"def {name}(" in (ROOT / file).read_text()
    names = [word for word in words[:1] if not word.startswith("-")]
    if command == "drill":
        assert {word for word in words if word in DRILLS} or "--list" in words
    elif command not in ("train", "do"):
        made = "\n".join(SET_UP)
        assert all(name in RUNS or name in made or (ROOT / name).exists() for name in names), names
