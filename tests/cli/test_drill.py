"""``sealegs drill``: real runs of the lab and of somebody's own loop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.forked import FORKED

from sealegs.cli import drill
from sealegs.cli.main import main
from sealegs.drills import loops, rank_processes
from sealegs.drills.catalogue import chosen
from sealegs.drills.loops import OwnLoop
from sealegs.lab.settings import SIZES
from sealegs.record.events import load_events
from sealegs.report.commands.drill import Drilled, DrillShown, OnRanks, page
from sealegs.report.postmortem import plots

OWN = """
import dataclasses
import torch
import sealegs

def batches():
    random = torch.Generator().manual_seed(0)
    return [{"x": (x := torch.randn(16, 4, generator=random)), "y": x.sum(1, keepdim=True)} for _ in range(60)]

def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = lambda batch: (model(batch["x"]) - batch["y"]).square().mean()
    return sealegs.Subject(model=model, optimizers=[optimizer], loss=loss, clip=1.0, batches=batches())

def of_tokens():
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    rows = torch.randint(32, (320, 9)).sort(1).values
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 8, shuffle=True)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = lambda batch: cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())
    return sealegs.Subject(
        model=model, optimizers=[torch.optim.AdamW(model.parameters(), lr=1e-2)], loss=loss, clip=1.0, batches=loader
    )

def of_a_generator():
    subject = of_tokens()
    return dataclasses.replace(subject, batches=(batch for batch in subject.batches))

def without_batches():
    model = torch.nn.Linear(4, 1)
    return sealegs.Subject(model=model, optimizers=[torch.optim.SGD(model.parameters())], loss=model)
"""


@pytest.fixture(autouse=True)
def few_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "LEFT_OUT", (1, 10))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a post-mortem they take the longest, and nothing here looks at them."""
    monkeypatch.setattr(plots, "can_draw", lambda: False)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def drilled(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, dict[str, Any]]:
    code = main(["drill", *words, "--json"])
    card = json.loads(capsys.readouterr().out)
    msgspec.convert(card, Drilled)  # has every key, and no value of another type
    return code, card, {each["name"]: each for each in card["drills"]}


@pytest.mark.long
@pytest.mark.usefixtures("little_of_the_library")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_lab_survives_a_nan_that_kills_a_run_without_a_guard(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "LEFT_OUT", (1, 20))
    monkeypatch.setattr(loops, "LEAD", 10)
    # a NaN is one at any depth
    monkeypatch.setitem(SIZES, "nano", replace(SIZES["nano"], model=replace(SIZES["nano"].model, layers=1)))
    kept = tmp_path / "kept"
    code, card, drills = drilled(
        capsys, "nan-gradient", "nan-gradient:placebo=yes", "hard-batch", "--at", "150", "--after", "60",
        *("--jobs", "1", "--keep", str(kept)),
    )  # fmt: skip
    struck = drills["nan-gradient"]
    assert (struck["unguarded"], struck["verdict"], struck["latency"], struck["skipped"]) == ("NaN", "survived", 0, 1)
    assert (struck["prevented"], struck["cause"], struck["is_right"]) == (1.0, "corrupt-gradient", True)
    placebo = drills["nan-gradient:placebo=yes"]
    assert (placebo["unguarded"], placebo["guarded"], placebo["verdict"]) == (0.0, 0.0, "no effect")
    assert drills["hard-batch"]["verdict"] == "left alone"
    assert (code, card["survived"]) == (0, True)
    assert (kept / "nan-gradient" / "unguarded" / "incidents" / "1" / "postmortem.md").is_file()


@pytest.mark.xdist_group("ranks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_ranks_survive_a_nan_of_one_which_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "LEFT_OUT", (1,))
    monkeypatch.setattr(loops, "LEAD", 10)
    # the depth of the model means nothing to a rank
    monkeypatch.setitem(SIZES, "nano", replace(SIZES["nano"], model=replace(SIZES["nano"].model, layers=1)))
    # to import torch in both ranks would take as long as all of their steps
    monkeypatch.setattr(rank_processes, "get_context", lambda method: FORKED)
    _, card, drills = drilled(capsys, "rank-nan", "nan-gradient:rank=1,placebo=yes", "--at", "40", "--after", "20")
    struck = drills["rank-nan"]
    # so early a step that is skipped is missed, which a grown run would not notice
    assert (struck["unguarded"], struck["prevented"], struck["latency"], struck["skipped"]) == ("NaN", 1.0, 0, 1)
    assert (struck["cause"], struck["ranks"], struck["rank"], struck["is_right"]) == ("corrupt-gradient", 2, 1, True)
    placebo = drills["nan-gradient:rank=1,placebo=yes"]
    assert (placebo["unguarded"], placebo["guarded"], placebo["verdict"]) == (0.0, 0.0, "no effect")
    assert card["loop"] == "lab, nano, seed 0, on 2 ranks"
    assert card["on_ranks"] == {"ranks": 2, "clean_loss": card["clean_loss"], "spread": card["spread"]}


def test_a_loop_of_ones_own_is_broken_and_guarded_too(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    code, card, drills = drilled(
        capsys, "nan-gradient", "lr-decay", "--build", f"{own}:build", "--at", "80", "--after", "40"
    )
    assert drills["nan-gradient"]["verdict"] == "survived"
    assert drills["nan-gradient"]["unguarded"] == "NaN"
    assert drills["nan-gradient"]["is_right"]
    assert drills["lr-decay"]["verdict"] == "left alone"
    assert (code, card["loop"]) == (0, f"{own}:build, seed 0")


def test_the_data_of_a_loop_of_ones_own_is_broken_below_a_guard_that_can_go_back(own: Path, tmp_path: Path) -> None:
    loop = OwnLoop(place=f"{own}:of_tokens", seed=0, at=20, last=30)
    (struck,) = chosen(["random-tokens"], is_lab=False)
    assert loop.ending(tmp_path / "run", struck, guarded=True) > 0
    events = load_events(tmp_path / "run" / "events.jsonl")
    told = [event.detail["text"] for event in events if event.kind == "fault"]
    assert [text.split(":")[0] for text in told] == [f"batch {number}" for number in range(20, 30)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nan-gradient", "--at", "3"), "--at 3: at least 40"),
        (("nan-gradient", "--build", "{own}:without_batches"), "has no batches to train on; give it batches=loader"),
        (
            ("random-tokens", "--build", "{own}:of_a_generator"),
            "of_a_generator: loader=generator: it cannot be brought",
        ),
        (("wide-init", "--build", "{own}:build"), "wide-init: needs the lab's own model or data"),
        (("rank-nan", "--build", "{own}:build"), "rank-nan: needs several ranks, and a loop of your own is drilled in"),
        (("nan-gradient:rank=1", "--build", "{own}:build"), "nan-gradient:rank=1: needs several ranks"),
        (
            ("random-tokens", "--build", "{own}:build", "--at", "40", "--after", "20"),
            "has no token ids that a fault of the data could",
        ),
        (("nan-gradient", "--keep", "{folder}"), "there is something in it; name a new folder"),
    ],
)
def test_what_cannot_be_drilled_is_refused(
    words: tuple[str, ...], told: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["drill", *(word.format(own=own, folder=own.parent) for word in words)])
    assert (code, capsys.readouterr().err.count(told)) == (2, 1)


def test_the_list_has_every_fault_as_one_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list"]) == 0
    told = capsys.readouterr().out
    assert "lr-spike:factor=30,steps=10" in told
    assert "--optimizer.warmup_steps=0" in told
    assert "skipped-all-reduce:rank=1,steps=50 (two ranks)" in told


def test_the_schema_in_the_documents_is_the_one_that_holds() -> None:
    promised = json.loads((Path(__file__).parents[2] / "docs" / "drill.schema.json").read_text())
    assert promised == msgspec.json.schema(Drilled)


CARD = Drilled(
    loop="lab, nano, seed 0",
    at=230,
    last=430,
    clean_loss=3.1644,
    spread=0.004,
    placebos=[1, 10],
    close=2.0,
    survived=False,
    on_ranks=OnRanks(ranks=2, clean_loss=3.1645, spread=0.0041),
    drills=[
        DrillShown(
            name="lr-x30", family="schedule", what="learning rate x30 for 10 steps", faults=["lr-spike@230"],
            settings=[], verdict="damaged", unguarded=659.7, guarded=4.3, prevented=0.99, seen=231, latency=1,
            skipped=1, done_again=40, done=["went back to step 200"], cause="lr-too-high",
            is_right=False, because="so", ranks=1, rank=None,
        ),
        DrillShown(
            name="nan-gradient", family="hardware", what="NaN", faults=["nan-gradient@230"], settings=[],
            verdict="survived", unguarded="NaN", guarded=0.5, prevented=1.0, seen=230, latency=0, skipped=1,
            done_again=0, done=[], cause="corrupt-gradient", is_right=True, because="so",
            ranks=1, rank=None,
        ),
        DrillShown(
            name="rank-nan", family="hardware", what="NaN", faults=["nan-gradient:rank=1@230"], settings=[],
            verdict="survived", unguarded="NaN", guarded=0.5, prevented=1.0, seen=230, latency=0, skipped=1,
            done_again=0, done=[], cause="corrupt-gradient", is_right=True, because="so", ranks=2, rank=1,
        ),
    ],
)  # fmt: skip


def test_the_card_says_what_is_wrong_with_it() -> None:
    assert (
        page(CARD)
        == """\
lab, nano, seed 0: faults strike at step 230, runs are compared at step 430. The clean twin ends at a loss of
3.1644; gaps are to that, in units of what healthy twins end from it by (0.004; without 1, 10 batches). Up to
2 is as good as it.
On 2 ranks (rank-nan) the clean twin ends at 3.1645, healthy ones 0.0041 from it.

drill                    unguarded  seen after  guarded  steps  tested cause
schedule
  lr-x30                    +659.7      1 step     +4.3     41  lr too high, wrong                damaged
hardware
  nan-gradient                lost     0 steps     +0.5      1  corrupt gradient, right           survived
  rank-nan                    lost     0 steps     +0.5      1  corrupt gradient, rank 1, right   survived

2 survived, 1 damaged, of 3.
Tested causes: 2 of 3 right, 1 wrong, 0 not known.
lr-x30, damaged: learning rate x30 for 10 steps. Done: 1 step skipped; went back to step 200."""
    )
