"""Whether the run's leader answers, and a record of what it said about the whole run.

The record is for a later sidecar that cannot ask. Published directories also tell of commits. But
the record serves a pod that has lost its shards, and it keeps pins, which no shard tells of.
"""

from __future__ import annotations

import time
from dataclasses import replace

from keepstep.core.node import LastReply, LeaderView
from keepstep.core.restore_vote import NEVER
from keepstep.errors import StorageError
from keepstep.steps import StepId
from keepstep_sidecar.commit.reachable_copies import LocalShards
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.log import warn


class ReportingState:
    """How reporting to the run's leader goes.

    `tried_at`: when a report first succeeded or failed, on the monotonic clock. `replied_at`: time
    of the newest answer, in Unix seconds. `failing`: the last report was not answered. `finishing`:
    the last report is to be sent now. `ended`: it was sent.
    """

    def __init__(self, changes: ChangeNotifier) -> None:
        self.tried_at = NEVER
        self.replied_at: float | None = None
        self.finishing = False
        self.ended = False
        self.failing = False
        self._changes = changes

    async def send_last_report(self, *, timeout_s: float) -> None:
        """Have the last report sent at once, out of turn. Returns within `timeout_s`."""
        self.finishing = True
        self._changes.ring()
        await self._changes.until(lambda: self.ended, timeout_s=timeout_s)


_EVERY_S = 10.0
"""A new commit is recorded at most this often; a new pin at once."""


class LeaderReplyRecorder:
    """Records on the volumes what the leader said."""

    def __init__(self, leader_view: LeaderView, local: LocalShards) -> None:
        """Gives `leader_view` what an earlier sidecar recorded."""
        record = local.run_record
        leader_view.remember(LastReply(commit=record.committed, pinned=record.pinned))
        self._run_view = leader_view
        self._local = local
        self._noted = self._word
        self._noted_at = -_EVERY_S

    async def take(self, *, at_once: bool) -> None:
        """Record what the leader said; a mere new commit at most every `_EVERY_S` seconds."""
        (commit, pinned), now = self._word, time.monotonic()
        due = at_once or pinned != self._noted[1] or now - self._noted_at >= _EVERY_S
        if (commit, pinned) == self._noted or not due:
            return
        self._noted_at = now
        try:
            await self._local.update_run_record(
                lambda record: replace(record, committed=commit, pinned=pinned)
            )
        except StorageError as error:
            warn("record.commit_not_written", step=str(commit), error=str(error))
        self._noted = commit, pinned  # not before: a write that was cancelled is made again

    @property
    def _word(self) -> tuple[StepId | None, frozenset[StepId]]:
        """The commit, which a machine alone finds on its own volumes, and the pins."""
        view = self._run_view
        return None if view.alone else view.commit, view.last_reply.pinned
