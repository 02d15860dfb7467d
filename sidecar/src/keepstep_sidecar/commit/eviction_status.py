"""What people are told of steps deleted because the volumes were full; `core.node` chooses them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepstep.core.retention import Retention
from keepstep.steps import StepId
from keepstep_sidecar.log import warn


@dataclass
class EvictionStatus:
    """`keep`: what the policy keeps. `count`: steps evicted since the start.

    `short`: the volumes have no room for all steps that the policy keeps.
    """

    keep: Retention
    count: int = 0
    short: bool = False

    def note(self, ids: Collection[StepId]) -> None:
        """These steps are about to be deleted. The caller adds them to `count` once they are."""
        self.short = self.short or bool(ids)
        for id in ids:
            warn("evicted", step=str(id), reason="the volumes are full", keep=str(self.keep))

    def see(self, *, committed: int) -> None:
        """`committed`: how many committed steps lie on the volumes. When there is one more than the
        policy keeps, the shortage is over.

        This does not hold when the policy keeps more than the last steps: the number of kept steps
        then grows, and the volumes soon run short again.
        """
        if committed > self.keep.last and self.keep.every is None:
            self.short = False

    @property
    def warning(self) -> str:
        """A warning for people; '' while everything that the policy keeps fits on the volumes."""
        if not self.short:
            return ""
        return (
            f"the volumes are full: not all committed steps that the policy keeps ({self.keep}) fit"
            " on them, the oldest go early. Raise the capacity or keep fewer steps"
        )
