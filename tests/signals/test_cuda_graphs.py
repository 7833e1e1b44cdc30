"""When a function is run, when it is recorded and when replayed. What is recorded on CUDA is in tests/gpu."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from sealegs.signals import weights
from sealegs.signals.cuda_graphs import EAGER_USES, MOST_MOVES, GraphCapturer, GraphedFunction, addresses, layout
from sealegs.signals.weights import WeightSampler

Result = TypeVar("Result")
CPU = torch.device("cpu")


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [result.sums, result.trained_squares, *result.sample]


class StandIn(GraphCapturer):
    """What a graph does, without a device: always the same tensors are written, and always the same addresses read."""

    def __init__(self, addresses: Callable[[], object]) -> None:
        super().__init__()
        self.addresses = addresses
        self.did: list[str] = []

    def record(self, function: Callable[[], Result], device: torch.device) -> Callable[[], Result] | None:
        self.did.append("record")
        recorded_at = self.addresses()
        result = function()

        def replay() -> Result:
            assert self.addresses() == recorded_at, "a graph would read what is not there any more"
            self.did.append("replay")
            for kept, new in zip(tensors_of(result), tensors_of(function()), strict=True):
                kept.copy_(new)
            return result

        return replay


def used(value: Tensor, times: int, replayed: GraphedFunction[Tensor], recorder: StandIn, *others: object) -> list[str]:
    """What was done at each use: "" for nothing but the function itself."""
    done = []
    for _ in range(times):
        value.add_(1.0)
        recorder.did.clear()
        assert replayed(lambda: value * 2, (addresses([value]), others), value.device).equal(value * 2)
        done.append(" ".join(recorder.did))
    return done


WHILE_NEW = [""] * EAGER_USES + ["record replay"]


def test_nobody_looks_any_more_where_tensors_are_that_never_stay() -> None:
    value = torch.zeros(3)
    recorder = StandIn(value.data_ptr)
    replayed: GraphedFunction[Tensor] = GraphedFunction(recorder)
    others = [torch.zeros(3), torch.zeros(2)]
    for move in range(MOST_MOVES + 1):
        replayed(lambda: value * 2, layout(others[: 1 + move % 2]), value.device)
    assert used(value, EAGER_USES + 3, replayed, recorder) == [""] * (EAGER_USES + 3)


def test_it_is_replayed_once_its_tensors_have_stayed_and_run_where_they_have_moved() -> None:
    value = torch.ones(4)
    recorder = StandIn(value.data_ptr)
    replayed = GraphedFunction[Tensor](recorder)
    assert used(value, 6, replayed, recorder) == [*WHILE_NEW, "replay", "replay", "replay"]
    kept = value.data
    value.data = torch.zeros(4)
    assert used(value, 4, replayed, recorder) == [*WHILE_NEW, "replay"]
    value.data = kept
    assert used(value, 1, replayed, recorder) == [""], "back at an address whose graph is gone"
    assert used(value, 4, replayed, recorder, "something else") == [*WHILE_NEW, "replay"]


def test_tensors_that_move_all_the_time_are_never_recorded() -> None:
    value = torch.ones(4)
    recorder = StandIn(value.data_ptr)
    replayed = GraphedFunction[Tensor](recorder)
    for _ in range(10):
        value.data = value.data.clone()
        assert used(value, 1, replayed, recorder) == [""]


def test_what_lies_at_the_same_address_may_be_something_else() -> None:
    tensor = torch.ones(4)
    first = layout([tensor])
    assert layout([tensor]) == first
    for other in (tensor[:3], tensor[1:], tensor.view(torch.int32)):
        assert layout([other]) != first
    moved = tensor.detach()
    moved.data = torch.ones(4)
    assert layout([moved]) != first


class Wrapper(Tensor):
    """Holds its numbers in another tensor, as quantized moments do."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_what_has_no_address_is_never_recorded() -> None:
    wrapper = Wrapper(torch.ones(4))
    recorder = StandIn(lambda: None)
    replayed = GraphedFunction[Tensor](recorder)
    for value in range(6):
        wrapper.held = torch.full((4,), float(value))
        assert replayed(lambda: wrapper.held * 2, layout([wrapper]), CPU).tolist() == [2.0 * value] * 4
    assert recorder.did == []
    for _ in range(EAGER_USES + 1):  # nothing has no address either, and can be recorded
        replayed(lambda: torch.ones(1), layout([torch.ones(0), torch.ones(0)]), CPU)
    assert recorder.did == ["record", "replay"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where nothing can be captured")
def test_where_recording_fails_the_function_is_run_for_ever() -> None:
    recorder = GraphCapturer()
    replayed = GraphedFunction[Tensor](recorder)
    value = torch.zeros(4)
    for step in range(10):
        value.fill_(step)
        assert replayed(lambda: value * 2, layout([value]), CPU).tolist() == [2.0 * step] * 4
        assert bool(recorder.failure) == (step >= EAGER_USES)
    assert recorder.failure.startswith("RuntimeError: ")


class Training:
    """A model that is sampled twice: as it is on CUDA, and eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8))
        self.optimizer: Optimizer = AdamW(self.model[:2].parameters(), lr=0.1, fused=True)
        self.sampler = WeightSampler(self.model, [self.optimizer])
        self.eager = WeightSampler(self.model, [self.optimizer])
        monkeypatch.setattr(weights, "_can_be_replayed", lambda plan: plan is self.sampler._plan)
        self.before, self.after = StandIn(self._weights_and_moments), StandIn(self._weights)
        self.sampler._measure = GraphedFunction(self.before)
        self.sampler._compare = GraphedFunction(self.after)

    def steps(self, count: int, during: Callable[[], object] = lambda: None) -> list[tuple[str, str]]:
        """What the recorders did before and after each update; ``during`` is part of it."""
        done = []
        results: list[tuple[Tensor, Tensor]] = []
        for _ in range(count):
            self.before.did.clear()
            self.after.did.clear()
            self.model(torch.randn(4, 8)).square().mean().backward()
            results.append((self.sampler.before_update(), self.eager.before_update()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            during()
            results.append((self.sampler.after_update(), self.eager.after_update()))
            done.append((" ".join(self.before.did), " ".join(self.after.did)))
        assert all(one.equal(other) for one, other in results), "of all steps: no result is written over"
        return done

    def _weights(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def _weights_and_moments(self) -> list[int]:
        states = self.optimizer.state.values()
        return self._weights() + [state[name].data_ptr() for state in states for name in ("exp_avg", "exp_avg_sq")]


NEW = [("", ""), ("", ""), ("record replay", ""), ("replay", ""), ("replay", "record replay")]
"""The second compares with what the first keeps, so it has to wait for it."""
REPLAYED = ("replay", "replay")


def test_a_sampler_replays_what_it_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    assert training.steps(1) == [("", "")], "there are no moments yet"
    assert training.steps(9) == [*NEW, *[REPLAYED] * 4]


def test_a_sampler_notices_weights_and_moments_that_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.steps(7)

    def move_weights() -> None:
        for parameter in training.model.parameters():
            parameter.data = parameter.data.clone()

    def move_a_moment(name: str = "exp_avg") -> None:
        moment = next(iter(training.optimizer.state.values()))[name]
        moment.data = moment.data.clone()

    def move_another() -> None:
        move_a_moment("exp_avg_sq")

    def replace_moments() -> None:
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))

    for change in (move_weights, move_a_moment, move_another, replace_moments):
        change()
        assert training.steps(6) == [*NEW, REPLAYED], change.__name__
    training.optimizer.add_param_group({"params": list(training.model[2].parameters())})
    assert training.steps(7) == [("", ""), *NEW, REPLAYED], "the first step makes the moments of the new ones"


def test_a_sampler_notices_weights_that_move_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.steps(7)

    def move() -> None:
        weight = training.model.get_parameter("0.weight")
        weight.data = weight.data * 2

    assert training.steps(1, move) == [("replay", "")], "before it they were in their places"
    assert training.steps(6) == [*NEW, REPLAYED]


def test_optimizers_that_count_steps_as_plain_numbers_are_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.steps(1)

    def count() -> None:
        for state in training.optimizer.state.values():
            state["steps"] = state.get("steps", 1000) + 1

    assert training.steps(7, count)[-1] == REPLAYED
