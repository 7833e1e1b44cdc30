"""A mixture of experts in the place of an MLP: a router chooses for each token, and says how evenly it does."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sealegs.lab.settings import ModelSettings

Notes: TypeAlias = list[tuple[str, Tensor]]
"""What layers say of a forward pass beside their output: names and tensors, in the order of the layers."""

DEAD = 0.1
"""The share of an equal load below which an expert counts as dead."""
BOUND = 1.0
"""Largest correction of a router's choice. Scores are from 0 to 1: beyond it the correction alone would choose."""


class Experts(nn.Module):
    """Several MLPs, of which each token uses the few that its router chooses.

    Every expert computes every token, and the router's weights take its choice of that. It drops no token, repeats bit
    for bit, needs no wait for a device, and gives an expert without tokens a gradient of exactly 0. It costs
    ``experts / experts_per_token`` times the arithmetic, which a real one would save.
    """

    bias: Tensor
    """Added to the scores for the choice alone, not for the weights: how ``balance="bias"`` keeps loads alike."""

    def __init__(self, settings: ModelSettings, make_expert: Callable[[ModelSettings], nn.Module]) -> None:
        super().__init__()
        self.chosen = settings.experts_per_token
        self.scores_add_up = settings.router == "softmax"
        self.router = nn.Linear(settings.width, settings.experts, bias=False)
        self.experts = nn.ModuleList(make_expert(settings) for _ in range(settings.experts))
        self.register_buffer("bias", torch.zeros(settings.experts))

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        """Each position by itself."""
        with torch.autocast(x.device.type, enabled=False):  # in few bits, close scores would be chosen by rounding
            logits = self.router(x.float())
            weights = self._weights(logits, notes)
        outputs = [expert(x, notes) * weights[..., i, None].to(x.dtype) for i, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(0)

    def _weights(self, logits: Tensor, notes: Notes | None) -> Tensor:
        """The share of each expert in each token's output: 0 but for the chosen ones, which add up to 1."""
        scores = logits.softmax(-1) if self.scores_add_up else logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.chosen, dim=-1).indices
        taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * taken
        if notes is not None:
            probabilities = scores if self.scores_add_up else scores / scores.sum(-1, keepdim=True)
            notes += routing_notes(logits, probabilities, taken)
        return weights / weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float) -> Tensor:
        """The bias that the next choice should have: more for who got less than an equal share, less for who got more.

        It goes by the sign of the error, stays around 0 and within ``BOUND``: what drifts off with all experts alike
        changes no choice, and would one day drown the scores.
        """
        moved = self.bias + rate * (1 / len(load) - load).sign()
        return (moved - moved.mean()).clamp(-BOUND, BOUND)


def routing_notes(logits: Tensor, probabilities: Tensor, taken: Tensor) -> Notes:
    """What a router did with the tokens of a pass; the two losses can be minimised."""
    experts = logits.shape[-1]
    load = taken.flatten(0, -2).mean(0)
    load = load / load.sum()
    mean_probability = probabilities.flatten(0, -2).mean(0)
    entropy = torch.special.entr(probabilities.detach()).sum(-1).mean()
    return [
        ("expert_load", load),
        ("router_entropy", entropy),
        ("router_balance_loss", experts * (load * mean_probability).sum()),
        ("router_z_loss", torch.logsumexp(logits, -1).square().mean()),
    ]


def stacked(notes: Notes) -> dict[str, Tensor]:
    """The notes by name; those of several layers as one tensor, a row a layer."""
    names = dict.fromkeys(name for name, _ in notes)
    return {name: torch.stack([each for other, each in notes if other == name]) for name in names}


def router_signals(beside: Mapping[str, Tensor], *, detailed: bool) -> dict[str, Tensor]:
    """The signals of a step's routers; ``detailed`` adds the load of each expert. Nothing waits for a device."""
    if "expert_load" not in beside:
        return {}
    load = beside["expert_load"]
    relative = load * load.shape[1]
    signals = {
        "expert_violation": relative.max() - 1,
        "dead_expert_share": (relative < DEAD).float().mean(),
        **{name: beside[name].mean() for name in ("router_entropy", "router_balance_loss", "router_z_loss")},
    }
    if detailed:
        signals |= {
            f"expert_load/{layer}.{expert}": share
            for layer, of_layer in enumerate(load.unbind())
            for expert, share in enumerate(of_layer.unbind())
        }
    return signals
