"""What is counted of each rank, for the status, the reports and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.steps import StepId


@dataclass
class RankCounters:
    """Of one rank, since the sidecar started. `staged`: the newest step that it sealed, at
    `staged_at` (unix seconds)."""

    saves: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    copy_s: float = 0.0
    staged: StepId | None = None
    staged_at: float | None = None
    skipped: dict[str, int] = field(default_factory=dict)
