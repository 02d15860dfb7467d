"""A training that writes its state down after each step, and compares what it goes on from.

`python training.py STEPS STATE VALUES` goes on from what is there and prints what it found. It is
run by keepsteps of several ages, so it uses only what the first of them had, and on several kinds
of processor, which round otherwise: the directory VALUES has what a step's own maker computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

import keepstep


class Training:
    """A model of several dtypes and memory formats, its optimizer, scheduler and a dict."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        numpy.random.seed(rank)
        self.model = torch.nn.ModuleDict(
            {
                "conv": torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
                "norm": torch.nn.BatchNorm2d(4),
                "head": torch.nn.Linear(4, 2),
            }
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.progress: dict[str, Any] = {
            "losses": [],
            "seen": {1, 2},
            "nested": {"mean": torch.zeros(2, dtype=torch.float64), 3: (b"bytes", None)},
            "table": numpy.arange(6, dtype=">i4").reshape(2, 3),
        }

    @property
    def components(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
        }

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.rand(2, 3, 5, 5)
        hidden = self.model["norm"](self.model["conv"](inputs)).mean((2, 3))
        loss = self.model["head"](hidden).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["losses"].append(loss.item())
        self.progress["nested"]["mean"] += step
        self.progress["seen"].add(step)
        self.progress["table"] += 1

    def values(self) -> list[Any]:
        """Everything that a restore brings back; the generators are left as they were."""
        state = [s[key] for s in self.optimizer.state.values() for key in sorted(s)]
        numpys = numpy.random.get_state()
        drawn = numpy.random.rand()
        numpy.random.set_state(numpys)
        return [
            *self.model.state_dict().values(),
            *state,
            self.scheduler.state_dict(),
            {**self.progress, "table": self.progress["table"].tolist()},
            str(self.progress["table"].dtype),
            torch.get_rng_state(),
            drawn,
        ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and bool(one == other)


def check(found: list[Any], expected: list[Any]) -> None:
    for number, pair in enumerate(zip(found, expected, strict=True)):
        assert same(*pair), (number, pair)


def main(steps: int, state: str, values: Path) -> None:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    training = Training(rank)
    checkpointer = keepstep.Checkpointer(training.components)
    found = checkpointer.restore()
    if found is not None:
        expected = values / f"{found.step}-{rank}.pt"
        check(training.values(), torch.load(expected, weights_only=False))
    tier = found.tier.value if found and found.tier else None
    print(f"from {found.step if found else None} {tier}", flush=True)
    for step in range(found.step + 1 if found else 0, steps):
        training.step(step)
        torch.save(training.values(), values / f"{step}-{rank}.pt")
        checkpointer.save(step)
        checkpointer.wait(step, state)
    os._exit(3)  # neither sidecar nor memory is let go of


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
