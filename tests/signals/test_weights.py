"""Norms of weights and moments, and sizes of updates, against computations of everything."""

import copy
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.launch import launch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop, Rprop

from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, OptimizerSettings
from sealegs.lab.train import build_optimizer
from sealegs.signals.collect import Block
from sealegs.signals.groups import group_of
from sealegs.signals.layout import replicas
from sealegs.signals.weights import MOST_SAMPLED, WeightSampler, flat, spacing

Loss = Callable[[], Tensor]


def lab_model(size: str = "nano") -> tuple[nn.Module, Loss]:
    settings = SIZES[size].model
    model = Transformer(settings)

    def loss() -> Tensor:
        tokens = torch.randint(0, settings.vocabulary, (4, 33))
        return model.losses(tokens[:, :-1], tokens[:, 1:].contiguous()).total / 128

    return model, loss


def conv_net() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 64, 3), nn.Flatten(), nn.Linear(1024, 10)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(5, 3, 8, 8)), torch.randint(0, 10, (5,)))

    return model, loss


class TiedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), num_layers=3)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.encoder.layers[0].requires_grad_(False)
        self.encoder.layers[1].get_parameter("linear1.weight").requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))  # type: ignore[no-any-return]


def tied_encoder() -> tuple[nn.Module, Loss]:
    model = TiedEncoder()

    def loss() -> Tensor:
        tokens = torch.randint(0, 50, (4, 12))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, loss


MODELS = [lab_model, conv_net, tied_encoder]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3, fused=True)


def sampled_update(sampler: WeightSampler, optimizer: Optimizer, loss: Loss) -> dict[str, float]:
    loss().backward()
    before = sampler.before_update()
    optimizer.step()
    optimizer.zero_grad()
    return read(sampler, before)


def read(sampler: WeightSampler, before: Tensor) -> dict[str, float]:
    """All values of a step whose update has just been made."""
    row: dict[str, float] = {}
    for block in (sampler.norms(before), sampler.changes(sampler.after_update())):
        row |= signals(block)
    return row


def signals(block: Block) -> dict[str, Any]:
    """A block as it arrives on the host."""
    finish, squares = block
    assert callable(finish)
    assert squares.dtype == torch.float64
    return dict(finish(squares.tolist()))


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def size_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def computed_in_full(
    before: dict[str, Tensor], after: dict[str, Tensor], trained: set[str], moments: dict[str, list[Tensor]]
) -> dict[str, float]:
    """What the sampler should say."""
    values = {"param_norm": size_of(before.values()), "params_finite": 1.0}
    for group in {group_of(name) for name in before}:
        members = [name for name in before if group_of(name) == group]
        values[f"param_norm/{group}"] = size_of([before[name] for name in members])
        changed = [name for name in members if name in trained]
        if changed:
            change = size_of([after[name] - before[name] for name in changed])
            values[f"update_ratio/{group}"] = change / size_of([before[name] for name in changed])
    elements = sum(before[name].numel() for name in trained)
    values["update_rms"] = size_of([after[name] - before[name] for name in trained]) / math.sqrt(elements)
    return values | {name: size_of(tensors) for name, tensors in moments.items() if tensors}


def state_of(optimizer: Optimizer, key: str) -> list[Tensor]:
    return [state[key].clone() for state in optimizer.state.values() if key in state]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_every_value_is_that_of_a_full_computation(build: Callable[[], tuple[nn.Module, Loss]]) -> None:
    torch.manual_seed(0)
    model, loss = build()
    optimizer = adamw(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sampler = WeightSampler(model, [optimizer])
    for step in range(4):
        before = copied(model)
        moments = {"moment1_norm": state_of(optimizer, "exp_avg"), "moment2_norm": state_of(optimizer, "exp_avg_sq")}
        values = sampled_update(sampler, optimizer, loss)
        wanted = computed_in_full(before, copied(model), trained, moments)
        assert set(values) == set(wanted)
        assert ("moment1_norm" in values) == (step > 0)
        for name, value in wanted.items():
            error = 0.01 if name.startswith("update") else 1e-6
            assert values[name] == pytest.approx(value, rel=error), name
    assert sampler.left_out == {}


def test_frozen_layers_have_a_norm_but_no_update_and_tied_weights_count_once() -> None:
    model, loss = tied_encoder()
    optimizer = adamw(model)
    values = sampled_update(WeightSampler(model, [optimizer]), optimizer, loss)
    assert "param_norm/encoder.layers.0" in values
    assert "update_ratio/encoder.layers.0" not in values
    assert "update_ratio/encoder.layers.1" in values
    assert "param_norm/head" not in values
    assert values["param_norm"] == pytest.approx(size_of(copied(model).values()), rel=1e-2)


@pytest.mark.parametrize(
    ("build", "of_embedding", "of_others"),
    [
        (lambda model: build_optimizer(model, OptimizerSettings()), 0.02, 0.02),
        # plain SGD changes the rows of the batch's tokens alone, and those of frequent ones the most
        (lambda model: SGD(model.parameters(), lr=0.5, momentum=0.9), 0.15, 0.02),
    ],
    ids=["adamw", "sgd"],
)
def test_sampling_a_larger_model_errs_by_little(
    build: Callable[[nn.Module], Optimizer], of_embedding: float, of_others: float
) -> None:
    torch.manual_seed(0)
    model, loss = lab_model("toy")
    assert sum(parameter.numel() > MOST_SAMPLED for parameter in model.parameters()) >= 13
    optimizer = build(model)
    sampler = WeightSampler(model, [optimizer])
    trained = {name for name, _ in model.named_parameters()}
    for _ in range(6):
        before = copied(model)
        values = sampled_update(sampler, optimizer, loss)
        wanted = computed_in_full(before, copied(model), trained, {})
        for name in wanted:
            error = of_embedding if name in ("update_ratio/embedding", "update_rms") else of_others
            assert values[name] == pytest.approx(wanted[name], rel=error), name


def test_a_skipped_update_is_exactly_nothing() -> None:
    model, loss = lab_model()
    sampler = WeightSampler(model, [adamw(model)])
    loss().backward()
    squares = sampler.before_update()
    values = read(sampler, squares)
    assert values["update_rms"] == 0.0
    assert {values[name] for name in values if name.startswith("update_ratio")} == {0.0}


def test_norms_are_of_the_weights_before_the_update() -> None:
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.fill_(3.0)
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=1.0)])
    squares = sampler.before_update()
    model.weight.data.fill_(5.0)
    values = read(sampler, squares)
    assert values["param_norm"] == 6.0
    assert values["update_rms"] == 2.0
    assert values["update_ratio/weight"] == pytest.approx(4.0 / 6.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_huge_weight_is_finite_and_an_infinite_one_is_not(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8).to(dtype)
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=1.0)])
    for value, is_finite in [(1e25, 1.0), (math.inf, 0.0), (-math.inf, 0.0), (math.nan, 0.0), (0.0, 1.0)]:
        with torch.no_grad():
            model.weight[3, 3] = value
        squares = sampler.before_update()
        values = read(sampler, squares)
        assert values["params_finite"] == is_finite, value
        if value == 1e25:
            assert values["param_norm"] == pytest.approx(1e25, rel=0.01)


def test_weights_of_zero_have_ratios() -> None:
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=1.0)])
    squares = sampler.before_update()
    with torch.no_grad():
        model.weight += 1.0
    values = read(sampler, squares)
    assert values["update_ratio/weight"] == math.inf
    assert values["update_ratio/bias"] == 0.0


OPTIMIZERS: list[tuple[Callable[[nn.Module], Optimizer], dict[str, str]]] = [
    (lambda model: SGD(model.parameters(), lr=0.1), {}),
    (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), {"moment1_norm": "momentum_buffer"}),
    (lambda model: RMSprop(model.parameters()), {"moment2_norm": "square_avg"}),
    (lambda model: Adagrad(model.parameters()), {"moment2_norm": "sum"}),
    (lambda model: Rprop(model.parameters()), {}),
    (lambda model: AdamW(model.parameters()), {"moment1_norm": "exp_avg", "moment2_norm": "exp_avg_sq"}),
]


@pytest.mark.parametrize(("build", "keys"), OPTIMIZERS)
def test_moments_are_those_that_the_optimizer_has(
    build: Callable[[nn.Module], Optimizer], keys: dict[str, str]
) -> None:
    model, loss = conv_net()
    optimizer = build(model)
    sampler = WeightSampler(model, [optimizer])
    sampled_update(sampler, optimizer, loss)
    wanted = {name: size_of(state_of(optimizer, key)) for name, key in keys.items()}
    values = sampled_update(sampler, optimizer, loss)
    moments = {name: value for name, value in values.items() if name.startswith("moment")}
    assert moments == pytest.approx(wanted, rel=1e-5)  # on a CPU they are added in float32


def test_moments_that_are_loaded_or_begun_anew_are_those_that_are_measured() -> None:
    model, loss = conv_net()
    optimizer = adamw(model)
    sampler = WeightSampler(model, [optimizer])
    for _ in range(2):
        sampled_update(sampler, optimizer, loss)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].fill_(100.0)
    optimizer.load_state_dict(saved)
    wanted = size_of(state_of(optimizer, "exp_avg"))
    assert sampled_update(sampler, optimizer, loss)["moment1_norm"] == pytest.approx(wanted)
    optimizer.state.clear()
    loss().backward()
    optimizer.step()
    wanted = size_of(state_of(optimizer, "exp_avg"))
    assert sampled_update(sampler, optimizer, loss)["moment1_norm"] == pytest.approx(wanted)


def test_two_optimizers_count_together() -> None:
    model, loss = lab_model()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizers = [SGD(matrices, lr=0.1, momentum=0.9), AdamW(vectors, lr=0.1)]
    sampler = WeightSampler(model, optimizers)
    for _ in range(2):
        loss().backward()
        squares = sampler.before_update()
        wanted = size_of(state_of(optimizers[0], "momentum_buffer") + state_of(optimizers[1], "exp_avg"))
        before = copied(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values = read(sampler, squares)
    assert values["moment1_norm"] == pytest.approx(wanted)
    full = computed_in_full(before, copied(model), set(before), {})
    assert values["update_ratio/blocks.0"] == pytest.approx(full["update_ratio/blocks.0"], rel=0.01)


def test_parameters_that_come_later_are_picked_up() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    sampler = WeightSampler(model, [optimizer])

    def loss() -> Tensor:
        return model(torch.ones(2, 8)).square().mean()  # type: ignore[no-any-return]

    assert "update_ratio/1" not in sampled_update(sampler, optimizer, loss)
    plan = sampler._plan
    sampled_update(sampler, optimizer, loss)
    assert sampler._plan is plan, "nothing has changed"
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert sampled_update(sampler, optimizer, loss)["update_ratio/1"] > 0
    model.append(nn.Linear(8, 4))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    values = sampled_update(sampler, optimizer, loss)
    assert values["update_ratio/2"] > 0
    assert values["param_norm"] == pytest.approx(size_of(copied(model).values()), rel=0.1)
    model[0].requires_grad_(False)
    assert "update_ratio/0" not in sampled_update(sampler, optimizer, loss)


def test_a_parameter_that_no_optimizer_holds_is_not_trained_and_master_copies_are_seen_through() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sampler = WeightSampler(model, [SGD(model[0].parameters(), lr=0.1)])
    assert read(sampler, sampler.before_update())["update_ratio/0"] == 0.0
    assert "update_ratio/1" not in read(sampler, sampler.before_update())
    master = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    sampler = WeightSampler(model, [SGD(master, lr=0.1)])
    assert {"update_ratio/0", "update_ratio/1"} <= set(read(sampler, sampler.before_update()))
    model[0].requires_grad_(False)
    assert "update_ratio/0" not in read(sampler, sampler.before_update())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.ghost = nn.Linear(100, 100, device="meta")
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.packed = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)


def test_what_cannot_be_measured_is_named() -> None:
    model = Mixture()
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=0.1)])
    assert sampler.left_out == {
        "ghost.weight": "on the meta device: it has no values",
        "ghost.bias": "on the meta device: it has no values",
        "waves": "of torch.complex64, which has no norm",
        "packed": "of torch.int8, which has no norm",
    }
    squares = sampler.before_update()
    with torch.no_grad():
        model.narrow.add_(1.0)
    values = read(sampler, squares)
    assert values["param_norm/wide"] == 2.0
    assert values["param_norm/narrow"] == 2.0
    assert values["update_ratio/narrow"] == 1.0
    assert values["update_ratio/wide"] == 0.0
    ghosts = WeightSampler(nn.Linear(2, 2, device="meta"), [])
    assert read(ghosts, ghosts.before_update()) == {"param_norm": 0.0, "params_finite": 1.0}
    assert len(ghosts.left_out) == 2


def test_spaced_elements_meet_all_rows_and_columns_alike() -> None:
    for shape in [(768, 3072), (1024, 1024), (50_257, 768), (3, 5, 7, 999), (999_983,)]:
        elements = math.prod(shape)
        step = spacing(elements)
        assert MOST_SAMPLED / 1.25 < len(range(0, elements, step)) <= MOST_SAMPLED
        met = torch.bincount(torch.arange(0, elements, step) % shape[-1], minlength=shape[-1])
        if shape[-1] < MOST_SAMPLED:
            assert met.max() - met.min() <= 2
            assert met.min() > 0
    assert spacing(MOST_SAMPLED) == 1
    assert spacing(0) == 1


def test_flat_is_a_view_where_memory_has_no_gaps() -> None:
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    for tensor in [images, images.to(memory_format=torch.channels_last), images.transpose(0, 3), torch.tensor(1.0)]:
        assert flat(tensor).data_ptr() == tensor.data_ptr()
        assert flat(tensor).sort().values.equal(tensor.flatten().sort().values)
    gaps = images[..., ::2]
    assert flat(gaps).sort().values.equal(gaps.flatten().sort().values)


def test_changes_can_be_read_later_and_in_another_process() -> None:
    """A row comes before its update, so what the update did stands in the next one; a run may be resumed between."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sampler = WeightSampler(model, [SGD(model[0].parameters(), lr=0.1)])
    sampler.before_update()
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    squares = sampler.after_update()
    expected = signals(sampler.changes(squares))
    assert list(expected) == ["update_rms", "update_ratio/0"]
    resumed = WeightSampler(model, [SGD(model[0].parameters(), lr=0.1)])
    assert signals(resumed.changes(squares)) == expected
    model.requires_grad_(False)
    sampler.before_update()  # has another plan
    assert signals(sampler.changes(squares)) == expected
    squares = sampler.after_update()
    assert signals(sampler.changes(squares)) == {}
    assert squares.shape == (0,)


def test_non_contiguous_parameters_are_sampled_where_they_change() -> None:
    model = nn.Module()
    model.turned = nn.Parameter(torch.randn(300, 200).T)
    model.gappy = nn.Parameter(torch.randn(300, 400)[:, :200])
    assert not model.gappy.is_contiguous()
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=0.1)])
    for _ in range(2):
        before = copied(model)
        squares = sampler.before_update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        values = read(sampler, squares)
        wanted = computed_in_full(before, copied(model), set(before), {})
        assert values == pytest.approx(wanted, rel=0.04)  # five standard errors: a seventh of the elements is read


def test_weights_that_move_in_memory_are_followed() -> None:
    """Some optimizers and frameworks replace the data of a parameter instead of changing it."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.full((1, 4), 3.0)
    sampler = WeightSampler(model, [SGD(model.parameters(), lr=1.0)])
    for value in (5.0, 6.0):
        squares = sampler.before_update()
        model.weight.data = torch.full((1, 4), value)
        values = read(sampler, squares)
    assert values["param_norm"] == 10.0
    assert values["update_rms"] == 1.0
    model.to(torch.float64)
    squares = sampler.before_update()
    assert read(sampler, squares)["param_norm"] == 12.0


def test_watching_changes_nothing() -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, loss = lab_model()
        optimizer = adamw(model)
        sampler = WeightSampler(model, [optimizer])
        for _ in range(3):
            loss().backward()
            if watched:
                sampler.before_update()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                sampler.after_update()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(one.equal(other) for one, other in zip(*results, strict=True))


def test_after_comes_after_before() -> None:
    with pytest.raises(AssertionError, match="before_update comes first"):
        WeightSampler(nn.Linear(2, 2), []).after_update()


def test_a_plain_tensor_lies_on_every_rank() -> None:
    assert replicas(torch.ones(2), 8) == 8


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from sealegs.signals.layout import Layout
from sealegs.signals.weights import WeightSampler

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 3))
for layer in model[:2]:  # the third stays whole on both ranks; of the second's bias one has nothing
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
sampler = WeightSampler(model, [optimizer], layout=Layout(world=2))
for _ in range(3):
    model(torch.ones(2, 7)).sum().backward()
    before = sampler.before_update()
    optimizer.step()
    optimizer.zero_grad()
    after = sampler.after_update()
    dist.all_reduce(before)
    dist.all_reduce(after)
if rank == 0:
    blocks = sampler.norms(before), sampler.changes(after)
    whole = {name: value for finish, squares in blocks for name, value in finish(squares.tolist()).items()}
    with open(folder + "/whole.json", "w") as file:
        json.dump(whole, file)
dist.destroy_process_group()
"""


@pytest.mark.xdist_group("ranks")
def test_ranks_add_up_to_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    launch(tmp_path / "rank.py", 2, str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 3))
    optimizer = AdamW(model.parameters(), lr=0.1)
    sampler = WeightSampler(model, [optimizer])
    for _ in range(3):
        alone = sampled_update(sampler, optimizer, lambda: model(torch.ones(2, 7)).sum())
    assert json.loads((tmp_path / "whole.json").read_text()) == pytest.approx(alone, rel=1e-5)


class Quantised(torch.Tensor):
    """A moment of eight bits, as a package wraps it: it is read by nobody but its optimizer."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> "Quantised":
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of eight bits")


def test_moments_of_a_type_of_their_own_are_passed_over() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = Quantised(model.weight)
    sampler = WeightSampler(model, [optimizer])
    names, norms = sampler.norms(sampler.before_update())
    found = dict(zip(names, norms.tolist(), strict=True)) if not callable(names) else names(norms.tolist())
    assert found["moment1_norm"] == pytest.approx(float(optimizer.state[model.bias]["exp_avg"].norm()))
