"""What ``sealegs`` exports, and what importing it costs."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import sealegs

ROOT = Path(__file__).parents[1]


def test_exported_names_are_sorted_and_there() -> None:
    assert sealegs.__all__ == sorted(sealegs.__all__)
    assert all(getattr(sealegs, name).__name__.removeprefix("sealegs.") == name for name in sealegs.__all__)
    assert len(sealegs.__all__) <= 30
    assert dir(sealegs) == sealegs.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sealegs.nothing  # noqa: B018


@pytest.mark.parametrize("program", ["import sealegs", "import sealegs; sealegs.open_run"])
def test_reading_runs_needs_no_torch(program: str) -> None:
    check = f"{program}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_changelog_tells_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert metadata.version("sealegs") == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
