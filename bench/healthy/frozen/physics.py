"""A seed and a keeper in, the error against the exact solution out: equations learnt from their residual."""

import math

import torch
from bench.healthy.contract import Keeper, training
from torch import Tensor, nn


def slope(of: Tensor, by: Tensor) -> Tensor:
    """Derivative of one column by another, itself differentiable."""
    (derivative,) = torch.autograd.grad(of.sum(), by, create_graph=True)
    return derivative


@training(
    kind="physics",
    metric="relative L2 error",
    about="PINN for a damped oscillator, fresh collocation points every step, loss over several decades, Adam",
    is_better_higher=False,
)
def damped_oscillator(seed: int, keeper: Keeper) -> float:
    """x'' + 2 d x' + x = 0 from x = 1 at rest, in units of the undamped frequency."""
    torch.manual_seed(seed)
    damping, until = 0.2, 4.0
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9975)
    steps = keeper.around(model, optimizer, scheduler=schedule)

    def place_at(time: Tensor) -> Tensor:
        """The start is built in, so that the residual is all there is to learn."""
        place: Tensor = 1 + time**2 * model(time)
        return place

    for _ in steps.batches(range(1200)):
        time = (until * torch.rand(32, 1)).requires_grad_()
        place = place_at(time)
        speed = slope(place, time)
        loss = ((slope(speed, time) + 2 * damping * speed + place) ** 2).mean()
        loss.backward()
        steps.step(loss)
    time = torch.linspace(0, until, 200)[:, None]
    ringing = math.sqrt(1 - damping**2)
    exact = torch.exp(-damping * time) * (torch.cos(ringing * time) + damping / ringing * torch.sin(ringing * time))
    with torch.no_grad():
        return float((place_at(time) - exact).norm() / exact.norm())
