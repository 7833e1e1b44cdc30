"""What the README and the docs show is run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sealegs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

PREAMBLE = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(12)]
"""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_diff_records_the_run_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (diff,) = blocks(README, "diff")
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    weights = []
    for program in (before, after):
        names: dict[str, Any] = {}
        exec(PREAMBLE + program, names)  # noqa: S102 - our own README
        weights.append(names["model"].weight.detach().clone())
    assert torch.equal(*weights)
    run = sealegs.open_run("experiments/mine")
    assert run.steps.tolist() == list(range(12))
    assert set(run.signals) == {"loss", "grad_norm", "time"}

    (reading,) = blocks(README, "python")
    done = subprocess.run([sys.executable, "-c", reading], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["11", str(run.column("loss")[-1]), str(run.column("grad_norm").max())]


def test_the_commands_run(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("\n\n".join(f"Document {number} of my own." for number in range(200)))
    (commands,) = blocks(README, "bash")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sealegs.open_run(tmp_path / "experiments" / "first").steps[-1] == 90
    assert done.stdout.count("nats under the unigram entropy") == 3


def test_the_map_has_a_line_for_each_file() -> None:
    source = ROOT / "src" / "sealegs"
    mapped = re.findall(r"^  ([\w/]+\.py) +\S", README, flags=re.MULTILINE)
    files = [path.relative_to(source).as_posix() for path in source.rglob("*.py") if path.stat().st_size]
    assert sorted(mapped) == sorted(files)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_the_settings_file_of_the_docs_is_taken(tmp_path: Path) -> None:
    from sealegs.lab.config import starting_point

    (toml,) = blocks((ROOT / "docs" / "lab.md").read_text(), "toml")
    (tmp_path / "mine.toml").write_text(toml)
    settings = starting_point(config=tmp_path / "mine.toml")
    assert (settings.steps, settings.data.accumulation) == (800, 2)
    assert settings.data.sources == {"grammar": 0.7, "stdlib": 0.3}


def test_the_snippet_on_batches_runs() -> None:
    (snippet,) = blocks((ROOT / "docs" / "lab.md").read_text(), "python")
    exec(snippet, {})  # noqa: S102 - our own docs


def test_documented_signals_and_files_are_the_real_ones() -> None:
    from sealegs.record.schema import CONTENTS, SIGNALS

    page = (ROOT / "docs" / "run-folder.md").read_text()
    assert all(f"`{signal}`" in page for signal in SIGNALS)
    assert all(name in page for name in CONTENTS)
