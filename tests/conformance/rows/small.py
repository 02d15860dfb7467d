"""The model, the data and the loop of most rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.conformance.table import Training


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def batch(width: int = 6) -> torch.Tensor:
    return torch.randn(5, width) + 1


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def trained(
    model: nn.Module,
    optimizer: Any = None,
    *,
    data: Callable[[], torch.Tensor] = batch,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
    after: Callable[[int], Any] = lambda step: None,
    also: dict[str, Any] | None = None,
    **more: Any,
) -> Training:
    """A plain loop. `after`: runs after the optimizer's step; what it returns is compared."""
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(number: int) -> Any:
        value = loss(model, data())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return [value.item(), after(number)]

    return Training(
        components={"model": model, "optimizer": optimizer, **(also or {})}, step=step, **more
    )
