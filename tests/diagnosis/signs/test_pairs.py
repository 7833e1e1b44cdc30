"""Signs, each beside a run that looks like it and is something else."""

from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.streams import Case, run_from

from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.diagnosis.signs.registry import SIGNS

Stream = dict[str, Any]
LOSS: Stream = {"line": [[0, 6.0], [100, 3.6], [400, 3.0], [1200, 2.7]], "noise": 0.012}
LEAP: Stream = {"line": [[0, 6.0], [100, 3.6], [600, 2.9], [603, 4.6], [640, 4.0], [1200, 3.6]], "noise": 0.012}
EARLY: Stream = {"line": [[0, 9.0], [19, 8.0], [20, 12.0], [60, 7.6], [400, 4.0], [1200, 3.4]], "noise": 0.01}
NORM: Stream = {"line": [[0, 3.0], [100, 1.0], [1200, 0.7]], "noise": 0.1}
RATE: Stream = {"line": [[0, 1e-5], [100, 1e-3], [1200, 4e-4]]}
RESUMED: Stream = {"resumes": [[600, 640]], "events": [{"kind": "resume", "step": 600}]}
TWICE: Stream = {"events": [{"kind": "resume", "step": 400}, {"kind": "resume", "step": 800}]}


def line(*points: list[float], noise: float = 0.0, **more: Any) -> Stream:
    return {"line": list(points), "noise": noise, **more}


def flat(level: float, noise: float = 0.0, **more: Any) -> Stream:
    return line([0, level], [1200, level], noise=noise, **more)


def steps_down(depth: float) -> Stream:
    """A loss that is lower from each of two resumes on."""
    first, second = [[400, 3.2 - depth], [799, 3.0 - depth]], [[800, 3.0 - 2 * depth], [1200, 2.9 - 2 * depth]]
    return {"line": [[0, 6.0], [100, 3.6], [399, 3.2], *first, *second], "noise": 0.008}


PAIRS: list[tuple[str, Stream, Stream]] = [
    (
        "zero-loss-zero-gradient",
        {"signals": {"loss": LOSS | {"set": [[700, 1200, 0.0]]}, "grad_norm": NORM | {"set": [[700, 1200, 0.0]]}}},
        {"signals": {"loss": LOSS | {"set": [[700, 1200, 0.0]]}, "grad_norm": NORM | {"set": [[700, 1200, "NaN"]]}}},
    ),
    (
        "gradient-climbs-before",
        {"signals": {"loss": line([0, 9.0], [90, 6.0], [100, 9.0], [1200, 9.0], noise=0.01)}
         | {"grad_norm": line([0, 1.0], [15, 1.0], [90, 20.0], [1200, 20.0], noise=0.05)}},
        {"signals": {"loss": line([0, 9.0], [90, 6.0], [100, 9.0], [1200, 9.0], noise=0.01)}
         | {"grad_norm": line([0, 4.0], [15, 1.0], [89, 1.0], [90, 20.0], [1200, 20.0], noise=0.05)}},
    ),
    (
        "loss-turns-with-lr",
        {"signals": {"loss": line([0, 6.0], [700, 2.9], [1200, 2.9], noise=0.01)}
         | {"lr": line([0, 1e-3], [700, 1e-5], [1200, 8e-4])}},
        {"signals": {"loss": line([0, 6.0], [1200, 2.0], noise=0.01)}
         | {"lr": line([0, 1e-3], [700, 1e-5], [1200, 8e-4])}},
    ),
    (
        "warmup-just-over",
        {"signals": {"loss": LEAP, "lr": line([0, 1e-6], [590, 1e-3], [1200, 4e-4])}},
        {"signals": {"loss": LEAP, "lr": line([0, 1e-4], [589, 1e-4], [590, 1e-3], [1200, 1e-3])}},
    ),
    (
        "no-warm-up",
        {"signals": {"loss": EARLY, "lr": line([0, 2e-3], [1200, 2e-4])}},
        {"signals": {"loss": EARLY, "lr": line([0, 1e-5], [100, 2e-3], [1200, 2e-4])}},
    ),
    (
        "lr-jumps",
        {"signals": {"loss": LEAP, "lr": RATE | {"set": [[598, 1200, 2e-2]]}}},
        {"signals": {"loss": EARLY, "lr": line([0, 0.0], [1, 2e-3], [1200, 2e-4])}},  # what it jumps from is its start
    ),
    (
        "updates-outgrow",
        {"signals": {"loss": LEAP, "lr": RATE, "grad_norm": NORM | {"set": [[600, 610, 6.0]]}}
         | {"update_rms": flat(0.2, 0.03, set=[[600, 610, 0.8]])}},
        {"signals": {"loss": LEAP, "lr": RATE, "grad_norm": NORM | {"set": [[600, 610, 6.0]]}}
         | {"update_rms": flat(0.2, 0.03)}},
    ),
    (
        "lr-ends-early",
        {"signals": {"loss": LOSS, "lr": line([0, 1e-3], [900, 0.0], [1200, 0.0])}},
        {"signals": {"loss": LOSS, "lr": line([0, 1e-3], [900, 1e-5], [1200, 1e-5])}},
    ),
    (
        "warm-up-outlasts-the-run",
        {"signals": {"loss": LOSS, "lr": line([0, 0.0], [1200, 1e-3])}, "settings": {"max_steps": 1200}},
        {"signals": {"loss": LOSS, "lr": line([0, 0.0], [1200, 1e-3])}, "settings": {"max_steps": 90_000}},
    ),
    (
        "rate-is-tiny",
        {"signals": {"loss": LOSS, "lr": flat(5e-7)}},
        {"signals": {"loss": LOSS, "lr": flat(5e-5)}},
    ),
    (
        "scale-falls",
        {"dtype": "fp16", "signals": {"loss": LOSS, "loss_scale": line([0, 65536], [700, 65536], [900, 16])}},
        {"dtype": "fp16", "signals": {"loss": LOSS, "loss_scale": line([0, 2**32], [60, 65536], [1200, 16384])}},
    ),
    (
        "goes-on-from-earlier",
        {"signals": {"loss": line([0, 6.0], [500, 3.0], [1200, 2.0], noise=0.004)
                     | {"after_resume": line([600, 5.4], [1000, 3.0], [1200, 2.8], noise=0.004)}}} | RESUMED,
        {"signals": {"loss": line([0, 6.0], [500, 3.0], [1200, 2.0], noise=0.004)
                     | {"after_resume": line([600, 5.4], [640, 3.0], [1200, 2.1], noise=0.004)}}} | RESUMED,
    ),
    (
        "weights-stand-still",
        {"signals": {"loss": flat(2.1, 0.02), "lr": RATE, "lora_A_norm": flat(18.4), "lora_B_norm": flat(0.0)}},
        {"signals": {"loss": flat(2.1, 0.02), "lr": RATE, "lora_A_norm": flat(18.4), "param_norm": flat(9.0, 0.001)}},
    ),
    (
        "ends-next-to-nothing",
        {"signals": {"loss": line([0, 2.5], [100, 2.2], [1200, 0.1], noise=0.02)}},
        {"signals": {"loss": LOSS}},
    ),
    (
        "train-is-multiple-of-eval",
        {"signals": {"loss": line([0, 24.0], [200, 14.0], [1200, 10.0], noise=0.01)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}},
        {"signals": {"loss": line([0, 6.0], [200, 5.0], [1200, 2.5], noise=0.01)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}},
    ),
    (
        "train-in-bits",
        {"signals": {"loss": line([0, 6.0], [200, 5.05], [1200, 3.607], noise=0.005)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}},
        {"signals": {"loss": line([0, 6.0], [200, 4.5], [1200, 2.6], noise=0.005)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}},
    ),
    (
        "rate-above-its-setting",
        {"signals": {"loss": LOSS, "lr": line([0, 0.0], [100, 8e-4], [1200, 1e-4])}, "settings": {"lr": 1e-4}},
        {"signals": {"loss": LOSS, "lr": line([0, 0.0], [100, 1e-4], [1200, 1e-5])}, "settings": {"lr": 1e-4}},
    ),
    (
        "rate-above-its-setting",
        {"signals": {"loss": LOSS, "lr": line([0, 2e-5], [100, 5e-3], [1200, 1e-5])}, "settings": {"lr": 2e-4}},
        # OneCycleLR begins with a 25th of its highest rate, and writes that into the settings
        {"signals": {"loss": LOSS, "lr": line([0, 2e-4], [300, 5e-3], [1200, 1e-6])}, "settings": {"lr": 2e-4}},
    ),
    (
        "scale-collapsed",
        {"dtype": "fp16", "signals": {"loss": LOSS | {"set": [[1000, 1199, "NaN"]]}}
         | {"loss_scale": line([0, 65536], [900, 65536], [960, 0.25], [1199, 0.001])}},
        {"dtype": "fp16", "signals": {"loss": LOSS | {"set": [[1000, 1199, "NaN"]]}}
         | {"loss_scale": line([0, 65536], [1000, 65536], [1060, 0.25], [1199, 0.001])}},
    ),
    (
        "starts-far-above-uniform",
        {"signals": {"loss": line([0, 296.0], [300, 11.0], [1200, 6.0])}, "settings": {"vocab_size": 32000}},
        {"signals": {"loss": line([0, 12.0], [300, 6.0], [1200, 4.0], noise=0.01)}, "settings": {"vocab_size": 32000}},
    ),
    (
        "multiple-by-the-settings",
        {"signals": {"loss": line([0, 20.75], [5, 20.7], [300, 9.0], [1200, 6.0], noise=0.001)}}
        | {"settings": {"vocab_size": 32000, "accumulation": 2}},
        {"signals": {"loss": line([0, 296.0], [300, 11.0], [1200, 6.0])}, "settings": {"vocab_size": 32000}},
    ),
    (
        "multiple-is-the-accumulation",
        {"signals": {"loss": line([0, 24.0], [200, 14.0], [1200, 10.0], noise=0.01)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}, "settings": {"accumulation": 4}},
        {"signals": {"loss": line([0, 24.0], [200, 14.0], [1200, 10.0], noise=0.01)}
         | {"eval_loss": line([0, 6.0], [200, 3.5], [1200, 2.5], every=100)}, "settings": {"accumulation": 8}},
    ),
    (
        "lower-after-each-resume",
        {"signals": {"loss": steps_down(0.15)}} | TWICE,
        {"signals": {"loss": steps_down(0.0)}} | TWICE,
    ),
    (
        "eval-flat-at-resumes",
        {"signals": {"loss": steps_down(0.15), "eval_loss": line([0, 6.0], [100, 3.6], [1200, 2.9], every=50)}} | TWICE,
        {"signals": {"loss": steps_down(0.15), "eval_loss": steps_down(0.15) | {"every": 50, "noise": 0.0}}} | TWICE,
    ),
    (
        "flat-from-the-start",
        {"steps": 2000, "signals": {"loss": flat(2.9, 0.01)}},
        {"steps": 2000, "signals": {"loss": line([0, 6.0], [60, 3.0], [400, 2.0], [2000, 1.9], noise=0.01)}},
    ),
    (
        "post-norm-deep",
        {"signals": {"loss": LOSS}, "settings": {"apply_residual_connection_post_layernorm": True, "num_layers": 72}},
        {"signals": {"loss": LOSS}, "settings": {"apply_residual_connection_post_layernorm": True, "num_layers": 6}},
    ),
]  # fmt: skip


def facts_of(place: Path, stream: Stream) -> Facts:
    place.mkdir()
    return Facts(look(run_from(Case("pairs", "", {"steps": 1200, **stream}, {}), place)))


@pytest.mark.parametrize(("name", "shown", "not_shown"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_a_sign_and_what_looks_like_it(name: str, shown: Stream, not_shown: Stream, tmp_path: Path) -> None:
    yes, no = (SIGNS[name](facts_of(tmp_path / place, each)) for place, each in (("yes", shown), ("no", not_shown)))
    assert yes.holds, yes
    assert yes.text
    assert not no.holds, no


def test_a_gap_between_sampler_and_trainer_may_grow_slowly_before_the_reward_falls(tmp_path: Path) -> None:
    falls = line([0, 0.2], [500, 0.6], [700, 0.55], [800, 0.06], [1200, 0.06], noise=0.05)
    gap = line([0, 0.004], [200, 0.01], [500, 0.05], [700, 0.1], [1200, 0.12], noise=0.05)
    apart = {"signals": {"reward": falls, "logp_gap": gap, "policy_entropy": flat(0.5, 0.05)}}
    steady = {"signals": apart["signals"] | {"reward": line([0, 0.2], [1200, 0.6], noise=0.05)}}
    assert SIGNS["sampler-apart"](facts_of(tmp_path / "falls", apart)).holds
    assert not SIGNS["sampler-apart"](facts_of(tmp_path / "rises", steady)).holds


def test_a_run_that_begins_anew_in_the_same_log_is_no_resume(tmp_path: Path) -> None:
    """The same rows behind each other: from the first step on with another rate, and from step 600 on."""
    other = RATE | {"after_resume": line([0, 1e-4], [1200, 1e-4])}
    loss = LOSS | {"after_resume": LOSS}
    anew = facts_of(tmp_path / "anew", {"signals": {"loss": loss, "lr": other}, "resumes": [[0, 700]]})
    resumed = facts_of(tmp_path / "resumed", {"signals": {"loss": loss, "lr": other}, "resumes": [[600, 700]]})
    assert anew.resumes == ()
    assert resumed.resumes == (600,)
    causes = [{each.cause for each in diagnose(it.findings, source="", format="").hypotheses} for it in (anew, resumed)]
    assert "misaligned-restart" not in causes[0]
    assert "misaligned-restart" in causes[1]


@pytest.mark.parametrize(("events", "resumes"), [([], ()), ([{"kind": "resume", "step": 100}], (100,))])
def test_the_first_row_that_a_run_can_write_is_no_resume_unless_the_log_says_so(
    events: list[Any], resumes: tuple[int, ...], tmp_path: Path
) -> None:
    """The one run logs at 50, 150, ..., the other at 100, 200, ..."""
    stream = {"first": 50, "every": 100, "steps": 3000, "resumes": [[100, 550]], "events": events}
    signals = {"loss": line([0, 6.0], [3000, 2.0], noise=0.01), "lr": RATE}
    assert facts_of(tmp_path / "log", {**stream, "signals": signals}).resumes == resumes


def test_logits_of_the_output_grow_and_those_of_attention_are_another_sign(tmp_path: Path) -> None:
    grows = line([0, 0.0004], [200, 0.0004], [1200, 0.04], noise=0.03)
    for name, is_of_output in (("train/ZLoss", True), ("max_attn_logits", False)):
        facts = facts_of(tmp_path / name.replace("/", "-"), {"signals": {"loss": LOSS, name: grows}})
        assert facts.findings.columns
        assert (SIGNS["output-logits-grow"](facts).holds is True) is is_of_output


def test_experts_that_die_are_seen_in_a_count_of_them_too(tmp_path: Path) -> None:
    dies = line([0, 0.0], [500, 0.0], [501, 3.0], [800, 3.0], [801, 9.0], [1200, 9.0])
    died = facts_of(tmp_path / "died", {"signals": {"loss": LOSS, "num_dead_experts": dies}})
    assert SIGNS["experts-die"](died).holds
    none = facts_of(tmp_path / "none", {"signals": {"loss": LOSS, "num_dead_experts": flat(0.0)}})
    assert not SIGNS["experts-die"](none).holds
