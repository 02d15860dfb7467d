"""Where the data stands: loaders, samplers and what draws random numbers on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from keepstep import Batches
from tests.conformance.rows.small import loss_of
from tests.conformance.table import Life, Result, Table, Training

TABLE = Table("Data")

_NO_POSITION = "a DataLoader has no state: an epoch begins again with `torch.save`"


class Numbers(Dataset[torch.Tensor]):
    """Twelve samples; `noise`: drawn from that generator of the process for each sample."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([float(at), self.noise()])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for at in range(12):
            yield torch.tensor([float(at), 0.0])


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))


def _batches(make: Callable[[], Any], *, epochs: int = 2) -> Training:
    """A loop over a loader, as docs/add-keepstep.md says."""
    model, loader = _model(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = Batches(loader)

    def train(x: torch.Tensor) -> Any:
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [x, loss.item()]

    def loop(life: Life) -> Iterator[Any]:
        if life.checkpointer is None:
            for _ in range(epochs):
                for x in loader:
                    yield train(x)
            return
        for _ in range(batches.epoch, epochs):
            for x in batches:
                yield train(x)

    components = {"model": model, "optimizer": optimizer, "batches": batches}
    return Training(components=components, loop=loop, uncompared=("batches",))


def _torch_noise() -> float:
    return torch.rand(()).item()


def _loader(noise: Callable[[], float] = lambda: 0.0, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(noise), batch_size=3, **options)


def _in_batches() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 3, False))


_WEIGHTS = [float(at + 1) for at in range(12)]
_LOADERS: dict[str, Callable[[], Any]] = {
    "DataLoader in order": _loader,
    "DataLoader(shuffle=True)": lambda: _loader(shuffle=True),
    "DataLoader(shuffle=True) with a generator of its own": lambda: _loader(
        shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "DataLoader with two workers": lambda: _loader(shuffle=True, num_workers=2),
    "DataLoader with workers and a generator": lambda: _loader(
        shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(3)
    ),
    "DataLoader with persistent workers": lambda: _loader(
        shuffle=True, num_workers=1, persistent_workers=True
    ),
    "samples that draw from torch's generator": lambda: _loader(_torch_noise, shuffle=True),
    "samples that draw from numpy's generator": lambda: _loader(
        lambda: float(np.random.random()), shuffle=True
    ),
    "samples that draw from Python's generator": lambda: _loader(random.random, shuffle=True),
    "RandomSampler with replacement": lambda: _loader(
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=12)
    ),
    "RandomSampler with a generator": lambda: _loader(
        sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    ),
    "WeightedRandomSampler": lambda: _loader(sampler=WeightedRandomSampler(_WEIGHTS, 12)),
    "SubsetRandomSampler": lambda: _loader(sampler=SubsetRandomSampler(range(12))),
    "a batch sampler": _in_batches,
    "DistributedSampler, whose epoch is never set": lambda: _loader(
        sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0)
    ),
    "an IterableDataset": lambda: DataLoader(Stream(), batch_size=3),
}
for _name, _make in _LOADERS.items():
    TABLE.add(
        f"{_name}, in Batches",
        _batches,
        _make,
        kills=(1, 5),
        observed=False,
        control=Result.DIFFERS,
        reason=_NO_POSITION,
    )
TABLE.add(
    "workers that draw from torch's generator, in Batches",
    _batches,
    lambda: _loader(_torch_noise, shuffle=True, num_workers=1),
    kills=(1, 5),
    observed=False,
    control=Result.DIFFERS,
    keepstep=Result.DIFFERS_LESS,
    reason="batches that are done are left out unread, so a worker draws their numbers later",
)
TABLE.add(
    "DataLoader(shuffle=True), in Batches, killed at the end of an epoch",
    _batches,
    _LOADERS["DataLoader(shuffle=True)"],
    kills=(3,),
    observed=False,
    control=Result.DIFFERS,
    reason=_NO_POSITION,
)


def _by_hand(make_sampler: Callable[[], Any], *, named: dict[str, Any]) -> Training:
    """A loop that keeps epoch and position, and skips in the sampler."""
    model, sampler = _model(), make_sampler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    progress = {"epoch": 0, "batches": 0}

    def loop(life: Life) -> Iterator[Any]:
        while progress["epoch"] < 2:
            sampler.set_epoch(progress["epoch"])
            indices = list(sampler)[progress["batches"] * 3 :]
            for x in DataLoader(
                Numbers(), batch_size=3, sampler=indices, generator=torch.Generator()
            ):
                loss = loss_of(model, x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress["batches"] += 1
                yield [x, loss.item()]
            progress.update(epoch=progress["epoch"] + 1, batches=0)

    components = {"model": model, "optimizer": optimizer, "progress": progress, **named}
    return Training(components=components, loop=loop)


TABLE.add(
    "DistributedSampler by epoch and position, in a dict",
    lambda: _by_hand(lambda: DistributedSampler(Numbers(), 1, 0, seed=4), named={}),
    kills=(1, 5),
)


def _shared_generator(*, where: str) -> Training:
    """One generator shuffles, and is named to the Checkpointer."""
    chance = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Numbers(), generator=chance)
    model = _model()
    named: dict[str, Any] = (
        {"chance": chance} if where == "component" else {"s": {"chance": chance}}
    )

    def step(number: int) -> Any:
        order = list(sampler)
        return [order, model(torch.tensor([[float(order[0]), 0.0]])).item()]

    return Training(components={"model": model, **named}, step=step)


TABLE.add(
    "a generator that a sampler holds, as a component",
    lambda: _shared_generator(where="component"),
)
TABLE.add(
    "a generator that a sampler holds, in a dict",
    lambda: _shared_generator(where="dict"),
    control=Result.DIFFERS,
    reason="`torch.load` makes another generator; keepstep sets the one that the sampler holds",
)


@TABLE.row("order by a number: batch n depends on a seed and n")
def _() -> Training:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    progress = {"batches": 0}

    def step(number: int) -> Any:
        chance = torch.Generator().manual_seed(1000 + progress["batches"])
        loss = loss_of(model, torch.randn(3, 2, generator=chance))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["batches"] += 1
        return loss.item()

    components = {"model": model, "optimizer": optimizer, "progress": progress}
    return Training(components=components, step=step)
