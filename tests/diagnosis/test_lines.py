"""Lines of a log that are no numbers: which are known, where they count, and that none takes long."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.lines import kinds_of, known_kinds
from sealegs.diagnosis.rank import diagnose
from sealegs.record.columns import Columns
from sealegs.record.log_lines import LogLine
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

FIRST, SECOND = "First rerun: unexpected result is", "Second rerun: unexpected result is"
"""As Megatron-Core prints them (megatron/core/rerun_state_machine.py), with its rank, node and device before."""
WHO = "Rank 5, node n7, device 3, iteration #812: "
DIFFERS, PERSISTENT = "rerun-differs", "rerun-other-device-differs"


def falling(lines: Sequence[LogLine], leap: int | None = None) -> Run:
    steps = np.arange(1000.0)
    losses = (2.4 + 6 * np.exp(-steps / 120)) * np.exp(0.01 * np.random.default_rng(0).standard_t(5, 1000))
    if leap is not None:
        losses[leap:] += 1.5
    columns = {"step": steps, "loss": losses}
    logged = {name: np.ones(1000, np.bool_) for name in columns}
    return run_of(Path("a"), Manifest(run_id="a"), Columns(columns, logged), lines=tuple(lines))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "device-error"),
        ("NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off the bus.", "device-broken"),
        ("NVRM: Xid (PCI:0000:65:00): 31, pid=1, MMU Fault", "device-error"),
        ("DEVICE-SIDE ASSERT TRIGGERED", "device-assert"),
        ("Some weights of M were not initialized from the model checkpoint", "weights-newly-made"),
        ("[WARNING] OVERFLOW! Skipping step. Attempted loss scale: 65536, reducing to 32768", "overflow-skipped"),
        ("Detected call of `lr_scheduler.step()` before `optimizer.step()`.", "scheduler-order"),
        ("size mismatch for lm_head.weight: copying a param with shape [32000]", "shape-mismatch"),
        (
            f"{WHO}{FIRST} not reproducible within the tolerance (7.1 != nan)!",
            DIFFERS,
        ),
        (f"{WHO}Possible transient error!", DIFFERS),
        (
            f"{WHO}{FIRST} reproducible within the tolerance (nan = nan). Need to rerun "
            "on a different GPU to verify correctness.!",
            "rerun-same-device-agrees",
        ),
        (f"{SECOND} not reproducible on a different GPU, therefore was likely incorrect (7.1 != nan)", PERSISTENT),
        (f"{WHO}Possible persistent error!", PERSISTENT),
        (f"{SECOND} reproducible on a different GPU, therefore it was likely correct (nan = nan)", "rerun-agrees"),
        (
            f"{WHO}Correct result (but possible Application error) (Spiky loss)!",
            "rerun-agrees",
        ),
        (
            "Unexpected result tensor(nan, device='cuda:3') on rank 5 at iteration #812 invocation #1 "
            "(message='found NaN in local forward loss calculation')",
            "result-unexpected",
        ),
        ("Rank 5, node n7, device 3, iteration 812: Unexpected result inf (message='Spiky loss')", "result-unexpected"),
        (
            "ts=2026-11-19 10:00:00.1 node=n7 device=3 jobID=77 rank=5 iteration=812 status=RerunValidationStatus."
            "FIRST_RERUN_NOT_REPRODUCIBLE result=7.1 message='Spiky loss'",
            DIFFERS,
        ),
        ("Result validation enabled", None),
        ("Missing keys: []", None),
        ('raise RuntimeError("CUDA out of memory")', None),  # a program that prints its own source
        ("loss scale is fine, nothing overflowed", None),
        ("Some weights of B were not initialized: ['classifier.weight']", None),  # a new head is meant
    ],
)
def test_a_line_is_known_by_its_words(text: str, name: str | None) -> None:
    found = kinds_of([LogLine(3, text, 1)], last=10)
    assert [each.known.name for each in found] == ([name] if name else [])


def test_what_megatron_found_out_about_a_machine_counts() -> None:
    said = {
        f"{WHO}Possible persistent error!": True,
        f"{WHO}Correct result (but possible Application error) (Spiky loss)!": False,
    }
    for line, is_machine in said.items():
        found = diagnose(look(falling([LogLine(601, line, 1)], leap=602)), source="a", format="text")
        causes_found = {each.cause: each for each in found.hypotheses}
        assert (found.hypotheses[0].cause == "device-fault") == is_machine, line
        assert any("Megatron computed the step again" in text for text in found.lines)
        if not is_machine and "device-fault" in causes_found:
            assert any("Megatron" in text for text in causes_found["device-fault"].evidence_against)


def test_the_table_names_causes_that_exist() -> None:
    for known in known_kinds():
        assert {*known.speaks_for, *known.against} <= set(causes()), known.name
        assert all(phrase == phrase.lower() for phrase in (*known.says, *known.unless)), known.name


def test_a_line_that_a_run_dies_of_counts_at_the_end_alone() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory."
    ended = diagnose(look(falling([LogLine(999, line, 1)])), source="a", format="text")
    went_on = diagnose(look(falling([LogLine(400, line, 1)])), source="a", format="text")
    assert (ended.findings.verdict, ended.hypotheses[0].cause) == ("watch", "out-of-memory")
    assert "CUDA out of memory" in ended.findings.because
    assert went_on.findings.verdict == "healthy"
    assert any("step 400" in text for text in went_on.lines)


@pytest.mark.parametrize(("step", "speaks"), [(600, True), (100, False)])
def test_a_line_about_the_onset_speaks_and_one_far_from_it_does_not(step: int, speaks: bool) -> None:
    said = "re-looping over the training data"
    found = diagnose(look(falling([LogLine(step, said, 1)], leap=602)), source="a", format="text")
    assert any(said in text for each in found.hypotheses for text in each.evidence_for) == (
        speaks and any(each.cause in ("data-order", "memorisation") for each in found.hypotheses)
    )
    assert any(said in text for text in found.lines), "it is told in any case"


def test_no_line_takes_long() -> None:
    hostile = ["nccl " * 400, "overflow ... " * 200, "a" * 100_000, "weights of the model checkpoint " * 60]
    begun = time.process_time()
    kinds_of([LogLine(1, text, 1) for text in hostile * 25], last=10)
    assert time.process_time() - begun < 5, "a tenth on an idle core: more would be another order of growth"
