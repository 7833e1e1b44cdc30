"""What a run folder holds does not grow with the ranks."""

from pathlib import Path

from bench.scale import STRUCK, Crowd, folder_of, rows_of

import sealegs
from sealegs.signals.ranks import FIELDS, MERGED, merge


def test_a_step_of_4096_ranks_takes_no_more_on_disk_than_one_of_two(tmp_path: Path) -> None:
    steps = STRUCK + 10
    few, many = (folder_of(world, steps, tmp_path / str(world)) for world in (2, 4096))
    assert few.keys() == many.keys()
    assert all(many[name] < 1.1 * few[name] + 100 for name in few), "other numbers have other lengths"
    for world in (2, 4096):
        run = sealegs.open_run(tmp_path / str(world))
        assert len(run.steps) == steps
        (skip,) = [event for event in run.events if event.kind == "skip"]
        assert skip.step == STRUCK
        assert skip.detail["culprit"].endswith(f" on rank {world // 2}")


def test_the_verdict_on_4096_rows_is_a_function_of_the_rows() -> None:
    rows = rows_of(4096, 10, 7)
    found = merge(rows[:, : len(FIELDS)])
    assert found.tolist() == merge(rows.clone()[:, : len(FIELDS)]).tolist()
    named = dict(zip(MERGED, found.tolist(), strict=True))
    assert abs(named["loss"] - 2.5) < 0.01
    assert named["losses"] == Crowd(4096).world
