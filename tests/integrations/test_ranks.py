"""Two real processes: a Trainer and a loop of Accelerate, each with a guard on every rank."""

import json
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from packaging.version import Version
from tests.ranks.launch import launch

import sealegs

pytestmark = pytest.mark.xdist_group("ranks")


HAS_FSDP2 = pytest.mark.skipif(
    Version(version("accelerate")) < Version("1.6"), reason="Accelerate has FSDP2 from 1.6 on"
)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    # as torchrun does it: a port that is only free now may be taken when an example comes to it
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    stores = [store("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    program, ports = Path(__file__).with_name("ranks.py"), (str(store.port) for store in stores)
    launch(program, 2, str(out), *ports, framework="transformers.trainer")
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_agree_and_a_guard_changes_nothing(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = launched
    assert first == second, "weights, moments, schedules and steps"
    assert first["trainer guarded"] == first["trainer"]
    assert first["loop guarded"]["end"] == first["loop standard"]["end"] == first["loop"]["end"]
    if "shards" in first:
        assert first["shards guarded"] == first["shards"]
    assert first["loop guarded"]["lr"] == first["loop"]["lr"] == pytest.approx([1e-2 * 0.99 ** (2 * 30)]), "a rank each"


@pytest.mark.conforms("ranks")
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("trainer", marks=pytest.mark.integration("Hugging Face Trainer")),
        pytest.param("shards", marks=[pytest.mark.integration("Accelerate"), HAS_FSDP2]),
    ],
)
def test_the_rank_at_fault_is_named(loop: str, launched: tuple[Path, list[dict[str, Any]]]) -> None:
    out, (first, _) = launched
    run = sealegs.open_run(out / f"{loop}-faulted-run")
    texts = [event.detail["text"] for event in run.events if event.kind == "skip"]
    assert [text.split()[1] for text in texts] == ["12", "20"]
    assert all("on rank 1" in text for text in texts)
    assert run.steps[run.logged("loss")].tolist() == list(range(30))
    assert first["trainer faulted"]["steps"] == 30


def test_what_each_rank_logs_is_averaged_where_it_is_judged(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    run = sealegs.open_run(launched[0] / "trainer-guarded-run")
    logged = run.logged("reward")
    assert run.steps[logged].tolist()[:3] == [5, 10, 15], "the step after each log"
    assert run.column("reward")[logged][:5].tolist() == [-1.5] * 5
    assert set(run.column("mine")[run.logged("mine")]) == {7}


def test_ranks_go_back_together(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    out, (first, _) = launched
    events = [event for event in sealegs.open_run(out / "loop-damaged-run").events if event.kind == "intervention"]
    assert [(event.detail["trigger"], event.detail["acted"]) for event in events] == [("damaged", True)]
    numbers = first["loop damaged"]["numbers"]
    assert any(after < before for before, after in pairwise(numbers))
    assert numbers[-1] == 110
    assert first["loop damaged"]["lr"] == pytest.approx([1e-2 * 0.99 ** (2 * 110)])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torchrun_ddp", "step 20  SKIP  grad_norm is not finite: nan  in 0.weight on rank 1"),
        ("fsdp2", "step 20  SKIP  grad_norm spike: "),
    ],
)
def test_the_examples_that_need_ranks(name: str, says: str, launched: tuple[Path, list[dict[str, Any]]]) -> None:
    out, _ = launched
    told, silent = ((out / f"{name}-{rank}.txt").read_text() for rank in range(2))
    skip, end = told.splitlines()
    assert skip.startswith(says)
    assert " on rank 1 " in skip
    assert end.endswith(f"after {len(sealegs.open_run(out / name).steps)} steps, recorded in {out / name}")
    assert silent == ""
