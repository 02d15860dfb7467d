"""The steps' directories on this machine's volumes: the only place that publishes and deletes them.

The node decides (`Publish`, `Retire`). An action that fails, or whose step is in use, is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from keepstep.core.ledger import Retire
from keepstep.core.node import Full, Publish
from keepstep.errors import KeepstepError
from keepstep.steps import StepId
from keepstep_sidecar.commit.inventory import LocalShards, RemoteInventory
from keepstep_sidecar.concurrency import Changes, OnThread
from keepstep_sidecar.history import History
from keepstep_sidecar.log import say, warn


class StepDirectories:
    """`retired`: how many steps were deleted since the start. `evicted`: those of them that went
    because the volumes were full."""

    def __init__(
        self,
        local: LocalShards,
        remotes: RemoteInventory,
        *,
        blocking: OnThread,
        must_stay: Callable[[StepId], bool],
        choose: Callable[[Full], Iterable[StepId]],
        keep: str,
        history: History,
        changes: Changes,
    ) -> None:
        """`must_stay`: whether a step is in use now. `choose`: the steps that go to make room.
        `keep`: what the policy keeps, for people."""
        self.retired = self.evicted = 0
        self._local = local
        self._remotes = remotes
        self._blocking = blocking
        self._must_stay = must_stay
        self._choose = choose
        self._keep = keep
        self._history = history
        self._changes = changes
        self._turn = asyncio.Lock()

    async def carry_out(self, actions: Iterable[Publish | Retire]) -> None:
        """Publish and delete steps that lie here."""
        async with self._turn:
            here = [action for action in actions if action.id in self._local.shards]
            for action in here:
                if isinstance(action, Publish):
                    await self._publish(action.id)
            # Before any deletion: the same reply that tells of a commit may retire the step.
            self._remotes.wake()
            for action in here:
                if isinstance(action, Retire) and not self._must_stay(action.id):
                    await self._retire(action.id)

    async def make_room(self, size_bytes: int, *, retired: int) -> bool:
        """Make room for `size_bytes`: delete copies kept for other pods, else the fewest steps that
        nobody needs. False if there was nothing to delete.

        `retired`: the count of retired steps when the failed write began. If the count is higher
        now, there may be room again.
        """
        if await self._remotes.make_room(size_bytes):
            return True
        async with self._turn:
            if self.retired != retired:
                return True
            missing = size_bytes - await self._blocking(self._local.volumes.free_bytes)
            doomed = list(self._choose(Full(missing, self._local.sizes)))
            for id in doomed:
                warn("evicted", step=str(id), reason="the volumes are full", keep=self._keep)
            for id in doomed:
                await self._retire(id)
                self._history.evicted(id)
            self.evicted += len(doomed)
            return bool(doomed)

    async def _publish(self, id: StepId) -> None:
        made_of = [shard.path for shard in self._local.shards.get(id, {}).values()]
        if not made_of:  # a scan in between no longer found it
            return
        try:
            path = await self._blocking(lambda: self._local.volumes.publish(id, made_of=made_of))
        except KeepstepError as error:
            warn("not published", step=str(id), reason=str(error))
            return
        if path is None:
            return
        self._local.show(id, path)
        self._history.committed(id)
        self._changes.ring()

    async def _retire(self, id: StepId) -> None:
        self._local.drop(id)
        self._remotes.wake()
        try:
            freed = await self._blocking(lambda: self._local.volumes.retire(id))
        except KeepstepError as error:
            warn("not retired", step=str(id), reason=str(error))
            return
        self.retired += 1  # not earlier: a write that found no room before this must still make it
        say("retired", level=logging.DEBUG, step=str(id), bytes=freed)
