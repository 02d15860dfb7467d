"""What goes into the ledger and what comes out: values only.

Reports are level-triggered: one says what *is* there, whole, and replaces what the same node said
before of the same rank and tier. So a report may be lost, repeated, or merged with the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.core.retention import Retention
from keepstep.core.shard import Told
from keepstep.steps import NEAREST_FIRST, Answer, Epoch, EpochId, StepId, Tier, Word


def at_least(tier: Tier) -> tuple[Tier, ...]:
    """This tier and the stronger ones."""
    return NEAREST_FIRST[NEAREST_FIRST.index(tier) :]


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """`tiers`: those that this run has; each must answer before a run may begin at step 0.

    `world`: ranks running now, None while unknown. `retention`: per durable tier; a tier that is
    not named is never cleaned. `stale_after`: committed steps in a row with unchanged parameters
    on every rank before that is alarming (gradient accumulation leaves some unchanged).
    """

    tiers: tuple[Tier, ...] = (Tier.MEMORY, Tier.LOCAL)
    world: int | None = None
    retention: Mapping[Tier, Retention] = field(default_factory=dict)
    stale_after: int = 6


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one node has of one rank. A tier named in `sealed` or `answers` is replaced as a whole,
    unless `gone` names it, too: then `sealed` comes to what is known, and those steps leave it."""

    sealed: Mapping[Tier, tuple[Told, ...]] = field(default_factory=dict)
    answers: Mapping[Tier, Answer] = field(default_factory=dict)
    gone: Mapping[Tier, Collection[StepId]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A node rank says what it has of some ranks, and every epoch that it ever saw.

    `sequence`: grows with every report of this node rank; an older one than the last is ignored.
    0: reports arrive in order.
    """

    node_rank: int = 0
    ranks: Mapping[int, RankReport] = field(default_factory=dict)
    epochs: tuple[Epoch, ...] = ()
    sequence: int = 0


@dataclass(frozen=True)
class EpochStarted:
    """All ranks agreed on this epoch in the collective of a restore."""

    epoch: Epoch


@dataclass(frozen=True)
class FreshStartAcknowledged:
    """Somebody knows that this epoch began anew although older steps exist: they may go.

    `epoch` None: the newest one that began anew.
    """

    epoch: EpochId | None = None


@dataclass(frozen=True)
class RankGone:
    """What this node reported of this rank is out of reach, until it reports again."""

    rank: int
    node_rank: int = 0


@dataclass(frozen=True)
class NodeGone:
    """Everything that this node reported is out of reach, until it reports again."""

    node_rank: int


Event = Reported | EpochStarted | FreshStartAcknowledged | RankGone | NodeGone


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    """Every rank holds this step on this tier or a stronger one. Said once per tier and step."""

    tier: Tier
    id: StepId


@dataclass(frozen=True)
class Retire:
    """Delete these ranks' copies on this tier. Said again until reports show that they are gone."""

    tier: Tier
    id: StepId
    ranks: tuple[int, ...]


class AlarmKind(Word):
    """What a person should look at."""

    STALE_SNAPSHOT = "stale-snapshot"
    WORLD_CHANGED = "world-changed"
    TWO_WRITERS = "two-writers"
    EPOCH_CONFLICT = "epoch-conflict"
    FRESH_START = "fresh-start"


@dataclass(frozen=True)
class Alarm:
    """Said once, and again only after it was gone in between."""

    kind: AlarmKind
    text: str


Action = Committed | Retire | Alarm


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestorePlan:
    """Restore this step, each rank of those that saved it from the nearest tier that holds it.

    `world`: how many saved it; when others run now, they share out its boxes. `by_twins`: ranks
    whose own image is gone; their boxes are restored from a twin's, which is on the tier named.
    """

    id: StepId
    tiers: Mapping[int, Tier]
    world: int = 0
    by_twins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nothing:
    """Every rank and every tier said that there is nothing: begin at step 0."""


@dataclass(frozen=True)
class Unknown:
    """No plan yet, or none possible; `reason` says which. Never a reason to begin at step 0.

    `waits_for`: (rank, tier) whose answer is missing; empty: waiting alone will not help.
    """

    reason: str
    waits_for: tuple[tuple[int, Tier], ...] = ()
