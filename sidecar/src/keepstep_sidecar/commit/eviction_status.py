"""What is said of steps that went because the volumes were full; `core.node` says which do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepstep.core.retention import Retention
from keepstep.steps import StepId
from keepstep_sidecar.log import warn


@dataclass
class EvictionStatus:
    """`keep`: what the policy keeps. `count`: steps evicted since the start.

    `short`: the volumes have no room for so many.
    """

    keep: Retention
    count: int = 0
    short: bool = False

    def note(self, ids: Collection[StepId]) -> None:
        """These steps are about to go. The caller counts them when they are gone: whoever finds no
        room until then must not take them for room that was made."""
        self.short = self.short or bool(ids)
        for id in ids:
            warn("evicted", step=str(id), reason="the volumes are full", keep=str(self.keep))

    def see(self, *, committed: int) -> None:
        """So many committed steps lie on the volumes: with one to spare, there is room again.

        Not where the policy keeps more than the last ones: that grows, and is short again soon.
        """
        if committed > self.keep.last and self.keep.every is None:
            self.short = False

    @property
    def warning(self) -> str:
        """For a person; '' while everything that the policy keeps has room."""
        if not self.short:
            return ""
        return (
            f"the volumes are full: not all committed steps that the policy keeps ({self.keep}) fit"
            " on them, the oldest go early. Raise the capacity or keep fewer steps"
        )
