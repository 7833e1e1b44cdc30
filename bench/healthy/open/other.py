"""Healthy trainings of other kinds: recommendations with a long tail."""

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from torch import Tensor, nn

USERS, ITEMS = 400, 300


class Factors(nn.Module):
    """A rating from what a user likes and what an item is like."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.of_user, self.of_item = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.zeros(()))
        for each in (self.users, self.items, self.of_user, self.of_item):
            nn.init.normal_(each.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Ratings."""
        liking = (self.users(user) * self.items(item)).sum(-1)
        rating: Tensor = self.mean + liking + (self.of_user(user) + self.of_item(item)).squeeze(-1)
        return rating


def ratings(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who rated what how: one to five stars, few items most of the time."""
    fixed = torch.Generator().manual_seed(5)
    tastes, kinds = torch.randn(USERS, 4, generator=fixed), torch.randn(ITEMS, 4, generator=fixed)
    strict, good = torch.randn(USERS, generator=fixed), torch.randn(ITEMS, generator=fixed)
    user = torch.randint(USERS, (count,))
    item = torch.multinomial(1 / torch.arange(1.0, ITEMS + 1), count, replacement=True)
    stars = 3.5 + 0.5 * (tastes[user] * kinds[item]).sum(-1) + 0.4 * (strict[user] + good[item])
    return user, item, (stars + 0.3 * torch.randn(count)).round().clamp(1, 5)


@training(
    kind="recommendation",
    metric="test RMSE",
    about="matrix factorisation, Zipf's items, batch 64, Adam",
    is_better_higher=False,
)
def long_tail(seed: int, keeper: Keeper) -> float:
    """Some items are in every batch, some in one of a hundred."""
    torch.manual_seed(seed)
    user, item, stars = ratings(50_000)
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    steps = keeper.around(model, optimizer, clip=5.0)
    for rows in steps.batches(torch.randperm(50_000)[: 64 * 750].view(750, 64)):
        loss = F.mse_loss(model(user[rows], item[rows]), stars[rows])
        loss.backward()
        steps.step(loss)
    user, item, stars = ratings(10_000)
    with torch.no_grad():
        return float(F.mse_loss(model(user, item), stars).sqrt())
