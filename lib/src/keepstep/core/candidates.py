"""What a sidecar offers a rank that restarts: the values that go into the vote."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.ranks import NOBODY, Ranks
from keepstep.core.suspicion import Failure
from keepstep.steps import Answer, Epoch, StepId, Tier

MOST_EPOCHS = 64
"""The most epochs that a vote carries, the newest: as far back as a step is lent."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A sealed image of this rank, on the nearest tier that holds it."""

    id: StepId
    tier: Tier
    world: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A step whose shards, wherever they are, cover all boxes of all ranks of its `world`.

    `tier`: the farthest tier that is needed. `images`: the saved ranks whose own images are among
    them; of the other ranks, a twin has the boxes.
    """

    id: StepId
    tier: Tier
    world: int
    images: Ranks = NOBODY


@dataclass(frozen=True, kw_only=True)
class Part:
    """A step of which the sidecar can bring the boxes of some saved ranks, `ranks`, but not of all.

    `tier`: the farthest tier that is needed. `images`: see `Offer`.
    """

    id: StepId
    tier: Tier
    world: int
    ranks: Ranks
    images: Ranks = NOBODY


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What one rank can restore: its vote.

    `candidates`: images of this rank. Dead and retired steps are not listed. `highest_epoch`: the
    highest epoch number ever seen here, 0 for none. `plan`: the step that the ledger would restore;
    a hint, already being fetched and hashed. `reason` explains `Answer.UNKNOWN`. `offers`: steps of
    which this sidecar can bring every byte of every rank, for ranks that cannot use an image of
    their own.

    `wanted`: the step that a person wants to go back to, as text; '' for the newest. `limit`: that
    step, None if it is not known here. Nothing newer is used and, where `exact`, nothing older.

    `failures`: recorded failures of the script itself, with the steps that they cast doubt on and
    that are not dead. `trusted`: pinned steps. `never_whole`: with `Answer.NONE`, as text, steps of
    which only some ranks have images.

    `parts`: what this sidecar can add to a step that it cannot bring alone. `epochs`: the newest
    epochs on record, from which the ranks together see which steps are dead.

    `fleeting`: what the pods of this run kept and no rank can reach is gone for good, with its pod
    or its drive, and the policy says to begin again then. `begin_again`: a person asked to begin at
    step 0 if no step can be restored. `way_out`: the command by which a person begins again, where
    a vote is refused.
    """

    answer: Answer
    candidates: tuple[Candidate, ...] = ()
    highest_epoch: int = 0
    plan: StepId | None = None
    reason: str = ""
    offers: tuple[Offer, ...] = ()
    wanted: str = ""
    limit: StepId | None = None
    exact: bool = False
    failures: tuple[Failure, ...] = ()
    trusted: tuple[StepId, ...] = ()
    never_whole: str = ""
    parts: tuple[Part, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    fleeting: bool = False
    begin_again: bool = False
    way_out: str = ""
