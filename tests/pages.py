"""What stands on a page, to be run and compared: blocks, the programs of a diff, commands, output that is shown."""

import re
import shlex


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a language, in order."""
    return [block for kind, block in all_blocks(text) if kind == language]


def all_blocks(text: str) -> list[tuple[str, str]]:
    """Every block with its language, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def programs_of(diff: str) -> tuple[str, str]:
    """A program as it was, and as the diff makes it."""
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    return before, after


def commands_of(block: str) -> list[list[str]]:
    """The words of each `sealegs` command, without the remark behind it."""
    lines = [shlex.split(re.sub(r"\s#.*", "", line)) for line in block.splitlines()]
    assert {program for program, *_ in lines} == {"sealegs"}
    return [words for _, *words in lines]


def assert_said(shown: str, said: str) -> None:
    """Each line that a page shows was said, in this order: numbers and dates may differ, words may not."""
    at = 0
    for line in shown.splitlines():
        if line.strip() == "...":
            continue
        pattern = re.sub(r"\d{4}-\d\d-\d\d", r"[\\d-]+", re.escape(line).replace(r"\-", "-"))
        pattern = re.sub(r"\d\d:\d\d:\d\d", r"[\\d:]+", re.sub(r"\d+\\\.\d+", r"[\\d.]+", pattern))
        found = re.compile(f"{pattern}$", flags=re.MULTILINE).search(said, at)
        assert found, f"the page shows {line!r}; it was said: {said[at:]}"
        at = found.end()
