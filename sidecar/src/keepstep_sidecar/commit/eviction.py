"""What goes when the volumes are full: as few steps as make room, the least wanted ones first.

Who may go at all is not decided here: the ledger (or the operator's word) says which copies are
expendable, and that never includes the newest commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from keepstep.core.retention import Retention, evicted
from keepstep.steps import StepId
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.scan import LocalShard


@dataclass
class Evictions:
    """`keep`: what the policy keeps. `count`: steps evicted since the start.

    `short`: the volumes have no room for so many.
    """

    keep: Retention
    count: int = 0
    short: bool = False

    def choose(
        self,
        shards: Mapping[StepId, Mapping[int, LocalShard]],
        expendable: Collection[StepId],
        *,
        unfinished: Collection[StepId],
        missing_bytes: int,
        written_at: Mapping[StepId, float],
    ) -> tuple[StepId, ...]:
        """Which steps to delete, so that `missing_bytes` come free; at least one if any may go.

        The file system may count otherwise than we do: whoever still finds no room asks again.
        """
        sizes = {id: sum(one.size_bytes for one in held.values()) for id, held in shards.items()}
        spared = frozenset(sizes.keys() - set(expendable))
        return evicted(
            sizes,
            replace(self.keep, pinned=spared),
            limit_bytes=sum(sizes.values()) - max(1, missing_bytes),
            unfinished=unfinished,
            written_at=written_at,
        )

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
