"""A tiny loop of one's own: `python own_loop.py OUT SETTINGS`; as trainer.py otherwise."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from keepstep.integrations.loaders import Batches
from tests.frameworks.script import SETTINGS, digest, random_states, write

ROWS = 60
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.randn(8, generator=torch.Generator().manual_seed(at))
        return row + 0.1 * torch.randn(8) if SETTINGS.get("augment") else row


def loader() -> Any:
    kind: Any = DataLoader
    if SETTINGS.get("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    workers: dict[str, Any] = {"num_workers": SETTINGS.get("workers", 0)}
    if SETTINGS.get("persistent"):
        workers["persistent_workers"] = True
    sampler = SETTINGS.get("sampler") and DistributedSampler(Rows())
    return kind(Rows(), batch_size=4, shuffle=not sampler, sampler=sampler or None, **workers)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def left(batches: Batches, checkpointer: Any) -> Any:
    """Undisturbed: the loader alone."""
    return batches.loader if SETTINGS.get("bare") else batches.left(checkpointer)


def main() -> None:
    net, others = globals()[f"on_{SETTINGS['on']}"]()
    write({"weights": digest(net.state_dict()), **others, "random": random_states()})


if __name__ == "__main__":
    main()
