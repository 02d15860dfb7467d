"""What a run has kept, decided from reports alone: see `machine` and docs/ledger.md."""

from keepstep.core.ledger.events import (
    NEAREST_FIRST,
    Action,
    Alarm,
    AlarmKind,
    Committed,
    EpochStarted,
    Event,
    FreshStartAcknowledged,
    LedgerConfig,
    NodeGone,
    Nothing,
    RankGone,
    RankReport,
    Reported,
    RestorePlan,
    Retire,
    Unknown,
)
from keepstep.core.ledger.lineage import Lineage, Segment, Standing
from keepstep.core.ledger.machine import Ledger

__all__ = [
    "NEAREST_FIRST",
    "Action",
    "Alarm",
    "AlarmKind",
    "Committed",
    "EpochStarted",
    "Event",
    "FreshStartAcknowledged",
    "Ledger",
    "LedgerConfig",
    "Lineage",
    "NodeGone",
    "Nothing",
    "RankGone",
    "RankReport",
    "Reported",
    "RestorePlan",
    "Retire",
    "Segment",
    "Standing",
    "Unknown",
]
