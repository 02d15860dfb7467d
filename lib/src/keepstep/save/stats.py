"""Counters of one trainer, and a summary of them in words."""

from __future__ import annotations

from dataclasses import dataclass, field

_KINDS = 100
_OTHERS = "other reasons"


@dataclass
class Stats:
    """Counters of one trainer. Seconds are sums, except those named `last`.

    `saves`: steps that `save` was to keep. Once no step is on its way, each of them was `staged`,
    `skipped` (nothing was written) or `discarded` (its image was begun, and is lost). `reasons`
    counts the reasons of skipped and discarded steps. `unkept`: how many saves were not kept since
    a step was staged; `why_unkept`: the reason of the last one.
    """

    saves: int = 0
    staged: int = 0
    skipped: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    last_blocked_s: float = 0.0
    copy_s: float = 0.0
    last_copy_s: float = 0.0
    unkept: int = 0
    why_unkept: str = ""
    reasons: dict[str, int] = field(default_factory=dict)

    def note(self, reason: str) -> str:
        """Count a reason. Returns the name that it is counted under: the number of kinds is
        limited.
        """
        if reason not in self.reasons and len(self.reasons) >= _KINDS:
            reason = _OTHERS
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return reason

    def why_not(self) -> str:
        """Why steps were not kept, as text for an error message."""
        reasons = [f"{count} x {reason}" for reason, count in self.reasons.items()]
        return "; ".join(reasons) or "nothing was saved"
