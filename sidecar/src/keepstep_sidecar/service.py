"""The sidecar without its socket: puts the parts together, and begins and ends their work.

One event loop owns all state, so nothing here needs a lock; what blocks runs on threads of sized
executors and touches no state. The parts decide nothing either: states and choices are those of
`keepstep.slots`, `keepstep.persist` and `keepstep.ledger`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from keepstep.protocol import (
    Candidates,
    CandidatesRequest,
    Flushed,
    FlushRequest,
    Opened,
    OpenRequest,
    RestoredRequest,
    StopRequest,
)
from keepstep.schedule import Grid
from keepstep_sidecar.catalog import Catalog
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.config import Config
from keepstep_sidecar.journal import say
from keepstep_sidecar.maker import Maker
from keepstep_sidecar.persister import Persister
from keepstep_sidecar.problems import refuse
from keepstep_sidecar.progress import Progress
from keepstep_sidecar.restorer import Restorer
from keepstep_sidecar.slotkeeper import Slotkeeper
from keepstep_sidecar.tasks import Tasks
from keepstep_sidecar.trainers import Trainers
from keepstep_sidecar.volumes import VolumeSet

_FLUSH_AT_END_S = 25.0
"""Within the 30 s that Kubernetes gives a pod by default."""


class Service:
    """One run's sidecar on this machine."""

    def __init__(self, config: Config, volumes: VolumeSet, tasks: Tasks) -> None:
        self.config = config
        self.started_at = time.time()
        self.changes = Changes()
        self.ending = False
        self._tasks = tasks
        self._volumes = volumes
        self._names = ThreadPoolExecutor(1, thread_name_prefix="names")
        self._writers = ThreadPoolExecutor(len(volumes.volumes), thread_name_prefix="write")
        self.keeper = Slotkeeper(config.memory_dir, run=config.run)
        self.maker = Maker(config.memory_dir, self.changes)
        self.persister = Persister(
            self.keeper,
            grid=Grid(config.persist_base),
            executor=self._writers,
            changes=self.changes,
            spawn=tasks.spawn,
        )
        self.catalog = Catalog(
            volumes,
            self.keeper,
            keep=config.keep,
            executor=self._names,
            changes=self.changes,
            busy=self.persister.busy,
        )
        self.persister.catalog = self.catalog
        self.trainers = Trainers(
            config,
            keeper=self.keeper,
            catalog=self.catalog,
            persister=self.persister,
            maker=self.maker,
            changes=self.changes,
        )
        self.restorer = Restorer(
            self.keeper,
            self.catalog,
            changes=self.changes,
            loaders=len(volumes.volumes),
            grow=self.trainers.grow,
        )
        self.trainers.restorer = self.restorer
        self.progress = Progress(
            self.trainers,
            keeper=self.keeper,
            catalog=self.catalog,
            persister=self.persister,
            changes=self.changes,
        )

    # --- begin and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what is in memory, then look at the volumes and prefetch, in the background."""
        self.keeper.adopt_all()
        for file in self.keeper.files():
            self.maker.settle(file)
        for number in range(self.maker.threads):
            self._tasks.spawn(self.maker.run(), f"make slots {number}")
        self._tasks.spawn(self._look(), "scan")
        if self.config.linger_s is not None:
            self._tasks.spawn(self._linger(self.config.linger_s), "linger")

    async def _look(self) -> None:
        await self.catalog.scan()
        for slots in self.keeper.ranks.values():
            for bank in slots.banks.values():
                bank.table.forget(self.catalog.ledger.is_dead)
        self.keeper.protect_common()
        self.trainers.plan_persists()
        await self.restorer.prefetch()

    async def _linger(self, linger_s: float) -> None:
        def alone() -> bool:
            return len(self.trainers.leases) == 0

        while await self.changes.until(lambda: not alone(), timeout_s=linger_s):
            while not alone():
                await self.changes.until(alone, timeout_s=linger_s)
        say("nobody came back", linger_s=linger_s)
        await self.stop(StopRequest(drain=True, forget=True))

    async def terminate(self) -> None:
        """SIGTERM: make the newest two steps durable and end; memory stays for a successor."""
        if not self.ending:
            await self.flush(FlushRequest(timeout_s=_FLUSH_AT_END_S))
            self._end()

    async def stop(self, request: StopRequest) -> Flushed:
        """End this sidecar; `forget` frees its memory."""
        flushed = Flushed()
        if request.drain:
            flushed = await self.flush(FlushRequest(timeout_s=request.timeout_s))
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
        self.restorer.stop()
        for executor in (self._writers, self._names):
            executor.shutdown(wait=True, cancel_futures=True)
        self._volumes.close()

    def require_running(self) -> None:
        """Raises SidecarError `stopping` once the end has begun."""
        if self.ending:
            raise refuse("stopping", "this sidecar is ending; try again when another one is up")

    # --- restore -----------------------------------------------------------------------------

    async def candidates(self, request: CandidatesRequest) -> Candidates:
        """What the rank could restore. Raises SidecarError `starting` when the scan is not done."""
        lease = self.trainers.leases.require(request.lease)
        if not await self.changes.until(lambda: self.catalog.scanned, timeout_s=request.timeout_s):
            raise refuse("starting", "the volumes are still being scanned; ask again")
        return self.restorer.candidates(lease)

    async def open(self, request: OpenRequest) -> Opened:
        """Bring a step into a slot, verified; see `Restorer.open`."""
        lease = self.trainers.leases.require(request.lease)
        return await self.restorer.open(lease, request.id, timeout_s=request.timeout_s)

    async def restored(self, request: RestoredRequest) -> None:
        """All ranks agreed on this epoch. Durable on return."""
        lease = self.trainers.leases.require(request.lease)
        await self.catalog.start_epoch(request.epoch)
        self.restorer.let_go(lease.rank)
        dead = self.catalog.ledger.is_dead
        for bank in self.keeper.rank(lease.rank).banks.values():
            bank.table.forget(dead)
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

    # --- flush -------------------------------------------------------------------------------

    async def flush(self, request: FlushRequest) -> Flushed:
        """Make the newest two common steps durable."""
        flushed = await self.progress.flush(timeout_s=request.timeout_s)
        say("flushed", steps=[str(id) for id in flushed.steps], reason=flushed.reason)
        return flushed
