"""Counters of one trainer, and what they say in words."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters of one trainer. Seconds are sums unless they say `last`."""

    saves: int = 0
    staged: int = 0
    skipped: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    last_blocked_s: float = 0.0
    copy_s: float = 0.0
    last_copy_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    def why_not(self) -> str:
        """Why steps were not kept, for an error's text."""
        reasons = [f"{count} x {reason}" for reason, count in self.reasons.items()]
        if self.discarded:
            reasons.append(f"{self.discarded} x changed before it was copied")
        return "; ".join(reasons) or "nothing was saved"
