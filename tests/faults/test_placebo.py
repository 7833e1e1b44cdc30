"""Every fault of model and optimizer as a placebo: all of it is done, and nothing comes of it."""

from dataclasses import replace
from typing import Any

import pytest
from tests.faults.loops import Loop, same
from tests.faults.two_ranks import STEPS
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sealegs.faults.live import LiveFault
from sealegs.faults.spec import KINDS, parse

FAULTS = [
    "nan-gradient@4",
    "inf-gradient@4",
    "gradient-scale:factor=100,steps=2@4",
    "bit-flip@4",
    "bit-flip:in=weight@4",
    "bit-flip:in=moment1@4",
    "bit-flip:in=moment2@4",
    "bit-flip:in=activation@4",
    "weight-scale:factor=3@4",
    "weight-scale:factor=3,tensor=0.weight,rows=1/2@4",
    "lr-spike:factor=30,steps=2@4",
    "lr-spike:factor=30,steps=2,log=shows@4",
    "moments-reset@4",
    "moments-reset:in=moment1@4",
    "frozen-moment2:steps=2@4",
    "wrong-betas:beta1=0.1,beta2=0.5,steps=2@4",
    "warmup-lost:steps=2@4",
    "scaler-off:steps=2@4",
    "bf16-weights:steps=2@4",
    "fp16-overflow:steps=2@4",
    "activation-scale:factor=10,module=0,steps=2@4",
    "router-bias:amount=3,module=0,steps=2@4",
    "missing-zero-grad:steps=2@4",
]


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))


def trained(*faults: str) -> Loop:
    return Loop(faults, schedule=warmup, micro_batches=2, clip=1.0).run(8)


def test_every_kind_is_here() -> None:
    live = {name for name, kind in KINDS.items() if issubclass(kind, LiveFault)}
    assert {parse(fault).name for fault in FAULTS} | {"skipped-all-reduce", "stuck-scale"} == live


@pytest.mark.parametrize("fault", FAULTS)
def test_a_placebo_changes_no_bit_and_is_reported(fault: str) -> None:
    placebo = replace(parse(fault), placebo="yes")
    loop, clean, struck = trained(str(placebo)), trained(), trained(fault)
    assert same(loop.weights(), clean.weights())
    assert loop.rates == clean.rates
    assert [(strike.step, strike.tensor, strike.element) for strike in loop.injector.strikes] == [
        (strike.step, strike.tensor, strike.element) for strike in struck.injector.strikes
    ]
    assert loop.injector.strikes
    for strike in loop.injector.strikes:
        assert strike.before == strike.after
        assert str(strike).startswith(f"step {strike.step}: {placebo} struck the ")
        assert str(strike).endswith(": a placebo, nothing changed")
    assert not loop.injector.pending()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_itself_changes_them(fault: str) -> None:
    struck = trained(fault)
    assert not same(struck.weights(), trained().weights())
    assert not any("placebo" in line for line in struck.lines())


@pytest.mark.xdist_group("ranks")
def test_on_two_ranks_too(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        clean, placebo, struck = (rank[f"ddp{which}"]["weights"] for which in ("", " skipped placebo", " skipped"))
        assert all(same(placebo[step], clean[step]) for step in range(STEPS + 1))
        assert not same(struck[STEPS], clean[STEPS])
    first, second = (rank["ddp skipped placebo"]["strikes"] for rank in two_ranks)
    assert not first
    assert [line.rpartition(": ")[2] for line in second] == ["a placebo, nothing changed"] * 2
