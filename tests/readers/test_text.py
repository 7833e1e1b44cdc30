"""Lines as programs print them."""

from pathlib import Path

import numpy as np
import pytest
from tests.readers import samples

from sealegs.errors import SourceError
from sealegs.readers.read import Log, read
from sealegs.readers.wording import LineWording, understood

MEGATRON = """\
  eod_mask_loss ................................... False
  initial_loss_scale .............................. 4294967296
 iteration       1/    1000 | consumed samples:         1024 | elapsed time per iteration (ms): 129181.9 | learning \
rate: 1.500E-04 | global batch size:  1024 | lm loss: 1.100000E+01 | loss scale: 12.0 | grad norm: 48.799 | number of \
skipped iterations:   0 | number of nan iterations:   0 |
 iteration       2/    1000 | consumed samples:         2048 | elapsed time per iteration (ms): 124965.5 | learning \
rate: 1.500E-04 | global batch size:  1024 | lm loss: NAN | loss scale: 12.0 | grad norm: inf | number of \
skipped iterations:   0 | number of nan iterations:   1 |
------------------------------------------------------------------------------------------------
 validation loss at iteration 2 | lm loss value: 9.500000E+00 | lm loss PPL: 1.335973E+04 |
"""
NANOGPT = """\
step 0: train loss 10.9886, val loss 10.9897
iter 0: loss 10.9733, time 31264.63ms, mfu -100.00%
iter 10: loss 10.5, time 3034.85ms, mfu 22.48%
step 20: train loss 9.9, val loss 9.8
saving checkpoint to out
iter 20: loss 10.1, time 3034.85ms, mfu 22.48%
"""
LLM_C = """\
| val_loss_every        | 250                                                |
val loss 11.007921
step    1/19560 | loss 11.009678 (+nanz)| norm 15.3670 (+nanz)| lr 8.57e-07 | 6222.23 ms | 29.2% bf16 MFU | 84260 tok/s
step    2/19560 | loss     nan (+0.11z)| norm 14.9 (-0.20z)| lr 1.71e-06 | 3587.33 ms | 38.1% bf16 MFU | 146150 tok/s
val loss 6.2
"""
MODDED = """\
    print(f"step:{step}/{args.num_iterations} val_loss:{val_loss:.4f} train_time:{approx:.0f}ms")
step:0/5100 val_loss:15.8898 train_time:246ms step_avg:nanms
step:1/5100 train_loss:15.8786 train_time:22138ms step_avg:nanms
step:2/5100 train_loss:9.3565 train_time:22772ms step_avg:600.1ms
"""
FAIRSEQ = """\
2021-05-01 10:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.01, "loss": "14.9", "ppl": "30541.1", \
"num_updates": "100", "lr": "1e-05", "gnorm": "2.437", "loss_scale": "128", "train_wall": "61"}
2021-05-01 10:01:00 | INFO | train_inner | {"epoch": 1, "update": 0.02, "loss": "13.1", "ppl": "8780.1", \
"num_updates": "200", "lr": "2e-05", "gnorm": "1.9", "loss_scale": "128", "train_wall": "61"}
2021-05-01 10:02:00 | INFO | valid | {"epoch": 1, "valid_loss": "12.5", "valid_num_updates": "200"}
"""
KERAS = """\
Epoch 1/2
10/10 [==============================] - 4s 2ms/step - loss: 0.2605 - accuracy: 0.9234 - val_loss: 0.1432
Epoch 2/2
10/10 [==============================] - 4s 2ms/step - loss: 0.1105 - accuracy: 0.9634 - val_loss: 0.1032
"""
MNIST = """\
Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300000
Train Epoch: 1 [640/60000 (1%)]\tLoss: 1.100000
Test set: Average loss: 0.5, Accuracy: 9000/10000 (90%)
Train Epoch: 2 [0/60000 (0%)]\tLoss: 0.900000
Train Epoch: 2 [640/60000 (1%)]\tLoss: 0.800000
"""
BARS = "".join(
    f"\rTraining:  {i}%|#    | {i}/100 [00:0{i}<01:00, 1.5it/s, loss={loss}]"
    for i, loss in [(0, 9.0), (1, 9.0), (1, 8.0), (2, 8.0), (2, 7.0)]
)
RANKS = "".join(f"[{rank}] iter {step} loss {5 - step + rank / 10}\n" for step in range(4) for rank in (1, 0))
TUPLES = "[1,  2000] loss: 2.2\n[1,  4000] loss: 1.8\n[2,  2000] loss: 1.5\n[2,  4000] loss: 1.4\n"
TENSORS = "".join(f"Epoch [{i}/9], Step [{i}/500], Loss: tensor({9 - i}.5, device='cuda:0')\n" for i in range(1, 4))

CASES: dict[str, tuple[str, str, list[int], list[float], dict[int, float]]] = {
    "megatron": (MEGATRON, "megatron text", [1, 2], [11, np.nan], {2: 9.5}),
    "nanogpt": (NANOGPT, "nanogpt text", [0, 10, 20], [10.9733, 10.5, 10.1], {0: 10.9897, 20: 9.8}),
    "llm.c": (LLM_C, "llm.c text", [1, 2], [11.009678, np.nan], {1: 11.007921, 2: 6.2}),
    "modded": (MODDED, "modded-nanogpt text", [0, 1, 2], [np.nan, 15.8786, 9.3565], {0: 15.8898}),
    "short names": ("s:0 tel:11.0\ns:0 trl:10.9\ns:1 trl:10.8\n", "modded-nanogpt text", [0, 1], [10.9, 10.8], {0: 11}),
    "no names": ("0 val 10.9\n0 train 10.5\n1 train 10.4\n", "text", [0, 1], [10.5, 10.4], {0: 10.9}),
    "fairseq": (FAIRSEQ, "fairseq text", [100, 200], [14.9, 13.1], {200: 12.5}),
    "keras": (KERAS, "text", [1, 2], [0.2605, 0.1105], {1: 0.1432, 2: 0.1032}),
    "mnist": (MNIST, "text", [0, 640, 641, 1281], [2.3, 1.1, 0.9, 0.8], {640: 0.5}),
    "bars": (BARS, "text", [0, 1, 2], [9, 8, 7], {}),
    "ranks": (RANKS, "text", [0, 1, 2, 3], [5.1, 4.1, 3.1, 2.1], {}),
    "tuples": (TUPLES, "text", [2000, 4000, 6000, 8000], [2.2, 1.8, 1.5, 1.4], {}),
    "tensors": (TENSORS, "text", [1, 2, 3], [8.5, 7.5, 6.5], {}),
    "separators": ("step 1,000 | loss 2.5\nstep 2,000 | loss 2.4\n", "text", [1000, 2000], [2.5, 2.4], {}),
    "dates": (
        "2025-03-02 05:16:20,962 - INFO - Epoch 1 - Batch loss: 12.1\n2025-03-02 05:16:22,229 - INFO - Batch loss: 3\n",
        "text", [0, 1], [12.1, 3], {},
    ),
    "escapes": ("\x1b[32mstep 1\x1b[0m loss \x1b[1m2.5\x1b[0m\nstep 2 loss 2.4\n", "text", [1, 2], [2.5, 2.4], {}),
}  # fmt: skip


def logged(log: Log, signal: str) -> dict[int, float]:
    there = log.run.logged(signal)
    return dict(zip(log.run.steps[there].tolist(), log.run.column(signal)[there].tolist(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_lines(name: str, tmp_path: Path) -> None:
    text, printed_by, steps, losses, evals = CASES[name]
    (tmp_path / "log").write_text(text)
    log = read(str(tmp_path / "log"))
    assert log.format == printed_by
    assert log.run.steps.tolist() == steps
    np.testing.assert_allclose(log.run.column("loss"), losses)
    assert (logged(log, "eval_loss") if evals else {}) == evals
    assert log.run.superseded_rows == 0


def test_megatron_has_the_other_signals_too(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(MEGATRON)
    log = read(str(tmp_path / "log"))
    assert log.run.column("grad_norm").tolist() == [48.799, np.inf]
    assert log.run.column("step_s").tolist() == pytest.approx([129.1819, 124.9655])
    assert {"lr": "learning rate", "loss_scale": "loss scale"}.items() <= log.mapping.items()
    assert log.run.column("number of nan iterations").tolist() == [0, 1]


@pytest.mark.parametrize("on", ["", " on validation set"])
def test_megatron_tells_of_an_evaluation_the_step_and_no_column_of_steps(on: str, tmp_path: Path) -> None:
    first, *_ = MEGATRON.splitlines()[2:]
    lines = []
    for step in range(1, 41):
        lines.append(first.replace("       1/", f"{step:8d}/"))
        if step % 8 == 0:
            rule = "-" * 117
            told = f"lm loss value: {9.5 - step / 10:.6E} | lm loss PPL: {1e4 / step:.6E} | "
            lines += [rule, f" validation loss at iteration {step}{on} | {told}", rule]
    (tmp_path / "log").write_text("\n".join([*lines, ""]))
    log = read(str(tmp_path / "log"))
    assert log.run.steps.tolist() == list(range(1, 41))
    assert logged(log, "eval_loss") == pytest.approx({step: 9.5 - step / 10 for step in range(8, 41, 8)})
    assert logged(log, "eval lm loss PPL") == pytest.approx({step: 1e4 / step for step in range(8, 41, 8)})
    assert not [name for name in log.run.signals if "iteration" in name and "number of" not in name]


def test_what_megatrons_rerun_machine_says_is_no_row(tmp_path: Path) -> None:
    first, *_ = MEGATRON.splitlines()[2:]
    said = [
        "Unexpected result 61.5 on rank 5 at iteration #1 invocation #1 (message='Spiky loss')",
        "Rank 5, node n7, device 3, iteration #1: First rerun: unexpected result is not reproducible within the "
        "tolerance (7.125 != 61.5)!",
        "Rank 5, node n7, device 3, iteration #1: Possible transient error!",
        "Max value for loss: 11.25",
        "ts=2026-11-19 10:00:00.1 node=n7 device=3 jobID=77 rank=5 iteration=1 "
        "status=RerunValidationStatus.INITIAL_RUN result=61.5 message='Spiky loss'",
    ]
    (tmp_path / "log").write_text("\n".join([MEGATRON, *said, first.replace("       1/", "       3/"), ""]))
    log = read(str(tmp_path / "log"))
    assert log.run.steps.tolist() == [1, 2, 3]
    assert log.run.column("loss")[[0, 2]].tolist() == [11, 11]
    kept = [line.text for line in log.run.lines]
    assert said[0] in kept
    assert said[1] in kept


def test_many_lines_of_a_kind_are_read_as_the_first_ones(tmp_path: Path) -> None:
    """From the third on a line is read by the pattern that was made of it: the slow and the quick way agree."""
    values = np.random.default_rng(0).normal(3, 1, 5000).round(4)
    lines = [
        f"iter {i:6d}/5000 | loss {v} ({v / 9:+.2f}z) | lr {1 / (i + 1):.2e} | 5ms\n" for i, v in enumerate(values)
    ]
    lines.insert(2500, "iter 2500/5000 | loss nan (+nanz) | lr 1 | 5ms\n")
    (tmp_path / "log").write_text("".join(lines))
    log = read(str(tmp_path / "log"))
    np.testing.assert_array_equal(log.run.column("loss"), values)
    assert log.run.steps.tolist() == list(range(5000))
    assert log.remarks == ("1 rows repeat a step: the last of each is taken",)


def test_an_epoch_that_is_printed_once_holds_until_the_next(tmp_path: Path) -> None:
    epochs = (f"Epoch {epoch}\n" + "".join(f"step {i} loss {epoch}.5\n" for i in range(1, 6)) for epoch in range(1, 5))
    (tmp_path / "log").write_text("".join(epochs))
    log = read(str(tmp_path / "log"))
    assert log.run.steps.tolist() == list(range(1, 21))
    assert log.run.column("loss")[::5].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert log.run.column("Epoch")[::5].tolist() == [1, 2, 3, 4]


def test_losses_in_its_own_source_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"step {i} loss {i}.5\n" for i in range(30)) + "    loss = 99.0\n")
    log = read(str(tmp_path / "log"))
    assert log.run.steps.tolist() == list(range(30))
    assert log.run.column("loss")[-1] == 29.5


def test_bars_of_other_lengths_do_not_count(tmp_path: Path) -> None:
    """Before the training the data are prepared, with many bars; now and then there is an evaluation."""
    prepared = "".join(f"\rMap: 100%|####| {n}/{n} [00:01<00:00]" for n in range(1000, 1020))
    trained = "".join(
        f"\r{i}%|#    | {i}/90 [00:0{i}<01:00]\n{{'loss': {9 - i}}}\n\rEval: 50%|## | 5/10 [00:01<00:01]"
        for i in range(1, 7)
    )
    (tmp_path / "log").write_text(prepared + trained)
    log = read(str(tmp_path / "log"))
    assert log.run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert log.mapping["step"] == "step of the bar to 90"


def test_text_without_a_loss_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("hello\nstep 1 done\n")
    with pytest.raises(SourceError, match=r"no line names a loss.*--pattern"):
        read(str(tmp_path / "log"))


def test_a_pattern_reads_what_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("T7 -> 3,5 / obj=1.5e0\nnoise\nT8 -> 4 / obj=NaN\n")
    log = read(str(tmp_path / "log"), pattern=r"T(?P<step>\d+).*obj=(?P<loss>\S+)")
    assert log.format == "pattern"
    assert log.run.steps.tolist() == [7, 8]
    np.testing.assert_array_equal(log.run.column("loss"), [1.5, np.nan])


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("(", "not a regular expression"), (r"\d+", "name the groups"), ("(?P<loss>xyz)", "no line has")],
)
def test_a_wrong_pattern_is_named(pattern: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("loss 1\n")
    with pytest.raises(SourceError, match=says):
        read(str(tmp_path / "log"), pattern=pattern)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("étape\nstep 1: loss 2.5\nstep 2: loss 2.4\n", encoding=encoding)
    assert read(str(tmp_path / "log")).run.column("loss").tolist() == [2.5, 2.4]


def test_zeros_before_the_text_are_passed_over(tmp_path: Path) -> None:
    """What is left of a log that was emptied while its writer held it open."""
    with (tmp_path / "log").open("wb") as file:
        file.seek(65 << 20)
        file.write(b"step 1: loss 2.5\nstep 2: loss 2.4\n")
    assert read(str(tmp_path / "log")).run.steps.tolist() == [1, 2]


VERL = "\x1b[36m(TaskRunner pid=12)\x1b[0m step:{0} - global_seqlen/min:900 - actor/entropy:0.{1} - actor/pg_loss:"
VERL += "np.float64(-0.0{1}) - critic/score/mean:0.{0} - val-core/gsm8k/acc/mean@8:0.5 - timing_s/step:2.5\n"
SB3 = """---------------------------------
| rollout/           |          |
|    ep_rew_mean     | 2{0}.5   |
| time/              |          |
|    iterations      | {0}      |
|    total_timesteps | {0}000   |
| train/             |          |
|    entropy_loss    | -0.{1}   |
|    loss            | 7.{0}    |
---------------------------------
"""
RSL = """                       \x1b[1m Learning iteration {0}/1500 \x1b[0m
          Mean value_function loss: 0.0307
               Mean surrogate loss: 0.0{1}
                 Mean entropy loss: -10.{1}
                       Mean reward: {0}.25
"""
GAN = "(epoch: {0}, iters: 100, time: 2.4) D_A: 0.5 G_A: 0.{1} cycle_A: 2.2\n"
NEMO = "====== Step {0}/100 ======\n  - Loss: -0.0{1}\n  - Avg Reward: 0.{0}\n"


@pytest.mark.parametrize(
    ("printed", "wanted"),
    [
        (VERL, {"reward": 0.3, "policy_entropy": 0.13, "loss": -0.013, "eval_reward": 0.5}),
        (SB3, {"reward": 23.5, "policy_entropy": 0.13, "loss": 7.3}),
        (RSL, {"reward": 3.25, "policy_entropy": -10.13, "loss": 0.013}),
        (GAN, {"generator_loss": 0.13, "discriminator_loss": 0.5, "loss": 0.13}),
        (NEMO, {"reward": 0.3, "loss": -0.013}),
        ("INFO Step {0} | Time: 34.5s | Reward: 0.{1} | Seq. Length: 800.2\n", {"reward": 0.13}),
    ],
)
def test_what_agents_and_gans_print(tmp_path: Path, printed: str, wanted: dict[str, float]) -> None:
    path = tmp_path / "printed.log"
    path.write_text("".join(printed.format(number, number + 10) for number in range(1, 9)))
    run = read(str(path)).run
    assert len(run.steps) == 8
    assert {signal: run.column(signal)[2] for signal in wanted} == pytest.approx(wanted)


def test_a_kind_of_line_is_known_again_after_many_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def counted(texts: list[str], numbers: list[str]) -> LineWording:
        looked_at.append(texts[0])
        return understood(texts, numbers)

    monkeypatch.setattr("sealegs.readers.text.understood", counted)
    lines = [
        f"step {number} loss {3 + number / 9}\n" * 30 + "".join(f"note{o}: train loss {number}\n" for o in range(20))
        for number in range(9)
    ]
    (tmp_path / "printed.log").write_text("".join(lines))
    assert len(read(str(tmp_path / "printed.log")).run.steps) == 9
    assert looked_at.count("step ") < 40  # of 270 lines: three each time that it was forgotten


def test_steps_of_each_epoch_run_on_over_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "loss_log.txt"
    epochs = [*range(1, 21), 12, *range(13, 30)]
    path.write_text("".join(f"(epoch: {e}, iters: {i}) loss: {1 + e / i}\n" for e in epochs for i in (100, 200)))
    log = read(str(path))
    assert log.run.segments[-1] == 1
    assert log.run.steps[-1] == 28 * 200 + 200


def test_progress_bars_between_rows_are_no_table(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "".join(
            f"Epoch 1: {n:3d}%|{'█' * (n // 10)}| {n}/100 [00:01<00:09, 9.8it/s, loss={3 - n / 100}]\n"
            for n in range(100)
        )
    )
    found = read(str(log))
    assert (found.format, len(found.run.steps)) == ("text", 100)
    log.write_text("".join(f"{n}%|###| {n}/60\nloss {3 - n / 60}\n" for n in range(60)))
    assert read(str(log)).format == "text"


@pytest.mark.parametrize("program", samples.PRINTED)
def test_what_programs_print(program: str, tmp_path: Path) -> None:
    rows = samples.rows(range(1, 41))
    log = tmp_path / "log"
    log.write_text(samples.printed(program, rows))
    found = read(str(log))
    norms = [] if program in ("litgpt", "ultralytics", "YOLOv5", "levanter", "mlx-lm") else ["grad_norm"]
    assert found.run.steps.tolist() == [row["step"] - (program == "levanter") for row in rows]
    for signal in ("loss", *norms):
        assert found.run.column(signal).tolist() == pytest.approx([row[signal] for row in rows], abs=1e-4), signal
    assert ("grad_norm" in found.mapping) == bool(norms)
    assert len(found.run.manifest.settings) == {"ultralytics": 6, "NeMo bars": 1}.get(program, 0)


def test_how_far_a_bar_has_come_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "".join(
            "".join(
                f"\rEpoch {n}/50 train: {at * 100 // 29:3}%|##  | {at}/29 [00:09<00:08, 3.1s/it]" for at in range(30)
            )
            + f"\n[Model] Epoch {n}/50 Train Loss: {3 / n:.4f} | Val Loss: {4 / n:.4f}\n"
            for n in range(1, 11)
        )
    )
    log = read(str(tmp_path / "log"))
    assert log.mapping["loss"] == "Train Loss"
    assert log.run.column("loss").tolist() == [round(3 / n, 4) for n in range(1, 11)]


def test_an_epoch_that_is_told_again_is_one_step(tmp_path: Path) -> None:
    lines = []
    for n in range(500, 15_500, 500):
        lines.append(f"epoch {n} | loss {1000 / n:.4f} | lr 1e-4")
        if n % 2000 == 0:
            lines.append(f"saved ckpt.pt (epoch {n}, loss {1000 / n:.4f})")
    (tmp_path / "log").write_text("\n".join(lines))
    assert read(str(tmp_path / "log")).run.steps.tolist() == list(range(500, 15_500, 500))


def test_losses_of_another_name_are_read_where_no_line_names_one(tmp_path: Path) -> None:
    named = "Samples -> train: 5661\n"
    rows = [f"Epoch {n}/400 train_mse_scaled={1 / n:.6f} val_mae={200 / n:.3f} tf=0.99 lr=0.001" for n in range(1, 63)]
    (tmp_path / "log").write_text(named + "\n".join(rows))
    log = read(str(tmp_path / "log"))
    assert (log.mapping["loss"], log.mapping["eval_loss"]) == ("train_mse_scaled", "val_mae")
    assert log.run.steps.tolist()[-1] == 62


def test_a_text_whose_losses_are_not_known_offers_what_is_like_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "\n".join(f"Epoch {n}/40 | Train Energy: {2 / n:.4f} | speed 3.5" for n in range(1, 41))
    )
    with pytest.raises(SourceError, match=r"among Train Energy, .*--metric loss='Train Energy'"):
        read(str(tmp_path / "log"))
    log = read(str(tmp_path / "log"), metrics={"loss": "Train Energy"})
    assert len(log.run.steps) == 40


def test_every_line_of_a_block_below_a_step_is_a_column(tmp_path: Path) -> None:
    """OLMo prints a line for each number; those whose names say nothing to us are of the step above, too."""
    lines = ["olmo.train:90 INFO host settings", "    optim/before_any_step=3"]
    for step in range(30):
        lines += [f"host:0 olmo.train:887 INFO [step={step}/30]", f"    train/CrossEntropyLoss={9 - step / 10:.4g}"]
        lines += [f"    train/ZLoss={0.1 + step:.4g}", f"    optim/clipped={step % 2}", "    note of/somebody = 7 or 8"]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    run = read(str(path)).run
    assert set(run.signals) == {"loss", "train/ZLoss", "optim/clipped"}
    assert run.steps.tolist() == list(range(30))
    assert run.column("train/ZLoss").tolist() == [0.1 + step for step in range(30)]


def test_a_second_launch_in_a_file_is_no_epoch(tmp_path: Path) -> None:
    """Its first rows stand below the last epoch of the launch before. Steps that begin anew do so at each epoch."""
    rows = [f"INFO - Step {step}, Loss: {6.3 - step / 1000:.4f}\n" for step in range(100, 3100, 100)]
    for epoch in (1, 2, 3):
        rows[10 * epoch - 1] += f"INFO - Epoch {epoch} completed. Average loss: {6.8 - epoch}\n"
    (tmp_path / "log").write_text(2 * "".join(rows))
    run = read(str(tmp_path / "log")).run
    assert [one.first for one in run.attempts] == [100, 100]
    assert run.steps.max() == 3000


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_bar_of_each_pass_runs_on_and_one_of_each_training_does_not(goes_on: bool, tmp_path: Path) -> None:
    lines = []
    for bar in range(6):
        for at in (40, 80, 99):
            loss = 0.9 - (0.6 if goes_on else 3.0) * (99 * bar * goes_on + at) / 600
            lines.append(f"Train: {at}%|####| {at}/99 [00:10<00:01, 5.0it/s, loss={loss:.4f}]")
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    log = read(str(tmp_path / "log"))
    assert ("the bar begins anew with each pass over the data: made to run on" in log.remarks) == goes_on
    assert int(log.run.steps[-1]) == (594 if goes_on else 99)
