"""Two checkpoints, or two ranks of one: which tensors differ, and by how much."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from sealegs.cli.main import main
from sealegs.errors import SourceError
from sealegs.report.commands.audit_comparison import Compared
from sealegs.state.checkpoint_comparison import compared, tensors_of


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("embed.weight", "layers.0.norm.weight", "layers.0.attn.weight", "layers.1.norm.weight", "head.weight")
    return {name: torch.randn(8) if "norm" in name else torch.randn(16, 8) for name in names}


def as_torch(path: Path, found: dict[str, torch.Tensor]) -> Path:
    torch.save({"model": found, "rng_state": torch.get_rng_state(), "step": 3}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def as_safetensors(path: Path, found: dict[str, torch.Tensor]) -> Path:
    save_file(found, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def as_hugging_face(path: Path, found: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(found, path / "model.safetensors")
    return path


def as_distributed(path: Path, found: dict[str, torch.Tensor]) -> Path:
    save(dict(found), storage_writer=FileSystemWriter(path), no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", [as_torch, as_safetensors, as_hugging_face, as_distributed])
def test_the_first_tensor_that_differs(form: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    other = {name: each.clone() for name, each in weights().items()}
    other["layers.0.attn.weight"][3, 5] += 0.5
    other["head.weight"][2] += 1e-7
    a, b = form(tmp_path / "a", weights()), form(tmp_path / "b", other)
    assert compared(tensors_of(a), tensors_of(a)).is_alike
    found = compared(tensors_of(a), tensors_of(b))
    assert [each.name.removeprefix("model.") for each in found.differing] == ["layers.0.attn.weight", "head.weight"]
    first = found.differing[0]
    assert (first.at, first.rows, first.share) == ((3, 5), (3, 3), 1 / 128)
    assert first.largest == pytest.approx(0.5)
    assert (found.shared, found.equal) == (5, 3)


def test_shapes_types_rounding_and_what_is_not_finite() -> None:
    a = {"w": torch.randn(4, 4), "v": torch.ones(4), "n": torch.tensor([1.0, float("nan")]), "s": torch.zeros(())}
    rounded = {**a, "w": a["w"].bfloat16().float()}
    (each,) = compared(a, rounded).differing
    assert each.is_rounding
    shapes = compared(a, {**a, "w": torch.randn(4, 5), "v": torch.ones(4, dtype=torch.float16)})
    assert [(each.name, each.what) for each in shapes.differing] == [("w", "shape"), ("v", "dtype")]
    broken = compared(a, {**a, "v": torch.tensor([1.0, 1.0, float("inf"), 1.0]), "s": torch.ones(())})
    assert [(each.name, each.at) for each in broken.differing] == [("v", (2,)), ("s", ())]
    assert compared(a, a).is_alike, "NaN in both is no difference"


def test_of_two_ranks_only_copies_must_be_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {name: each if "norm" in name else each + 1 for name, each in weights().items()}
    paths = [tmp_path / f"mp_rank_0{rank}" for rank in (0, 1)]
    for path, found in zip(paths, (weights(), own), strict=True):
        path.mkdir()
        torch.save({"model": found}, path / "model.pt")
    assert main(["audit", *(str(path / "model.pt") for path in paths)]) == 0
    assert "every copy that ranks must share is equal, to the last bit (2 tensors)" in capsys.readouterr().out
    own["layers.1.norm.weight"] = own["layers.1.norm.weight"] * 1.001
    torch.save({"model": own}, paths[1] / "model.pt")
    assert main(["audit", *(str(path / "model.pt") for path in paths)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DIFFERENT: 1 of 2 tensors, the first is model.layers.1.norm.weight: copies have gone apart")
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "tp.pt")
    assert main(["audit", str(tmp_path / "tp.pt"), str(tmp_path / "tp.pt"), "--ranks"]) == 0
    assert capsys.readouterr().out.startswith("CANNOT TELL")


def test_the_object_and_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**weights(), "extra": torch.ones(2)}
    other["embed.weight"] = other["embed.weight"] + float("nan")
    a, b = as_torch(tmp_path / "a", weights()), as_torch(tmp_path / "b", other)
    assert main(["audit", str(a), str(b), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert msgspec.convert(told, Compared).differing[0].largest == "NaN"
    assert told["only_in_b"] == ["model.extra"]
    promised = Path(__file__).parents[2] / "docs" / "audit-comparison.schema.json"
    assert json.loads(promised.read_text()) == msgspec.json.schema(Compared)


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": Path("x")}, tmp_path / "pickle.pt")
    with pytest.raises(SourceError, match="cannot be read without running what is in it"):
        tensors_of(tmp_path / "pickle.pt")
    (tmp_path / "empty").mkdir()
    a = as_torch(tmp_path / "a", weights())
    for words in ((str(a), "nowhere"), (str(a), str(tmp_path / "empty"))):
        assert main(["audit", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
