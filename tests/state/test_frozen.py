"""What is frozen stays out of states: they are as small as what is trained, and go back as exactly as whole ones."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.state.adapters import KINDS, Base, adapted, loss_of, texts, trained_bytes
from torch import Tensor, nn
from torch.optim import AdamW

import sealegs
from sealegs import Guard, Playbook
from sealegs.cli.main import main
from sealegs.errors import ConfigError, SourceError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.state import frozen
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.frozen import LOOKED_AT, FrozenWeights, digests
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState

QUIET = Telemetry(sample_every=0)


def training(model: Any, *, parameters: Any = None) -> TrainingState:
    trained = [each for each in model.parameters() if each.requires_grad] if parameters is None else parameters
    optimizers = [AdamW(trained, lr=1e-3)]
    return TrainingState(model=model, optimizers=optimizers, frozen=FrozenWeights(model, optimizers))


def train(subject: TrainingState, batches: list[Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(subject.model, batch)
        loss.backward()
        assert subject.frozen is not None
        subject.frozen.before_update()
        for optimizer in subject.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))


def weight_of(subject: TrainingState, name: str) -> nn.Parameter:
    return dict(subject.model.named_parameters())[name]


def bits(model: nn.Module) -> dict[str, Any]:
    return {name: (each.dtype, each.tolist()) for name, each in model.state_dict().items()}


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in sealegs.open_run(folder).events if e.kind in kinds]


# Digests


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("count", [1, 7, 2**16, 2**16 + 1, 5 * 2**16 + 3])
def test_a_digest_changes_with_any_bit_and_any_place(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tensor = (torch.randn(count, generator=generator) * 3).to(dtype)
    before = digests(tensor)
    assert digests(tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    for place in {0, count // 2, count - 1}:
        raw[place * tensor.element_size()] ^= 1
        assert digests(tensor) != before
        raw[place * tensor.element_size()] ^= 1
    if count > 1 and dtype.is_floating_point:
        assert digests(tensor.roll(1)) != before
        assert digests(-tensor) != before
    assert digests(tensor) == before


def test_a_digest_is_of_the_elements_and_not_of_how_they_lie() -> None:
    tensor = torch.randn(300, 70, dtype=torch.bfloat16)
    gaps = torch.randn(300, 141, dtype=torch.bfloat16)[:, 1:141:2]  # at an odd place in memory
    gaps.copy_(tensor)
    assert digests(tensor) == digests(tensor.T.contiguous().T) == digests(gaps)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("change", ["codes", "scales"])
def test_the_digest_of_a_quantised_tensor_is_that_of_its_storage(change: str) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(40, 40), 0.1, 3, torch.qint8)
    other = torch.quantize_per_tensor(tensor.dequantize(), 0.1, 3, torch.qint8)
    assert digests(tensor) == digests(other)
    codes = other.int_repr().clone()
    codes[3, 3] += change == "codes"
    scale = 0.2 if change == "scales" else 0.1
    assert digests(tensor) != digests(torch._make_per_tensor_quantized_tensor(codes, scale, 3))


# What is left out


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_as_large_as_what_is_trained_and_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    subject = training(model)
    batches = texts()
    train(subject, batches[:5])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, subject.capture())
    snapshots = Snapshots(model, subject.optimizers, frozen=subject.frozen)
    snapshots.take(5, {})
    small, buffers = trained_bytes(model), 2048  # the statistics of the norm
    held = sum(part.nbytes for part in snapshots._buffers[0].parts.values())
    assert held < 1.1 * small + buffers
    stored = subject.capture().tensors
    assert sum(each.nbytes for each in stored.values()) < 1.1 * small + buffers + 5100  # torch's random state
    assert size_of(tmp_path / "5") < 1.1 * small + buffers + 5100 + 1500 * len(stored)  # the header of each
    then = bits(model)
    went_on = train(subject, batches[5:9])

    for _ in range(16):
        snapshots.healthy(5)
    snapshot = snapshots.newest(5)
    assert snapshot is not None
    snapshots.restore_tensors(snapshot)
    assert bits(model) == then
    assert train(subject, batches[5:9]) == went_on

    other = training(adapted(kind))
    train(other, batches[20:23])
    assert other.restore(checkpoints.load(5, like=other.capture(with_frozen=True))) == []
    assert bits(other.model) == then
    assert train(other, batches[5:9]) == went_on
    assert bits(other.model) == bits(model)


@pytest.mark.parametrize("kind", KINDS)
def test_another_base_is_refused_and_named(kind: str, tmp_path: Path) -> None:
    subject = training(adapted(kind))
    train(subject, texts()[:2])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, subject.capture())
    other = training(adapted(kind, seed=5))
    before = bits(other.model)
    with pytest.raises(
        SourceError, match=r"base model is another: (base\.)?table\.weight, which was frozen, was float32"
    ):
        other.restore(checkpoints.load(2, like=other.capture(with_frozen=True)))
    assert bits(other.model) == before


def test_one_number_of_the_base_is_enough(tmp_path: Path) -> None:
    subject = training(adapted("LoRA"))
    Checkpoints(tmp_path).save(0, subject.capture())
    model = adapted("LoRA")
    with torch.no_grad():
        model.outside.base.weight[17, 3] += 1e-3
    with pytest.raises(SourceError, match=r"outside\.base\.weight"):
        training(model).restore(Checkpoints(tmp_path).load(0))


def test_the_scales_of_four_bit_weights_belong_to_the_base(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(0, training(adapted("QLoRA")).capture())
    model = adapted("QLoRA")
    model.inside.base.absmax[0][2] = 7.0
    with pytest.raises(SourceError, match=r"inside\.base\.weight\.absmax"):
        training(model).restore(Checkpoints(tmp_path).load(0))


def whole(model: Any) -> None:
    model.requires_grad_(True)


def half(model: Any) -> None:
    for name, each in model.named_parameters():
        each.requires_grad_("outside" in name or "table" in name)


@pytest.mark.parametrize("freeze", [whole, half])
def test_of_models_that_are_trained_nothing_is_left_out(freeze: Callable[[Any], None]) -> None:
    """Nor of one of which less is frozen than trained: it may be a target network."""
    model: Any = Base()
    freeze(model)
    state = training(model, parameters=list(model.parameters())).capture()
    assert "frozen" not in state.plain
    assert state.tensors.keys() >= {f"model/{name}" for name in model.state_dict()}


def test_what_lies_in_the_memory_of_a_trained_weight_is_held() -> None:
    model = adapted("LoRA")
    model.outside.base.bias = nn.Parameter(model.inside.base.bias.data.view(48), requires_grad=False)
    assert "outside.base.bias" in training(model).capture().plain["frozen"]
    model.inside.base.bias.requires_grad_(True)
    state = training(model).capture()
    assert "outside.base.bias" not in state.plain["frozen"]
    assert "model/outside.base.bias" in state.tensors
    assert "outside.base.weight" in state.plain["frozen"]


def test_a_large_buffer_is_left_out_once_a_step_has_left_it_as_it_was() -> None:
    subject = training(adapted("LoRA"))
    assert "model/angles" in subject.capture().tensors
    train(subject, texts()[:2])
    state = subject.capture()
    assert "angles" in state.plain["frozen"]
    assert "model/norm.running_mean" in state.tensors, "what is small is held, whether it changes or not"
    dict(subject.model.named_buffers())["angles"].zero_()
    assert "model/angles" in subject.capture().tensors


# What changes after all


def writes() -> dict[str, Callable[[Tensor], Any]]:
    return {
        "one number": lambda weight: weight[-1, -2].add_(1.0),
        "all, behind torch's back": lambda weight: weight.data.mul_(0.99),
        "another memory": lambda weight: setattr(weight, "data", weight.data * 2),
    }


@pytest.mark.parametrize("how", writes())
def test_a_frozen_weight_that_is_written_to_is_held_from_then_on(how: str, tmp_path: Path) -> None:
    subject = training(adapted("LoRA"))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, subject.capture())
    with torch.no_grad():
        writes()[how](weight_of(subject, "inside.base.weight"))
    state = subject.capture()
    assert "model/inside.base.weight" in state.tensors
    assert "model/outside.base.weight" not in state.tensors
    assert subject.frozen is not None
    (told,) = subject.frozen.news()
    assert told.startswith("inside.base.weight, frozen at the start, have changed since")
    checkpoints.save(1, state)
    changed = bits(subject.model)
    with pytest.raises(SourceError, match=r"inside\.base\.weight was frozen then and has been changed since"):
        subject.restore(checkpoints.load(0))
    assert bits(subject.model) == changed
    other = training(adapted("LoRA"))
    other.restore(checkpoints.load(1))
    assert bits(other.model) == changed
    assert "model/inside.base.weight" in other.capture().tensors, "it is not that of the base"


def test_the_same_values_written_again_change_nothing() -> None:
    subject = training(adapted("LoRA"))
    subject.capture()
    subject.model.load_state_dict(subject.model.state_dict())
    for each in subject.model.parameters():
        each.data = each.data.clone()
    assert "inside.base.weight" in subject.capture().plain["frozen"]


def test_a_write_to_few_numbers_that_torch_does_not_count_shows_at_a_restore(tmp_path: Path) -> None:
    """The limit of what is looked at: the rest is compared when it matters."""
    subject = training(adapted("LoRA"))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, subject.capture())
    weight = weight_of(subject, "inside.base.weight")
    weight.data[-1, -2] += 1.0
    assert weight.numel() > LOOKED_AT
    assert "model/inside.base.weight" not in subject.capture().tensors
    with pytest.raises(SourceError, match=r"inside\.base\.weight was frozen then"):
        subject.restore(checkpoints.load(0))


@pytest.mark.parametrize("state", ["snapshot", "checkpoint"])
def test_a_weight_that_thaws_goes_back_to_what_it_was(state: str, tmp_path: Path) -> None:
    model = adapted("LoRA")
    subject = training(model, parameters=list(model.parameters()))
    batches = texts()
    train(subject, batches[:3])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, subject.capture())
    snapshots = Snapshots(model, subject.optimizers, frozen=subject.frozen)
    snapshots.take(3, {})
    for _ in range(16):
        snapshots.healthy(3)
    then = bits(model)
    model.inside.base.requires_grad_(True)
    train(subject, batches[3:6])
    assert bits(model)["inside.base.weight"] != then["inside.base.weight"]
    thawed = subject.capture()
    assert "model/inside.base.weight" in thawed.tensors
    assert "optimizer/0/inside.base.weight.exp_avg" in thawed.tensors
    assert "model/outside.base.weight" not in thawed.tensors
    checkpoints.save(6, thawed)
    later = bits(model)

    if state == "snapshot":
        snapshot = snapshots.newest(3)
        assert snapshot is not None
        snapshots.restore_tensors(snapshot)
    else:
        subject.restore(checkpoints.load(3))
    assert bits(model) == then
    assert not subject.optimizers[0].state.get(model.inside.base.weight)
    subject.restore(checkpoints.load(6))
    assert bits(model) == later

    model.inside.base.requires_grad_(False)
    frozen_again = subject.capture()
    assert "model/inside.base.weight" in frozen_again.tensors, "what was trained is never left out again"
    checkpoints.save(7, frozen_again)
    other = training(adapted("LoRA"))
    other = TrainingState(model=other.model, optimizers=[AdamW(other.model.parameters(), lr=1e-3)], frozen=other.frozen)
    other.restore(checkpoints.load(7))
    assert bits(other.model) == later
    other.restore(checkpoints.load(3))  # from before the thaw, in a process that has read the base anew
    assert bits(other.model)["outside.base.weight"] == then["outside.base.weight"]


def test_a_checkpoint_with_frozen_weights_is_read_still(tmp_path: Path) -> None:
    """Those of older versions hold everything; so do those that are asked to."""
    subject = training(adapted("LoRA"))
    train(subject, texts()[:2])
    Checkpoints(tmp_path).save(2, subject.capture(with_frozen=True))
    then = bits(subject.model)
    other = training(adapted("LoRA", seed=9))
    other.restore(Checkpoints(tmp_path).load(2))
    assert bits(other.model) == then
    assert "model/inside.base.weight" in other.capture().tensors, "the base here was another"
    again = training(adapted("LoRA"))
    again.restore(Checkpoints(tmp_path).load(2))
    assert "model/inside.base.weight" not in again.capture().tensors


# Under a guard


def guarded(folder: Path, model: nn.Module, **more: Any) -> Guard:
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    words: dict[str, Any] = {"run": folder, "telemetry": QUIET, "checkpoint_every": 20} | more
    return Guard(model, optimizer, **words)


def run(guard: Guard, model: nn.Module, until: int, bad: frozenset[int] = frozenset()) -> list[float]:
    losses: dict[int, float] = {}
    left = set(bad)
    for batch in guard.batches(texts()):
        loss = loss_of(model, batch)
        losses[guard.number] = loss.item()
        factor = math.nan if guard.number in left else 1.0
        left.discard(guard.number)
        (loss * factor).backward()
        guard.step(loss * factor)
        if guard.loop.checkpoints is not None:
            guard.loop.checkpoints.wait()
        if guard.number >= until:
            break
    return [losses[step] for step in sorted(losses)]


@pytest.mark.parametrize("kind", ["LoRA", "QLoRA"])
def test_a_resumed_fine_tune_is_that_of_one_that_went_on(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    with guarded(tmp_path / "a", model) as guard:
        whole_run = run(guard, model, 60)
    straight = bits(model)
    model = adapted(kind)
    with guarded(tmp_path / "b", model) as guard:
        run(guard, model, 40)
    model = adapted(kind)
    with guarded(tmp_path / "b", model, resume=True) as guard:
        assert guard.number == 40
        assert run(guard, model, 60) == whole_run[40:]
    assert bits(model) == straight
    (audit,) = events(tmp_path / "b", "resume-audit")
    assert {"weights", "frozen weights"} <= set(audit["as_saved"])
    assert not audit["not_as_saved"]


def test_a_resume_on_another_base_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = adapted("LoRA")
    with guarded(tmp_path / "a", model) as guard:
        run(guard, model, 20)
    with pytest.raises(
        SourceError, match=r"the base model is another: table\.weight, which was frozen, was float32 \["
    ):
        guarded(tmp_path / "a", adapted("LoRA", seed=1), resume=True)


@pytest.mark.parametrize("memory", [None, 0], ids=["from memory", "from disk"])
def test_a_rollback_goes_to_what_the_run_was_then(memory: float | None, tmp_path: Path) -> None:
    seen: dict[int, dict[str, Any]] = {}
    model = adapted("LoRA")
    how = Checkpointing(every=50, snapshot_memory=memory)
    with guarded(tmp_path / "a", model, checkpoint_every=how, playbook=Playbook.standard()) as guard:
        left = {130, 131, 132}
        for batch in guard.batches(texts()):
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()
            now = bits(model)
            assert seen.setdefault(guard.number, now) == now or guard.number > 130
            factor = math.nan if guard.number in left else 1.0
            left.discard(guard.number)
            loss = loss_of(model, batch) * factor
            loss.backward()
            guard.step(loss)
            if guard.number >= 128 and not left:
                break
    (done,) = events(tmp_path / "a", "intervention")
    assert done["to_step"] == 100
    (told,) = events(tmp_path / "a", "snapshots") if memory is None else [{"text": "2 x 0.01 MiB"}]
    assert "KiB" in told["text"] or memory == 0


def test_a_thaw_in_a_run_is_told_and_rolled_back(tmp_path: Path) -> None:
    model = adapted("LoRA")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with Guard(
        model, optimizer, run=tmp_path / "a", telemetry=QUIET, checkpoint_every=20, playbook=Playbook.standard()
    ) as guard:
        for batch in guard.batches(texts()):
            if guard.number == 60:
                model.inside.base.requires_grad_(True)
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
            if guard.number == 55:
                before = bits(model)["inside.base.weight"]
            if guard.number == 62:
                break
        assert bits(model)["inside.base.weight"] != before
        guard.ask("rollback", "20")
        assert guard.number < 60
        assert bits(model)["inside.base.weight"] == before
    (told,) = events(tmp_path / "a", "thawed")
    assert told["text"].startswith("inside.base.weight and 1 more, frozen at the start, are trained from here on")


def test_a_checkpoint_holds_everything_where_that_is_asked_for(tmp_path: Path) -> None:
    for name, is_asked in (("small", False), ("large", True)):
        model = adapted("LoRA")
        with guarded(tmp_path / name, model, checkpoint_every=Checkpointing(every=20, with_frozen=is_asked)) as guard:
            run(guard, model, 20)
    small, large = (size_of(tmp_path / name / "checkpoints" / "20") for name in ("small", "large"))
    base = sum(each.nbytes for each in adapted("LoRA").parameters() if not each.requires_grad)
    assert large - small > base
    assert "frozen" not in json.loads((tmp_path / "large" / "checkpoints" / "20" / "plain.json").read_text())


# What an audit says


def audited(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["audit", str(path), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_an_audit_says_what_is_left_out_and_that_the_digest_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted("LoRA")
    with guarded(tmp_path / "a", model) as guard:
        run(guard, model, 40)
    model = adapted("LoRA")
    with guarded(tmp_path / "a", model, resume=True) as guard:
        run(guard, model, 45)
    capsys.readouterr()
    _, found = audited(tmp_path / "a", capsys)
    holds = {each["name"]: each for each in found["holds"]}
    assert holds["weights"]["what"].startswith("7 tensors")
    told = holds["frozen weights"]
    assert told["problem"] is None
    numbers = sum(
        each.numel() for name, each in model.state_dict().items() if "norm.r" not in name and "tracked" not in name
    )
    numbers -= sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert told["what"].startswith(
        f"9 tensors (9 float32), {numbers:,} numbers, are left out: a resume compares their digests, together "
    )
    assert "frozen weights" in found["resume"]["as_saved"]

    plain = tmp_path / "a" / "checkpoints" / "20" / "plain.json"
    text = plain.read_text()
    of_table = json.loads(text)["frozen"]["table.weight"]
    plain.write_text(text.replace(of_table, of_table[:-4] + "0000"))
    code, found = audited(tmp_path / "a", capsys)
    assert code == 1
    (problem,) = [each["problem"] for each in found["holds"] if each["name"] == "frozen weights"]
    assert problem == f"checkpoint 20 is of another base: table.weight is {of_table[:-4]}0000 there"


def test_what_a_stranger_says_of_frozen_weights_is_no_trap(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = training(adapted("LoRA")).capture()
    traps: list[Any] = [
        [],
        {"table.weight": 3},
        {"table.weight": "float32 [1, 2] \x1b[31m"},
        {"table.weight": "float32 [1e9] " + "0" * 16},
    ]
    for said in traps:
        checkpoints.save(0, replace(state, plain={**state.plain, "frozen": said}))
        with pytest.raises(SourceError, match="what it says of frozen weights is none"):
            checkpoints.load(0)


class Later:
    """Stands in for an event of a device that is still working, which a CPU has not."""

    def synchronize(self) -> None:
        pass


def test_what_a_device_finds_late_costs_the_candidate_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_on_its_way", lambda differs: (differs, Later()))
    subject = training(adapted("LoRA"))
    train(subject, texts()[:2])
    snapshots = Snapshots(subject.model, subject.optimizers, frozen=subject.frozen, promote_after=2)
    for step, is_written in ((50, False), (100, True), (150, False)):
        if is_written:
            weight_of(subject, "inside.base.weight").data.mul_(0.5)  # which torch does not count
        snapshots.take(step, {})
        snapshots.healthy(step)
        if is_written:
            assert snapshots.candidate is not None
            with pytest.raises(SourceError, match="lacks frozen weights that had been changed"):
                subject.capture_past(snapshots, snapshots.candidate)
        snapshots.healthy(step + 1)
        if is_written:
            assert snapshots.steps == [50], "this one lacks what was changed"
    assert snapshots.steps == [150], "the first is of another layout"
    then = bits(subject.model)
    weight_of(subject, "inside.base.weight").data.zero_()
    train(subject, texts()[:2])
    snapshot = snapshots.newest(150)
    assert snapshot is not None
    snapshots.restore_tensors(snapshot)
    now = bits(subject.model)
    assert {name: each for name, each in now.items() if "norm" not in name} == {
        name: each for name, each in then.items() if "norm" not in name
    }


def test_what_has_no_bits_to_read_is_refused_at_the_start_as_ever() -> None:
    model = adapted("LoRA")
    model.odd = nn.Parameter(torch.empty(60, 60, device="meta"), requires_grad=False)
    subject = training(model)
    with pytest.raises(ConfigError, match="model/odd is"):
        Snapshots(model, subject.optimizers, frozen=subject.frozen)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_base_goes_along(tmp_path: Path) -> None:
    """A snapshot refuses such tensors; where they are frozen nobody has to copy them."""

    def subject(scale: float) -> TrainingState:
        model = adapted("LoRA")
        codes = torch.quantize_per_tensor(torch.ones(40, 40), scale, 0, torch.qint8)
        model.codes = nn.Parameter(codes, requires_grad=False)
        model.sparse = nn.Parameter(torch.eye(9).to_sparse(), requires_grad=False)
        return training(model)

    one = subject(0.1)
    snapshots = Snapshots(one.model, one.optimizers, frozen=one.frozen)
    for step in (50, 100):
        train(one, texts()[:2])
        snapshots.take(step, {})
        for _ in range(16):
            snapshots.healthy(step)
    assert snapshots.steps == [100, 50]
    state = one.capture()
    assert {"codes", "sparse"} <= state.plain["frozen"].keys()
    subject(0.1).frozen.refuse_others(state.plain["frozen"])  # type: ignore[union-attr]
    with pytest.raises(SourceError, match="codes, which was frozen, was qint8"):
        subject(0.2).frozen.refuse_others(state.plain["frozen"])  # type: ignore[union-attr]
