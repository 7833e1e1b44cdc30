"""``sealegs.preflight``: advice about a live model, its optimizer, its schedule and its data.

It changes nothing: the forward pass is in evaluation mode, a trial step is undone, random states are restored.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from sealegs.errors import ConfigError
from sealegs.preflight_check.config_readers import Read
from sealegs.preflight_check.plan import Plan, merged, plan_from, written
from sealegs.preflight_check.rule import check
from sealegs.preflight_check.rules import RULES
from sealegs.preflight_check.structure import is_trained, read_structure
from sealegs.report.commands.preflight import Advised
from sealegs.state.extra_state import Stateful, not_held

MOST_STEPS = 100_000
"""The most steps of a schedule that must be stepped through; one that is a function of the step is read in full."""
IGNORED = -100
DTYPES = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Loss: TypeAlias = Callable[[], Tensor]


def preflight(
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: LRScheduler | None = None,
    *,
    loader: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    example: Any = None,
    labels: Tensor | None = None,
    loss: Loss | None = None,
    also: Mapping[str, Stateful] = MappingProxyType({}),
    **more: Any,
) -> Advised:
    """Everything that can be said before the first step. The result prints as a page; ``findings`` are values.

    ``example`` is what the model is called with; without it, token ids are tried. ``labels`` are those of a batch: of
    the same one, where ``example`` has ``input_ids`` and an ``attention_mask``, so that it shows what of a row counts.
    ``loss`` gives the loss of a batch, to be backpropagated: with it one step is tried, and undone. ``also`` is what
    the guard is given to keep beside the model. ``more`` is what
    the objects do not show, by the names of a plan (``steps=20_000, clip=1.0, dtype="bf16"``), or ``plan={...}`` with
    its tables; or one or several results of ``preflight_check.config_readers``.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    plans = [Plan()]
    if model is not None and any(each.is_meta for each in model.parameters()):
        raise ConfigError("model: its weights are on the meta device; materialise them first, there is nothing to see")
    if model is not None:
        plans.append(plan_from(read_structure(model, example) | _weights(model)))
    if optimizers:
        plans.append(plan_from(_settings(optimizers, model)))
    if model is not None and optimizers:
        plans.append(plan_from(_ownership(model, optimizers)))
        plans.append(plan_from({"not_held": tuple(not_held(model, optimizers, also))}))
        if loss is not None:
            plans.append(plan_from(_after_a_step(model, optimizers, loss)))
    if scheduler is not None:
        plans.append(plan_from(_schedule(scheduler, more.get("steps"))))
    begun = any(plan.state.moments_empty is False or plan.schedule.schedule_step for plan in plans)
    if model is not None and not begun and is_trained(model):
        plans.append(plan_from({"finetunes": True}))
    if scaler is not None or more.get("dtype"):
        plans.append(plan_from({"scaler": scaler is not None and scaler.is_enabled()}))
    if isinstance(loader, DataLoader):  # nothing is known of other loaders
        plans.append(plan_from(_loading(loader)))
    if labels is not None:
        plans.append(plan_from(_targets(labels)))
    if isinstance(example, Mapping):
        plans.append(plan_from(_rows(example, labels, getattr(model, "config", None))))
    told = more.pop("plan", ())
    plans.append(plan_from(more))
    names = dict.fromkeys(("beta1", "beta2"), "optimizer.betas") if optimizers else {}
    for each in told if isinstance(told, list | tuple) and not isinstance(told, Read) else [told]:
        if isinstance(each, Read):
            names |= each.names
            plans.append(each.plan)
        else:
            plans.append(each if isinstance(each, Plan) else written(each, "plan"))
    name = "live objects" if model is None else type(model).__name__
    not_judged = "" if scheduler is None else _not_judged(scheduler, more.get("steps"))
    return check(merged(*plans), name, RULES, names, not_judged=not_judged)


def of_batch(model: nn.Module, batch: Mapping[str, Any]) -> Advised:
    """What can be said of a batch of texts as its collator made it."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    known = _rows(batch, labels, getattr(model, "config", None))
    if isinstance(ids, Tensor) and isinstance(labels, Tensor) and labels.shape == ids.shape:
        known |= _targets(labels)
    if getattr(model, "peft_config", None):
        known |= {"finetunes": True}
    return check(plan_from(known), "the first batch", RULES)


def _weights(model: nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        bad = tuple(name for name, each in model.named_parameters() if not each.isfinite().all())
    frozen = tuple(name for name, each in model.named_parameters() if not each.requires_grad)
    known: dict[str, Any] = {"nonfinite": bad, "frozen": frozen, "untied": tuple(_untied(model))}
    return known | ({"finetunes": True, "adapter": True} if getattr(model, "peft_config", None) else {})


def _untied(model: nn.Module) -> Iterator[str]:
    """Pairs of an embedding and another matrix that are equal bit for bit, or configured to be tied, and are not tied.

    A configuration is about the word embedding and the head that reads it, never about other tables of that shape.
    """
    owners: Counter[Tensor | None] = Counter(each for module in model.modules() for each in module._parameters.values())
    tables = {each.weight: name for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    said = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    words, heads = _words_and_heads(model, tables)
    for name, each in model.named_parameters():
        for table, table_name in tables.items():
            if owners[table] > 1 or each in tables or each.shape != table.shape:  # tied; a table; not a head
                continue
            is_meant = said is True and table in words and each in heads
            if is_meant or (said is None and bool((each == table).all() and each.any())):
                yield f"{name} and {table_name}.weight"


def _words_and_heads(model: nn.Module, tables: Mapping[Tensor, str]) -> tuple[set[Tensor | None], set[Tensor | None]]:
    """The word embedding and the head, by the names in Hugging Face's models; otherwise the largest table."""
    asked: Any = model
    try:
        words, head = asked.get_input_embeddings(), asked.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return set(sorted(tables, key=lambda each: each.numel())[-1:]), set(model.parameters())
    return {getattr(words, "weight", None)}, {getattr(head, "weight", None)}


def _settings(optimizers: Sequence[Optimizer], model: nn.Module | None) -> dict[str, Any]:
    """Settings of the group with the largest learning rate; the decay of any group that has it."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    main = max(groups, key=lambda group: _number(group.get("initial_lr", group["lr"])) or 0.0)
    betas = main.get("betas") or (None, None)
    kind = type(optimizers[0]).__name__.lower()
    decays = [_number(group.get("weight_decay", 0.0)) or 0.0 for group in groups]
    decayed = [each for group, decay in zip(groups, decays, strict=True) if decay > 0 for each in group["params"]]
    embeddings = {
        each.weight for each in (model.modules() if model is not None else ()) if isinstance(each, nn.Embedding)
    }
    dtypes = {DTYPES.get(each.dtype) for group in groups for each in group["params"]}
    moments = [
        value for optimizer in optimizers for state in optimizer.state.values() for value in _moments(state).values()
    ]
    steps = [
        _number(state["step"]) for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    ]
    known = {
        "optimizer": kind,
        "lr": _number(main.get("initial_lr", main["lr"])) or None,
        "beta1": _number(betas[0]),
        "beta2": _number(betas[1]),
        "eps": _number(main.get("eps")) if betas[0] is not None else None,
        "weight_decay": max(decays),
        "decoupled": bool(main.get("decoupled_weight_decay", kind == "adamw")),
        "decays_vectors": any(each.ndim < 2 for each in decayed),
        "decays_embeddings": any(each in embeddings for each in decayed) if embeddings else None,
        "weights_dtype": dtypes.pop() if len(dtypes) == 1 else None,
        "moments_empty": not any(optimizer.state for optimizer in optimizers),
        "optimizer_step": int(max(step for step in steps if step is not None)) if steps else None,
    }
    known["moments_dtype"] = DTYPES.get(moments[0].dtype) if moments else known["weights_dtype"]
    return known


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim and name != "step"}


def _ownership(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    owned = [
        (f"group {number}, parameter {place}", each)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for place, each in enumerate(group["params"])
    ]
    names = {each: name for name, each in model.named_parameters()}
    counts = Counter(each for _, each in owned)
    return {
        "unowned": tuple(name for each, name in names.items() if each.requires_grad and each not in counts),
        "strangers": tuple(place for place, each in owned if each not in names),
        "owned_twice": tuple(names[each] for each, count in counts.items() if count > 1 and each in names),
    }


def _after_a_step(model: nn.Module, optimizers: Sequence[Optimizer], loss: Loss) -> dict[str, Any]:
    """Parameters that one step leaves unchanged, and the share of the entries that it changes; it is then undone."""
    owned = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad and each in owned}
    before = {each: each.detach().clone() for each in owned | set(model.parameters())}
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    gradients = {each: each.grad for each in before}
    states = [copy.deepcopy(dict(optimizer.state), {id(each): each for each in before}) for optimizer in optimizers]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    devices = sorted({each.device.index or 0 for each in before if each.is_cuda})
    try:
        for each in before:
            each.grad = None
        with torch.random.fork_rng(devices=devices):
            loss().backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:  # a warm-up may begin at zero
                    group["lr"] = max(group.get("initial_lr", 0.0), group["lr"])
                    group["weight_decay"] = 0.0  # decay moves what no gradient moves
                _plain_step(optimizer)
        unmoved = tuple(name for name, each in trained.items() if torch.equal(each.detach(), before[each]))
        called = [(each, each.grad != 0) for each in trained.values() if each.grad is not None]
        pulled = sum(int(where.sum()) for _, where in called)
        moved = sum(int(((each.detach() != before[each]) & where).sum()) for each, where in called)
        return {"unmoved": unmoved} | ({"moved_share": moved / pulled} if pulled else {})
    finally:
        with torch.no_grad():
            for each, was in before.items():
                each.copy_(was)
                each.grad = gradients[each]
            for buffer, was in buffers:
                buffer.copy_(was)
        for optimizer, state, settings in zip(optimizers, states, groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, was_set in zip(optimizer.param_groups, settings, strict=True):
                group.update(was_set)


def _plain_step(optimizer: Optimizer) -> None:
    """The optimizer's own step, without the scheduler's wrapper: that counts steps, and this is not one."""
    type(optimizer).step(optimizer)


def _schedule(scheduler: LRScheduler, steps: int | None) -> dict[str, Any]:
    """The learning rate of every step, in the group with the largest; from the first step on, if it can be told."""
    known: dict[str, Any] = {"schedule_step": max(0, int(scheduler.last_epoch))}
    if steps is None:
        return known
    if isinstance(scheduler, LambdaLR):
        group = max(range(len(scheduler.base_lrs)), key=lambda each: _number(scheduler.base_lrs[each]) or 0.0)
        base, share = _number(scheduler.base_lrs[group]) or 0.0, scheduler.lr_lambdas[group]
        return known | {"rates": tuple(base * float(share(step)) for step in range(steps))}
    if scheduler.last_epoch > 0 or isinstance(scheduler, ReduceLROnPlateau):
        return known  # a schedule under way, or one that waits for a metric, cannot be simulated
    optimizer = scheduler.optimizer
    stand_in = torch.optim.SGD([{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the optimizer has not been stepped
        walked = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        rates = [_rate(stand_in)]
        for _ in range(1, min(steps, MOST_STEPS)):
            try:
                walked.step()
            except ValueError:  # a schedule that knows its end
                break
            rates.append(_rate(stand_in))
    return known | {"rates": tuple(rates)}


def _not_judged(scheduler: LRScheduler, steps: int | None) -> str:
    """Why a schedule has no curve, and what to do about it, in a sentence."""
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        return f"The schedule was not judged: {kind} waits for a metric, so that nobody knows its rates before the run."
    if scheduler.last_epoch > 0 and not isinstance(scheduler, LambdaLR):
        return f"The schedule was not judged: {kind} is under way; ask before its first step, with steps=."
    if steps is None:
        return "The schedule was not judged: pass the length of the run, as in sealegs.preflight(..., steps=20_000)."
    return ""


def _rate(optimizer: Optimizer) -> float:
    return max(_number(group["lr"]) or 0.0 for group in optimizer.param_groups)


def _loading(loader: DataLoader[Any]) -> dict[str, Any]:
    known: dict[str, Any] = {"workers": loader.num_workers}
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    streams = isinstance(loader.dataset, IterableDataset)
    if isinstance(sampler, SequentialSampler) and not streams:
        known["shuffle"] = "none"
    elif isinstance(sampler, RandomSampler | DistributedSampler):
        known["shuffle"] = "all" if getattr(sampler, "shuffle", True) else "none"
    if loader.worker_init_fn is None:
        inside = getattr(loader.dataset, "__dict__", {})
        known["workers_share_seed"] = any(_is_generator(value) for value in inside.values())
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        known["ranks"] = dist.get_world_size()
        if isinstance(sampler, DistributedSampler) or (isinstance(sampler, SequentialSampler) and not streams):
            known["ranks_share_data"] = not isinstance(sampler, DistributedSampler)
    return known


def _is_generator(value: object) -> bool:
    """Whether it draws random numbers, and goes to every worker in its present state."""
    return isinstance(value, torch.Generator) or any(
        hasattr(value, name) for name in ("bit_generator", "get_state", "getrandbits")
    )


def _targets(labels: Tensor) -> dict[str, Any]:
    counted = (labels != IGNORED).float()
    rows = counted.flatten(1) if labels.ndim > 1 else counted[None]
    return {"target_share": float(counted.mean()), "emptiest_row": float(rows.mean(1).min())}


def _rows(example: Mapping[str, Any], labels: Tensor | None, config: object) -> dict[str, Any]:
    """What a batch of texts shows: the side of its padding, a doubled beginning, what of a row counts for the loss."""
    ids, mask = example.get("input_ids"), example.get("attention_mask")
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.ndim == 2 and mask.shape == ids.shape):
        return {}
    rows = [(row, at) for row, at in enumerate(each.nonzero().flatten() for each in mask) if len(at)]
    sides = {"left" if at[0] > 0 else "right" for _, at in rows if len(at) < ids.shape[1]}
    known: dict[str, Any] = {"padding_side": sides.pop() if len(sides) == 1 else None}
    begins, ends = _special(config, "bos_token_id"), _special(config, "eos_token_id")
    if begins and rows:
        known["doubled_bos"] = all(len(at) > 1 and set(ids[row][at[:2]].tolist()) <= begins for row, at in rows)
    if labels is None or labels.shape != ids.shape:
        return known
    texts = [(ids[row][at], labels[row][at] != IGNORED) for row, at in rows]
    texts = [(text, counts) for text, counts in texts if counts.any()]  # rows without a target are told apart
    ended = [
        (_is_any(text, ends - begins) & counts).any() for text, counts in texts if _is_any(text, ends - begins).any()
    ]
    if texts:
        known["answers_learned"] = sum(bool(counts[len(counts) * 3 // 4 :].any()) for _, counts in texts) / len(texts)
    return known | ({"ends_learned": bool(any(ended))} if ended else {})


def _special(config: object, name: str) -> set[int]:
    """The tokens of a name in a model's configuration."""
    said = getattr(config, name, None)
    return {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, int)}


def _is_any(tokens: Tensor, wanted: set[int]) -> Tensor:
    return torch.isin(tokens, torch.tensor(sorted(wanted), dtype=tokens.dtype, device=tokens.device))


def _number(value: Any) -> float | None:
    """A setting of an optimizer as a number; it may be a tensor."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
