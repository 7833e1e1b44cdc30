"""Real faults in real training, run again from their capsules: the cause that is named is the one that was put in."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import sealegs
from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
from sealegs.cli.replay import builder
from sealegs.diagnosis.cause_cards import causes
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.guard_options import Checkpointing
from sealegs.lab import branches
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.recovery.incident_tracker import IncidentTracker
from sealegs.replay import arms, tested_causes
from sealegs.replay.experiment import Change, Experiment, Outcome
from sealegs.replay.fidelity import ALIKE
from sealegs.replay.tested_causes import judge_causes
from sealegs.report.commands import replay as replayed
from sealegs.report.commands.contracts import contract

pytestmark = [
    pytest.mark.xdist_group("replay"),  # one prefix serves all
    pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly"),  # they are to
]

NANO = SIZES["nano"]
CADENCE = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
MODEL = replace(NANO.model, layers=1)  # no cause depends on its depth, and a step takes a third less
SETTINGS = resolved(replace(NANO, steps=300, threads=1, shadow=True, cadence=CADENCE, model=MODEL))
FORK, STRUCK, LAST = 200, 230, 245
MOST_STEPS = 240
"""That a judgement may run."""

Branch = Callable[[str], Path]
Judged = Callable[[str], tested_causes.Tested]


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> Branch:
    """The folder of the incident that a fault at step 230 ends in, with nothing done about it."""
    folder = tmp_path_factory.mktemp("replays")
    made: dict[str, Path] = {}

    def incident(fault: str) -> Path:
        if not made:
            branches.begin(SETTINGS, open_data(SETTINGS), folder / "beginning", steps=FORK)
        if fault not in made:
            made[fault] = folder / str(len(made))
            strike = partial(disturbed, [parse(fault)], SETTINGS.model.vocabulary)
            data = open_data(SETTINGS)
            shutil.copytree(folder / "beginning", made[fault])
            left = iter(range(LAST - FORK))
            train(
                SETTINGS,
                data,
                made[fault],
                resume=True,
                disturb=strike,
                should_stop=lambda: None if next(left, None) is not None else "enough",
            )
        return made[fault] / "incidents" / "1"

    return incident


@pytest.fixture(scope="module")
def judged(branch: Branch) -> Judged:
    """What the reruns of a fault's incident say. One judgement serves all tests of that fault."""

    @cache
    def tested(fault: str) -> tested_causes.Tested:
        capsule = open_capsule(branch(fault))
        return judge_causes(Experiment(capsule, builder(capsule.folder, None)()))

    return tested


HIDDEN_RATE = "lr-spike:factor=30,steps=10@230"
"""Its cause is the one that test_the_command_says_it_in_another_place finds."""
CAUSES = {
    "random-shard:batches=40@230": "bad-data-batch",
    "shifted-labels:batches=10@230": "bad-data-batch",
    "masked-labels:batches=8@230": "masked-labels",
    "rare-tokens:batches=10@230": "long-tail-token",
    "encoding-junk:batches=4@230": "bad-data-batch",
    "duplicate-batch:batches=36@200": "duplicate-batch",
    "lr-spike:factor=60,steps=10,log=shows@230": "lr-discontinuity",
    "nan-gradient@230": "corrupt-gradient",
    "bit-flip:in=weight@230": "corrupt-weight",
    "weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@230": "corrupt-weight",
}


LIKE_OTHERS = ("encoding-junk:", "weight-scale:")
"""Which `make drills` runs, too, as all of them."""


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param(fault, cause, marks=[pytest.mark.long] if fault.startswith(LIKE_OTHERS) else [])
        for fault, cause in CAUSES.items()
    ],
)
def test_the_cause_is_the_one_that_was_put_in(fault: str, cause: str, judged: Judged) -> None:
    found = judged(fault)
    assert found.cause == cause, found.because
    assert found.steps <= MOST_STEPS


def test_a_rerun_is_the_run_bit_for_bit(branch: Branch) -> None:
    """In another process, from another folder, without the run's checkpoints."""
    incident = branch("random-shard:batches=40@230")
    capsule = open_capsule(incident)
    experiment = Experiment(capsule, builder(capsule.folder, None)())
    assert experiment.exactly() == 0.0
    for step, seen in experiment.seen.items():
        row = experiment.rows[step]
        assert (seen.loss, seen.grad_norm) == (row["loss"], row["grad_norm"])
    assert set(experiment.seen) == set(range(201, 238)) < set(capsule.steps())  # and those after it was found


def test_what_is_necessary_and_what_is_not(judged: Judged) -> None:
    found = judged("shifted-labels:batches=10@230")
    assert found.standings == {"bad-data-batch": "necessary and sufficient", "long-tail-token": "not needed"}
    shows = {each.arm.name: (each.is_there, each.is_gone) for each in found.tried}
    assert shows["one ulp"] == shows["other order"] == shows["older state"] == (True, False)
    assert shows["other batches"] == (False, True)


def test_without_time_nothing_is_claimed(branch: Branch) -> None:
    capsule = open_capsule(branch("random-shard:batches=40@230"))
    found = judge_causes(Experiment(capsule, builder(capsule.folder, None)()), seconds=0)
    assert not found.tried
    assert "other batches" in found.unasked
    assert found.cause is None


def test_only_what_is_asked_for_is_run(branch: Branch, capsys: pytest.CaptureFixture[str]) -> None:
    incident = branch("random-shard:batches=40@230")
    assert main(["replay", str(incident), "--arms", "lr-too-high", "--arms", "older state", "--json"]) == 1
    found = replayed.read(capsys.readouterr().out.encode())
    assert [arm.name for arm in found.arms] == ["one ulp", "other order", "older state", "rate x0.5", "rate x0.1"]
    assert found.causes == {"bad-data-batch": "sufficient", "lr-too-high": "not needed"}
    assert main(["replay", str(incident), "--arms", "rate x3"]) == 2
    assert "--arms rate x3: not one of this incident's, which are one ulp, other order, " in capsys.readouterr().err


def test_from_spike_to_token(judged: Judged) -> None:
    """The tokens that the fault drew are named, as text, with how seldom they were met before."""
    lit = judged("rare-tokens:batches=10@230").spotlight
    assert lit is not None
    assert lit.loss > 2 * lit.usual
    assert len(lit.tokens) == 8
    assert all(token.before < 20 and token.times >= 1 for token in lit.tokens)
    assert lit.tokens[0].loss > lit.usual + 2
    assert min(row.rare for row in lit.rows) > 0.5
    assert [row.share for row in lit.rows] == sorted((row.share for row in lit.rows), reverse=True)
    assert all(row.origin.startswith("grammar, document") and row.grad_norm > 0 for row in lit.rows)
    assert all(f"[{row.text.split('[', 1)[1]}" in row.text for row in lit.rows)
    assert sum(lit.histogram) == 8 * 32
    assert sum(place * count for place, count in enumerate(lit.histogram)) / 256 > 12


def test_an_incident_that_harmless_changes_end_proves_nothing(branch: Branch, monkeypatch: pytest.MonkeyPatch) -> None:
    capsule = open_capsule(branch("random-shard:batches=40@230"))
    experiment = Experiment(capsule, builder(capsule.folder, None)())
    before = experiment.before()[0]
    monkeypatch.setattr(arms, "_turned", lambda batch: before[0])
    monkeypatch.setattr(tested_causes, "one_ulp", lambda seed: arms._placebo("", "", Change(batches=lambda *_: before)))
    found = judge_causes(experiment)
    assert found.cause is None
    assert "does not survive harmless changes" in found.because
    assert set(found.standings.values()) == {"unknown"}


@pytest.mark.parametrize(
    ("without", "placebos", "standing"),
    [
        ({"x0.5": [1, 2, 1, 1]}, [13, 44, 15, 93, 19], "necessary"),
        ({"x0.5": [9, 14], "x0.1": [1, 0, 1, 2]}, [13, 44, 15, 93, 19], "necessary"),  # one of two arms is enough
        ({"x0.5": [1, 2, 1, 1]}, [3, 44, 15, 93, 19], "necessary"),  # there in four of five
        ({"x0.5": [1, 14, 1, 1]}, [13, 44, 15, 93, 19], "unknown"),  # as little is left of a placebo
        ({"x0.5": [1, 1], "x0.1": [1, 1]}, [13, 44, 15, 93, 19], "unknown"),  # neither was repeated
        ({"x0.5": [0, 0, 0, 0]}, [3, 44, 2, 120, 90], "unknown"),  # harmless changes end it
    ],
)
def test_where_chance_has_its_part_it_takes_repetition(
    without: dict[str, list[float]], placebos: list[float], standing: str
) -> None:
    def tried(kind: Any, cause: str, does: str, size: float) -> tested_causes.Tried:
        arm = arms.Arm(name="", kind=kind, cause=cause, does=does, change=Change())
        outcome = Outcome(losses={}, grad_norms={}, height=size, damage=0.0)
        left = size / 100
        return tested_causes.Tried(arm=arm, outcome=outcome, left=left, is_there=left >= 0.5, is_gone=left < 0.25)

    seen = [tried("placebo", "", "", size) for size in placebos]
    seen += [tried("without", "lr-too-high", does, size) for does, sizes in without.items() for size in sizes]
    assert tested_causes._standing("lr-too-high", seen) == standing


@pytest.mark.parametrize(
    ("left", "batches", "is_so"),
    [(0.31, "necessary and sufficient", False), (0.1, "necessary and sufficient", True), (0.31, "necessary", True)],
)
def test_batches_that_are_at_fault_with_any_state_are_so_for_rare_tokens_alone_where_nothing_else_is_left(
    left: float, batches: tested_causes.Standing, is_so: bool
) -> None:
    """Of tokens drawn at random most are rare, and without them the rest is as dear."""
    masked = arms.Arm(name="m", kind="without", cause="long-tail-token", does="masked", change=Change())
    outcome = Outcome(losses={}, grad_norms={}, height=left, damage=0.0)
    tried = [tested_causes.Tried(arm=masked, outcome=outcome, left=left, is_there=False, is_gone=True)]
    assert tested_causes._is_of_rare_tokens_alone(tried, {"bad-data-batch": batches}) is is_so


def test_a_state_is_restored_as_often_as_one_likes(branch: Branch) -> None:
    capsule = open_capsule(branch("random-shard:batches=40@230"))
    experiment = Experiment(capsule, builder(capsule.folder, None)())
    first = experiment.run()
    experiment.run(Change(lr=lambda step, lr: lr * 100, before=_shaken))
    assert experiment.run() == first


@torch.no_grad()
def _shaken(subject: sealegs.Subject) -> None:
    for parameter in subject.model.parameters():
        parameter.add_(1.0)


def test_the_command_says_it_in_another_place(branch: Branch, tmp_path: Path) -> None:
    shutil.copytree(branch(HIDDEN_RATE), tmp_path / "brought")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from sealegs.cli.main import main; sys.exit(main())",
            "replay",
            str(tmp_path / "brought"),
            "--json",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = replayed.read(done.stdout.encode())
    assert found.cause == "unlogged-step-size"
    assert found.steps <= MOST_STEPS
    rate = re.search(r"a learning rate (\S+) times the one in the log", found.because)
    assert rate is not None
    assert float(rate[1]) == pytest.approx(30, rel=ALIKE), "it is sought until it explains the loss so well"
    assert json.loads((tmp_path / "brought" / "replay.json").read_text()) == json.loads(done.stdout)
    page = replayed.page(found)
    assert page.splitlines()[2].startswith("TESTED CAUSE: unlogged step size")


def test_the_object_has_the_schema_that_is_promised() -> None:
    promised = json.loads((Path(__file__).parents[2] / "docs" / "replay.schema.json").read_text())
    assert promised == msgspec.json.schema(replayed.Replayed)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "no such run"),
        ([".#x"], "after the # comes the number of an incident"),
        (["{run}#7"], "no such incident; there are 1"),
        (["{run}", "--build", "nowhere.py:build"], "no Python file that can be read"),
        (["{run}", "--build", "train.py"], "give a file and a function in it"),
    ],
)
def test_bad_input_is_one_sentence(
    words: Sequence[str], sentence: str, branch: Branch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = branch("random-shard:batches=40@230").parent.parent
    assert main(["replay", *(word.format(run=run) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_damaged_capsule_is_refused(branch: Branch, tmp_path: Path) -> None:
    shutil.copytree(branch("random-shard:batches=40@230"), tmp_path / "a")
    (state,) = (tmp_path / "a" / "capsule" / "state").glob("*.distcp")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 255
    state.write_bytes(content)
    with pytest.raises(sealegs.errors.SourceError, match="is not what was written"):
        open_capsule(tmp_path / "a").state()


# A loop that is not the lab's.

BUILD = """
import sealegs, torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: JUMP if 300 <= step < 310 else 1.0)
    return sealegs.Subject(
        model=model,
        optimizers=[optimizer],
        schedulers=[schedule],
        loss=lambda batch: (model(batch["x"]) - batch["y"]).square().mean(),
    )
"""


@pytest.mark.parametrize("cause", ["bad-data-batch", "corrupt-weight", "lr-discontinuity"])
def test_a_loop_of_ones_own(cause: str, tmp_path: Path) -> None:
    """With the function that builds it; the batches are dicts of tensors."""
    source = BUILD.replace("JUMP", "300.0" if cause == "lr-discontinuity" else "1.0")
    (tmp_path / "own.py").write_text(source)
    space: dict[str, Any] = {}
    exec(source, space)  # noqa: S102
    subject = space["build"]()
    torch.manual_seed(1)
    data = [{"x": x, "y": x[:, :4]} for x in torch.randn(400, 16, 8)]
    if cause == "bad-data-batch":
        for batch in data[300:]:
            batch["y"] = 20 * torch.randn(16, 4)
    how: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "act": False,
        "checkpoint_every": Checkpointing(snapshot_memory=2**20),
    }
    how["scheduler"] = subject.schedulers
    with sealegs.Guard(subject.model, subject.optimizers, run=tmp_path / "a", clip=1.0, **how) as guard:
        for batch in guard.batches(data):
            if guard.number == 300 and cause == "corrupt-weight":
                with torch.no_grad():
                    subject.model[0].weight.mul_(20)
            loss = subject.loss(batch)
            loss.backward()
            guard.step(loss)
            if guard.number == 330:
                break
    build = f"{tmp_path / 'own.py'}:build"
    assert main(["replay", f"{tmp_path / 'a'}#1", "--json", "--build", build]) == 0
    told = replayed.read((tmp_path / "a/incidents/1/replay.json").read_bytes())
    assert told.cause == cause
    if cause == "lr-discontinuity":  # the batches are brought without the rate that they came with
        assert told.causes["bad-data-batch"] == "not needed"


def test_bad_data_that_is_found_late_is_not_laid_to_the_second_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy device: 30 bad batches were trained on before the first was judged."""
    held: list[Any] = []
    queue_row = IncidentTracker.queue_row

    def late(self: IncidentTracker, row: Any, verdict: Any) -> None:
        held.append((row, verdict))
        while held and not 300 <= row["step"] < 330:
            queue_row(self, *held.pop(0))

    monkeypatch.setattr(IncidentTracker, "queue_row", late)
    space: dict[str, Any] = {}
    exec(BUILD.replace("JUMP", "1.0").replace("16", "64"), space)  # noqa: S102
    subject = space["build"]()
    torch.manual_seed(1)
    data = [{"x": x, "y": x[:, :4]} for x in torch.randn(360, 16, 8)]
    for batch in data[300:]:
        batch["y"] = 20 * torch.randn(16, 4)
    how: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "act": False,
        "clip": 1.0,
        "checkpoint_every": Checkpointing(snapshot_memory=2**30),
    }
    how["scheduler"] = subject.schedulers
    with sealegs.Guard(subject.model, subject.optimizers, run=tmp_path / "a", **how) as guard:
        for batch in guard.batches(data):
            guard.step(subject.gradients([batch]))
            if guard.number == 340:
                break
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    found = judge_causes(Experiment(capsule, space["build"]()))
    assert found.standings["stale-beta2"] == "necessary"
    assert found.cause == "bad-data-batch"


def test_every_cause_that_a_replay_can_name_has_a_card() -> None:
    source = "".join(path.read_text() for path in Path(arms.__file__).parent.glob("*.py"))
    named = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', source))
    assert {"lr-discontinuity", "softmax-overflow", "hard-batch"} <= named
    assert named <= causes().keys()


def test_tensors_are_plain_values_in_a_page() -> None:
    """A replay that ends in NaN has infinite heights: they are words in the object, and on the page."""
    shown = replayed.Replayed(
        source="a",
        incident=1,
        kind="nonfinite",
        onset=3,
        steps=9,
        apart=0.0,
        departure=None,
        height=float("inf"),
        damage=float("inf"),
        arms=[],
        causes={},
        location=None,
        cause=None,
        because="it is not known",
    )
    assert contract(shown)["height"] == "Infinity"
    again = replayed.read(msgspec.json.encode(contract(shown)))
    assert "without bound" in replayed.page(again)
    assert "NOT KNOWN YET" in replayed.page(again)
