"""The sidecar without its socket: starts and ends the work of its parts.

One event loop owns all state, so nothing here needs a lock. Blocking calls run on threads of sized
executors and touch no state. The parts make no decisions either: `keepstep.core.node` does.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from keepstep.core.node import RanksServed
from keepstep.errors import StorageError
from keepstep.steps import StepId, Tier
from keepstep.wire.member_reports import ReportReply
from keepstep.wire.trainer import (
    Flushed,
    FlushRequest,
    RegisterOwnerRequest,
    StopSidecarRequest,
    UnseenHugePagesRequest,
)
from keepstep_sidecar.api.pinning import PinHandlers
from keepstep_sidecar.api.restoring import RestoreHandlers
from keepstep_sidecar.api.saving import SaveHandlers, StepLongPoll
from keepstep_sidecar.commit.leader_state_record import ReportingState
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import Tasks, run_on_detached_thread
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.leases import OwnerProcessWatcher
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.memory.slot_allocator import SLOTS
from keepstep_sidecar.restore.chunk_buffers import ChunkBuffers
from keepstep_sidecar.restore.sources import ImageSourceHandlers
from keepstep_sidecar.volume.history_file import HistoryFile
from keepstep_sidecar.volume.volume import VolumeSet

_LAST_WORD_S = 3.0
"""How long the last report may take, and the last write of the history. Both come after the flush,
within the grace period."""

_COMMIT_S = 10.0
"""How long a pod that ends waits for its last step to be committed before it archives the step."""

_WATCH_S = 1.0
"""How often to check that directories and slots still exist."""

_NOTICE_S = 0.2

_LONGEST_PAUSE_S = 60.0
"""The longest pause between scans that fail."""

_RESCUE_S = 10.0
"""How long images in slots without names may take to their volume before they are given up."""


@dataclass(eq=False, kw_only=True)
class SidecarService:
    """One run's sidecar on this machine. `app.build` makes the parts."""

    tasks: Tasks
    leader: ReportingState
    volumes: VolumeSet
    executors: tuple[ThreadPoolExecutor, ...]
    owner: OwnerProcessWatcher
    remote_tiers: RemoteTiers
    image_sources: ImageSourceHandlers
    chunk_buffers: ChunkBuffers
    saving: SaveHandlers
    restoring: RestoreHandlers
    step_waits: StepLongPoll
    pinning: PinHandlers
    history_file: HistoryFile
    run_warnings: Callable[[], Iterable[str]] = tuple
    started_at: float = field(default_factory=time.time)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It is time to close the socket."""
    no_metrics: str = ""
    """Why metrics are not served although they should be; '' when all is well."""
    leaves: bool = False
    """The pod is being deleted, or this sidecar ends: until a trainer comes."""
    _closing: bool = False
    _arrived: int = 0
    """How often a trainer or an owner of the run has come."""
    _repairing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _outliving: bool = False
    _outlived: StepId | None = None

    def __post_init__(self) -> None:
        saving = self.saving
        self.config, self.changes, self.history = saving.config, saving.changes, saving.history
        self.leases, self.slots, self.allocator = saving.leases, saving.slots, saving.allocator
        self.restoring.repair = self.repair_memory
        self.node_host, self.restorer = saving.node_host, saving.restorer
        self.local_shards, self.node = self.node_host.local_shards, self.node_host.node

    # --- begin and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Adopt the slots in memory; then scan the volumes and prefetch, in the background."""
        self.chunk_buffers.remove_leftover_buffers()
        self.slots.adopt_all()
        for file in self.slots.files():
            self.allocator.queue_adopted_slot(file)
        for number in range(self.allocator.threads):
            self.tasks.spawn_with_retries(self.allocator.run, f"make slots {number}")
        self.tasks.spawn_with_retries(self._scan_forever, "scan")
        self.tasks.spawn_with_retries(self._watch_volumes, "watch volumes")
        self.tasks.spawn_with_retries(
            self.node_host.delete_deferred_steps, "retire what was in use"
        )
        self.remote_tiers.start(self.tasks, self.restorer.prefetch)
        if self.config.owner_pid is not None:
            self.owner.watch(self.config.owner_pid)
        if self.config.linger_s is not None:
            self.tasks.spawn_with_retries(
                functools.partial(self._linger, self.config.linger_s), "linger"
            )

    async def _scan_forever(self) -> None:
        """Scan the volumes. A scan that fails is repeated with growing pauses; also a later one,
        for example after a shard turned out to be damaged. Runs until cancelled."""
        await self._scan()
        pause_s = _WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            if failed := self.local_shards.scan_failed:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                warn("volume.scan_failed", error=failed)
                await self._scan()
            else:
                pause_s = _WATCH_S

    async def _scan(self) -> None:
        await self.node_host.scan_volumes()
        self.saving.update_served_ranks()
        await self.restorer.prefetch()

    async def _watch_volumes(self) -> None:
        """If a run's directory was removed, make it again, so that the next step is kept."""
        trouble = ""
        while True:
            await asyncio.sleep(_WATCH_S)
            if await self._is_removed():
                # a sidecar that was held up learns only now that its command has ended
                await asyncio.sleep(_NOTICE_S)
                if await self._is_given_up():
                    warn("memory.freed", reason="the run's directory was removed")
                    await self.stop(StopSidecarRequest(drain=False))
                    return
            try:
                repaired = self.local_shards.scanned and await self.local_shards.blocking(
                    self.volumes.repair_directories
                )
            except StorageError as error:
                if str(error) != trouble:
                    warn("volume.unavailable", error=str(error))
                trouble = str(error)
                continue
            trouble = ""
            if repaired:
                warn("volume.recreated", reason="the run's directory was removed")
                self.local_shards.note_all_removed()  # whether or not the scan succeeds
                self.node_host.feed(RanksServed(frozenset(), SLOTS))  # and then anew
                await self._scan()

    async def _is_given_up(self) -> bool:
        """Whether somebody removed the run's directory while the run neither trains nor is
        supervised: a new start is then to begin at step 0, and not from this memory. The sidecar of
        a pod waits for its trainer."""
        if self.config.linger_s is None or not self._is_alone():
            return False
        return await self._is_removed() and self._is_alone()

    async def _is_removed(self) -> bool:
        if not self.local_shards.scanned:
            return False
        try:
            return bool(await self.local_shards.blocking(self.volumes.is_run_directory_removed))
        except StorageError:
            return False

    def _is_alone(self) -> bool:
        return len(self.leases) == 0 and not self.owner.present

    async def repair_memory(self) -> None:
        """Make slots again that were removed or truncated, so that the next step is kept.

        Images that have lost only their names are made durable first. The trainer's lease ends: the
        trainer comes back at once, and no longer maps any of its former slots.
        """
        async with self._repairing:
            damaged = self.slots.damaged_ranks()
            for slots in damaged:
                self.slots.drop_damaged(slots, cut_off_only=True)
            if any(slots.list_sealed_steps() for slots in damaged):
                await self.step_waits.persist_newest_steps(timeout_s=_RESCUE_S)
            for slots in damaged if not self.ending else ():
                self.slots.directories.make(slots.rank)
                self.slots.drop_damaged(slots)
                lease = self.leases.of(slots.rank)
                if lease is not None and lease.training:  # one that restores fills no slot yet
                    self.tasks.spawn(
                        self.saving.end_trainer_lease(lease), f"memory of rank {slots.rank} lost"
                    )
                self.changes.ring()
            for slots in self.slots.ranks.values() if not self.ending else ():
                # also what an order met that was carried out while others removed its file
                for slot_set in (*slots.slot_sets.values(), *slots.bases.sets.values()):
                    self.allocator.fill(slot_set)

    async def unseen(self, request: UnseenHugePagesRequest) -> dict[str, str]:
        """A trainer does not see huge pages: make the images there durable, and from now on make
        all slots of small pages."""
        lease = self.leases.require_lease(request.lease)
        self.slots.directories.give_up_huge(
            f"the trainer of rank {lease.rank} does not see it; mount it there, too"
        )
        await self.repair_memory()
        return {}

    async def _linger(self, linger_s: float) -> None:
        while not self.ending:
            while await self.changes.until(lambda: not self._is_alone(), timeout_s=linger_s):
                while not self._is_alone():
                    await self.changes.until(self._is_alone, timeout_s=linger_s)
            info("sidecar.linger_expired", linger_s=linger_s)
            await self.stop(StopSidecarRequest(), arrived=self._arrived)

    async def terminate(self) -> None:
        """SIGTERM: make the newest two steps durable and end. Memory stays for the next sidecar.

        What would be lost with this pod is sent beyond it: durable shards to peers, committed steps
        to the archive.
        """
        if not self.ending:
            self.leaves = True
            self.changes.ring()
            deadline = time.monotonic() + self.config.flush_timeout_s

            def left_s() -> float:
                return max(0.0, deadline - time.monotonic())

            flushed = await self.persist_newest_common_steps(FlushRequest(timeout_s=left_s()))
            await self._archive_newest(flushed.steps, timeout_s=min(left_s(), _COMMIT_S))
            await self.remote_tiers.drain(timeout_s=left_s(), whole=False)
            await self.node_host.report_holdings_to_node()  # nothing is in use any more
            await self._report_flush(flushed.steps, timeout_s=left_s())
            self._end()

    async def flush_for_shutdown(self, request: FlushRequest) -> Flushed:
        """The pod begins to end (preStop): as `flush`, and the others are to know."""
        self.leaves = True
        self.changes.ring()
        return await self.persist_newest_common_steps(request)

    async def _report_flush(self, flushed: tuple[StepId, ...], *, timeout_s: float) -> None:
        """Tell the leader what the flush has made durable, and record its answer. The machines of a
        run end together, so wait for the others' shards of the last step."""
        if flushed and not self.config.alone and self.node_host.leader_answers:
            await self.changes.until(
                lambda: self.leader.failing or self.node_host.was_committed(flushed[-1]),
                timeout_s=min(timeout_s, _COMMIT_S),
            )
        await self.leader.send_last_report(timeout_s=_LAST_WORD_S)
        await self.node_host.notes.take(at_once=True)

    async def stop(self, request: StopSidecarRequest, *, arrived: int | None = None) -> Flushed:
        """End this sidecar; `forget` frees its memory (see `_forget`), without `drain` in any case.
        `arrived`: how often somebody had come when this was decided; it stays if somebody came
        since, until all is durable, which may take as long as an archive that is away is waited
        for."""
        flushed = Flushed()
        if request.drain:
            flushed = await self.persist_newest_common_steps(
                FlushRequest(timeout_s=request.timeout_s)
            )
            await self.remote_tiers.drain(timeout_s=request.timeout_s)
            await self.node_host.report_holdings_to_node()  # nothing is in use any more
        if arrived not in (None, self._arrived):
            info("sidecar.stop_cancelled", reason="a trainer connected")
            return flushed
        self._closing = True
        try:
            await self._report_flush(flushed.steps, timeout_s=_COMMIT_S)
            if request.forget:
                await self.step_waits.wait_for_writes(timeout_s=request.timeout_s)
                await asyncio.to_thread(self.allocator.stop)
                self._forget(even_unwritten=not request.drain)
            self._end()
        finally:
            self._closing = self.ending  # if the caller has gone, the sidecar goes on
        return flushed

    def _forget(self, *, even_unwritten: bool) -> None:
        """Free the memory, but not where a step lies there that no volume has taken: it stays for a
        successor, who may find room."""
        if even_unwritten or (step_id := self.node.newest_unwritten_step()) is None:
            self.slots.free_all_slots()
        else:
            warn("memory.kept", step=str(step_id), reason=self.node_host.images.trouble)

    @property
    def ending(self) -> bool:
        """Whether nothing new is begun here."""
        return self.ended.is_set()

    def _end(self) -> None:
        self.ended.set()
        self.changes.ring()

    async def close(self) -> None:
        """Wait for running writes, then release threads and volumes."""

        def end_threads() -> None:
            self.allocator.stop()
            self.chunk_buffers.remove_all_buffers()
            for executor in self.executors:
                executor.shutdown(wait=True, cancel_futures=True)

        await asyncio.to_thread(end_threads)
        last = functools.partial(self.history_file.append, self.history.all(), self.history.before)
        await asyncio.wait(
            {run_on_detached_thread(last, "last of the history")}, timeout=_LAST_WORD_S
        )
        self.slots.directories.close()
        await asyncio.to_thread(self.volumes.close)

    def admit_trainer(self) -> None:
        """A trainer comes. Raises SidecarError `stopping` once the end has begun."""
        if self.ending or self._closing:
            raise refusal_error(
                "stopping", "this sidecar is ending; try again when the next sidecar runs"
            )
        self._arrived += 1
        self.leaves = False

    def register_owner(self, request: RegisterOwnerRequest) -> None:
        """From now on another process stands for this run; see `OwnerProcessWatcher`."""
        self._arrived += 1
        self.owner.watch(request.pid)

    async def apply_reply(self, reply: ReportReply) -> None:
        """Apply the leader's answer to a report. A new plan is prefetched meanwhile."""
        before = self.node.last_reply.plan
        await self.node_host.apply_reply(reply)
        self.remote_tiers.set_peers(
            reply.peers,
            self.tasks.spawn,
            agents=reply.agents,
            awaits=reply.awaits,
            complete=reply.all_peers,
        )
        if reply.plan is not None and reply.plan != before and self.local_shards.scanned:
            self.tasks.spawn(self.restorer.prefetch(), "prefetch")
        self._flush_if_leaving(leaving=reply.leaving)

    # --- a pod of the run leaves -------------------------------------------------------------

    def _flush_if_leaving(self, *, leaving: bool) -> None:
        """Keep the newest step when a pod begins to leave: at once, and again for steps staged
        since, once no trainer is left here. While trainers are here, the schedule decides."""
        if not leaving:
            self._outlived = None
            return
        newest = max(self.node.list_steps_held_by_local_ranks(), default=None)
        again = self._outlived is not None and (newest == self._outlived or len(self.leases) > 0)
        if newest is not None and not again and not self._outliving and not self.ending:
            self._outliving, self._outlived = True, newest
            self.tasks.spawn(self._outlive(), "keep the last step of a pod that leaves")

    async def _outlive(self) -> None:
        try:
            timeout_s = self.config.flush_timeout_s
            flushed = await self.persist_newest_common_steps(FlushRequest(timeout_s=timeout_s))
            await self._archive_newest(flushed.steps, timeout_s=timeout_s)
        finally:
            self._outliving = False

    async def _archive_newest(self, steps: tuple[StepId, ...], *, timeout_s: float) -> None:
        """The archive takes only committed steps. All pods wait for the same step: the newest that
        each of them has."""
        if not steps or not self.node_host.remotes.has_tier(Tier.ARCHIVE):
            return
        if not self.node_host.leader_answers:
            timeout_s = 0.0  # no answer would come
        committed = await self.step_waits.wait_until_committed(steps, timeout_s=timeout_s)
        if committed is not None:
            self.node_host.remotes.request_archiving(committed)

    # --- flush -------------------------------------------------------------------------------

    async def persist_newest_common_steps(self, request: FlushRequest) -> Flushed:
        """Make the newest two steps durable that all ranks here have in common."""
        with self.volumes.pace.lift_limit():
            flushed = await self.step_waits.persist_newest_steps(timeout_s=request.timeout_s)
        info(
            "flush.finished",
            steps=[str(step_id) for step_id in flushed.steps],
            reason=flushed.reason,
        )
        return flushed
