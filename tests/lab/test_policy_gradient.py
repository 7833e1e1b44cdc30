"""Questions in, a policy that answers them out, and the signals of how it learns."""

from functools import partial
from pathlib import Path

import pytest
import torch

from sealegs.drills import loops
from sealegs.drills.catalogue import DRILLS
from sealegs.drills.loops import PolicyLoop
from sealegs.errors import ConfigError
from sealegs.faults.practice import disturbed_policy
from sealegs.faults.spec import parse
from sealegs.lab.policy_gradient import (
    ASKED,
    END,
    LIMIT,
    QUESTION,
    PolicySettings,
    Samples,
    advantages_of,
    divergence,
    gap_signals,
    questions,
    reward_signals,
    share_right,
    train_policy,
)
from sealegs.record.run import Run, open_run

QUICK = PolicySettings(steps=30, questions=6, lr=3e-3, evaluate_steps=29, warmup=60)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Run]:
    folder = tmp_path_factory.mktemp("grpo") / "run"
    return train_policy(QUICK, folder), open_run(folder)


def answers(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers to the question 1 2 3 4, up to their first end, and which of their tokens count."""
    tokens = torch.tensor([[1, 2, 3, 4, ASKED, *row, *[0] * (LIMIT - len(row))] for row in rows])
    counts = torch.tensor([[1.0] * len(row) + [0.0] * (LIMIT - len(row)) for row in rows])
    return tokens, counts


def test_an_answers_reward_is_the_share_of_its_places_that_are_right() -> None:
    tokens, counts = answers([1, 2, 3, 4, END], [1, 2, 9, 4, END], [1, END], [1, 2, 3, 4, 5, 6, 7, 8])
    assert share_right(tokens, counts).tolist() == pytest.approx([1.0, 0.8, 0.2, 0.5])


def test_held_out_questions_are_never_trained_on() -> None:
    generator = torch.Generator().manual_seed(0)
    asked, kept = questions(400, generator), questions(40, generator, held_out=True)
    assert not {tuple(row) for row in asked.tolist()} & {tuple(row) for row in kept.tolist()}
    assert (len(asked), len(kept)) == (400, 40)
    assert (asked[:, -1] == ASKED).all()


def test_an_answer_is_worth_what_it_is_better_than_its_group() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert advantages_of(rewards, is_scaled=False).tolist() == [[-0.5, 0.5], [0.0, 0.0]]
    assert advantages_of(rewards, is_scaled=True)[0, 1] == pytest.approx(0.5**0.5, rel=1e-3)


def test_the_signals_are_those_of_the_definitions() -> None:
    tokens, counts = answers([1, END], [1, 2, 3, 4, 5, 6, 7, 8], [1, END], [2, END])
    samples = Samples(tokens, counts, torch.zeros(4, LIMIT))
    found = reward_signals(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), samples)
    assert {name: float(value) for name, value in found.items()} == {
        "reward": 0.5,
        "reward_std": pytest.approx(0.408, abs=1e-3),
        "zero_spread_share": 0.5,
        "completion_length": 3.5,
        "cut_share": 0.25,
    }
    gaps = gap_signals(samples, torch.full((4, LIMIT), 0.25).where(counts > 0, torch.tensor(9.0)))
    assert (float(gaps["logp_gap"]), float(gaps["logp_gap_max"])) == (0.25, 0.25)
    assert float(divergence(torch.tensor(0.5), torch.tensor(0.5))) == 0.0
    assert float(divergence(torch.tensor(0.5), torch.tensor(0.3))) > 0


def test_it_learns_and_says_how(learned: tuple[float, Run]) -> None:
    reward, run = learned
    first, last = (float(run.column("reward")[part].mean()) for part in (slice(0, 6), slice(24, 30)))
    assert first < 0.4
    assert last > first + 0.15
    assert reward > first + 0.15
    assert run.column("policy_entropy")[29] < run.column("policy_entropy")[0]
    assert run.column("kl")[0] == 0.0
    assert run.column("kl")[29] > 0.0
    assert (run.column("logp_gap")[:30] < 0.02).all()  # bf16 weights
    ratios = run.column("importance_ratio_max")
    assert max(ratios[0:30:2]) < min(1.2, max(ratios[1:30:2]))  # the second update of a set of samples is off-policy
    assert not any(event.kind in ("skip", "alarm") for event in run.events)


def test_a_seed_repeats_and_other_samples_differ(tmp_path: Path) -> None:
    short = PolicySettings(steps=2, questions=2, warmup=2)
    one, same, other = (
        train_policy(settings, tmp_path / name)
        for name, settings in [
            ("a", short),
            ("b", short),
            ("c", PolicySettings(steps=2, questions=2, warmup=2, samples_seed=1)),
        ]
    )
    rows = [open_run(tmp_path / name).column("policy_entropy").tolist() for name in "abc"]
    assert one == same
    assert rows[0] == rows[1] != rows[2]
    assert other >= 0


@pytest.mark.parametrize(
    ("fault", "signal", "is_struck"),
    [
        ("constant-reward:value=0.5@2", "zero_spread_share", lambda before, after: before < 1 and after == 1),
        ("noisy-sampler:noise=0.5@2", "logp_gap", lambda before, after: after > 20 * before),
        ("hacked-reward:weight=3@2", "reward", lambda before, after: after > before + 0.5),
    ],
)
def test_a_fault_shows_in_its_signal(tmp_path: Path, fault: str, signal: str, is_struck: object) -> None:
    disturb = partial(disturbed_policy, [parse(fault)])
    train_policy(PolicySettings(steps=4, questions=2, warmup=2), tmp_path / "a", disturb=disturb)
    run = open_run(tmp_path / "a")
    assert callable(is_struck)
    assert is_struck(float(run.column(signal)[0]), float(run.column(signal)[2]))
    [told] = [event.detail["text"] for event in run.events if event.kind == "fault"]
    assert told.startswith(f"step 2: {fault} ")


def test_a_drill_compares_the_share_of_wrong_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "PolicySettings", partial(PolicySettings, questions=2, warmup=2))
    loop = PolicyLoop(seed=0, at=2, last=4)
    clean = loop.ending(tmp_path / "clean", None, guarded=True)
    struck = loop.ending(tmp_path / "struck", DRILLS["zero-spread"], guarded=False)
    assert 0 < clean < 1
    assert 0 < struck < 1
    assert open_run(tmp_path / "clean").column("zero_spread_share")[3] < 1
    assert open_run(tmp_path / "struck").column("zero_spread_share")[3] == 1


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"group": 1}, {"temperature": 0.0}])
def test_what_cannot_be_trained_is_refused(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(ConfigError, match=f"{name}="):
        PolicySettings(**wrong)  # type: ignore[arg-type]


def test_a_question_and_its_longest_answer_fit_the_context() -> None:
    assert QUICK.model.context == QUESTION + LIMIT
