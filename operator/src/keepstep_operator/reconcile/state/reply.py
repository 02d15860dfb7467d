"""What all sidecars of a run are told: watermarks, the plan, and the expendable steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from keepstep.leader.run_ledger import RunLedger
from keepstep.steps import StepId
from keepstep.wire.reports import ReportReply

NOBODY: Final = msgspec.Raw(b"[]")
_SMALL_WORLD: Final = 64
_OLD_S_A_RANK: Final = 0.001


def may_be_old_s(world: int | None) -> float:
    """The age, in seconds, up to which a result may be used again whose computation takes time for
    each rank."""
    return ((world or 0) - _SMALL_WORLD) * _OLD_S_A_RANK


@dataclass(frozen=True, kw_only=True)
class Reply(ReportReply):
    """A reply with the peers as JSON, which is encoded once for all pods of a run."""

    peers: msgspec.Raw = field(default_factory=lambda: NOBODY)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice as of `at`. `committed`: the watermark by tier. `commits`: all commits on local.
    `expendable`: steps on local that may be deleted. Steps are oldest first."""

    at: float
    committed: dict[str, StepId]
    commits: tuple[StepId, ...]
    plan: StepId | None
    expendable: tuple[StepId, ...]


class AdviceCache:
    """Keeps the advice of large runs for a moment. Computing it takes time for each rank, and a
    sidecar that hears it a second later loses nothing."""

    def __init__(self, host: RunLedger) -> None:
        self._ledger = host
        self._known: Advice | None = None

    def forget(self) -> None:
        """Compute the advice anew when next asked, because what it depends on has changed."""
        self._known = None

    def advise(self, *, at: float) -> Advice:
        """The present advice, or advice that is a little old."""
        known = self._known
        if known is None or not known.at <= at < known.at + may_be_old_s(self._ledger.world):
            known = self._known = self._work_out(at)
        return known

    def _work_out(self, at: float) -> Advice:
        return Advice(
            at=at,
            committed={str(tier): id for tier, id in self._ledger.watermarks().items()},
            commits=self._ledger.commits(),
            plan=self._ledger.plan(),
            expendable=self._ledger.expendable(),
        )
