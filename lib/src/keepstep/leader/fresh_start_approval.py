"""A person's word on a start at step 0: that one was right, or that the next one may be. Pure."""

from __future__ import annotations

import contextlib
from typing import Final

from keepstep.leader.run_ledger import RunLedger
from keepstep.steps import EpochId

ALLOW: Final = "allow"
"""Begin at step 0 if no step can be restored. Else, the word is an epoch, or `newest`."""
NEWEST_S: Final = 120.0
"""How long `newest` waits for the reports that show which epoch it means. It must not acknowledge a
later one."""


class FreshStartApproval:
    """`asked`: the word. `acknowledged`: the epoch that it meant, once that is known."""

    def __init__(self) -> None:
        self.asked = ""
        self.acknowledged: EpochId | None = None
        self._until: float | None = None
        self._after: int | None = None
        """The newest epoch's number when a person allowed a start at step 0; None: nobody did."""
        self._began: EpochId | None = None
        """The epoch that then began at step 0, as long as it has no step that all ranks hold."""

    def apply_request(self, text: str, ledger: RunLedger, *, at: float) -> None:
        """The present word."""
        if text == self.asked:
            return
        self.asked, self.acknowledged = text, None
        self._until = at + NEWEST_S if text else None
        current = ledger.core.lineage.current_epoch
        self._after = (current.number if current else 0) if text == ALLOW else None

    @property
    def is_allowed(self) -> bool:
        """Whether to begin at step 0 if no step can be restored: until an epoch begins and, if it
        began at step 0, until that has a commit."""
        return self._after is not None or self._began is not None

    def acknowledge_fresh_start(self, ledger: RunLedger, *, at: float) -> None:
        """Acknowledge the start that was meant, once it is known."""
        current, fresh = ledger.core.lineage.current_epoch, ledger.core.lineage.fresh
        if self._began is not None and ledger.find_newest_restorable_step() is not None:
            self._began = None
        after = self._began.number if self._began else self._after
        if after is not None:
            if current is not None and current.number > after:
                self._begun(ledger, after=after, current=current)
            return
        if self._until is None:
            return
        with contextlib.suppress(ValueError):
            fresh = EpochId.parse(self.asked)
        if fresh is not None:
            self._until, self.acknowledged = None, fresh
            ledger.acknowledge_fresh_start(fresh)
        elif at > self._until:
            self._until = None

    def _begun(self, ledger: RunLedger, *, after: int, current: EpochId) -> None:
        """An epoch has begun since the word: that was for one start."""
        self._after = self._began = self._until = None
        self.acknowledged, fresh = current, ledger.core.lineage.fresh
        if fresh is not None and fresh.number > after:
            self._began = fresh
            ledger.acknowledge_fresh_start(fresh)
