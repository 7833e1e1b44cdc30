"""Tables as people write them."""

from pathlib import Path

import numpy as np
import pytest

from sealegs.errors import SourceError
from sealegs.readers.read import Log, read


def table(tmp_path: Path, text: str, metrics: dict[str, str] | None = None) -> Log:
    (tmp_path / "table").write_text(text)
    return read(str(tmp_path / "table"), metrics=metrics)


@pytest.mark.parametrize("delimiter", [",", "\t", ";", " | "])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_delimiters_and_line_ends(delimiter: str, ends: str, tmp_path: Path) -> None:
    lines = [("step", "loss"), ("1", "2.5"), ("2", "NaN"), ("3", "2.25")]
    log = table(tmp_path, "".join(delimiter.join(line) + ends for line in lines))
    assert log.format == "csv"
    assert log.run.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(log.run.column("loss"), [2.5, np.nan, 2.25])
    assert log.remarks == ()


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_decimal_commas(delimiter: str, tmp_path: Path) -> None:
    lines = [("Schritt", "Verlust", "Rate"), ("1", "2,5", "1,5e-3"), ("2", "NaN", "0,001"), ("3", "2,125", "0,001")]
    text = "".join(delimiter.join(line) + "\n" for line in lines)
    log = table(tmp_path, text, {"loss": "Verlust", "step": "Schritt"})
    assert log.run.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(log.run.column("loss"), [2.5, np.nan, 2.125])


def test_commas_between_thousands_are_none(tmp_path: Path) -> None:
    log = table(tmp_path, "step;loss\n1,000;2.5\n2,000;2.25\n3,000;2.0\n")
    assert log.run.steps.tolist() == [1000, 2000, 3000]


def test_quotes_separators_and_words(tmp_path: Path) -> None:
    log = table(
        tmp_path, 'step,loss,phase\n"1,000","1,234.5",warm-up\n"2,000",oops,main\n"3,000",2,main\n"4,000",1,main\n'
    )
    assert log.run.steps.tolist() == [1000, 2000, 3000, 4000]
    assert log.run.logged("loss").tolist() == [True, False, True, True]
    assert "1 cells of loss are no numbers: taken as missing" in log.remarks
    assert log.run.signals == ("loss",)


def test_an_empty_cell_is_missing_where_values_come_now_and_then(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i / 10 if i % 3 == 0 else ''},0.1\n" for i in range(30))
    log = table(tmp_path, f"step,loss,lr\n{rows}")
    assert log.run.steps[log.run.logged("loss")].tolist() == list(range(0, 30, 3))
    assert not log.remarks


def test_an_empty_cell_is_nan_where_all_rows_of_its_kind_had_a_value(tmp_path: Path) -> None:
    """pandas writes NaN as nothing; rows with other columns are of another kind."""
    rows = "".join(
        f"{i},{f'{9 - i / 10},{i / 5}' if i < 20 else ','},\n" + ("" if i % 10 else f"{i},,,3\n") for i in range(60)
    )
    log = table(tmp_path, f"step,loss,grad_norm,val_loss\n{rows}")
    assert log.run.logged("loss").all()
    assert np.isnan(log.run.column("loss")[20:]).all()
    assert np.isfinite(log.run.column("loss")[:20]).all()
    assert log.run.steps[log.run.logged("eval_loss")].tolist() == list(range(0, 60, 10))
    assert log.remarks[0] == "40 empty cells of loss are taken as NaN: rows of their kind have a value"


def test_a_last_row_that_only_closes_the_run_is_not_nan(tmp_path: Path) -> None:
    rows = "".join(f"{i},{9 - i / 10},{i},{i},{i}\n" for i in range(40))
    log = table(tmp_path, f"step,loss,a,b,c\n{rows}40,,,,7\n")
    assert log.run.logged("loss").tolist() == [True] * 40 + [False]


def test_lines_with_other_numbers_of_cells_are_left_out(tmp_path: Path) -> None:
    log = table(tmp_path, "step,loss\n1,2\n2,3,4\n3\n" + "".join(f"{i},5\n" for i in range(4, 14)))
    assert log.run.steps.tolist() == [1, *range(4, 14)]
    assert log.remarks == ("2 lines have too many or too few cells: left out",)


def test_a_line_twice_as_long_is_left_out(tmp_path: Path) -> None:
    log = table(tmp_path, "step,loss\n1,2\n2,3,4,5\n" + "".join(f"{i},5\n" for i in range(3, 30)))
    assert log.run.steps.tolist() == [1, *range(3, 30)]
    assert log.remarks == ("1 lines have too many or too few cells: left out",)


def test_a_short_line_beside_a_long_one_shifts_nothing(tmp_path: Path) -> None:
    log = table(tmp_path, "step,loss\n1,2\n2\n3,4,5\n4,5\n" + "".join(f"{i},5\n" for i in range(5, 30)))
    assert log.run.steps.tolist() == [1, *range(4, 30)]
    assert log.run.column("loss")[1:].tolist() == [5.0] * 26


def test_a_header_that_comes_again_is_no_row(tmp_path: Path) -> None:
    log = table(
        tmp_path, " \nstep,loss\n1,2\n2,3\nstep,loss\nstep,loss\n2,4\n" + "".join(f"{i},5\n" for i in range(3, 20))
    )
    assert log.run.steps.tolist() == list(range(1, 20))
    assert log.run.column("loss").tolist() == [2, 4, *([5] * 17)]
    assert log.remarks[0] == "the header comes 3 times"


@pytest.mark.parametrize("cell", ["0.5", "", "word", '"0.5"', "0.5\n\n", "\u0660.5"])
def test_every_way_to_split_a_table_gives_the_same(cell: str, tmp_path: Path) -> None:
    losses = np.random.default_rng(0).normal(3, 1, 40)
    log = table(
        tmp_path,
        "step,loss,lr\n" + "".join(f"{i},{v!r},{cell if i == 30 else 0.5}\n" for i, v in enumerate(losses.tolist())),
    )
    assert log.run.steps.tolist() == list(range(40))
    np.testing.assert_array_equal(log.run.column("loss"), losses)
    assert (log.run.column("lr")[log.run.logged("lr")] == 0.5).all()
    assert log.run.logged("lr").sum() == (39 if cell in ("", "word") else 40)


def test_names_that_come_twice_are_told_apart(tmp_path: Path) -> None:
    log = table(tmp_path, "step,loss,a,a,a (7),a,a\n1,2,3,4,5,6,7\n2,3,4,5,6,7,8\n")
    assert log.run.column("loss").tolist() == [2, 3]
    assert sorted(log.run.signals) == ["a", "a (4)", "a (6)", "a (7)", "loss"]


def test_columns_without_names_can_be_named(tmp_path: Path) -> None:
    text = "0,3.5\n1,3.4\n2,3.3\n"
    with pytest.raises(SourceError, match=r"among column 1, column 2; say which it is: --metric loss=NAME"):
        table(tmp_path, text)
    log = table(tmp_path, text, metrics={"loss": "column 2", "step": "column 1"})
    assert log.run.column("loss").tolist() == [3.5, 3.4, 3.3]
    assert log.mapping == {"loss": "column 2", "step": "column 1"}


def test_one_column_is_a_table_too(tmp_path: Path) -> None:
    log = table(tmp_path, "loss\n3.5\n3.4\nnan\n")
    assert log.run.steps.tolist() == [0, 1, 2]
    assert log.remarks == ("steps are row numbers: no step column",)


def test_a_w_and_b_export_names_its_run(tmp_path: Path) -> None:
    log = table(
        tmp_path,
        '"Step","a - train/loss","a - train/loss__MIN","a - train/loss__MAX"\n"0","3","2","9"\n"1","2","1","9"\n',
    )
    assert log.mapping["loss"] == "a - train/loss"
    assert log.run.column("loss").tolist() == [3, 2]


def test_an_export_of_several_runs_asks_which(tmp_path: Path) -> None:
    text = '"Step","a - train/loss","b - train/loss"\n"0","3","2"\n"1","2","1"\n'
    with pytest.raises(SourceError, match="the losses of 2 runs; choose: --metric loss='a - train/loss'"):
        table(tmp_path, text)
    assert table(tmp_path, text, metrics={"loss": "b - train/loss"}).run.column("loss").tolist() == [2, 1]


def test_pieces_of_a_long_table_fit_together(tmp_path: Path) -> None:
    """Longer than what is read at once; words in one column from the start, in another only late."""
    random = np.random.default_rng(0)
    losses = random.random(60_000).round(5)
    text = "".join(f"{i},2025-12-06T18:14:05.289056,{v},{'late' if i > 50_000 else i}\n" for i, v in enumerate(losses))
    log = table(tmp_path, f"step,time,loss,other\n{text}")
    np.testing.assert_array_equal(log.run.column("loss"), losses)
    assert log.run.steps.tolist() == list(range(60_000))
    assert log.run.logged("other").sum() == 50_001
    assert "time" not in log.run.signals


def test_a_monitor_of_episodes_has_rewards_and_no_loss(tmp_path: Path) -> None:
    log = table(tmp_path, '#{"t_start": 1.5, "env_id": "CartPole-v1"}\nr,l,t\n20.0,20,0.5\n31.5,32,1.5\n')
    assert log.run.column("reward").tolist() == [20.0, 31.5]
    assert "loss" not in log.run.signals
    assert log.remarks == ("steps are row numbers: no step column",)


def test_progress_of_an_agent_without_a_loss(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i * 2048},{20 + i},{'' if i < 2 else -0.6}\n" for i in range(1, 31))
    log = table(tmp_path, "time/iterations,time/total_timesteps,rollout/ep_rew_mean,train/entropy_loss\n" + rows)
    assert log.run.steps.tolist() == list(range(1, 31))
    assert log.run.series("policy_entropy")[1].tolist() == [0.6] * 29
    assert log.remarks == ("policy_entropy is the negative of train/entropy_loss",)


def test_a_row_in_which_nothing_was_trained_has_no_nan(tmp_path: Path) -> None:
    """An agent's log has rows of episodes and evaluations alone: without a rate, without an update."""
    rows = [f"{n},{n * 4},-{n},{1 / n},0.0005," for n in range(1, 201)]
    rows[120], rows[160] = "121,484,-121,,,", "161,,,,,3.6"
    log = table(
        tmp_path, "\n".join(["total_timesteps,episodes,reward,train/loss,learning_rate,eval_reward", *rows]) + "\n"
    )
    assert len(log.run.series("loss")[1]) == 198
    assert not any("taken as NaN" in remark for remark in log.remarks)


def test_a_held_out_loss_alone_is_judged_in_place_of_a_training_loss(tmp_path: Path) -> None:
    log = table(tmp_path, "epoch,val_loss,mAP\n" + "".join(f"{n},{3 / n},0.5\n" for n in range(1, 31)))
    assert log.mapping["loss"] == "val_loss"
    assert log.remarks[0] == "no training loss is logged: the held-out val_loss is judged in its place"


def test_rows_of_an_evaluation_take_no_step_from_another_counter(tmp_path: Path) -> None:
    """Updates count ten for an iteration. The row has what was trained since the one before, which has a loss, too."""
    head = "time/iterations,time/total_timesteps,rollout/ep_rew_mean,train/n_updates,train/loss,eval/mean_reward\n"
    rows = []
    for n in range(1, 41):
        trained = f"{10 * n - 10},{1 / n}"
        rows += [f",{2048 * n - 500},,{trained},-{n}.5"] if n in (10, 20, 30) else []
        rows += [f"{n},{2048 * n},{n},{',' if n in (10, 20, 30) else trained},"]
    run = table(tmp_path, head + "\n".join(rows) + "\n").run
    assert run.steps.tolist() == list(range(1, 41))
    np.testing.assert_allclose(run.column("loss"), 1 / np.arange(1, 41))
    assert [values.tolist() for values in run.series("eval_reward")] == [[10, 20, 30], [-10.5, -20.5, -30.5]]


def test_a_warning_above_a_printed_list_is_no_name_of_a_column(tmp_path: Path) -> None:
    listed = "".join(f"          {number},\n" for number in range(3, 60, 2))
    rows = "".join(f"INFO train.py:357 step:{step} loss:{5 / step:.3f} lr:1.0e-05\n" for step in range(1, 40))
    for first in (
        "WARNING:root:'codec' is not available, falling back",
        "Some weights were not used when loading it, so",
    ):
        log = table(tmp_path, f"{first}\n{{'episodes': [0,\n{listed}]}}\n{rows}")
        assert log.format == "text"
        assert log.run.column("loss").tolist()[:2] == [5.0, 2.5]
