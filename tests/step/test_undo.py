"""A step that is taken back leaves nothing behind: no weight, no memory, no number, whatever the optimizer keeps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.state.memory import sizes_of
from sealegs.step.undo import MOST_WAITS, Undo
from sealegs.step.update import Update

NAN, FINE = torch.tensor(1.0), torch.tensor(0.0)


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


class Own(Optimizer):
    """As a public repository would write one: plain SGD, and what ``remember`` keeps."""

    def __init__(
        self, parameters: Any, remember: Callable[["Own", Tensor, dict[str, Any]], None], lr: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.remember = remember

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.remember(self, p, self.state[p])
                        p.add_(p.grad, alpha=-group["lr"])


def lion(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(gradient(p), 0.1)


def replaces(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg"] = 0.9 * state.get("exp_avg", torch.zeros_like(p)) + gradient(p)


def in_a_list(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    for factor in state.setdefault("preconditioners", [torch.eye(n) for n in p.shape]):
        factor.mul_(0.9).add_(gradient(p).square().sum())


def eight_bits(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("quantised", torch.zeros(p.shape, dtype=torch.int8)).add_((100 * gradient(p)).to(torch.int8))
    state.setdefault("is_set", torch.zeros((), dtype=torch.bool)).logical_not_()


def on_itself(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    if not hasattr(own, "average"):
        own.average = torch.zeros(())  # type: ignore[attr-defined]
    own.average += gradient(p).sum()  # type: ignore[attr-defined]


def transposed(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    if "columns" not in state:
        state["columns"] = torch.zeros(p.shape[::-1]).t()
        state["every_other"] = torch.zeros(2 * p.numel())[::2]
    state["columns"].add_(gradient(p))
    state["every_other"].add_(gradient(p).reshape(-1))


def late(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    """Memory that is there from the third step on."""
    count = state.setdefault("count", torch.zeros(()))
    count += 1
    if count >= 3:
        lion(own, p, state)


def counts(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    state["step"] = state.get("step", 0) + 1
    lion(own, p, state)


def counts_in_the_group(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    own.param_groups[0]["k"] = own.param_groups[0].get("k", 0) + 1


def counts_on_itself(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    own.number = getattr(own, "number", 0) + 1  # type: ignore[attr-defined]


def keeps_a_flag(own: Own, p: Tensor, state: dict[str, Any]) -> None:
    own.is_ready = True  # type: ignore[attr-defined]
    lion(own, p, state)


REMEMBERS = {
    each.__name__: each
    for each in (lion, replaces, in_a_list, eight_bits, on_itself, transposed, late, counts, counts_in_the_group)
} | {each.__name__: each for each in (counts_on_itself, keeps_a_flag)}
NEED_THE_HOST = {"counts", "counts_in_the_group", "counts_on_itself"}


def everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Weights, and every bit of what an optimizer has in it, whether zero or not."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, dict):
            return {key if isinstance(key, str) else "p": plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else repr(value)

    kept = {name: value for name, value in vars(optimizer).items() if name not in ("defaults", "remember", "state")}
    states = [plain(optimizer.state.get(p)) for p in model.parameters()]
    return [plain(list(model.parameters())), states, plain({k: v for k, v in kept.items() if not k.startswith("_")})]


def made(remember: str) -> tuple[nn.Module, Own]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    return model, Own(model.parameters(), REMEMBERS[remember])


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()


@pytest.mark.parametrize("remember", REMEMBERS)
def test_a_run_with_steps_taken_back_is_the_run_without_them(remember: str) -> None:
    skipped = {0, 2, 3, 5}
    found = []
    for takes_back in (True, False):
        model, optimizer = made(remember)
        update = Update([optimizer])
        ways = []
        for seed in range(8):
            backward(model, seed)
            is_bad = seed in skipped
            if not takes_back:
                update.apply(not is_bad)
                continue
            if is_bad:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.fill_(float("nan"))
            before = everything(model, optimizer)
            ways.append(update.can_be_taken_back())
            if ways[-1]:
                update.apply_unless(NAN if is_bad else FINE)
            else:
                update.apply(not is_bad)
            if is_bad:
                assert everything(model, optimizer) == before
        found.append(everything(model, optimizer))
        if takes_back:
            assert ways[-1] is (remember not in NEED_THE_HOST), update.why_not_taken_back()
    assert found[0] == found[1]


def test_a_parameter_without_a_gradient_and_one_written_past_torch_are_kept() -> None:
    model, optimizer = made("lion")
    undo = Undo(optimizer)
    for seed in range(3):
        backward(model, seed)
        undo.step(FINE)
    backward(model, 9)
    first, second = model.parameters()
    first.grad = None
    second.data.clamp_(-0.01, 0.01)  # as a critic's weights are, which no version counts
    before = everything(model, optimizer)
    undo.step(NAN)
    assert everything(model, optimizer) == before
    assert second.abs().max() <= 0.01


def test_what_cannot_be_looked_into_is_refused_and_named() -> None:
    class Index:
        pass

    def strange(own: Own, p: Tensor, state: dict[str, Any]) -> None:
        state["index"] = Index()

    model, _ = made("lion")
    optimizer = Own(model.parameters(), strange)
    undo = Undo(optimizer)
    assert undo.is_possible()
    backward(model, 0)
    undo.step(FINE)
    assert not undo.is_possible()
    assert undo.why_not == "it keeps a Index, into which nobody can look"


def test_without_room_the_host_decides_and_says_what_was_lacking() -> None:
    _, optimizer = made("lion")
    undo = Undo(optimizer, most=1e-12)
    assert not undo.is_possible()
    assert undo.why_not.startswith("a copy of what it changes takes ")


def test_memory_that_is_new_again_and_again_is_waited_for_only_so_often() -> None:
    def grows(own: Own, p: Tensor, state: dict[str, Any]) -> None:
        state[f"part {len(state)}"] = torch.zeros(())

    model, _ = made("lion")
    undo = Undo(Own(model.parameters(), grows))
    steps = 0
    while undo.is_possible():
        backward(model, steps)
        undo.step(FINE)
        steps += 1
    assert steps == MOST_WAITS + 1
    assert undo.why_not == "it makes new memory again and again"


def test_a_loaded_state_is_looked_at_anew() -> None:
    model, optimizer = made("lion")
    undo = Undo(optimizer)
    for seed in range(2):
        backward(model, seed)
        undo.step(FINE)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["index"] = {"inner": torch.Generator, "odd": object()}
    optimizer.load_state_dict(state)
    assert not undo.is_possible()


def test_the_copies_take_what_the_step_changes_and_no_more() -> None:
    model, optimizer = made("lion")
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    undo = Undo(optimizer)
    for seed in range(2):
        backward(model, seed)
        undo.step(FINE)
    changed = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    assert undo.copied_bytes == sum(sizes_of({str(n): each.detach() for n, each in enumerate(changed)}).values())


def test_hooks_are_called_and_the_gradients_are_let_go() -> None:
    model, optimizer = made("lion")
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    update = Update([optimizer])
    backward(model, 0)
    update.apply_unless(FINE)
    assert called == ["before", "after"]
    assert all(p.grad is None for p in model.parameters())


def moved(model: nn.Module, optimizer: Own) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def turned(model: nn.Module, optimizer: Own) -> None:
    second = [*model.parameters()][1]
    second.data = second.data.t().contiguous().t()  # the same numbers in another order


def loaded(model: nn.Module, optimizer: Own) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def given_another_group(model: nn.Module, optimizer: Own) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(3)


def thawed(model: nn.Module, optimizer: Own) -> None:
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(5)


def given_a_memory(model: nn.Module, optimizer: Own) -> None:
    optimizer.state[next(model.parameters())]["note"] = torch.ones(2)


def given_a_rate(model: nn.Module, optimizer: Own) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


PLANS: list[tuple[Callable[[nn.Module, Own], None], list[int]]] = [
    (moved, [0, 1, 4, 7]),
    (turned, [0, 1, 4]),  # it is turned already
    (loaded, [0, 1, 4, 7]),
    (given_another_group, [0, 1, 4, 5, 6, 7, 8, 9]),  # memory that is made and removed, made, and there
    (thawed, [0, 1, 4, 5, 6]),
    (given_a_memory, [0, 1, 4, 7]),
    (given_a_rate, [0, 1]),
]


@pytest.mark.parametrize(("move", "plans"), PLANS)
def test_what_somebody_moves_between_two_steps_is_taken_back_as_well(
    move: Callable[[nn.Module, Own], None], plans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step makes memory, the second plans for those after it; then only what has moved is planned anew."""
    model, optimizer = made("lion")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5), requires_grad=False)]})
    undo = Undo(optimizer)
    step, planned, plan = 0, list[int](), undo._planned

    def noted() -> Any:
        planned.append(step)
        return plan()

    monkeypatch.setattr(undo, "_planned", noted)
    for step in range(10):
        if step in (4, 7):
            move(model, optimizer)
        backward(model, step)
        before = [everything(model, optimizer), [group["params"][-1].tolist() for group in optimizer.param_groups]]
        undo.step(NAN if step in (4, 6, 7) else FINE)
        after = [everything(model, optimizer), [group["params"][-1].tolist() for group in optimizer.param_groups]]
        assert (before == after) is (step in (4, 6, 7))
    assert planned == plans
    assert undo.is_possible()
