"""Which steps are sent to the archive, and in which order. Pure; what is committed is passed in.

Nothing is queued: what is missing is worked out anew from what is committed, what the archive holds
and what its retention keeps. So an archive that was down is caught up with by few uploads, however
long it was: what would be deleted again at once is never sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.retention import Retention, retired
from keepstep.steps import StepId


def due(id: StepId, *, every: int) -> bool:
    """The step lies on the archive's grid."""
    return id.step % every == 0


def missing(
    committed: Collection[StepId],
    archived: Collection[StepId],
    *,
    every: int,
    retention: Retention,
    written_at: Mapping[StepId, float] | None = None,
) -> tuple[StepId, ...]:
    """The steps to send now, oldest first: on the grid or pinned, and not retired by what follows.

    `committed`: those that could be sent, alive and still held here. `archived`: complete there.
    `written_at`: unix seconds of both, for `Retention.every_s`.
    """
    wanted = {id for id in committed if due(id, every=every) or id in retention.pinned}
    kept_out = retired(wanted.union(archived), retention, written_at=written_at)
    return tuple(sorted(wanted.difference(archived, kept_out)))


def newest_wanted(
    committed: Collection[StepId], *, every: int, retention: Retention
) -> StepId | None:
    """The newest step that the archive should have: what a trainer that closes waits for."""
    wanted = (id for id in committed if due(id, every=every) or id in retention.pinned)
    return max(wanted, default=None)
