"""Finds out what kind of model a live one is: by its structure and one forward pass, never by names of classes.

- A *norm* is a module without matrices that gives the same output for ten times the input.
- A forward pass shows where norms stand. A norm that reads what its layer reads comes before it. A layer that gives
  what a norm gives has it on the residual stream. Otherwise norms are on what a layer adds.
- Weights are fresh while every gain of a norm is exactly one (or zero) and every bias of one zero. Rules for initial
  weights do not apply to trained ones.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sealegs.preflight_check.config_readers import of_model_config
from sealegs.signals.groups import find_layers

ROWS, TOKENS = 2, 8
"""Shape of the forward pass, if no example is given."""


class Structure(NamedTuple):
    """Parts of a model."""

    layers: dict[str, nn.Module]
    norms: dict[str, nn.Module]
    embeddings: dict[str, nn.Embedding]


def read_structure(model: nn.Module, example: Any = None) -> dict[str, Any]:
    """Fields of a plan. ``example`` is what the model is called with: a tensor, a tuple, or a dict of names."""
    with _evaluating(model):
        found = _read(model, example)
    return {name: each for name, each in found.items() if not isinstance(each, float) or math.isfinite(each)}


def is_trained(model: nn.Module) -> bool:
    """Whether the gains of its norms are no longer what they begin as: then the weights come from a training."""
    with _evaluating(model):
        norms = dict(_norms(model))
    has_gains = any(True for norm in norms.values() for _ in norm.parameters(recurse=False))
    return has_gains and not _is_fresh(Structure({}, norms, {}))


def _read(model: nn.Module, example: Any) -> dict[str, Any]:
    parts = Structure(find_layers(model), dict(_norms(model)), dict(_embeddings(model)))
    known: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
    known["layers"] = len(parts.layers) or None
    if parts.embeddings:
        table = max(parts.embeddings.values(), key=lambda each: each.weight.numel())
        known |= {"width": table.embedding_dim, "vocabulary": table.num_embeddings}
        known["tied_head"] = _is_tied(model, parts, table)
    if (eps := [_eps(norm) for norm in parts.norms.values()]) and None not in eps:
        known["norm_eps"] = min(each for each in eps if each is not None)
    if parts.layers and parts.norms:
        known["qk_norm"] = all(_has_qk_norm(layer, parts.norms) for layer in parts.layers.values())
    known |= _configured(model)
    given = _example(parts, example)
    seen = None if given is None else _forward(model, parts, given)
    if seen is not None:
        known |= _positions(parts, seen)
    if "width" in known and _is_fresh(parts):
        known |= _initial(model, parts, known["width"], tied=bool(known["tied_head"]))
        if seen is not None and seen.logits is not None and seen.logits.shape[-1] == known["vocabulary"]:
            known["initial_logit_std"] = float(seen.logits.float().std())
    return known


def _configured(model: nn.Module) -> dict[str, Any]:
    """What a Hugging Face model's config says and its structure does not show: caps, kernels, intended ties."""
    config: Any = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else None
    if not isinstance(told, Mapping):
        return {}
    known = of_model_config(told, type(config).__name__).plan.known()
    kernel = getattr(config, "_attn_implementation", None)
    caps = {"logit_softcap", "misplaced_softcap", "attention_softcap", "attention_kernel"}
    wanted = caps | {"mup_base_width", "quantised", "compute_dtype"}
    return {name: value for name, value in known.items() if name in wanted} | (
        {"attention_kernel": kernel} if isinstance(kernel, str) else {}
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put each module into evaluation mode inside, and restore its mode after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# Parts


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    yield from ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Embedding))


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if not list(module.children()) and _is_norm(module):
            yield name, module


@torch.no_grad()
def _is_norm(module: nn.Module) -> bool:
    """Whether it behaves as a norm: the direction of its input matters, its scale does not."""
    own = list(module.parameters())
    sizes = {each.numel() for each in own}
    has_eps = any("eps" in name and isinstance(value, float) for name, value in vars(module).items())
    if any(each.ndim != 1 for each in own) or len(sizes) > 1 or not (own or has_eps):
        return False
    width = sizes.pop() if sizes else math.prod(getattr(module, "normalized_shape", (8,)))
    device, dtype = (own[0].device, own[0].dtype) if own else (torch.device("cpu"), torch.float32)
    if device.type == "meta":
        return False
    random = torch.Generator().manual_seed(0)
    row = torch.randn(2, width, generator=random).to(device, dtype)
    try:
        once, larger = module(row).float(), module(10 * row).float()
    except Exception:  # not a module that takes a row of numbers
        return False
    if once.shape != row.shape or not once.isfinite().all() or not once.abs().any():
        return False
    return bool(torch.allclose(once, larger, rtol=1e-2, atol=1e-3) and not torch.allclose(once[0], once[1]))


@torch.no_grad()
def _eps(norm: nn.Module) -> float | None:
    """What the norm adds before it divides; 0 if a row of zeros gives NaN, whatever it is called."""
    said = [value for name, value in vars(norm).items() if "eps" in name and isinstance(value, float)]
    own = next(norm.parameters(), None)
    if own is not None and not norm(torch.zeros_like(own)[None]).isfinite().all():
        return 0.0
    return said[0] if said else None


def _has_qk_norm(layer: nn.Module, norms: Mapping[str, nn.Module]) -> bool:
    """Whether a part of a layer that has matrices of its own has two norms of its own as well."""
    known = set(norms.values())
    for part in layer.children():
        inside = [each for each in part.modules() if each in known]
        if len(inside) >= 2 and any(each.ndim == 2 for each in part.parameters()):
            return True
    return False


def _is_tied(model: nn.Module, parts: Structure, table: nn.Embedding) -> bool:
    """Whether two modules share the table, or nothing else outside the layers has its shape: then a head reads it."""
    owners = [each for each in model.modules() if any(own is table.weight for own in each._parameters.values())]
    inside = {each for layer in parts.layers.values() for each in layer.parameters()}
    others = [each for each in model.parameters() if each is not table.weight and each not in inside]
    return len(owners) > 1 or not any(sorted(each.shape) == sorted(table.weight.shape) for each in others)


# One forward pass


class ForwardPass(NamedTuple):
    """Which tensor went where in a forward pass."""

    layers: dict[nn.Module, tuple[int, int]]
    """What each layer read and gave."""
    norms: list[tuple[nn.Module, int, int]]
    """What each call of a norm read and gave, in order."""
    last_layer_at: int
    """Calls of norms until the last layer was done."""
    logits: Tensor | None


def _example(parts: Structure, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if given is None:
        if not parts.embeddings:
            return None
        table = max(parts.embeddings.values(), key=lambda each: each.weight.numel())
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(table.num_embeddings, (ROWS, TOKENS), generator=random)
        return (tokens.to(table.weight.device),), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


@torch.no_grad()
def _forward(model: nn.Module, parts: Structure, given: tuple[tuple[Any, ...], dict[str, Any]]) -> ForwardPass | None:
    """Run the model once, and leave no trace; ``None`` if it does not run on this input."""
    layers: dict[nn.Module, tuple[int, int]] = {}
    norms: list[tuple[nn.Module, int, int]] = []
    kept: list[Tensor] = []  # kept alive, so that no other tensor gets the same id
    at_last_layer = 0

    def place(value: Any) -> int:
        found = next((each for each in _tensors(value) if each.is_floating_point()), None)
        if found is None:
            return -1
        kept.append(found)
        return found.data_ptr()

    def after_layer(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal at_last_layer
        layers[module] = (place((args, kwargs)), place(output))
        at_last_layer = len(norms)

    def after_norm(module: nn.Module, args: Any, output: Any) -> None:
        norms.append((module, place(args), place(output)))

    handles = [each.register_forward_hook(after_layer, with_kwargs=True) for each in parts.layers.values()]
    handles += [each.register_forward_hook(after_norm) for each in parts.norms.values()]
    args, kwargs = given
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)):
            output = model(*args, **kwargs)
    except Exception:  # a model may raise anything if it is called with the wrong inputs
        return None
    finally:
        for handle in handles:
            handle.remove()
    logits = max((each for each in _tensors(output) if each.ndim == 3), key=lambda each: each.shape[-1], default=None)
    return ForwardPass(layers, norms, at_last_layer, logits)


def _positions(parts: Structure, seen: ForwardPass) -> dict[str, Any]:
    """The position of the norms, and whether one comes after the last layer."""
    if not parts.norms or not seen.layers or any(layer not in seen.layers for layer in parts.layers.values()):
        return {}
    found: set[str] = set()
    for layer, (read, gave) in seen.layers.items():
        inside = set(layer.modules())
        own = [(reads, gives) for norm, reads, gives in seen.norms if norm in inside]
        if not own:
            return {}
        found.add("post" if gave in {gives for _, gives in own} else "pre" if own[0][0] == read else "branch")
    if len(found) != 1:
        return {}
    inside_layers = {each for layer in parts.layers.values() for each in layer.modules()}
    return {
        "norm_position": found.pop(),
        "final_norm": len(seen.norms) > seen.last_layer_at,
        "embedding_norm": any(norm not in inside_layers for norm, _, _ in seen.norms[: seen.last_layer_at]),
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for inner in value.values() for each in _tensors(inner))
    elif isinstance(value, tuple | list):
        yield from (each for inner in value for each in _tensors(inner))


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({each.device.index or 0 for each in model.parameters() if each.is_cuda})


# Initial weights


def _is_fresh(parts: Structure) -> bool:
    gains = [(name, each) for norm in parts.norms.values() for name, each in norm.named_parameters(recurse=False)]
    if not gains:
        return False
    return all(bool((each == (0.0 if "bias" in name else 1.0)).all() or (each == 0).all()) for name, each in gains)


@torch.no_grad()
def _initial(model: nn.Module, parts: Structure, width: int, *, tied: bool) -> dict[str, Any]:
    """The widest matrix among layers and head, and whether some of each layer are narrower than the others."""
    inside = [f"{name}." for name in parts.layers]
    tables = {each.weight for each in parts.embeddings.values()} if not tied else set()
    spreads = {
        name: float(each.float().std())
        for name, each in model.named_parameters()
        if each.ndim == 2 and each not in tables and width in each.shape
    }
    widest = max(spreads, key=lambda name: spreads[name], default=None)
    if widest is None:
        return {}
    of_layers = [std for name, std in spreads.items() if name.startswith(tuple(inside))]
    narrowed = min(of_layers) < 0.6 * max(of_layers) if of_layers else None
    return {"init_std": spreads[widest], "widest_tensor": widest, "narrowed_residual": narrowed}
