"""A fault in; everything that is sampled at its step and the next ones out, and elsewhere at the usual interval."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sealegs import judge
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.settings import SIZES, CadenceSettings, DataSettings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.run import Run, open_run
from sealegs.report.dashboard.values import page_of, see
from sealegs.signals.incident_window import STEPS_AFTER

STRUCK = 25
STEPS = 50
AROUND = [*range(STRUCK, STRUCK + STEPS_AFTER + 1)]
TENTHS = [*range(0, STEPS, 10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose embedding is 3.2 times as large at one step, whose gradients are not finite there."""
    folder = tmp_path_factory.mktemp("struck")
    random = np.random.default_rng(0)
    ids = np.where(random.random(8000) < 0.1, random.integers(0, 60, 8000), np.arange(8000) % 60)
    ids[:3] = 63  # rare
    np.save(folder / "counter.npy", ids.astype(np.uint16))
    settings = replace(
        SIZES["nano"],
        steps=STEPS,
        threads=1,
        dtype="fp32",
        data=DataSettings(sources={str(folder / "counter.npy"): 1.0}),
        cadence=CadenceSettings(evaluate_steps=0, checkpoint_steps=0, snapshot_steps=1000),
    )
    faults = [parse(f"weight-scale:factor=3.2,tensor=embedding.weight@{STRUCK}"), parse(f"nan-gradient@{STRUCK}")]
    settings = resolved(settings)
    disturb = partial(disturbed, faults, settings.model.vocabulary)
    train(settings, open_data(settings), folder / "run", disturb=disturb)
    return open_run(folder / "run")


def steps_with(run: Run, signal: str) -> list[int]:
    steps: list[int] = run.steps[run.logged(signal)].tolist()
    return steps


@pytest.mark.parametrize(
    "signal",
    [
        *("param_norm", "param_norm/blocks.0", "grad_norm/embedding", "params_finite"),
        *("token_entropy", "rare_token_share"),
    ],
)
def test_the_step_of_an_incident_is_sampled_as_the_next_ones_are(run: Run, signal: str) -> None:
    assert steps_with(run, signal) == sorted({*TENTHS, *AROUND})


def test_activations_begin_with_the_next_step_and_those_of_the_embedding_with_the_step_itself(run: Run) -> None:
    usual = set(TENTHS[1:])  # the first step is not watched
    assert steps_with(run, "activation_norm/blocks.1") == sorted({*usual, *AROUND[1:]})
    assert steps_with(run, "activation_norm/embedding") == sorted({*usual, *AROUND})
    norms = run.column("activation_norm/embedding")
    assert norms[STRUCK] / norms[20] == pytest.approx(3.2, rel=0.15)


def test_what_the_updates_around_it_did_is_there(run: Run) -> None:
    assert steps_with(run, "update_ratio/embedding") == sorted({step + 1 for step in (*TENTHS, *AROUND) if step < 49})
    assert run.column("update_rms")[STRUCK + 1] == 0, "the struck step was skipped"


def test_the_tokens_of_the_batch_are_there_as_text(run: Run) -> None:
    rows = {int(row["step"]): row for row in run.rows()}
    counts = [int(part.partition("=")[2]) for part in str(rows[STRUCK]["token_frequencies"]).split()]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == 16
    assert "token_frequencies" not in rows[STRUCK - 1]


def test_the_recorded_rows_are_judged_as_they_were(run: Run) -> None:
    words = {verdict.step: verdict.word for verdict in judge.replay(run.rows())}
    assert [step for step, word in words.items() if word != "GO"] == [STRUCK]
    assert [event.step for event in run.events if event.kind == "skip"] == [STRUCK]


def test_panel_ten_has_points_at_the_incident(run: Run) -> None:
    panel = page_of([see(str(run.folder), "struck")]).panels[9]
    points = {line.signal: set(line.line.steps.tolist()) for line in panel.series}
    assert set(AROUND) <= points["token_entropy"]
    assert set(AROUND) <= points["rare_token_share"]
