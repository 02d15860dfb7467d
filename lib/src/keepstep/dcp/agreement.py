"""What the ranks of a `dcp.save` must agree on before they write: the step and the epoch.

It travels with DCP's own plans: each rank puts a `Ballot` into its local plan, the coordinator
answers with an `Agreed` in each rank's part of the global plan. So there is no collective of ours,
and whatever group DCP was given (a process group, `no_dist=True`) is the world of the step: a
storage writer is not told which one it is, and a vote of its own would meet the wrong ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from keepstep.errors import UsageError
from keepstep.steps import Epoch, EpochId, StepId

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one rank knows. `epoch`: the one it is in, if it saved before, in a `world` of so many;
    `loaded`: the step that it goes on from; `highest_epoch`: the highest epoch number that its
    sidecar ever saw."""

    step: int
    epoch: Epoch | None
    world: int
    loaded: StepId | None
    highest_epoch: int


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What one rank does: `rank` of `world` writes its image of `step` in `epoch`."""

    step: int
    epoch: Epoch
    rank: int
    world: int


def agree(ballots: Sequence[Ballot], *, nonce: str) -> list[Agreed]:
    """Decide from the ballots of all ranks, in rank order. Pure.

    The ranks of an epoch stay in it, else a new one begins, with the step that all of them loaded
    as its parent: an epoch has one world, or a rank that saves alone would commit a step of the
    others by itself. Raises UsageError when the ranks save, or loaded, different steps.
    """
    step = _same([one.step for one in ballots], "save steps")
    loaded = _same([one.loaded for one in ballots], "loaded")
    epoch = ballots[0].epoch
    world = len(ballots)
    if epoch is None or any((one.epoch, one.world) != (epoch, world) for one in ballots):
        number = max(one.highest_epoch for one in ballots) + 1
        epoch = Epoch(EpochId(number, nonce), loaded)
    return [Agreed(step=step, epoch=epoch, rank=rank, world=world) for rank in range(world)]


def _same(values: Sequence[T], what: str) -> T:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(
                f"rank 0 and rank {rank} {what} {values[0]} and {value}:"
                " all ranks must name the same step"
            )
    return values[0]
