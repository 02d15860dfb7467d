"""Waits until steps are staged, durable, committed or archived; the flush before an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keepstep.core.node import Flush, Settled
from keepstep.steps import State, StepId, Tier
from keepstep.wire.trainer import Flushed, Waited, WaitRequest
from keepstep_sidecar.api.saving import Saving
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.errors import refuse
from keepstep_sidecar.leases import Lease
from keepstep_sidecar.memory.slot_pool import SlotPool

_NEWEST = 2
"""Two: whatever dies between their seals, every rank has sealed one of the two."""


class StepWaits:
    """Long polls on the state of steps."""

    def __init__(
        self,
        saving: Saving,
        *,
        slots: SlotPool,
        committer: Committer,
        remote_tiers: RemoteTiers,
        changes: Changes,
    ) -> None:
        self._saving = saving
        self._slots = slots
        self._committer = committer
        self._node, self._images = committer.node, committer.images
        self._local_shards, self._remotes = committer.local_shards, committer.remotes
        self._remote_tiers = remote_tiers
        self._changes = changes
        self.awaited = 0
        """How many trainers wait for a commit now."""

    async def wait(self, request: WaitRequest) -> Waited:
        """Wait until the step has the state. Raises SidecarError `bad-request` for a wrong
        state."""
        lease = self._saving.leases.require(request.lease)
        reached = self._predicate(lease, request)
        if request.flush and not reached():
            self._committer.feed(Flush({request.id}))
        counters = self._saving.of(lease.rank)

        def settled() -> bool:
            # A step that could not be written is not tried again. Only a later step can help.
            failed = self._images.failed == request.id == counters.staged
            return reached() or failed or self._overtaken(lease.rank, request.id)

        deadline = time.monotonic() + request.timeout_s
        with self._counted(request.state):
            await self._changes.until(settled, timeout_s=request.timeout_s)
        if reached() and request.state == State.ARCHIVED:
            self._remote_tiers.want(request.id)
            return await self._archived(request.id, deadline - time.monotonic())
        if reached():
            return Waited(reached=True)
        if self._overtaken(lease.rank, request.id):
            reason = f"step {request.id} was overwritten by later ones before it was written"
            return Waited(reached=False, reason=reason, final=True)
        return Waited(reached=False, reason=self._missing(request.id))

    async def _archived(self, id: StepId, left_s: float) -> Waited:
        """Wait until the archive has all that it is to have of a committed step, which it was told
        of. This may not include the step: a step that is damaged here, or was deleted before its
        turn, is not sent."""
        deadline, tiers = time.monotonic() + max(0.0, left_s), self._remote_tiers
        if await tiers.drain(timeout_s=max(0.0, left_s), tier=Tier.ARCHIVE):
            if not tiers.archived(id):
                await tiers.look(anew=True)  # an earlier life may have brought it there
            if unknown := self._remotes.why_unknown(Tier.ARCHIVE):
                left_s = deadline - time.monotonic()
                await self._changes.until(lambda: tiers.archived(id), timeout_s=left_s)
            if tiers.archived(id):
                return Waited(reached=True)
            reason = (
                f"step {id} is not in the archive, and is not sent: a shard of it is damaged here,"
                " or was deleted before its turn (the sidecar's log tells); wait for a later step"
            )
            return Waited(reached=False, reason=unknown or reason, final=not unknown)
        archive = self._remote_tiers.statuses()[Tier.ARCHIVE]
        why = archive.trouble or f"{archive.backlog} shards are on their way"
        return Waited(reached=False, reason=f"the archive is behind: {why}")

    @contextmanager
    def _counted(self, state: str) -> Iterator[None]:
        """Count a wait for a commit: perhaps only the operator knows of that commit."""
        commits = int(state in (State.COMMITTED, State.ARCHIVED))
        self.awaited += commits
        if commits:
            self._changes.ring()
        try:
            yield
        finally:
            self.awaited -= commits

    def _predicate(self, lease: Lease, request: WaitRequest) -> Callable[[], bool]:
        rank, id = lease.rank, request.id
        try:
            state = State(request.state)
        except ValueError as error:
            raise refuse("bad-request", str(error)) from error
        if state is State.STAGED:
            return lambda: self._staged(rank, id)
        if state is State.DURABLE:
            return lambda: self._local_shards.was_durable(rank, id)
        if state is State.ARCHIVED and not self._remote_tiers.has(Tier.ARCHIVE):
            raise refuse("bad-request", "this sidecar has no archive; start it with --archive")
        return lambda: self._committer.was_committed(id)

    def _overtaken(self, rank: int, id: StepId) -> bool:
        """Whether the step is neither in memory nor on a volume, and never will be."""
        newest = self._saving.of(rank).staged
        later = newest is not None and newest.epoch == id.epoch and newest > id
        gone = later and not self._staged(rank, id) and not self._node.busy(id)
        return gone and not self._local_shards.was_durable(rank, id)

    def _staged(self, rank: int, id: StepId) -> bool:
        return (
            self._saving.of(rank).staged == id
            or self._slots.rank(rank).find(id) is not None
            or self._local_shards.holds(rank, id) is not None
        )

    def _missing(self, id: StepId) -> str:
        """Why the step has not reached the wanted state."""
        if self._images.trouble:
            return self._images.trouble
        if self._saving.unequal:
            return self._saving.unequal
        unstaged: list[int] = []
        unwritten: list[int] = []
        for rank in sorted(self._slots.here()):
            if self._local_shards.holds(rank, id) is None:
                (unwritten if self._staged(rank, id) else unstaged).append(rank)
        if unstaged:
            return f"step {id} was not staged, or not kept, by ranks {unstaged}"
        if unwritten:
            return f"step {id} is staged, but not yet durable for ranks {unwritten}"
        if self._committer.silent:
            return f"step {id} is durable here; nobody can tell whether it is on the other pods"
        return f"step {id} is durable here, but not committed: some rank of the run lacks it"

    async def until_committed(
        self, steps: tuple[StepId, ...], *, timeout_s: float
    ) -> StepId | None:
        """Wait until the last of these steps is committed or time is up. Returns the newest
        committed one of them; None if none is."""
        with self._counted(State.COMMITTED):
            await self._changes.until(
                lambda: self._committer.was_committed(steps[-1]), timeout_s=timeout_s
            )
        return max(filter(self._committer.was_committed, steps), default=None)

    async def flush(self, *, timeout_s: float) -> Flushed:
        """Make the newest two steps that all ranks here hold durable. Best effort, in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not await self._changes.until(lambda: self._local_shards.scanned, timeout_s=timeout_s):
            return Flushed(reason="the volumes are still being scanned")
        for rank, slots in self._slots.ranks.items():
            if not slots.settled and self._saving.leases.of(rank) is None:
                slots.settled = True  # its trainer never came back: the images are final
                self._committer.feed(Settled(rank))
        self._saving.plan_persists()
        self._committer.feed(Flush(newest=_NEWEST))
        wanted = self._node.kept_by_all()[-_NEWEST:]
        left_s = deadline - asyncio.get_running_loop().time()
        await self._changes.until(lambda: self._committer.idle, timeout_s=left_s)
        here, holds = self._slots.here(), self._local_shards.holds
        durable = tuple(id for id in wanted if all(holds(rank, id) is not None for rank in here))
        missing = [id for id in wanted if id not in durable]
        return Flushed(steps=durable, reason=self._missing(missing[-1]) if missing else "")

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until nothing is being written. Returns False when the time is up."""
        return await self._changes.until(lambda: self._committer.idle, timeout_s=timeout_s)
