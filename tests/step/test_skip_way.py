"""The cheaper way is taken, after both were tried; where only one is possible, it is that one."""

from dataclasses import dataclass, field

import pytest

from sealegs.errors import ConfigError
from sealegs.step.skip_way import BEGIN, BLOCK, BLOCKS, Skipping, SkipWay


@dataclass
class Moment:
    at: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Moment") -> float:
        return later.at - self.at


@dataclass
class Device:
    """One that takes so long for a step, either way; it is slow in the first steps after a change of it."""

    costs: dict[str, float]
    now: float = 0.0
    went: list[str] = field(default_factory=list)

    def step(self, way: str) -> None:
        changes = 3.0 if self.went and self.went[-1] != way else 1.0
        self.went.append(way)
        self.now += changes * self.costs[way]

    def mark(self) -> Moment:
        return Moment(self.now)


def run(way: SkipWay, device: Device, steps: int, possible_until: int = 1000) -> None:
    for step in range(steps):
        device.step(way.next(is_possible=step < possible_until))
        way.stepped()


@pytest.mark.parametrize(
    ("device_ms", "host_ms", "cheaper"), [(10, 14, "device"), (300, 299, "host"), (5, 5, "device")]
)
def test_the_cheaper_way_is_taken_and_both_figures_are_kept(device_ms: float, host_ms: float, cheaper: str) -> None:
    device = Device({"device": device_ms, "host": host_ms})
    way = SkipWay("auto", clock=device.mark)
    run(way, device, BEGIN + BLOCKS * BLOCK + 20)
    assert way.way == cheaper
    assert way.measured == {"device": device_ms, "host": host_ms}
    assert device.went[:BEGIN] == ["device"] * BEGIN
    assert device.went[BEGIN : BEGIN + 2 * BLOCK] == ["device"] * BLOCK + ["host"] * BLOCK
    assert device.went[-20:] == [cheaper] * 20


@pytest.mark.parametrize("asked", ["device", "host"])
def test_what_was_asked_for_is_done_without_measuring(asked: str) -> None:
    device = Device({"device": 9, "host": 1})
    way = SkipWay(asked, clock=device.mark)  # type: ignore[arg-type]
    run(way, device, 100)
    assert set(device.went) == {asked}
    assert not way.measured


@pytest.mark.parametrize("asked", ["device", "auto"])
def test_from_the_first_step_that_cannot_be_taken_back_the_host_decides(asked: str) -> None:
    device = Device({"device": 1, "host": 9})
    way = SkipWay(asked, clock=device.mark)  # type: ignore[arg-type]
    run(way, device, 100, possible_until=7)
    assert device.went == ["device"] * 7 + ["host"] * 93


def test_one_rank_that_cannot_is_enough() -> None:
    way = SkipWay("device", agree=lambda mine: False)
    assert way.next(is_possible=True) == "host"


def test_a_word_that_is_no_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Skipping\.way='gpu': one of auto, device, host"):
        Skipping(way="gpu")  # type: ignore[arg-type]
