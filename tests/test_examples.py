"""The examples are run."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_three_ways(tmp_path: Path) -> None:
    words = ["--size", "nano", "--steps", "300", "--fault", "lr-spike:factor=60,steps=10@200", "--folder", "runs"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "three_ways.py"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    gaps = dict(re.findall(r"^(unguarded|guarded) +\S+ +(\S+)", done.stdout, flags=re.MULTILINE))
    assert abs(float(gaps["guarded"])) < 0.03
    assert float(gaps["unguarded"]) > 0.3
    assert "outcome   helped" in done.stdout
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"beginning", "clean", "unguarded", "guarded"}


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "three_ways.py"), "--fault", "fire@3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("three_ways.py: ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
