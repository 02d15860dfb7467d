"""What a sidecar knows of the whole run beyond its own ranks: what the operator told it.

The operator's word saves and frees: it publishes commits, names the step to fetch ahead of time,
allows deletion. It is never needed to restore (the ranks' vote decides) nor to go on training, and
while it is silent this sidecar deletes only what lies between the last known commit and its own
newest steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from keepstep.core.retention import crowded_out, unwatched
from keepstep.errors import StorageError
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.volume_set import VolumeSet

SILENT_AFTER_S = 60.0
"""Two of the operator's usual report intervals."""


class RunView:
    """`told`: there is somebody to tell, who decides what is kept. `commit`: the last one heard of,
    from whatever life of this sidecar. `commits`: those that it holds, by the newest answer."""

    def __init__(self, *, told: bool, clock: Callable[[], float]) -> None:
        self.told = told
        self.heard = False
        self.commit: StepId | None = None
        self.commits: frozenset[StepId] = frozenset()
        self.memory: StepId | None = None
        self.plan: StepId | None = None
        self.pinned: frozenset[StepId] = frozenset()
        self._retire: frozenset[StepId] = frozenset()
        self._clock = clock
        self._heard_at = clock()

    @property
    def word(self) -> tuple[StepId | None, frozenset[StepId]]:
        """What a later sidecar of this place must know: the last commit, and the pins."""
        return self.commit, self.pinned

    @property
    def pins_known(self) -> bool:
        """Whether the operator has said in this life of the sidecar which steps stay."""
        return self.heard or not self.told

    def remember(self, commit: StepId | None) -> None:
        """What an earlier sidecar wrote down."""
        if commit is not None:
            self.commit = max(commit, self.commit or commit)

    def hear(self, reply: ReportReply) -> None:
        """The operator has answered. One that has just started may not know what we know."""
        self._heard_at, self.heard = self._clock(), True
        self.remember(reply.committed.get(str(Tier.LOCAL)))
        self.commits = frozenset(reply.commits)
        self.memory = reply.committed.get(str(Tier.MEMORY))
        self.plan = reply.plan
        self.pinned = frozenset(reply.pinned)
        self._retire = frozenset(reply.retire)

    @property
    def silent(self) -> bool:
        """Nobody was there to tell for too long."""
        return self.told and self._clock() - self._heard_at > SILENT_AFTER_S

    def retired(self, held: Iterable[StepId]) -> list[StepId]:
        """The steps of `held` that the operator wants deleted, oldest first.

        Never one that is not older than the last commit: no operator rightly asks for that.
        """
        return sorted(
            id
            for id in held
            if id in self._retire
            and id not in self.pinned
            and self.commit is not None
            and id < self.commit
        )

    def unwatched(self, held: Iterable[StepId], *, commit: StepId | None) -> list[StepId]:
        """What may go while nobody is there to tell."""
        return [id for id in unwatched(held, last_commit=commit) if id not in self.pinned]

    def crowded_out(self, held: Iterable[StepId], *, commit: StepId | None) -> list[StepId]:
        """What may go because the volume is full."""
        return list(crowded_out(held, last_commit=commit, pinned=self.pinned))


# --- what the operator said, on record -------------------------------------------------------
#
# What somebody said of the whole run, noted in the run's record: for a successor that cannot ask.
#
# Published directories tell of commits, too; the note is for the pod that has lost its shards,
# and for pins, which no shard tells of.


_EVERY_S = 10.0
"""A new commit is noted that often; a new pin at once."""


class Notes:
    """`blocking`: runs a blocking call on the thread that changes names on the volumes."""

    def __init__(
        self,
        run_view: RunView,
        volumes: VolumeSet,
        blocking: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> None:
        """What an earlier sidecar has noted is known to `run_view` afterwards."""
        run_view.remember(volumes.last_commit())
        run_view.pinned = volumes.pinned()
        self._overview = run_view
        self._volumes = volumes
        self._blocking = blocking
        self._noted = run_view.word
        self._noted_at = -_EVERY_S

    async def take(self, *, at_once: bool) -> None:
        """Note what was heard, not too often."""
        (commit, pinned), now = self._overview.word, time.monotonic()
        due = at_once or pinned != self._noted[1] or now - self._noted_at >= _EVERY_S
        if commit is None or (commit, pinned) == self._noted or not due:
            return
        self._noted, self._noted_at = (commit, pinned), now
        try:
            await self._blocking(lambda: self._volumes.save_word(commit, pinned))
        except StorageError as error:
            warn("commit not noted", step=str(commit), reason=str(error))
