"""``sealegs preflight``: settings, runs and what Hugging Face writes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sealegs.cli.main import main
from sealegs.record import manifest as manifests
from sealegs.record.writer import RunWriter
from sealegs.report.commands.preflight import Advice, Advised, page

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text('dtype = "fp16"\n[optimizer]\nclip = 0.0\n[model]\nnorm_eps = 0.0\n')
    return tmp_path / "mine.toml"


def preflight(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["preflight", *words, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    msgspec.convert(found, Advised)  # has every key, and no value of another type
    return code, found


def test_settings_of_the_lab_are_looked_at(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = preflight(capsys, str(toml))
    assert (code, [each["code"] for each in found["findings"]]) == (1, ["ARC2", "CLIP1"]), "errors first"
    assert found["margins_missing"] == ["CLIP1", "ARC2"]
    assert [each["knob"] for each in found["findings"]] == ["model.norm_eps", "optimizer.clip"], "as the file has them"
    assert main(["preflight", str(toml)]) == 1
    assert " ".join(capsys.readouterr().out.split()).endswith("One may be survived, two probably not.")


def test_warnings_are_no_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training_args.json").write_text('{"learning_rate": 5e-5, "adam_beta2": 0.999}')
    code, found = preflight(capsys, str(tmp_path))
    assert (code, [each["knob"] for each in found["findings"]]) == (0, ["adam_beta2"])


def test_where_all_is_well_one_line_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('size = "toy"\n')
    assert main(["preflight", str(tmp_path / "mine.toml")]) == 0
    out = capsys.readouterr().out
    assert (out.count("\n"), ": nothing to say. 40 rules were asked" in out) == (1, True)


def test_several_sources_are_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8192}')
    (tmp_path / "args.json").write_text('{"learning_rate": 0.003}')
    for order in ("config.json", "args.json"), ("args.json", "config.json"):
        _, found = preflight(capsys, *(str(tmp_path / name) for name in order))
        assert [each["code"] for each in found["findings"]] == ["OPT10"], "neither knows both, width and rate"
    (tmp_path / "last.toml").write_text("[plan]\noptimizer.lr = 1e-4\n")
    _, found = preflight(capsys, *(str(tmp_path / name) for name in ("config.json", "args.json", "last.toml")))
    assert found["findings"] == [], "the last has its say"


def test_of_a_run_its_gradients_are_known_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"clip": 0.5, "weight_decay": 0.1}
    with RunWriter.create(Path("experiments/mine"), manifests.describe("mine", settings=settings)) as record:
        for step in range(20):
            record.row({"step": step, "loss": 3.0, "grad_norm": 0.6 if step != 7 else float("nan")})
    code, found = preflight(capsys, "mine")
    assert (code, [each["code"] for each in found["findings"]]) == (0, ["CLIP3"])
    assert "half of them are above 0.6" in found["findings"][0]["found"]


def test_the_pages_of_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "--explain", "opt1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("OPT1: The second moment remembers too long.")
    assert all(f"\n{part}: " in said for part in ("Why", "Set", "Sure", "See"))
    assert main(["preflight", "--explain", "all"]) == 0
    assert "  STA6   Weights that belong together are two\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words", "told"),
    [
        ({}, (), "SOURCE: name settings to look at"),
        ({}, ("nowhere.toml",), "nowhere.toml: cannot be read"),
        ({}, ("nowhere",), "nowhere: cannot be read"),
        ({}, ("--explain", "OPT99"), "--explain OPT99: no rule is called that"),
        ({"a.toml": "[plan]\noptimizer.beta3 = 1"}, ("a.toml",), "a.toml: Object contains unknown field `beta3`"),
        ({"a.toml": "steps = 1\n[plan]"}, ("a.toml",), "a.toml: steps beside [plan]"),
        ({"a.toml": "[optimiser]\nlr = 1"}, ("a.toml",), "did you mean optimizer?"),
        (
            {"a/b.txt": ""},
            ("./a",),
            "./a: there is neither manifest.json nor config.json nor training_args.json nor adapter_config.json in it",
        ),
        ({"a.json": '{"x": 1}'}, ("a.json",), "a.json: neither training arguments"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    files: dict[str, str], words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = main(["preflight", *words])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_torch_is_not_waited_for(toml: Path) -> None:
    run = f"import sys; from sealegs.cli.main import main; main(['preflight', {str(toml)!r}])"
    program = f"{run}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_the_schema_in_the_documents_is_the_one_that_holds() -> None:
    assert json.loads((ROOT / "docs" / "preflight.schema.json").read_text()) == msgspec.json.schema(Advised)


def test_the_page() -> None:
    one = Advice(
        code="PRC1", grade="error", title="fp16 without a loss scaler", found="fp16, and no loss scaler",
        why="fp16 ends at 65504.", knob="fp16", value="bf16", sure="established.", reference="Micikevicius et al.",
        margin=True,
    )  # fmt: skip
    told = Advised(
        source="a.toml", findings=[one], asked=3, unknown=["OPT1"], margins_missing=["PRC1"], margins_there=["CLIP1"],
        margins_unknown=["OPT1"],
    )  # fmt: skip
    assert (
        page(told)
        == """\
a.toml: 1 error. 3 rules were asked, 1 knows too little.

ERROR    PRC1   fp16 without a loss scaler
  found  fp16, and no loss scaler
  why    fp16 ends at 65504.
  set    fp16: bf16
  sure   established.
  see    Micikevicius et al.

Margins of stability: 1 is missing (PRC1), 1 is there, 1 is not known of. One that is missing may be
survived."""
    )
