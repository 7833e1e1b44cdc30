"""A guarded loop under each kind of parallelism in turn, with the same faults: run by test_matrix.py on four ranks.

In the end rank 0 trains each kind of model alone, on the same global batches: what it records is what theirs is
compared with. Writes what each rank saw to OUT/<rank>.json.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW

import sealegs
from sealegs.errors import ConfigError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.playbook import CopyMajority, Rung, Trigger
from sealegs.signals import meter

ASKED, BACK = 22, 8
"""The step before which a rollback is asked for, and how far it is to go back at least."""
NAN, SPIKE, LAST = 8, 12, 14
"""Steps after the rollback: a loss that is NaN, a loss times a thousand, and the last."""
SPIKE_FACTOR = 1e3
WIDTH, ROWS, LENGTH, WORLD = 8, 8, 8, 4
LR, CLIP = 1e-3, 1.0


class Block(nn.Module):
    """A layer of a transformer, as small as it can be; its kind is in what lies between the norms."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "attention":
            self.inner: nn.Module = Attention()
        elif kind == "experts":
            self.inner = Experts()
        else:
            self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.after = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.after(self.inner(self.norm(x)))
        return out


class Attention(nn.Module):
    """One head over the whole sequence; with ``group`` each rank has a part of the sequence."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.group is not None:
            key, value = (all_gather_tensor_autograd(each.contiguous(), 1, self.group) for each in (key, value))
        mixed: Tensor = self.out((query @ key.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ value)
        return mixed


class Experts(nn.Module):
    """Four experts that take turns over the tokens, each weighed by a gate; with ``group`` each rank holds one."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WORLD)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(WORLD))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WORLD, WIDTH).transpose(0, 1)  # expert, token, width
        if self.group is None:
            out = torch.stack([expert(part) for expert, part in zip(self.experts, tokens, strict=True)])
        else:
            flat = tokens.reshape(-1, WIDTH)
            equal = [len(flat) // WORLD] * WORLD
            (expert,) = self.experts
            out = expert(all_to_all_single_autograd(flat, equal, equal, self.group))
            out = all_to_all_single_autograd(out, equal, equal, self.group).reshape(tokens.shape)
        gates = self.gate(x).softmax(-1).reshape(-1, WORLD, WORLD)
        chosen = gates.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        weighed: Tensor = (out.transpose(0, 1) * chosen).reshape(x.shape)
        return weighed


def whole(kind: str) -> nn.Sequential:
    """Two blocks; or for a pipeline without replicas one for each rank, all made from one seed, as experts are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(WORLD if kind == "deep" else 2)))
    for module in model.modules():
        if isinstance(module, Experts):
            for expert in module.experts:
                expert.load_state_dict(module.experts[0].state_dict())
    for block in model if kind == "deep" else ():
        block.load_state_dict(model[0].state_dict())
    return model


def global_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    rows = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator)
    return rows[0], rows[1]


class Part(NamedTuple):
    """What one rank trains."""

    model: nn.Module
    train: Callable[[Tensor, Tensor, float], Tensor | None]
    """Forward and backward of a rank's part of a batch, whose loss is multiplied; None where there is no loss."""
    dp: tuple[int, int] = (0, 1)
    """Which part of the rows, and of how many."""
    cp: tuple[int, int] = (0, 1)
    """Which part of the sequence."""
    struck: tuple[int, ...] = (1,)
    """The ranks whose loss is to be spoilt."""


def straight(model: nn.Module, dp: tuple[int, int], cp: tuple[int, int] = (0, 1)) -> Part:
    def train(x: Tensor, y: Tensor, factor: float) -> Tensor:
        loss: Tensor = (model(x) - y).square().mean() * factor
        loss.backward()
        return loss.detach()

    return Part(model, train, dp, cp)


def ddp(rank: int) -> Part:
    return straight(nn.parallel.DistributedDataParallel(whole("mlp")), (rank, WORLD))


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(next(model.children()), mesh=mesh)  # two units, since each costs three collectives a step
    fully_shard(model, mesh=mesh)
    return model


def hsdp(rank: int) -> Part:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return straight(sharded(whole("mlp"), mesh), (rank, WORLD))


def scattered() -> PrepareModuleInput:
    """What the ranks have of a sequence is split among them, as sequence parallel wants it."""
    return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False)


def fsdp2_tp(rank: int) -> Part:
    """In the first block tensor parallel has the MLP alone, in the second a norm as well, as sequence parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = whole("mlp")
    parallelize_module(model[1], mesh["tp"], {"norm": scattered()})
    plan: dict[str, Any] = {
        "0.inner.0": ColwiseParallel(),
        "0.inner.2": RowwiseParallel(),
        "1.norm": SequenceParallel(),
        "1.inner.0": ColwiseParallel(input_layouts=Shard(1)),
        "1.inner.2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    return straight(sharded(model, mesh["dp"]), (rank // 2, 2))._replace(struck=(2, 3))


def tp(rank: int) -> Part:
    """Tensor and sequence parallel without FSDP: gradients of the norms are partial sums."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    model = whole("mlp")
    for block in model:
        parallelize_module(block, mesh, {"norm": scattered()})
        plan: dict[str, Any] = {
            "norm": SequenceParallel(),
            "inner.0": ColwiseParallel(input_layouts=Shard(1)),
            "inner.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return straight(model, (0, 1))._replace(struck=(0, 1, 2, 3))


def staged(stage: nn.Module, index: int, stages: int, dp: tuple[int, int], group: Any = None) -> Part:
    part = PipelineStage(stage, index, stages, torch.device("cpu"), group=group)
    factor = [1.0]
    schedule = ScheduleGPipe(part, 2, loss_fn=lambda out, y: (out - y).square().mean() * factor[0])

    def train(x: Tensor, y: Tensor, times: float) -> Tensor | None:
        factor[0] = times
        losses: list[Tensor] = []
        first, last = index == 0, index == stages - 1
        schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        return torch.stack(losses).mean().detach() if last else None

    return Part(stage, train, dp, struck=(WORLD - 1,))


def pipeline(rank: int) -> Part:
    """A block on each rank: their tensors have the same names."""
    return staged(whole("deep")[rank], rank, WORLD, (0, 1))


def pipeline_fsdp2(rank: int) -> Part:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    blocks = whole("mlp")[stage : stage + 1]
    return staged(sharded(blocks, mesh["dp"]), stage, 2, (rank % 2, 2), mesh["pp"].get_group())


def context(rank: int) -> Part:
    model = whole("attention")
    for module in model.modules():
        if isinstance(module, Attention):
            module.group = dist.group.WORLD
    return straight(nn.parallel.DistributedDataParallel(model), (0, 1), (rank, WORLD))


def expert(rank: int) -> Part:
    model = whole("experts")
    own = []
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.experts = nn.ModuleList([module.experts[rank]])
            module.group = dist.group.WORLD
            for inner, parameter in module.experts.named_parameters():
                parameter.register_hook(lambda gradient: gradient / WORLD)  # the mean over ranks, as of all others
                own.append(f"{name}.experts.{inner}")
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return straight(nn.parallel.DistributedDataParallel(model), (rank, WORLD))


class Case(NamedTuple):
    """Which model is trained, and how."""

    kind: str
    part: Callable[[int], Part]


CASES = {
    "DDP": Case("mlp", ddp),
    "HSDP": Case("mlp", hsdp),
    "TP": Case("mlp", tp),
    "FSDP2 x TP": Case("mlp", fsdp2_tp),
    "PP": Case("deep", pipeline),
    "PP x FSDP2": Case("mlp", pipeline_fsdp2),
    "CP": Case("attention", context),
    "EP": Case("experts", expert),
}


OF_PARTS = ("PP", "PP x FSDP2", "EP")
"""Where ranks hold different tensors of one name."""
SAVED = 10
"""Steps between checkpoints."""


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Weights, moments and step counts of this rank."""
    parts = []
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            held = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
            parts.append(held.double().flatten())
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


class Parts:
    """A rank's parts of the global batches."""

    def __init__(self, part: Part) -> None:
        self._dp, self._cp = part.dp, part.cp

    def __len__(self) -> int:
        return ASKED + 1

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        rows = (each.chunk(self._dp[1])[self._dp[0]] for each in global_batch(number))
        x, y = (each.chunk(self._cp[1], 1)[self._cp[0]].contiguous() for each in rows)
        return number, x, y

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        return (self[number] for number in range(len(self)))


def run(part: Part, folder: Path, rank: int) -> dict[str, Any]:
    optimizer = AdamW(part.model.parameters(), lr=LR)
    saw: dict[str, Any] = {"digests": {}, "skipped": {}, "verdicts": []}
    has_gone_back = False
    with sealegs.Guard(
        part.model,
        optimizer,
        run=folder,
        clip=CLIP,
        playbook=sealegs.Playbook.standard(),
        checkpoint_every=Checkpointing(every=SAVED, snapshot_every=4),
        telemetry=Telemetry(sample_every=5),
    ) as guard:
        for number, x, y in guard.batches(Parts(part)):
            if guard.is_probe:
                guard.step(part.train(x, y, 1.0))
                continue
            step = guard.number
            assert step == number
            is_struck = has_gone_back and rank in part.struck
            factor = {NAN: float("nan"), SPIKE: SPIKE_FACTOR}.get(step, 1.0) if is_struck else 1.0
            loss = part.train(x, y, factor)
            before = digest(part.model, optimizer)
            verdict = guard.step(loss)
            after = digest(part.model, optimizer)
            saw["verdicts"].append(str(verdict))
            saw["digests"].setdefault(str(guard.number), []).append(after)
            if not verdict.go:
                saw["skipped"][str(step)] = [before == after, verdict.culprit]
            if guard.number == ASKED:
                guard.ask("rollback", str(BACK))
                has_gone_back = True
                saw["back"] = [guard.number, digest(part.model, optimizer)]
            if has_gone_back and guard.number == LAST:
                break
    return saw


def resumed(part: Part, folder: Path) -> list[Any]:
    """Where another process goes on, what it has there, and what comes of its first step."""
    optimizer = AdamW(part.model.parameters(), lr=LR)
    playbook = sealegs.Playbook.standard()
    with sealegs.Guard(
        part.model, optimizer, run=folder, clip=CLIP, playbook=playbook, checkpoint_every=100, resume=True
    ) as guard:
        found = [guard.number, digest(part.model, optimizer)]
        for _, x, y in guard.batches(Parts(part)):
            guard.step(part.train(x, y, 1.0))
            break
        return [*found, digest(part.model, optimizer)]


COMPARED, DAMAGED = 4, 5
"""How often weights are compared here, in steps, and the step before which some are damaged."""


def differing(model: nn.Module, damaged: set[int], folder: Path, rank: int) -> dict[str, Any]:
    """Replicas of which some are damaged, and a playbook that copies the majority's weights."""
    meter.CHECKSUM_STEPS = COMPARED
    optimizer = AdamW(model.parameters(), lr=LR)
    mending = sealegs.Playbook(name="mend", rungs=(Rung({Trigger.REPLICAS_DIFFER}, (CopyMajority(),)),))
    part, digests = Parts(straight(model, (rank, WORLD))), []
    error = ""
    try:
        with sealegs.Guard(model, optimizer, run=folder, clip=CLIP, playbook=mending) as guard:
            for number, x, y in guard.batches(part):
                if number == DAMAGED and rank in damaged:
                    with torch.no_grad():
                        weight: Any = next(model.parameters())
                        held = weight.to_local() if hasattr(weight, "to_local") else weight
                        held.view(-1)[0] += 1e-3
                loss = (model(x) - y).square().mean()
                loss.backward()
                guard.step(loss.detach())
                digests.append(digest(model, optimizer))
                if guard.number == 3 * COMPARED:
                    break
    except sealegs.SealegsError as raised:
        error = str(raised)
    return {"digests": digests, "error": error}


def refusals(out: Path, rank: int) -> list[str]:
    """What is said of a step without any loss."""
    said = []
    model = ddp(rank).model
    with sealegs.Guard(model, AdamW(model.parameters()), run=None) as guard:
        model(global_batch(0)[0]).square().mean().backward()
        try:
            guard.step(None)
        except ConfigError as error:
            said.append(str(error))
    return said


def main(out: Path, names: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert world == WORLD
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    cases = {name: CASES[name] for name in names or CASES}
    saw: dict[str, Any] = {name: run(case.part(rank), out / name, rank) for name, case in cases.items()}
    for name in OF_PARTS:
        if name in cases:
            if rank == 0:
                shutil.copytree(out / name, out / f"{name} again")
            dist.barrier()
            saw[name]["resumed"] = resumed(CASES[name].part(rank), out / f"{name} again")
    saw["refused"] = refusals(out, rank)
    saw["one of four"] = differing(ddp(rank).model, {2}, out / "one of four", rank)
    saw["two of four"] = differing(ddp(rank).model, {2, 3}, out / "two of four", rank)
    (out / f"{rank}.json").write_text(json.dumps(saw))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        for kind in sorted({case.kind for case in cases.values()}):
            run(straight(whole(kind), (0, 1))._replace(struck=(0,)), out / kind, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
