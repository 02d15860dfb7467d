"""The events that go into the ledger, and the actions and answers that come out: values only.

Reports are level-triggered: a report says all that *is* there now, and replaces what the same node
reported before of the same rank and tier. So a report may be lost, repeated, or merged with the
next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.core.retention import Retention
from keepstep.core.shard import ShardFacts
from keepstep.steps import IN_POD, NEAREST_FIRST, Answer, Epoch, EpochId, StepId, StrEnum, Tier


def at_least(tier: Tier) -> tuple[Tier, ...]:
    """This tier and the stronger ones."""
    return NEAREST_FIRST[NEAREST_FIRST.index(tier) :]


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """What a ledger must know of its run.

    `tiers`: the tiers of the run. Each must answer before the run may begin at step 0. `world`: how
    many ranks run now, None while unknown. `retention`: the policy of each durable tier. From a
    tier without a policy nothing is ever deleted. `stale_after`: after so many committed steps in a
    row with unchanged parameters on every rank, an alarm is raised (gradient accumulation leaves
    the parameters of some steps unchanged).
    """

    tiers: tuple[Tier, ...] = IN_POD
    world: int | None = None
    retention: Mapping[Tier, Retention] = field(default_factory=dict)
    stale_after: int = 6


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one node has of one rank.

    A tier that `sealed` or `answers` names is replaced as a whole, unless `gone` names it, too. Of
    such a tier, the images in `sealed` are added to what is known, and the steps in `gone` are
    removed.
    """

    sealed: Mapping[Tier, tuple[ShardFacts, ...]] = field(default_factory=dict)
    answers: Mapping[Tier, Answer] = field(default_factory=dict)
    gone: Mapping[Tier, Collection[StepId]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A node rank says what it has of some ranks, and every epoch that it ever saw.

    `sequence`: grows with every report of this node rank. A report with a lower number than the
    last one is ignored. Always 0: reports arrive in order.
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
    """It was acknowledged that this epoch began at step 0 although older steps exist. The older
    steps may then be deleted.

    `epoch` None: the newest epoch that began at step 0 beside older steps.
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
    """Every rank holds this step on this tier or a stronger one. Said once per tier and step, and
    again if the step was lost and came back."""

    tier: Tier
    id: StepId


@dataclass(frozen=True)
class Retire:
    """Delete these ranks' copies on this tier. Repeated until reports show that they are gone."""

    tier: Tier
    id: StepId
    ranks: tuple[int, ...]


class AlarmKind(StrEnum):
    """What a person should look at."""

    STALE_SNAPSHOT = "stale-snapshot"
    WORLD_CHANGED = "world-changed"
    TWO_WRITERS = "two-writers"
    EPOCH_CONFLICT = "epoch-conflict"
    FRESH_START = "fresh-start"


@dataclass(frozen=True)
class Alarm:
    """A condition that a person should look at. Said once when it arises, and again only if it
    went away in between."""

    kind: AlarmKind
    text: str


Action = Committed | Retire | Alarm


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestorePlan:
    """Restore this step.

    `tiers`: for each rank that saved the step, the nearest tier that holds its image. `world`: how
    many ranks saved it. If another number of ranks runs now, these divide its boxes among
    themselves. `by_twins`: ranks whose own image is gone. Their boxes are restored from a twin's
    image, which is on the tier named in `tiers`.
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
    """There is no plan yet, or none is possible; `reason` says which. This is never a reason to
    begin at step 0.

    `waits_for`: the (rank, tier) pairs whose answers are missing. Empty: waiting alone will not
    help.
    """

    reason: str
    waits_for: tuple[tuple[int, Tier], ...] = ()
