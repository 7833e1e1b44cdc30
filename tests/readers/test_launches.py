"""Attempts of a text log: launches that go back, launches that go on, and what is none."""

from pathlib import Path

import pytest

from sealegs.errors import SourceError
from sealegs.readers.read import read
from sealegs.record.attempts import Attempt
from sealegs.record.run import Run

HEADER = (
    "------------------------ arguments ------------------------\n"
    "  lr .............................................. {lr}\n"
    "  seed ............................................ 1\n"
    "  clip_grad ....................................... {clip}\n"
    "-------------------- end of arguments ---------------------\n"
)


def rows(first: int, last: int, loss: float = 3.0) -> str:
    return "".join(
        f" iteration {step:6d}/ 1000 | learning rate: 1.000E-03 | lm loss: {loss - step / 500:.6E} | grad norm: 1.0 |\n"
        for step in range(first, last + 1)
    )


def run_of(tmp_path: Path, text: str) -> Run:
    log = tmp_path / "train.log"
    log.write_text(text)
    return read(str(log)).run


def shape(attempts: tuple[Attempt, ...]) -> list[tuple[int, int, int | None, int | None, int | None]]:
    return [(one.first, one.last, one.parent, one.begun_from, one.given_up_from) for one in attempts]


def test_a_launch_that_goes_back_is_an_attempt_with_its_line_and_its_settings(tmp_path: Path) -> None:
    text = (
        HEADER.format(lr=0.001, clip=1.0)
        + rows(1, 120)
        + HEADER.format(lr=0.0005, clip=1.0)
        + " loading checkpoint from /ckpt at iteration 80\n"
        + rows(81, 150)
    )
    run = run_of(tmp_path, text)
    first, second = run.attempts
    assert shape(run.attempts) == [(1, 120, None, None, 81), (81, 150, 0, 80, None)]
    assert second.told_by == "loading checkpoint from /ckpt at iteration 80"
    assert second.changed == {"lr": (0.001, 0.0005)}
    assert first.settings == {"lr": 0.001, "seed": 1, "clip_grad": 1.0}
    assert run.manifest.settings["lr"] == 0.0005
    assert run.superseded_rows == 40


def test_a_launch_that_goes_on_is_an_attempt_if_its_line_names_the_step(tmp_path: Path) -> None:
    line = "INFO successfully loaded checkpoint from /ckpt at iteration {}\n"
    run = run_of(tmp_path, rows(1, 100) + line.format(100) + rows(101, 200))
    assert shape(run.attempts) == [(1, 100, None, None, None), (101, 200, 0, 100, None)]
    assert run.segments[[0, 99, 100, 199]].tolist() == [0, 0, 1, 1]
    assert run.superseded_rows == 0

    other = run_of(tmp_path, rows(1, 100) + line.format(7000) + rows(101, 200))
    assert len(other.attempts) == 1


def test_settings_printed_anew_begin_an_attempt(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, HEADER.format(lr=0.001, clip=1.0) + rows(1, 50) + HEADER.format(lr=0.001, clip=0.1) + rows(51, 99)
    )
    assert shape(run.attempts) == [(1, 50, None, None, None), (51, 99, 0, 50, None)]
    assert run.attempts[1].changed == {"clip_grad": (1.0, 0.1)}


def test_three_attempts_are_a_tree(tmp_path: Path) -> None:
    text = rows(1, 100) + rows(61, 90) + rows(41, 80) + rows(1, 30)
    assert shape(run_of(tmp_path, text).attempts) == [
        (1, 100, None, None, 1),
        (61, 90, 0, 60, 61),
        (41, 80, 0, 40, 41),
        (1, 30, None, None, None),
    ]


def test_what_only_speaks_of_checkpoints_is_no_launch(tmp_path: Path) -> None:
    lines = (
        "saving checkpoint at iteration 50\n",
        "Loading best checkpoint from step 50 for evaluation\n",
        "resume_from_checkpoint: 50\n",
        "WARNING: could not find a checkpoint to resume from at 50\n",
        "Loading checkpoint shards: 50\n",
    )
    for line in lines:
        assert len(run_of(tmp_path, rows(1, 50) + line + rows(51, 90)).attempts) == 1, line


def test_a_cut_of_a_run_keeps_its_launches(tmp_path: Path) -> None:
    run = run_of(tmp_path, rows(1, 60) + "resuming training from step 60\n" + rows(61, 90))
    assert shape(run.cut(1, 50, 80).attempts) == [(50, 60, None, None, None), (61, 80, 0, 60, None)]


def folder_of(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".").replace("_", "-")).write_text(text)
    return tmp_path


def test_files_of_several_launches_are_one_run_in_the_order_they_were_written(tmp_path: Path) -> None:
    header = HEADER.format(lr=0.001, clip=1.0), HEADER.format(lr=0.0005, clip=1.0)
    log = read(str(folder_of(tmp_path, slurm_9__out=header[0] + rows(1, 120), slurm_10__out=header[1] + rows(81, 150))))
    assert shape(log.run.attempts) == [(1, 120, None, None, 81), (81, 150, 0, 80, None)]
    assert log.run.attempts[1].told_by == "slurm-10.out begins"
    assert log.run.attempts[1].changed == {"lr": (0.001, 0.0005)}
    assert log.remarks[0].startswith("read from 2 files as launches of one run: slurm-9.out, slurm-10.out; give one")


def test_a_launch_that_goes_on_in_the_next_file_is_an_attempt(tmp_path: Path) -> None:
    run = read(str(folder_of(tmp_path, log__txt=rows(1, 100), log__1__txt=rows(101, 150)))).run
    assert shape(run.attempts) == [(1, 100, None, None, None), (101, 150, 0, 100, None)]


def test_files_are_ordered_by_the_times_in_them_and_rotated_ones_backwards(tmp_path: Path) -> None:
    early, late = "2025-01-01 10:00:00 start\n", "2025-01-02 10:00:00 start\n"
    (tmp_path / "a").mkdir()
    timed = folder_of(tmp_path / "a", train_1__log=late + rows(51, 90), train_2__log=early + rows(1, 50))
    (tmp_path / "b").mkdir()
    rotated = folder_of(tmp_path / "b", train__log=rows(61, 90), train__log__1=rows(31, 60), train__log__2=rows(1, 30))
    for folder in (timed, rotated):
        run = read(str(folder)).run
        assert run.steps.tolist() == list(range(1, 91))
        assert run.superseded_rows == 0


@pytest.mark.parametrize("names", [("seed1.log", "seed2.log"), ("rank0.log", "rank1.log"), ("a.log", "b.log")])
def test_files_of_several_runs_are_asked_about(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).write_text(rows(1, 50))
    with pytest.raises(SourceError, match="2 logs or runs in it"):
        read(str(tmp_path))


def test_a_column_that_goes_anywhere_does_not_count_steps(tmp_path: Path) -> None:
    log = tmp_path / "episodes.csv"
    lines = (f"{episode},{episode / 100},{300 + 97 * episode % 211}\n" for episode in range(200))
    log.write_text("episode,reward,steps\n" + "".join(lines))
    run = read(str(log)).run
    assert len(run.steps) == 200
    assert len(run.attempts) == 1
