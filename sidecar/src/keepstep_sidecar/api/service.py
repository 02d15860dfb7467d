"""The sidecar without its socket: puts the parts together, and begins and ends their work.

One event loop owns all state, so nothing here needs a lock; what blocks runs on threads of sized
executors and touches no state. The parts decide nothing either: states and choices are those of
`keepstep.core.slot_table`, `keepstep.core.persist_planner` and `keepstep.core.ledger`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from keepstep.core.candidates import Candidates
from keepstep.core.readiness import NEVER, View
from keepstep.core.schedule import Grid
from keepstep.errors import StorageError
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import ReportedRestore, ReportReply
from keepstep.wire.trainer import (
    CandidatesRequest,
    Flushed,
    FlushRequest,
    Opened,
    OpenRequest,
    OwnerRequest,
    RestoredRequest,
    StopRequest,
)
from keepstep_sidecar.api.saving import Trainers
from keepstep_sidecar.api.waiting import Progress, Votes
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.commit.inventory import Remotes
from keepstep_sidecar.commit.persister import Persister
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import Changes, Tasks
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.errors import refuse
from keepstep_sidecar.leases import Owner
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.allocator import Allocator
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.restore.chunks import Windows
from keepstep_sidecar.restore.fetch import Fetcher
from keepstep_sidecar.restore.prefetch import Loader
from keepstep_sidecar.restore.restorer import Restorer
from keepstep_sidecar.restore.sources import Reads
from keepstep_sidecar.tiers.source import LocalReader
from keepstep_sidecar.tiers.tier import Depot
from keepstep_sidecar.volume.volume_set import VolumeSet

_LAST_WORD_S = 3.0
"""How long the last report may take: after the flush, within the grace period."""

_IN_THE_POD = (Tier.MEMORY, Tier.LOCAL)

_RESTORES_KEPT = 16

_WATCH_S = 1.0
"""How often it is seen whether directories and slots are still there."""

_LONGEST_PAUSE_S = 60.0
"""Between scans that fail."""

_RESCUE_S = 10.0
"""How long images in slots without names may take to their volume, before they are given up."""


class Reports(Protocol):
    """Whoever tells the operator. `tried_at`: when that first succeeded or failed, of the monotonic
    clock. `heard_at`: the newest answer, Unix seconds."""

    tried_at: float
    heard_at: float | None

    async def run(self) -> None:
        """Report until `finish`."""

    async def finish(self, *, timeout_s: float) -> None:
        """Send the last report."""


class Service:
    """One run's sidecar on this machine."""

    def __init__(
        self, config: Config, volumes: VolumeSet, tasks: Tasks, depots: Sequence[Depot] = ()
    ) -> None:
        self.config = config
        self.started_at = time.time()
        self.changes = Changes()
        self.ending = False
        self.flushing = False
        self.restores: list[ReportedRestore] = []
        self.owner = Owner(self.changes)
        self.reporter: Reports | None = None
        self._tasks = tasks
        self._volumes = volumes
        self._names = ThreadPoolExecutor(1, thread_name_prefix="names")
        self._writers = [
            ThreadPoolExecutor(1, thread_name_prefix=f"write-{number}")
            for number, _ in enumerate(volumes.volumes)
        ]
        self._loads = ThreadPoolExecutor(len(volumes.volumes), thread_name_prefix="load")
        self._chunks = ThreadPoolExecutor(
            len(volumes.volumes) * config.io_threads, thread_name_prefix="chunk"
        )
        self.keeper = SlotPool(config.memory_dir, run=config.run)
        self.maker = Allocator(config.memory_dir, self.changes)
        self.persister = Persister(
            self.keeper,
            grid=Grid(config.persist_base),
            executors=self._writers,
            changes=self.changes,
            spawn=tasks.spawn,
        )
        self.committer = Committer(
            volumes,
            self.keeper,
            keep=config.keep,
            executor=self._names,
            changes=self.changes,
            busy=self.persister.busy,
            reader=LocalReader(volumes, loads=self._loads, chunks=self._chunks),
            remotes=Remotes(depots),
            told=config.reporting is not None,
            wish=config.wish,
        )
        self.persister.committer = self.committer
        self.beyond = RemoteTiers(self.committer, self.changes)
        self.trainers = Trainers(
            config,
            keeper=self.keeper,
            committer=self.committer,
            persister=self.persister,
            maker=self.maker,
            changes=self.changes,
        )
        nearest = Fetcher(self.keeper, self.committer)
        self.reads = Reads(self.keeper, self.committer, self.trainers.leases, nearest)
        self.windows = Windows(
            self.keeper,
            self.trainers.leases,
            nearest,
            memory_dir=config.memory_dir,
            limit_bytes=config.memory_limit_bytes,
        )
        self.restorer = Restorer(
            self.keeper,
            self.committer,
            Loader(
                self.keeper,
                self.committer,
                nearest,
                changes=self.changes,
                grow=self.trainers.grow,
                leased=lambda rank: self.trainers.leases.of(rank) is not None,
            ),
            self.reads,
            self.windows,
            changes=self.changes,
            restores=self.trainers.restores,
        )
        self.trainers.restorer = self.restorer
        self.votes = Votes(self._vote_view, self.beyond.look, self.changes)
        self.progress = Progress(
            self.trainers,
            keeper=self.keeper,
            committer=self.committer,
            persister=self.persister,
            beyond=self.beyond,
            changes=self.changes,
        )

    # --- begin and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what is in memory, then look at the volumes and prefetch, in the background."""
        self.windows.start()
        self.keeper.adopt_all()
        for file in self.keeper.files():
            self.maker.settle(file)
        for number in range(self.maker.threads):
            self._tasks.keep(self.maker.run, f"make slots {number}")
        self._tasks.keep(self._look, "scan")
        self._tasks.keep(self._watch_volumes, "watch volumes")
        self.beyond.start(self._tasks, self.restorer.prefetch)
        if self.reporter is not None:
            self._tasks.keep(self.reporter.run, "report")
        if self.config.owner_pid is not None:
            self.owner.watch(self.config.owner_pid)
        if self.config.linger_s is not None:
            self._tasks.keep(functools.partial(self._linger, self.config.linger_s), "linger")

    async def _look(self) -> None:
        """Scan the volumes; a scan that fails is repeated, less and less often."""
        pause_s = _WATCH_S
        await self._look_once()
        while self.committer.scan_failed:
            warn("scan failed", reason=self.committer.scan_failed, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._look_once()

    async def _look_once(self) -> None:
        await self.committer.scan()
        for slots in self.keeper.ranks.values():
            for slot_set in slots.slot_sets.values():
                slot_set.table.forget(self.committer.ledger.is_dead)
        self.keeper.protect_common()
        self.trainers.plan_persists()
        await self.restorer.prefetch()

    async def _watch_volumes(self) -> None:
        """Make a run's directory again that somebody removed, so that the next step is kept."""
        trouble = ""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                mended = self.committer.scanned and await self.committer.blocking(
                    self._volumes.mend
                )
            except StorageError as error:
                if str(error) != trouble:
                    warn("volume lost", reason=str(error))
                trouble = str(error)
                continue
            trouble = ""
            if mended:
                warn("volume made anew", reason="somebody removed the run's directory")
                self.persister.plan_anew()
                await self._look()

    async def mend_memory(self) -> None:
        """Make slots again that somebody removed or truncated, so that the next step is kept.

        Images that have lost only their names are made durable first. A trainer's lease ends: it
        comes back at once, and maps nothing any more that it had.
        """
        if not (damaged := self.keeper.damaged()):
            return
        for slots in damaged:
            self.keeper.drop_damaged(slots, cut_off_only=True)
        if any(slots.sealed() for slots in damaged):
            await self.progress.flush(timeout_s=_RESCUE_S)
        if self.ending:
            return
        for slots in damaged:
            self.keeper.make_directory(slots.rank)
            self.keeper.drop_damaged(slots)
            lease = self.trainers.leases.of(slots.rank)
            if lease is not None and lease.training:  # one that restores fills no slot yet
                self._tasks.spawn(self.trainers.ended(lease), f"memory of rank {slots.rank} lost")
            for slot_set in slots.slot_sets.values():
                self.maker.fill(slot_set)
        self.changes.ring()

    async def _linger(self, linger_s: float) -> None:
        def alone() -> bool:
            return len(self.trainers.leases) == 0 and not self.owner.present

        while await self.changes.until(lambda: not alone(), timeout_s=linger_s):
            while not alone():
                await self.changes.until(alone, timeout_s=linger_s)
        say("nobody came back", linger_s=linger_s)
        await self.stop(StopRequest(drain=True, forget=True))

    async def terminate(self) -> None:
        """SIGTERM: make the newest two steps durable and end; memory stays for a successor."""
        if not self.ending:
            started = time.monotonic()
            await self.flush(FlushRequest(timeout_s=self.config.flush_timeout_s))
            left_s = self.config.flush_timeout_s - (time.monotonic() - started)
            await self.beyond.drain(timeout_s=max(0.0, left_s), whole=False)
            await self._last_word()
            self._end()

    async def _last_word(self) -> None:
        """Tell the operator what the flush has made durable, and note what it answers."""
        if self.reporter is not None:
            await self.reporter.finish(timeout_s=_LAST_WORD_S)
            await self.committer.notes.take(at_once=True)

    async def stop(self, request: StopRequest) -> Flushed:
        """End this sidecar; `forget` frees its memory."""
        flushed = Flushed()
        if request.drain:
            flushed = await self.flush(FlushRequest(timeout_s=request.timeout_s))
            await self.beyond.drain(timeout_s=request.timeout_s)
        await self._last_word()
        if request.forget:
            await self.progress.drain(timeout_s=request.timeout_s)
            await asyncio.to_thread(self.maker.stop)
            self.keeper.forget_all()
        self._end()
        return flushed

    def _end(self) -> None:
        self.ending = True
        self.changes.ring()

    async def ended(self) -> None:
        """Return when it is time to close the socket."""
        while not self.ending:
            await self.changes.until(lambda: self.ending, timeout_s=3600.0)

    def close(self) -> None:
        """Wait for what is being written, then let go of threads and volumes. Blocks."""
        self.maker.stop()
        self.windows.stop()
        for executor in (self._loads, self._chunks, *self._writers, self._names):
            executor.shutdown(wait=True, cancel_futures=True)
        self._volumes.close()

    def require_running(self) -> None:
        """Raises SidecarError `stopping` once the end has begun."""
        if self.ending:
            raise refuse("stopping", "this sidecar is ending; try again when another one is up")

    def own(self, request: OwnerRequest) -> None:
        """Somebody else stands for this run from now on; see `Owner`."""
        self.owner.watch(request.pid)

    async def obey(self, reply: ReportReply) -> None:
        """What the operator answered to a report. A plan is fetched ahead of time, meanwhile."""
        before = self.committer.run_view.plan
        await self.committer.hear(reply)
        self.beyond.meet(
            reply.peers, self._tasks.spawn, awaits=reply.awaits, complete=reply.all_peers
        )
        if reply.plan is not None and reply.plan != before and self.committer.scanned:
            self._tasks.spawn(self.restorer.prefetch(), "prefetch")

    # --- restore -----------------------------------------------------------------------------

    def _vote_view(self, rank: int) -> View:
        held = any(one.tier in _IN_THE_POD for one in self.restorer.held(rank).values())
        heard_at = -NEVER if self.reporter is None else self.reporter.tried_at
        return self.beyond.view(held=held, heard_at=heard_at)

    async def candidates(self, request: CandidatesRequest) -> Candidates:
        """What the rank could restore. Raises SidecarError `starting` when the scan is not done."""
        lease = self.trainers.leases.require(request.lease)
        await self.votes.ready(lease.rank, timeout_s=request.timeout_s)
        if not self.committer.scanned:
            raise refuse("starting", "the volumes are still being scanned; ask again")
        return self.restorer.candidates(lease)

    async def open(self, request: OpenRequest) -> Opened:
        """Bring a step into a slot, verified; see `Restorer.open`."""
        lease = self.trainers.leases.require(request.lease)
        return await self.restorer.open(
            lease, request.id, timeout_s=request.timeout_s, bad=request.bad
        )

    async def restored(self, request: RestoredRequest) -> None:
        """All ranks agreed on this epoch. Durable on return."""
        lease = self.trainers.leases.require(request.lease)
        lost = self._beyond(lease.rank, request.epoch.parent)
        await self.committer.start_epoch(request.epoch)
        lease.training = True
        self._note_restore(lease.rank, request, lost)
        self.restorer.let_go(lease.rank)
        dead = self.committer.ledger.is_dead
        for slot_set in self.keeper.rank(lease.rank).slot_sets.values():
            slot_set.table.forget(dead)
        self.persister.forget(dead)
        say(
            "restored",
            rank=lease.rank,
            epoch=str(request.epoch.id),
            seconds=request.seconds,
            step=request.epoch.parent and str(request.epoch.parent),
            tier=request.tier and str(request.tier),
        )
        self.changes.ring()

    def _note_restore(self, rank: int, request: RestoredRequest, lost: int) -> None:
        noted = ReportedRestore(
            rank=rank,
            epoch=self.committer.ancestry.named(request.epoch),
            tier=request.tier,
            seconds=request.seconds,
            at=time.time(),
            lost_steps=lost,
        )
        others = [
            one for one in self.restores if (one.rank, one.epoch.id) != (rank, request.epoch.id)
        ]
        self.restores = [*others, noted][-_RESTORES_KEPT:]

    def _beyond(self, rank: int, parent: StepId | None) -> int:
        """How many steps the rank had staged here beyond the one that it goes on from."""
        known = {*self.keeper.rank(rank).sealed(), self.trainers.of(rank).staged}
        known |= {id for id, held in self.committer.shards.items() if rank in held}
        if parent is None:
            return 0
        later = [id.step for id in known if id is not None and id.epoch == parent.epoch]
        return max(0, max(later, default=0) - parent.step)

    # --- flush -------------------------------------------------------------------------------

    async def flush(self, request: FlushRequest) -> Flushed:
        """Make the newest two common steps durable."""
        self.flushing = True
        try:
            with self._volumes.pace.lifted():
                flushed = await self.progress.flush(timeout_s=request.timeout_s)
        finally:
            self.flushing = False
        say("flushed", steps=[str(id) for id in flushed.steps], reason=flushed.reason)
        return flushed
