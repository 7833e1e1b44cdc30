"""Samples of weights as captured graphs: the bits of the eager computation, whatever moves, and no waiting."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sealegs.signals import cuda_graphs
from sealegs.signals.cuda_graphs import EAGER_USES, GraphCapturer, GraphedFunction, layout
from sealegs.signals.layout import Layout
from sealegs.signals.norms import GradientReader
from sealegs.signals.tensor_norms import lengths
from sealegs.signals.weights import WeightSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

SETTLED = 2 * EAGER_USES + 2
"""Steps from the first, which makes the moments, to the last capture: the comparison is captured after the sample."""
A_WHILE = 1_000_000_000
"""Clock cycles of the device, about half a second: longer than anything the host does here."""


class Model(nn.Module):
    """Tensors larger than a sample, two types, frozen layers, a tied weight and one with gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.layers[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.gappy = nn.Parameter(torch.randn(64, 128)[:, :64] / 8)
        self.added = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + F.dropout(torch.tanh(layer(hidden)), 0.1)
        scores: Tensor = self.added(hidden * self.scale) @ self.gappy @ self.embedding.weight.T
        return scores


class Training:
    """A model that is sampled by graphs, and by one operation after the other."""

    def __init__(self, world: int = 1) -> None:
        torch.manual_seed(0)
        self.model = Model().cuda()
        layout = Layout(world=world)
        self.model.gappy.data = torch.randn(64, 128, device="cuda")[:, :64] / 8
        trained = [p for name, p in self.model.named_parameters() if not name.startswith(("added", "gappy"))]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        self.plain = torch.optim.SGD([self.model.gappy], lr=1e-3)  # a fused one takes no gaps
        self.sampler = WeightSampler(self.model, [self.optimizer, self.plain], layout=layout)
        self.eager = WeightSampler(self.model, [self.optimizer, self.plain], layout=layout)
        self.eager._recorder.failure = "to compare with"
        self.results: list[tuple[Tensor, Tensor]] = []

    def steps(self, count: int, during: Callable[[], object] = lambda: None) -> None:
        """``during`` is part of each update."""
        for _ in range(count):
            tokens = torch.randint(0, 512, (4, 32), device="cuda")
            F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()).backward()
            self.results.append((self.sampler.before_update(), self.eager.before_update()))
            for optimizer in (self.optimizer, self.plain):
                optimizer.step()
            self.model.zero_grad()
            during()
            self.results.append((self.sampler.after_update(), self.eager.after_update()))

    def check(self, *, replays: bool) -> None:
        """That all results so far are equal to the last bit, and whether both samples are replayed now."""
        assert self.sampler._recorder.failure == ""
        assert all(one.equal(other) for one, other in self.results)
        assert all(bool(one.isfinite().all()) and bool(one.any()) for one, _ in self.results)
        self.results.clear()
        is_replayed = self.sampler._measure._replay is not None, self.sampler._compare._replay is not None
        assert is_replayed == (replays, replays)


@pytest.mark.parametrize("world", [1, 4])
def test_a_hundred_steps_give_the_bits_of_the_eager_computation(world: int) -> None:
    training = Training(world)
    training.steps(EAGER_USES)
    training.check(replays=False)
    training.steps(SETTLED - EAGER_USES)
    training.check(replays=True)
    training.steps(100)
    values = torch.stack([one for one, _ in training.results[1::2]])
    assert (values[1:] != values[:-1]).any(1).all(), "every update is another"
    training.check(replays=True)


def move_weights(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()


def move_a_frozen_weight(training: Training) -> None:
    bias = training.model.get_parameter("layers.0.bias")
    bias.data = bias.data * 3


def move_a_moment(training: Training) -> None:
    moment = training.optimizer.state[training.model.embedding.weight]["exp_avg"]
    moment.data = moment.data * 3


def load_moments(training: Training) -> None:
    saved = copy.deepcopy(training.optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg_sq"] *= 3
    training.optimizer.load_state_dict(saved)


def add_parameters(training: Training) -> None:
    training.optimizer.add_param_group({"params": list(training.model.added.parameters())})


def freeze(training: Training) -> None:
    training.model.layers[3].requires_grad_(False)


def widen(training: Training) -> None:
    training.model.scale.data = training.model.scale.data.float()
    state = training.optimizer.state[training.model.scale]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].float(), state["exp_avg_sq"].float()


CHANGES = [move_weights, move_a_frozen_weight, move_a_moment, load_moments, add_parameters, freeze, widen]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_moves_is_noticed_and_captured_again(change: Callable[[Training], None]) -> None:
    training = Training()
    training.steps(SETTLED)
    training.check(replays=True)
    change(training)
    training.steps(1)
    training.check(replays=False)
    training.steps(SETTLED)
    training.check(replays=True)


def test_weights_that_move_during_an_update_are_followed() -> None:
    training = Training()
    training.steps(SETTLED)
    training.steps(1, lambda: move_weights(training))
    training.steps(SETTLED)
    training.check(replays=True)
    training.steps(5, lambda: move_weights(training))
    training.check(replays=False)


def test_neither_capture_nor_replay_waits_for_the_device() -> None:
    training = Training()
    training.steps(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.steps(29)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.check(replays=True)
    another = Training()
    move_weights(another)  # closes the gaps: with them there are more kernels than the device's queue holds
    another.steps(2)
    for change in (None, None, move_weights):  # it captures, replays, and captures again
        if change is not None:
            change(another)
        torch.cuda.synchronize()
        torch.cuda._sleep(A_WHILE)
        slept = torch.cuda.Event()
        slept.record()
        for _ in range(SETTLED):
            another.sampler.before_update()
            another.sampler.after_update()
        assert not slept.query(), "the host has waited"
        another.check(replays=True)


def private_bytes() -> int:
    """Memory of graphs, all that there are."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def test_memory_does_not_grow() -> None:
    training = Training()
    training.steps(50)
    training.check(replays=True)
    held = set()
    for _ in range(3):
        gc.collect()  # what other tests have left behind goes when it likes
        torch.cuda.synchronize()
        held.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        training.steps(50)
        training.check(replays=True)
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) in held
    of_graphs = private_bytes()
    for _ in range(5):
        move_weights(training)
        training.steps(SETTLED)
        training.check(replays=True)
    assert 0 < private_bytes() <= of_graphs, "later graphs lie where the first did"


def test_it_can_be_done_on_any_stream() -> None:
    training = Training()
    training.steps(SETTLED)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training.steps(5)
        move_weights(training)
        training.steps(SETTLED)
    torch.cuda.current_stream().wait_stream(stream)
    training.steps(5)
    training.check(replays=True)


def test_it_becomes_part_of_a_graph_of_the_user() -> None:
    training = Training()
    training.steps(SETTLED)
    training.check(replays=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training.sampler.before_update()
    graph.replay()
    assert captured.equal(training.eager.before_update())
    training.sampler.before_update()
    assert training.sampler._measure._replay is not None


def test_a_capture_that_fails_leaves_everything_as_it_was() -> None:
    """Waiting invalidates a capture: torch then goes on as if it were capturing, unless it is set right."""
    value = torch.ones(4, device="cuda")
    training = Training()  # its graphs are to survive
    training.steps(SETTLED)
    training.check(replays=True)

    def waits() -> Tensor:
        return value * value.sum().item()

    def raises() -> Tensor:
        result = value * 4
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a graph")
        return result

    for function, cause in ((waits, "capturing"), (raises, "ValueError: not in a graph")):
        recorder = GraphCapturer()
        once = GraphedFunction[Tensor](recorder)
        held = len(cuda_graphs._invalidated)
        for _ in range(EAGER_USES + 3):
            assert once(function, layout([value]), value.device).tolist() == [4.0] * 4
            assert not torch.cuda.is_current_stream_capturing()
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert cause in recorder.failure
        assert len(cuda_graphs._invalidated) - held == (function is waits)
        assert F.dropout(torch.ones(1000, device="cuda"), 0.5).count_nonzero().item() > 0
        _check_that_memory_of_two_streams_is_freed()
    training.steps(20)
    training.check(replays=True)
    move_weights(training)
    training.steps(SETTLED)
    training.check(replays=True)


def _check_that_memory_of_two_streams_is_freed() -> None:
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        large = torch.ones(10_000_000, device="cuda")
        large.record_stream(other)
        del large
        torch.cuda.synchronize()
    torch.ones(1, device="cuda")  # the allocator looks at what was freed when it is next asked
    assert torch.cuda.memory_allocated() - before < 80_000_000


def test_norms_of_gradients_are_the_same_bits_wherever_the_gradients_lie() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).cuda()
    reader = GradientReader(model, [torch.optim.AdamW(model.parameters(), fused=True)])

    def read_stays(steps: int) -> list[bool]:
        """Whether the gradients of each step, which lie where those of the step before did, are read in one launch."""
        done = []
        for _ in range(steps):
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            read = reader.read()
            assert read.norms.equal(lengths(read.tensors, reader.device))
            assert read.norms.all()
            done.append(reader._norms._replay is not None)
            torch._foreach_zero_(read.tensors)
        return done

    assert read_stays(6) == [False] * EAGER_USES + [True] * 4
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert read_stays(6) == [False] * EAGER_USES + [True] * 4
    model[0].weight.grad = None
    assert read_stays(6) == [False] * EAGER_USES + [True] * 4
