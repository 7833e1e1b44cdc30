"""Reruns with a remedy: what each change does to the steps, in a loop that is not the lab's."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sealegs
from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
from sealegs.errors import ConfigError
from sealegs.guard_options import Checkpointing
from sealegs.replay.experiment import Experiment
from sealegs.replay.remedy import _joined, _spread, _taken, borrowed, plan, rerun
from sealegs.replay.subject import load_builder
from sealegs.report.fixes import parse
from sealegs.report.postmortem import plots

pytestmark = [
    pytest.mark.xdist_group("remedied"),  # one run serves all
    pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly"),  # it is to
]

BUILD = """
import sealegs, torch

def text(model):
    def losses(batch):
        logits = model(batch["ids"])[:, :-1].flatten(0, 1)
        wanted = batch["ids"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="none").view(len(batch["ids"]), -1)
    return sealegs.Text(targets=lambda batch: batch["ids"][:, 1:], losses=losses, without=lambda batch, mask: batch)

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    read = text(model)
    return sealegs.Subject(
        model=model, optimizers=[optimizer], loss=lambda batch: read.losses(batch).mean(), text=read
    )
"""
BAD, FOUND, SEEN = 300, 312, 31


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a counter, whose batches from step 300 on are of tokens that it has never seen."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(BUILD)
    subject = load_builder(f"{folder / 'own.py'}:build")()
    generator = torch.Generator().manual_seed(1)
    data = [{"ids": batch_from(torch.randint(0, SEEN, (8, 1), generator=generator))} for _ in range(400)]
    for batch in data[BAD:]:
        batch["ids"] = torch.randint(40, 64, (8, 12), generator=generator)
    how: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "act": False,
        "checkpoint_every": Checkpointing(snapshot_memory=2**20),
    }
    with sealegs.Guard(subject.model, subject.optimizers, run=folder / "a", clip=1.0, **how) as guard:
        for batch in guard.batches(data):
            loss = subject.loss(batch)
            loss.backward()
            guard.step(loss)
            if guard.number == FOUND:
                break
    return folder


def batch_from(first: Tensor) -> Tensor:
    return (first + torch.arange(12)) % SEEN


def experiment(folder: Path) -> Experiment:
    return Experiment(open_capsule(folder / "a" / "incidents" / "1"), load_builder(f"{folder / 'own.py'}:build")())


def shown(folder: Path, *fixes: str, last: int = BAD + 20) -> dict[str, dict[int, float]]:
    here, changes = experiment(folder), [parse(text) for text in fixes]
    return rerun(here, changes, plan(here, changes, last, borrowed(here))).values


def test_without_a_change_it_is_as_it_was(struck: Path) -> None:
    here = experiment(struck)
    again = shown(struck, "weights=restored")
    for step in here.capsule.steps():
        assert again["loss"][step] == here.rows[step]["loss"]
        assert again["grad_norm"][step] == here.rows[step]["grad_norm"]
        assert again["clipped_norm"][step] == pytest.approx(min(again["grad_norm"][step], 1.0), rel=1e-5)


def test_what_is_left_out_is_passed_over(struck: Path) -> None:
    here = experiment(struck)
    bad = here.capsule.steps().stop
    changes = [parse(f"skip={BAD}:{bad}")]
    planned = plan(here, changes, BAD + 5, borrowed(here))
    assert list(planned) == list(range(here.oldest, BAD + 6))
    assert [planned[BAD + n][0]["ids"].tolist() for n in range(3)] == [
        batches[0]["ids"].tolist() for batches in islice(borrowed(here), 3)
    ]
    assert max(shown(struck, f"skip={BAD}:{bad}")["loss"].values()) < here.usual.loss + 1
    assert max(shown(struck, "clip=2")["loss"].values()) > here.usual.loss + 2


def test_an_update_that_is_gated_changes_nothing(struck: Path) -> None:
    gated, plain = shown(struck, f"gate={BAD}:{BAD + 1}"), shown(struck, "weights=restored")
    assert gated["loss"][BAD] == plain["loss"][BAD]
    assert gated["loss"][BAD + 1] != plain["loss"][BAD + 1]
    assert BAD not in gated["clipped_norm"]
    assert BAD + 1 in gated["clipped_norm"]


def test_norms_rates_and_moments_are_what_was_asked_for(struck: Path) -> None:
    plain = shown(struck, "weights=restored")["loss"]
    assert max(shown(struck, "clip=0.25")["clipped_norm"].values()) == pytest.approx(0.25, rel=1e-4)
    first = experiment(struck).oldest
    for change in ("clip=0.01", "lr=0.5", "beta2=0.5"):
        changed = shown(struck, change)["loss"]
        assert changed[first] == plain[first], "the weights of the state"
        assert changed[BAD + 1] != plain[BAD + 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [("lr=before", "no jump in the capsule"), ("dtype=fp32", "the subject has no precision=")],
)
def test_what_cannot_be_carried_out_is_one_sentence(change: str, sentence: str, struck: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shown(struck, change)


def test_rows_with_the_same_rare_token_are_spread(struck: Path) -> None:
    """The rows stay the same, and none is lost: of each kind one to a batch."""
    here = experiment(struck)
    plain = batch_from(torch.arange(8)[:, None])
    rare = plain.clone()
    rare[:3, 5] = 63
    batches = [({"ids": rare},), *(({"ids": plain},) for _ in range(4))]
    made = _spread(here, batches)
    assert sorted(int((batch["ids"] == 63).sum()) for (batch,) in made) == [0, 0, 1, 1, 1]
    rows = [sorted(row for (batch,) in each for row in batch["ids"].tolist()) for each in (batches, made)]
    assert rows[0] == rows[1]
    assert all(len(batch["ids"]) == 8 for (batch,) in made)


def test_rows_of_every_kind_of_batch_can_be_taken() -> None:
    one = {"a": np.arange(4).reshape(2, 2), "b": ["x", "y"], "c": torch.zeros(2)}
    two = {"a": np.arange(4).reshape(2, 2) + 4, "b": ["u", "v"], "c": torch.ones(2)}
    taken = _taken(_joined([one, two]), [3, 0])
    assert (taken["a"].tolist(), taken["b"], taken["c"].tolist()) == ([[6, 7], [0, 1]], ["v", "x"], [1.0, 0.0])
    with pytest.raises(ConfigError, match="rows of a int cannot be told apart"):
        _joined([1, 2])


def test_the_command_verifies_a_loop_of_ones_own(
    struck: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)  # pictures take longer than the reruns
    build = ["--build", f"{struck / 'own.py'}:build"]
    words = ["verify", f"{struck / 'a'}#1", *build]
    expected = ["--expect", f"max loss[{BAD}:{BAD + 20}]<baseline+1"]
    end = open_capsule(struck / "a" / "incidents" / "1").steps().stop
    assert main([*words, "--fix", f"skip={BAD}:{end}", "--json", *expected]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["borrowed"] == 20, "the capsule has none but bad ones"
    assert main([*words, "--fix", "clip=0.5", *expected]) == 1
    assert main([*words, "--fix", "model.norm_eps=1e-6", *expected]) == 2
    assert "this is no run of `sealegs train`; change it in build()" in capsys.readouterr().err
    assert main([*words[:2], "--fix", "clip=0.5"]) == 2
    assert "say --build FILE.py:FUNCTION" in capsys.readouterr().err


def test_a_file_finds_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where it is the program."""
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / "neighbour_of_mine.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(
        "import sealegs, torch\nfrom neighbour_of_mine import WIDTH\n"
        "def build():\n    model = torch.nn.Linear(WIDTH, 1)\n"
        "    return sealegs.Subject(model=model, optimizers=[torch.optim.SGD(model.parameters())], loss=model)\n"
    )
    assert load_builder(f"{tmp_path / 'mine.py'}:build")().model.in_features == 3
