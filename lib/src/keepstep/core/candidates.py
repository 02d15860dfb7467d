"""What a sidecar offers a rank that restarts: the values that go into the vote."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.suspicion import Failure
from keepstep.steps import Answer, StepId, Tier


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

    `tier`: the farthest tier that is needed.
    """

    id: StepId
    tier: Tier
    world: int


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
    `limit_run`: the step is of this other run's archive.

    `failures`: recorded failures of the script itself, with the steps that they cast doubt on and
    that are not dead. `trusted`: pinned steps. `never_whole`: with `Answer.NONE`, as text, steps of
    which only some ranks have images.
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
    limit_run: str = ""
    failures: tuple[Failure, ...] = ()
    trusted: tuple[StepId, ...] = ()
    never_whole: str = ""
