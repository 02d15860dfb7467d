"""A model with frozen layers and low-rank adapters beside them, as people fine-tune large ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.01)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Model(nn.Module):
    """`layers` adapted layers; with 4 of width 1024, 16.8 MB of it are frozen."""

    def __init__(self, *, layers: int = 4, width: int = 1024, rank: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted(width, rank) for _ in range(layers)])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def made(seed: int = 0, **shape: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model, the same for the same seed, and an optimizer of its adapters."""
    torch.manual_seed(seed)
    model = Model(**shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def train(model: Model, optimizer: torch.optim.Optimizer, *, steps: int = 1) -> list[float]:
    """The losses of so many steps on random data."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, model.layers[0].base.in_features)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal(first: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same values, bit by bit."""
    mine, theirs = first.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[at], theirs[at]) for at in mine)
