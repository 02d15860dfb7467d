"""What the ranks of a `dcp.save` or `dcp.load` agree on, through DCP's own exchange of plans.

Before a save, the ranks agree on the step and the epoch.

The agreement travels with DCP's own plans: each rank puts a `Ballot` into its local plan, and the
coordinator answers with an `Agreed` in each rank's part of the global plan. So keepstep needs no
collective of its own, and the group that DCP was given (a process group, or `no_dist=True`) is the
world of the step. DCP does not tell a storage writer its group, so a separate vote would meet the
wrong ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from keepstep.core.vote import Candidates, limit_of
from keepstep.core.vote import choose as choose_step
from keepstep.errors import NothingCommonError, RestoreError, UsageError
from keepstep.steps import Answer, Epoch, EpochId, StepId

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one rank knows before a save.

    `epoch`: the epoch that the rank is in, if it saved before; `world`: the number of ranks of that
    epoch. `loaded`: the step that it goes on from. `highest_epoch`: the highest epoch number that
    its sidecar ever saw.
    """

    step: int
    epoch: Epoch | None
    world: int
    loaded: StepId | None
    highest_epoch: int


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What one rank must do: as `rank` of `world`, write its image of `step` in `epoch`."""

    step: int
    epoch: Epoch
    rank: int
    world: int


def agree(ballots: Sequence[Ballot], *, nonce: str) -> list[Agreed]:
    """Decide from the ballots of all ranks, in rank order. Pure.

    If all ranks are in one epoch of this world, they stay in it. Otherwise a new epoch begins,
    whose parent is the step that all of them loaded. An epoch has one world: otherwise a rank that
    saves alone would by itself commit a step of the other ranks. Raises UsageError if the ranks
    save different steps, or loaded different steps.
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


# --- which step is loaded --------------------------------------------------------------------
#
# Which step the ranks of a `dcp.load` load: `keepstep.core.vote` decides, through DCP's own
# exchange.
#
# DCP plans before it exchanges anything. So each rank plans for the newest step that its own
# sidecar can bring, and its ballot travels with that plan. The coordinator answers with the newest
# step that all ranks can bring, and a rank that planned for another step plans again. As with a
# save, keepstep needs no collective of its own, and the group that DCP was given is the group that
# agrees.
#
# Only *offers* count: steps of which a sidecar can bring every byte of every rank. The rank's own
# image is not enough, because DCP's planner keeps replicated tensors in one of the ranks' images.


@dataclass(frozen=True, kw_only=True)
class LoadBallot:
    """What one rank knows before a load. `step`: the number that is asked for; None for the newest.
    `failed`: steps that the rank could not read.
    """

    vote: Candidates
    step: int | None
    failed: frozenset[StepId]


def choose(ballots: Sequence[LoadBallot]) -> StepId | None:
    """The newest step that all ranks can bring, from the ballots in rank order; None if nothing was
    ever kept. Pure.

    Raises UsageError if the ranks ask for different steps, and RestoreError if there are steps, but
    none that all ranks can bring.
    """
    for rank, one in enumerate(ballots):
        if one.step != ballots[0].step:
            raise UsageError(
                f"rank 0 asks for step {ballots[0].step}, rank {rank} for {one.step}: all ranks"
                " must name the same step, or none"
            )
    limit, exact = limit_of([one.vote for one in ballots])
    votes = [_offers_of(one) for one in ballots]
    for rank, (ballot, vote) in enumerate(zip(ballots, votes, strict=True)):
        if not vote.offers:
            if limit is None and ballot.step is None and all(map(_is_empty, ballots)):
                return None
            raise _nothing(rank, ballot, votes)
    failed = {id for one in ballots for id in one.failed}
    return choose_step(votes, failed, limit=limit, exact=exact, lending=False).id


def _offers_of(ballot: LoadBallot) -> Candidates:
    offers = tuple(one for one in ballot.vote.offers if ballot.step in (None, one.id.step))
    return replace(ballot.vote, candidates=(), offers=offers)


def _is_empty(ballot: LoadBallot) -> bool:
    vote = ballot.vote
    return vote.answer is Answer.NONE and not vote.candidates and not vote.offers


def _nothing(rank: int, ballot: LoadBallot, votes: Sequence[Candidates]) -> RestoreError:
    """Why this rank has nothing to bring although a step must be loaded."""
    vote, which = ballot.vote, "" if ballot.step is None else f" {ballot.step}"
    others = sorted({one.id for each in votes for one in each.offers})
    said = f"; another rank can bring {others[-1]}" if others else ""
    if vote.answer is Answer.UNKNOWN:
        return RestoreError(
            f"rank {rank}: nobody can tell what there is to load: {vote.reason}; bring that storage"
            f" back, or load a copy by its path{said}"
        )
    own = [one.id for one in vote.candidates if ballot.step in (None, one.id.step)]
    if own and not vote.offers:
        return NothingCommonError(
            f"rank {rank}: its sidecar holds step {max(own)}, but not the images of all ranks of"
            " it: dcp.load needs them within reach of every sidecar, by peers or by an archive"
            f" (or keepstep.Checkpointer, which needs a rank's own image only){said}"
        )
    return RestoreError(
        f"rank {rank}: no committed step{which} to load{said}: `keepstep steps` lists what is"
        " there, and keepstep.dcp.latest_step() is None when a run begins"
    )
