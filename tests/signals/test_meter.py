"""What several ranks measured becomes one row. Real processes are in tests/ranks."""

import math

import pytest
import torch

from sealegs.errors import ConfigError
from sealegs.signals.collect import named_now
from sealegs.signals.meter import Meter, _agreed
from sealegs.signals.ranks import Ranks
from sealegs.signals.together import ABSENT, largest, mean_of_sent, present


def test_ranks_at_different_steps_are_refused_before_anything_else_is_read() -> None:
    names = ("culprit_rank", "steps_apart", "losses", "ranks_differ")
    assert _agreed(7, names, [1.0, 0.0, 4.0, 2.0]) == {"culprit_rank": 1.0, "ranks_differ": 2.0}
    with pytest.raises(ConfigError, match="step 7: the guards of the ranks are 3 steps apart"):
        _agreed(7, names, [1.0, 3.0, 4.0, 2.0])
    with pytest.raises(ConfigError, match="step 7: loss=None on every rank"):
        _agreed(7, names, [1.0, 0.0, 0.0, 2.0])


def test_a_layer_that_one_rank_dropped_is_known_from_the_others() -> None:
    rows = torch.tensor([[2.0, ABSENT, ABSENT, 1.0], [4.0, 6.0, ABSENT, math.nan]])
    assert mean_of_sent(rows).tolist()[:3] == [3.0, 6.0, ABSENT]
    assert math.isnan(mean_of_sent(rows)[3]), "NaN is seen"
    assert largest(rows).tolist()[:3] == [4.0, 6.0, ABSENT]
    assert list(present(("a", "b", "c", "d"), mean_of_sent(rows).tolist())) == ["a", "b", "d"]


class Two(Ranks):
    """This rank, and another one that sends what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.world = 2
        self.other: list[torch.Tensor] = []

    def gather(self, mine: torch.Tensor, step: int) -> torch.Tensor:
        self.other.append(mine)
        return torch.stack([self.other[0], mine])


class Routing(torch.nn.Module):
    """Two experts; the router gives indices."""

    num_experts, chosen = 2, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((*tokens.shape[:-1], 1), self.chosen)


class WithRouter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rest, self.router = torch.nn.Linear(2, 1), Routing()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.router(tokens)
        return self.rest(tokens)  # type: ignore[no-any-return]


def test_ranks_add_what_routers_chose_and_average_what_they_log() -> None:
    """Rank 0 sends 20 tokens to the first expert and logs a reward, rank 1 sends 60 to the second and logs none."""
    ranks, model = Two(), WithRouter()
    meters = []
    for rank, tokens in enumerate((20, 60)):
        model.router.chosen = rank
        meter = Meter(model, [torch.optim.SGD(model.parameters(), 0.1)], sample_every=1, ranks=ranks)
        meter.exchange(("kl", "reward"))
        meter.get_ready(1)
        loss = model(torch.ones(tokens, 2)).sum()
        loss.backward()
        logged = {} if rank else {"reward": -3.0, "mine": 1.0}
        seen = meter.measure_step(1, loss.detach(), None, token_losses=None, loss_scale=None, logged=logged)
        model.zero_grad()
        assert meter.alone(logged) == ({} if rank else {"mine": 1.0})
        meters.append(named_now(seen.blocks))
    found = meters[1]
    assert found["reward"] == -3
    assert "kl" not in found
    assert (found["expert_load/router.0"], found["expert_load/router.1"]) == (0.25, 0.75)
    assert found["expert_violation"] == 0.5
