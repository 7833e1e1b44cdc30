"""What the README and the docs show is run."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.site.markdown import headings, links
from tests.pages import assert_said, blocks, commands_of, programs_of

import sealegs
from sealegs.cli.main import main
from sealegs.drills.catalogue import chosen
from sealegs.lab.config import Listeners, told

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sealegs"
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()

PREAMBLE = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
"""
CONV_NET = """
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
)
loader = [(torch.randn(16, 3, 8, 8), torch.randint(4, (16,))) for _ in range(12)]
criterion = F.cross_entropy
"""
ENCODER = """
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.readout = torch.nn.Linear(16, 50, bias=False)
        self.readout.weight = self.embedding.weight  # tied
        self.layers.layers[0].requires_grad_(False)  # frozen

    def forward(self, tokens):
        return self.readout(self.layers(self.embedding(tokens)))

def criterion(logits, wanted):
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

model = Encoder()
loader = [(tokens := torch.randint(50, (8, 10)), tokens.roll(-1, 1)) for _ in range(12)]
"""
OPTIMIZER = """
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
"""
MODELS = {"conv-net": CONV_NET, "encoder": ENCODER}


@pytest.fixture
def programs() -> tuple[str, str]:
    """A loop as it was, and as the diff makes it."""
    (diff,) = blocks(README, "diff")
    return programs_of(diff)


@pytest.mark.parametrize("model", MODELS)
def test_the_diff_trains_as_before_and_is_recorded(
    model: str, programs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = []
    for program in programs:
        names: dict[str, Any] = {}
        exec(PREAMBLE + MODELS[model] + OPTIMIZER + program, names)  # noqa: S102 - our own README
        inputs, wanted = names["loader"][0]
        losses.append(names["criterion"](names["model"](inputs), wanted).item())
    assert losses[0] == losses[1], "to the last bit"
    run = sealegs.open_run("experiments/mine")
    assert run.steps.tolist() == list(range(12))
    assert run.column("lr")[1] == pytest.approx(0.9e-3)


@pytest.mark.parametrize("model", MODELS)
def test_the_diff_survives_what_the_loop_did_not(
    model: str, programs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient that is not finite, in the middle of the run."""
    monkeypatch.chdir(tmp_path)
    poison = """
handle = next(p for p in reversed(list(model.parameters())) if p.requires_grad).register_hook(
    lambda gradient: gradient * (float("nan") if scheduler.last_epoch == 6 else 1.0)
)
"""
    finite = []
    for program in programs:
        names: dict[str, Any] = {}
        exec(PREAMBLE + MODELS[model] + OPTIMIZER + poison + program, names)  # noqa: S102 - our own README
        finite.append(all(p.isfinite().all() for p in names["model"].parameters()))
    assert finite == [False, True]
    (skip,) = [event for event in sealegs.open_run("experiments/mine").events if event.kind == "skip"]
    assert skip.step == 6


def test_the_guards_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = blocks((ROOT / "docs" / "guard.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(PREAMBLE + CONV_NET + OPTIMIZER + "\n".join(snippets), names)  # noqa: S102 - our own docs
    names["guard"].close()
    assert len(snippets) == 5
    for run in ("watched", "guarded"):
        assert len(sealegs.open_run(f"experiments/{run}").steps) == 12


def test_the_page_on_batches_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.arange(100 * 8).reshape(100, 8) % 397)
    (snippet,) = blocks((ROOT / "docs" / "batches.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(PREAMBLE + snippet, names)  # noqa: S102 - our own docs
    assert len(names["sampler"]) == 4


@pytest.mark.xdist_group("mlflow")  # one process for all that imports trackers
@pytest.mark.parametrize(("page", "count"), [("trackers", 2), ("notifications", 1)])
def test_the_pages_on_who_is_told_run(page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TELL_ME", f"tee {tmp_path / 'told.txt'}")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    snippets = blocks(text, "python")
    assert len(snippets) == count
    exec(PREAMBLE + CONV_NET + OPTIMIZER + "\n".join(snippets), {})  # noqa: S102 - our own docs
    if page == "notifications":
        assert (tmp_path / "told.txt").read_text().startswith("told: closed (step 11)\nloss ")
    for toml in blocks(text, "toml"):
        (tmp_path / "mine.toml").write_text(toml)
        assert told(tmp_path / "mine.toml") != Listeners()


def test_a_playbook_is_one_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (guarding,) = blocks(README, "python")
    (own,) = blocks((ROOT / "docs" / "recovery.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(PREAMBLE + CONV_NET + OPTIMIZER + "import sealegs\n" + guarding + own, names)  # noqa: S102 - our own README
    assert len(list(names["guard"].batches(names["loader"]))) == 12
    names["guard"].close()
    assert str(names["mine"]).startswith("playbook mine")


def what_the_page_on_the_folder_reads(run: str) -> list[str]:
    """The last step of a run, and whether torch was needed for it."""
    (reading,) = blocks((ROOT / "docs" / "run-folder.md").read_text(), "python")
    program = reading.replace("experiments/a", f"experiments/{run}")
    program += "import sys; print(run.steps[-1], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    lab = (ROOT / "docs" / "lab.md").read_text()
    (tmp_path / "mine.toml").write_text(blocks(lab, "toml")[0])
    (tmp_path / "my.txt").write_text("\n\n".join(f"Document {number} of my own." for number in range(200)))
    np.save("tokens.npy", np.arange(64 * 40, dtype=np.uint16) % 300)
    broken, prevent, detect, recover, explain, _ = blocks(README, "bash")
    practice, *_ = blocks(lab, "bash")
    commands = commands_of(broken + prevent + recover + explain + practice)
    for words in commands:
        assert main(words) == 0, words
    said, noted = capsys.readouterr()
    for shown in re.findall(r"^    (step \d+  SKIP  .*)$", README, flags=re.MULTILINE):
        assert_said(shown, noted)
    assert what_the_page_on_the_folder_reads("begun") == ["90", "False"]
    assert "TESTED CAUSE: unlogged step size" in said
    assert "a learning rate 30 times the one in the log" in said.replace("\n  ", " ")
    assert said.count("nats under the unigram entropy") == sum(words[0] == "train" for words in commands) == 6
    assert "by playbook standard, rung 3" in said
    assert "outcome   helped" in said
    assert said.count("no step was skipped") == 4
    assert "\nskipped 2 of " in said
    for words in commands_of(detect):
        assert main(words) in (0, 1)  # it exits with 1 where it finds something
        out, err = capsys.readouterr()
        assert err == ""
        assert len(out.splitlines()) > 5


def test_the_drills_are_there() -> None:
    """They are run by the tests of the command: a card takes a while."""
    *_, practise = blocks(README, "bash")
    ((command, *names),) = commands_of(practise)
    assert command == "drill"
    assert [drill.name for drill in chosen(names, is_lab=True)] == names


@pytest.mark.parametrize("framework", ["hf", "lightning", "accelerate"])
def test_a_framework_is_attached_as_the_table_says(framework: str) -> None:
    """By the source: an import would bring the framework along."""
    (text,) = re.findall(rf"`({framework}\.attach\(.*?\))`", README)
    call = ast.parse(text, mode="eval").body
    module = ast.parse((ROOT / "src" / "sealegs" / "integrations" / f"{framework}.py").read_text())
    (attach,) = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "attach"]
    assert isinstance(call, ast.Call)
    assert len(call.args) == len(attach.args.args)
    assert {keyword.arg for keyword in call.keywords} <= {argument.arg for argument in attach.args.kwonlyargs}


def test_the_design_has_a_row_for_each_package() -> None:
    """In an order that the layers of pyproject.toml allow."""
    rows = re.findall(r"^\| `([\w/]+(?:/|\.py))` \|", DESIGN, flags=re.MULTILINE)
    modules = [path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"]
    packages = [f"{path.parent.relative_to(SOURCE).as_posix()}/" for path in SOURCE.rglob("*/__init__.py")]
    assert sorted(rows) == sorted(modules + packages)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in reversed(contracts[0]["layers"])]
    height = {name: number for number, names in enumerate(layers) for name in names}
    heights = [height[re.split(r"[/.]", row)[0]] for row in rows]
    assert heights == sorted(heights)


def test_what_a_package_says_it_holds_is_there() -> None:
    """``file.py`` beside it, or ``sealegs.module``."""
    named = [
        (package, name)
        for package in SOURCE.rglob("*/__init__.py")
        for name in re.findall(r"``([\w.]+\.(?:py|toml)|sealegs\.[\w.]+)``", package.read_text())
    ]
    assert {package for package, _ in named} > {SOURCE / "signals/__init__.py", SOURCE / "diagnosis/__init__.py"}
    for package, name in named:
        own, of_all = package.parent / name, SOURCE.parent / name.replace(".", "/")
        places = (own, of_all, of_all.with_suffix(".py"), of_all.parent.with_suffix(".py"))
        assert any(place.exists() for place in places), f"{package}: {name} is not there"


def test_the_design_names_nothing_that_does_not_exist() -> None:
    """``path``, or ``path: NAME`` of something that is defined there."""
    named = re.findall(r"`([\w./-]+(?:/|\.(?:py|toml|md)))(?:: (\w+))?`", DESIGN)
    assert len(named) > 100
    for path, name in named:
        found = [place for place in (SOURCE / path, ROOT / path) if place.exists()]
        assert found, f"{path} is not there"
        if name:
            defined = re.search(rf"^ *(?:(?:def|class) )?{name}\b", found[0].read_text(), flags=re.MULTILINE)
            assert defined, f"{path} has no {name}"


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a file that is there, and to a heading that it has."""
    path = ROOT / page
    for link in links(path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, heading = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), link


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
