"""What is believed of the archive: each rank's own pod knows all of it, others tell the newest.

The pods of the first and of the last rank tell of all ranks, but for a large run of the newest
steps only. That must not make the older ones look gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from keepstep.core.ledger import Held
from keepstep.wire.reports import Report, ReportedRank
from keepstep_operator.reconcile.places import kept


class Archived:
    """What was last believed of each rank, also when its pod is gone."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Held, ...]] = {}

    def believed(self, report: Report, *, heard: Collection[int]) -> Report:
        """The report as the ledger should hear it. `heard`: ranks whose own pods are there and have
        told of the archive themselves."""
        return replace(report, ranks=tuple(self._believed(one, heard) for one in report.ranks))

    def _believed(self, one: ReportedRank, heard: Collection[int]) -> ReportedRank:
        if one.archive_answer is None:
            return one
        if kept(one):
            if one.rank in heard:
                return replace(one, archive=(), archive_answer=None)
            one = replace(one, archive=(*self._older(one), *one.archive))
        self._known[one.rank] = one.archive
        return one

    def _older(self, one: ReportedRank) -> tuple[Held, ...]:
        """Known, and too old to be named by a pod that names the newest."""
        if not one.archive:
            return ()
        oldest = min(held.id for held in one.archive)
        return tuple(held for held in self._known.get(one.rank, ()) if held.id < oldest)
