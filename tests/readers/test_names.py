"""Which column is which signal."""

from pathlib import Path

import numpy as np
import pytest

from sealegs.errors import SourceError
from sealegs.readers.names import assign, candidates, live_names, role
from sealegs.readers.read import read
from sealegs.record.columns import Columns


def columns(**counts: int) -> Columns:
    """Columns with so many values each; ``__`` stands for a slash."""
    rows = max(counts.values())
    names = {name.replace("__", "/"): count for name, count in counts.items()}
    return Columns({n: np.zeros(rows) for n in names}, {n: np.arange(rows) < c for n, c in names.items()}, rows=rows)


@pytest.mark.parametrize(
    ("signal", "names"),
    {
        "loss": "loss|train/loss|Loss/train|lm loss|train_loss_step|Training Loss|train/lm_loss|metrics/train/loss|trl"
        "|Batch loss|losses/train loss|reduced_train_loss|Conductor_loss|train|losses|train/box_om",
        "eval_loss": "eval_loss|val_loss|validation/loss|Loss/val|valid_lm_loss|test/ctc_loss|eval_g0_loss|tel|val"
        "|lm loss value",
        "grad_norm": "grad_norm|grad norm|gnorm|train/grad_norm|global_grad_norm|gradients/global_norm|norm"
        "|grad_2.0_norm_total",
        "lr": "lr|learning_rate|learning rate|lr-AdamW|train/learning_rate|lr-AdamW/pg1",
        "loss_scale": "loss_scale|loss scale|scale",
        "tokens_per_s": "tokens_per_second|tok/sec|tokens/sec",
        "step_s": "elapsed time per iteration (ms)|step_time_ms|dt (ms)|time (ms)",
        "step": "step|global_step|trainer/global_step|_step|iter|iteration|it|num_updates|current_steps|s"
        "|Finished training it",
        "epoch": "epoch|Epoch|train/epoch|of epoch",
    }.items(),
)
def test_what_names_mean(signal: str, names: str) -> None:
    assert {name: getattr(role(name), "signal", None) for name in names.split("|")} == dict.fromkeys(
        names.split("|"), signal
    )


NOTHING = (
    "loss_weight|koleo_loss_weight|best_val_loss|val_loss_every|accuracy|grad_norm_squared|val/grad_norm|total_steps"
    "|warmup_steps|steps_per_second|number of skipped iterations|train_time (ms)|gradient_norm/layer1|loss/train__MIN"
)


@pytest.mark.parametrize("name", NOTHING.split("|"))
def test_what_means_nothing(name: str) -> None:
    assert role(name) is None


@pytest.mark.parametrize(
    "name", ["rank0_grad_norm", "rank_3/grad_norm", "layers.0.grad_norm", "encoder_grad_norm", "h11 norm"]
)
def test_the_norm_of_a_part_is_not_that_of_the_run(name: str) -> None:
    assert role(name) is None
    assert "grad_norm" not in assign("log", columns(step=9, loss=9, **{name: 9}), {})
    assert assign("log", columns(step=9, loss=9, **{name: 9, "rank-encoder-7 - grad_norm": 9}), {})["grad_norm"]


@pytest.mark.parametrize("one", ["rank0_loss", "loss_rank_0", "rank_3/train/loss", "gpu1_loss", "local_loss"])
@pytest.mark.parametrize("of_all", ["loss_avg", "global_loss", "ce_loss", "loss_world", "nll"])
def test_the_loss_of_one_rank_comes_after_any_of_all(one: str, of_all: str) -> None:
    assert candidates(columns(**{one: 50, of_all: 50}), "loss") == [of_all, one]
    assert assign("log", columns(step=9, **{one: 9}), {})["loss"] == one
    assert candidates(columns(**{one: 50, f"run on gpu0 - {of_all}": 50}), "loss")[1] == one


def test_the_better_name_wins_unless_it_is_seldom_logged() -> None:
    assert candidates(columns(train__loss=50, loss=50, mean_loss=50), "loss")[0] == "loss"
    assert candidates(columns(train_loss=1, batch_loss=50), "loss")[0] == "batch_loss"
    assert candidates(columns(step=50, train__global_step=50), "step")[0] == "train/global_step"


def test_the_user_has_the_last_word() -> None:
    found = assign("log", columns(loss=9, objective=9), {"loss": "objective", "grad_norm": "loss"})
    assert found == {"loss": "objective", "grad_norm": "loss"}
    with pytest.raises(SourceError, match="log: no column 'nope' to take loss from; it has loss, objective"):
        assign("log", columns(loss=9, objective=9), {"loss": "nope"})


def test_no_loss_lists_what_there_is() -> None:
    with pytest.raises(SourceError, match=r"no column looks like a training loss among val_energy, acc; .*loss=NAME"):
        assign("log", columns(val_energy=9, acc=9), {})
    assert assign("log", columns(val_loss=9, acc=9), {}) == {"loss": "val_loss"}


def test_what_a_framework_logs_live_has_our_names_once_each_and_takes_none_that_is_measured() -> None:
    logged = {
        "rewards/chosen": "chosen_reward",
        "completions/mean_length": "completion_length",
        "sampling/sampling_logp_difference/mean": "logp_gap",
        "clip_ratio/region_mean": "clip_share",
        "clip_ratio/low_mean": "clip_ratio/low_mean",
        "entropy": "policy_entropy",
        "approx_kl": "policy_kl",
        "eval_reward": "eval_reward",
        "reward": "reward",
        "mean_reward": "mean_reward",
        "update_ratio/a": "trainer/update_ratio/a",
        "step": "trainer/step",
        "gate_closed": "trainer/gate_closed",
        "odd": "trainer/odd",
        'a"b': "a_b-7aa52f22",
    }
    assert live_names(logged, taken={"odd"}) == logged | {'a"b': live_names(['a"b'])['a"b']}
    assert live_names(['a"b'])['a"b'].startswith("a_b-")


def table_of(tmp_path: Path, header: str) -> Path:
    path = tmp_path / "log.csv"
    cells = len(header.split(",")) - 1
    path.write_text(header + "\n" + "".join(f"{step}{f',{3 - step / 50}' * cells}\n" for step in range(40)))
    return path


@pytest.mark.parametrize(
    ("header", "loss", "eval_loss"),
    [
        ("Epoch,TrainLoss,ValLoss,LR", "TrainLoss", "ValLoss"),
        ("epoch,train_mse,val_mse", "train_mse", "val_mse"),
        ("step,val_nll,train/nll_per_token,nll_weight", None, None),
        ("step,train/bpb", "train/bpb", None),
        ("step,mse,reward", None, None),
    ],
)
def test_a_loss_under_another_name_is_taken_and_said(
    tmp_path: Path, header: str, loss: str | None, eval_loss: str | None
) -> None:
    if loss is None and "reward" not in header:
        with pytest.raises(SourceError, match="among train/nll_per_token, val_nll, nll_weight, step; say which it is"):
            read(str(table_of(tmp_path, header)))
        return
    log = read(str(table_of(tmp_path, header)))
    assert (log.mapping.get("loss"), log.mapping.get("eval_loss")) == (loss, eval_loss)
    is_said = any(f"no column is called a loss: {loss} is taken for it" in remark for remark in log.remarks)
    assert is_said == (loss is not None and "oss" not in loss)


def test_loss_like_names_come_first_where_one_has_to_be_said(tmp_path: Path) -> None:
    header = ",".join([*(f"a{n}" for n in range(30)), "eval cost", "train cost"])
    with pytest.raises(
        SourceError, match=r"among train cost, eval cost, a0, .*; say which it is: --metric loss='train"
    ):
        read(str(table_of(tmp_path, header)))


@pytest.mark.parametrize("name", ["max_grad_norm", "train/max_grad_norm", "clip_grad_norm", "args/lr", "maxGradNorm"])
def test_a_setting_is_no_signal(tmp_path: Path, name: str) -> None:
    log = read(str(table_of(tmp_path, f"step,loss,{name}")))
    assert not {"grad_norm", "lr"} & set(log.mapping)


def test_the_lowest_held_out_loss_so_far_does_not_hide_the_held_out_loss() -> None:
    assert assign("log", columns(val_loss=30, min_loss=29, val_f1=30), {})["loss"] == "val_loss"
