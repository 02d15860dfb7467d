"""Decides what a run has kept, from reports alone: see docs/ledger.md.

machine       the ledger: events in, actions out
commit_rule   when a step is committed, whole, or at risk
alarms        what people should look at
events        the values that go in and come out
"""

from keepstep.core.ledger.events import (
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
from keepstep.core.ledger.ledger import Ledger, is_among
from keepstep.core.lineage import Lineage, Segment, Standing

__all__ = [
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
    "is_among",
]
