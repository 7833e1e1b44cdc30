"""``sealegs coordcheck``: real training at three widths, of the lab's model and of somebody's own."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sealegs.cli.main import main
from sealegs.report.commands.coordcheck import Coordinated, Layer, page

OWN = """
import torch
import sealegs

def batches():
    random = torch.Generator().manual_seed(0)
    return [(x := torch.randn(64, 8, generator=random), x.sum(1, keepdim=True).sin()) for _ in range(20)]

class Net(torch.nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, width), torch.nn.Linear(width, width)])
        self.readout, self.scale = torch.nn.Linear(width, 1, bias=False), scale

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.readout(x) * self.scale

def subject(model, groups):
    optimizer = torch.optim.Adam(groups)
    loss = lambda batch: (model(batch[0]) - batch[1]).square().mean()
    return sealegs.Subject(model=model, optimizers=[optimizer], loss=loss, batches=batches())

def standard(width):
    model = Net(width, 1.0)
    return subject(model, [{"params": model.parameters(), "lr": 0.02}])

def mup(width):
    times = width / 32
    model = Net(width, 1 / times)
    torch.nn.init.normal_(model.readout.weight, std=0.1)
    rest = [*model.layers[0].parameters(), model.layers[1].bias, model.readout.weight]
    return subject(model, [{"params": rest, "lr": 0.02}, {"params": [model.layers[1].weight], "lr": 0.02 / times}])

def another_depth(width):
    model = Net(width, 1.0)
    model.layers.extend([torch.nn.Linear(width, width)] if width > 32 else [])
    return subject(model, [{"params": model.parameters(), "lr": 0.02}])

def few(width):
    made = standard(width)
    return sealegs.Subject(model=made.model, optimizers=made.optimizers, loss=made.loss, batches=batches()[:3])

def fails(width):
    raise ValueError(f"{width} is no width")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["coordcheck", *words, "--json"])
    out, _ = capsys.readouterr()
    found = json.loads(out)
    msgspec.convert(found, Coordinated)  # has every key, and no value of another type
    assert code == int(not found["flat"])
    return code, found


def words_of(found: Any) -> dict[str, str]:
    return {layer["name"]: layer["word"] for layer in found["layers"]}


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_labs_mup_is_flat_and_its_standard_parametrisation_is_not(
    tied: str, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, base in (("mup", "mup_base_width = 32"), ("standard", "")):
        settings = (
            f'size = "nano"\n[model]\nheads = 2\ntied_head = {tied}\n{base}\n[data.sources]\n"{tokens_file}" = 1\n'
        )
        (tmp_path / f"{name}.toml").write_text(settings)
    small = ("--widths", "32", "128", "--seeds", "3", "--steps", "6")
    _, flat = checked(capsys, str(tmp_path / "mup.toml"), *small)
    assert flat["flat"], flat["because"]
    assert {words_of(flat)[name] for name in ("embedding", "blocks.0", "blocks.1")} == {"flat"}
    _, not_flat = checked(capsys, str(tmp_path / "standard.toml"), *small)
    assert not not_flat["flat"]
    assert words_of(not_flat) == {
        "embedding": "shrinking", "blocks.0": "growing", "blocks.1": "growing", "output": "growing",
    }  # fmt: skip


def test_a_model_of_ones_own_is_checked_and_drawn(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = ("--widths", "32", "128", "512")
    picture = tmp_path / "own.svg"
    assert main(["coordcheck", "--build", f"{own}:standard", *widths, "--seeds", "3", "-o", str(picture)]) == 1
    out, err = capsys.readouterr()
    assert "NOT FLAT: " in out
    assert err == f"drawn in {picture}\n"
    drawn = picture.read_text()
    assert all(word in drawn for word in ("<svg", "layers.1", "growing", "512"))
    _, found = checked(capsys, "--build", f"{own}:mup", *widths)
    assert words_of(found)["layers.1"] == "flat", found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "CONFIG.toml: give settings of the lab, or --build"),
        (("nowhere.toml",), "nowhere.toml: cannot be read"),
        (("--build", "{own}:standard"), "--widths: say which"),
        (("--build", "{own}:standard", "--widths", "64", "32"), "--widths 64 32: two or more, rising"),
        (("--build", "{own}:fails", "--widths", "32", "64"), "fails: it fails at line 46 (ValueError: 32 is no width)"),
        (("--build", "{own}:few", "--widths", "32", "64"), "3 batches, and --steps 10 needs one more"),
        (
            ("--build", "{own}:another_depth", "--widths", "32", "64"),
            "at width 64 the model has other layers than at 32",
        ),
        (("--build", "{own}:standard", "--widths", "32", "64", "--seeds", "1"), "--seeds 1: at least 2, since"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(
    words: tuple[str, ...], told: str, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    code = main(["coordcheck", *(word.format(own=own) for word in words)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert not (own.parent / "coordcheck.svg").exists()


def test_the_schema_in_the_documents_is_the_one_that_holds() -> None:
    promised = json.loads((Path(__file__).parents[2] / "docs" / "coordcheck.schema.json").read_text())
    assert promised == msgspec.json.schema(Coordinated)


def test_the_page() -> None:
    layers = [
        Layer(name="embedding", sizes=[0.08, 0.08, 0.081], slope=0.012, within=0.034, word="flat"),
        Layer(name="output", sizes=[1.0, "NaN", "Infinity"], slope=None, within=None, word="not finite"),
    ]
    found = Coordinated(
        source="a.toml",
        widths=[32, 64, 128],
        steps=10,
        seeds=1,
        layers=layers,
        flat=False,
        because="output is not finite",
    )
    assert (
        page(found)
        == """\
a.toml: size of activations after 10 steps, 1 seed

width            32        64       128          slope
embedding      0.08      0.08     0.081  +0.01 +- 0.03  flat
output            1       NaN  Infinity                 not finite

NOT FLAT: output is not finite"""
    )
