"""Whatever a signal is called and whatever it is, its row can be read again, and what was changed is said once."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import sealegs
from sealegs.errors import ConfigError
from sealegs.record.rows import SoundRows, is_sound_name, read_row, sound_name
from sealegs.record.run import open_run

BAD = ['a"b', "a\\b", "a\nb", "a\0b", "\x1b[2J", "\u202e", "\ud800", "x" * 400]


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_a_name_is_made_sound_and_stays_the_same(name: str) -> None:
    assert is_sound_name(sound_name(name))
    assert sound_name(name) == sound_name(name)
    assert sound_name(sound_name(name)) == sound_name(name)
    assert sound_name(name) != sound_name(f"{name}{name[-1]}"), "two names stay two"


def test_a_watch_writes_every_row_so_that_it_can_be_read(tmp_path: Path) -> None:
    """Names and values that made all rows of a run count as damaged."""
    with sealegs.Watch(tmp_path / "run") as watch:
        for step in range(3):
            odd: dict[str, Any] = {name: float(step) for name in BAD}
            odd |= {"list": [1, 2], "dict": {}, "large": 10**400, "text": "caf\udce9 \U0001f642", "flag": True}
            watch.see(step, loss=1.0 + step, **odd)
    run = open_run(tmp_path / "run")
    assert run.damaged_lines == 0
    assert run.column("loss").tolist() == [1.0, 2.0, 3.0]
    for name in BAD:
        assert run.column(sound_name(name)).tolist() == [0.0, 1.0, 2.0]
    assert run.column("large").tolist() == [math.inf] * 3
    assert run.column("text").tolist() == ["caf\ufffd \U0001f642"] * 3
    [said] = [event for event in run.events if event.kind == "signals-changed"]
    assert said.step == 0
    assert len(said.detail["renamed"]) == len(BAD)
    assert said.detail["left_out"] == {"list": "list", "dict": "dict"}


def test_a_module_of_any_name_can_be_trained(tmp_path: Path) -> None:
    names = ['quo"ted', "back\\slash", "new\nline", "zero\0"]
    model = torch.nn.Sequential(OrderedDict((name, torch.nn.Linear(2, 2)) for name in names))
    with sealegs.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run=tmp_path / "run") as guard:
        for _ in range(12):  # details are written every tenth step
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            guard.step(loss)
    run = open_run(tmp_path / "run")
    assert (len(run.steps), run.damaged_lines) == (12, 0)
    assert sum(name.startswith("param_norm/") for name in run.signals) == len(names)
    assert all(map(is_sound_name, run.signals))
    assert [event.kind for event in run.events].count("signals-changed") >= 1


def test_there_is_an_end_to_what_is_said() -> None:
    rows = SoundRows()
    notices = [rows.sound({"step": step, f"\n{step}": 1.0})[1] for step in range(100)]
    said = [notice for notice in notices if notice is not None]
    assert len(said) == 10
    assert [notice.is_last for notice in said] == [False] * 9 + [True]
    many = SoundRows().sound({"step": 0, **{f"\n{number}": 1.0 for number in range(100)}})[1]
    assert many is not None
    assert len(many.plain()["renamed"]) == 12
    assert many.plain()["more"] == 88


def test_a_histogram_may_be_given_as_a_list(tmp_path: Path) -> None:
    counts = [3] * 32 + [0]
    with sealegs.Watch(tmp_path / "run") as watch:
        watch.see(0, loss=1.0, token_loss_histogram=counts)
        watch.see(1, loss=1.0, token_loss_histogram=" ".join(map(str, counts)))
        watch.see(2, loss=1.0, token_loss_histogram=[-1])
    run = open_run(tmp_path / "run")
    assert run.texts("token_loss_histogram", 0, 9) == dict.fromkeys((0, 1), " ".join(map(str, counts)))
    (said,) = (event for event in run.events if event.kind == "signals-changed")
    assert said.detail["left_out"] == {"token_loss_histogram": "list"}, "what is no list of counts"


@pytest.mark.parametrize("step", [2**53 + 1, -(2**60)])
def test_a_step_that_no_float_holds_is_refused(step: int, tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "run") as watch, pytest.raises(ConfigError, match="so that a float holds it"):
        watch.see(step, loss=1.0)


@pytest.mark.parametrize("line", ["", "[]", "{", '{"loss": 1}', '{"step": "1"}', '{"step": true}', '{"step": 1e300}'])
def test_a_line_without_a_step_is_no_row(line: str) -> None:
    assert read_row(line) is None


def test_of_a_row_what_is_no_value_is_missing() -> None:
    line = {"step": 2, "loss": "high", "grad_norm": "Infinity", "lr": None, "note": "x", "culprit": 5, "flag": True}
    assert read_row(json.dumps(line)) == {"step": 2, "grad_norm": math.inf, "note": "x", "culprit": 5}
