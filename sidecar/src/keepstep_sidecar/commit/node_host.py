"""Executes what `core.node` decides (writes, publishes, retires) and tells the node what happens.

Its duties as a host (docs/protocol.md): list what this machine holds whenever that changes, record
an epoch durably before the ledger hears of it, and do what the node says. A commit is a property of
storage. Nothing here makes a commit; `publish_step` only shows it to stock readers. In a run of
several machines, none sees a complete step. The leader tells each which steps are committed
(`LastReply`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

from keepstep.core.commit_rule import combine_rank_reports
from keepstep.core.history import EventKind
from keepstep.core.ledger import Alarm, EpochStarted, Ledger, Reported, StepCommittedOnTier
from keepstep.core.node import (
    Event,
    Flush,
    LastReply,
    Node,
    Publish,
    Retire,
    Scanned,
    VolumeFull,
    WriteEnded,
)
from keepstep.core.retention import Retention
from keepstep.core.schedule import PersistCostMeasurements, PersistInterval, StepGrid, Write
from keepstep.errors import KeepstepError, NoSpaceError, UsageError
from keepstep.image import ControlPage
from keepstep.steps import IN_POD, Epoch, EpochId, StepId, Tier
from keepstep.wire.member_reports import ReportReply
from keepstep_sidecar.commit.leader_state_record import LeaderReplyRecorder
from keepstep_sidecar.commit.lineage import RestartStepPredictor, Rollback, RunLineage
from keepstep_sidecar.commit.reachable_copies import LocalShards, ReachableCopies, RemoteInventory
from keepstep_sidecar.concurrency import ChangeNotifier, OnThread
from keepstep_sidecar.config.sidecar import RollbackRequest
from keepstep_sidecar.history import MachineHistory
from keepstep_sidecar.log import RareWarning, info, warn
from keepstep_sidecar.memory.slot_pool import PooledSlot, SlotPool
from keepstep_sidecar.tiers.remote_tier import LocalInventory, RunFacts
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import CUT_OFF, SealedMemoryImage, VolumeSet, WrittenShard

# --- steps on the volumes --------------------------------------------------------------------


@dataclass(eq=False)
class StepDirectoryActions:
    """`must_stay`: whether a step is in use now. `choose`: the steps that go to make room.
    `surplus`: those that the policy does not keep. `keep`: what it keeps, for people. `retired`:
    how many steps were deleted since the start. `evicted`: those of them that the policy keeps, and
    that went because the volumes were full."""

    local: LocalShards
    remotes: RemoteInventory
    _: KW_ONLY
    must_stay: Callable[[StepId], bool]
    choose: Callable[[VolumeFull], Iterable[StepId]]
    surplus: Callable[[], Collection[StepId]]
    keep: str
    history: MachineHistory
    changes: ChangeNotifier
    retired: int = 0
    evicted: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def apply_actions(self, actions: Iterable[Publish | Retire]) -> None:
        """Publish and delete steps that lie here."""
        async with self._turn:
            here = [action for action in actions if action.id in self.local.shards]
            for action in here:
                if isinstance(action, Publish):
                    await self._publish(action.id)
            # Before any deletion: the same reply that tells of a commit may retire the step.
            self.remotes.notify_local_change()
            for action in here:
                if isinstance(action, Retire) and not self.must_stay(action.id):
                    await self._retire(action.id)

    async def make_room(self, size_bytes: int, *, retired: int) -> bool:
        """Make room for `size_bytes`: delete copies kept for other pods, else the fewest steps that
        nobody needs. False if there was nothing to delete.

        `retired`: the count of retired steps when the failed write began. If the count is higher
        now, there may be room again.
        """
        if await self.remotes.delete_kept_copies(size_bytes):
            return True
        async with self._turn:
            if self.retired != retired:
                return True
            missing = size_bytes - await self.local.blocking(self.local.volumes.find_max_free_bytes)
            doomed = list(self.choose(VolumeFull(missing, self.local.bytes_by_step)))
            surplus = self.surplus()
            early = [step_id for step_id in doomed if step_id not in surplus]
            for step_id in early:
                warn(
                    "step.evicted", step=str(step_id), reason="the volumes are full", keep=self.keep
                )
            for step_id in doomed:
                await self._retire(step_id)
            for step_id in early:
                self.history.evicted(step_id)
            self.evicted += len(early)
            return bool(doomed)

    async def _publish(self, step_id: StepId) -> None:
        try:
            published = await self.local.publish_step(step_id)
        except KeepstepError as error:
            warn("step.publish_failed", step=str(step_id), error=str(error))
            return
        if published:
            self.history.committed(step_id)
            self.changes.ring()

    async def _retire(self, step_id: StepId) -> None:
        self.remotes.notify_local_change()
        try:
            freed = await self.local.delete_step(step_id)
        except KeepstepError as error:
            warn("step.delete_failed", step=str(step_id), error=str(error))
            return
        self.retired += 1  # not earlier: a write that found no room before this must still make it
        info("step.deleted", level=logging.DEBUG, step=str(step_id), size_bytes=freed)


# --- images from slots -----------------------------------------------------------------------


T = TypeVar("T")


@dataclass
class WriteTotals:
    """Bytes and seconds of all writes since the start, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class ImageWriter:
    """`writers`: for each volume an executor of one thread. So a drive writes one image at a time,
    and no drive is idle while another has a queue. `trouble`: why the last write failed, '' after a
    write that succeeded. `failed`: the step of the last failed write. `running`: the writes that
    have not ended."""

    slots: SlotPool
    local: LocalShards
    directories: StepDirectoryActions
    _: KW_ONLY
    writers: Sequence[Executor]
    totals: WriteTotals = field(default_factory=WriteTotals)
    trouble: str = ""
    failed: StepId | None = None
    running: set[Write] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._writers = [OnThread(writer) for writer in self.writers]

    @property
    def idle(self) -> bool:
        """Whether no sealed image is being written."""
        return not self.running

    async def write(self, write: Write) -> WrittenShard | None:
        """Write the shard and return it, durable; None if that failed. Never raises an Exception,
        because the node must hear of the end in any case."""
        try:
            slot = self.slots.rank(write.rank).find(write.id)
            control = None if slot is None else slot.file.control()
            if slot is not None and slot.file.is_cut_off:
                raise UsageError(CUT_OFF)
            if slot is None or control is None or control.step_id != write.id:
                return None
            base = self._base_of(slot, control)
            written = await self._write_with_room(slot, control, base)
            if slot.file.control() == control:
                self._count(written)
                return written
            path = written.shard.path
            warn("shard.overwritten", path=str(path))
            await self.local.blocking(lambda: self.local.volumes.quarantine(path, "overwritten"))
        except Exception as error:
            if str(error) != self.trouble:  # an error that hits every step is logged once
                warn("shard.write_failed", rank=write.rank, step=str(write.id), error=str(error))
            self.trouble, self.failed = str(error), write.id
        return None

    def _base_of(self, slot: PooledSlot, control: ControlPage) -> SealedMemoryImage | None:
        """The base of an image, which stays as long as the image does. Raises UsageError."""
        if control.base is None:
            return None
        found = self.slots.rank(control.rank).bases.find(control.base)
        sealed = None if found is None else found.file.control()
        if found is None or sealed is None or found.file.is_cut_off:
            raise UsageError(f"the base of step {control.step_id} in memory is damaged")
        return SealedMemoryImage(view=found.file.view, layout=found.layout, control=sealed)

    async def _write_with_room(
        self, slot: PooledSlot, control: ControlPage, base: SealedMemoryImage | None
    ) -> WrittenShard:
        volumes = self.local.volumes
        write = functools.partial(volumes.write, slot.file.view, slot.layout, control, base=base)
        size_bytes = slot.layout.size_bytes + (base.layout.size_bytes if base else 0)
        while True:
            retired = self.directories.retired
            try:
                return await self._writers[volumes.home_volume(control.rank)](write)
            except NoSpaceError:
                if not await self.directories.make_room(size_bytes, retired=retired):
                    raise

    def _count(self, written: WrittenShard) -> None:
        self.trouble = ""
        self.totals.bytes += written.bytes
        self.totals.seconds += written.seconds
        info(
            "shard.written",
            rank=written.shard.rank,
            step=str(written.shard.step_id),
            size_bytes=written.bytes,
            duration_s=round(written.seconds, 4),
            level=logging.DEBUG,
        )


# --- the host of the node --------------------------------------------------------------------


Spawn = Callable[[Coroutine[Any, Any, None], str], None]

_COMMITTED_S = 60.0
"""How often a commit is logged."""
_SWEEP_S = 1.0
"""How often to check whether steps that were kept because they were being read still are."""


class NodeHost:
    """The host of a machine's node. Its parts, which it makes, are for those who ask: `node` what
    is decided, `local_shards`, `remotes` and `copies` what is held, `epochs`, `restart`, `images`
    and `directories` their own subjects."""

    def __init__(
        self,
        volumes: VolumeSet,
        slots: SlotPool,
        *,
        remotes: RemoteInventory,
        names: Executor,
        writers: Sequence[Executor],
        changes: ChangeNotifier,
        spawn: Spawn,
        keep: Retention,
        grid: StepGrid,
        pacing: PersistCostMeasurements | None = None,
        alone: bool = False,
        rollback_request: RollbackRequest | None = None,
        history: MachineHistory | None = None,
    ) -> None:
        """`names`: an executor of one thread, which changes names on the volumes. `writers`: see
        `ImageWriter`. `pacing`: None when a person chose which steps are persisted. `alone`: see
        `LeaderView`. `rollback_request`: the step to go back to."""
        self.remotes = remotes
        self.local_shards = local = LocalShards(volumes, OnThread(names))
        self.copies = ReachableCopies(local, slots, remotes)
        self.rollback = Rollback(
            rollback_request, lambda: local.run_record.epochs, asked=local.run_record.asked
        )
        self.node = Node(
            slots.ranks,
            grid=grid,
            tiers=(*IN_POD, *remotes.tiers),
            keep=keep,
            alone=alone,
            began=time.monotonic(),
            pacing=pacing,
            epochs=lambda: self.epochs.collect_own_epochs(),
            in_use=lambda step_id: (
                self.rollback.names(step_id) or remotes.is_step_being_sent(step_id)
            ),
            may_write=lambda step_id: self.epochs.may_persist_step(step_id),
        )
        self.epochs = RunLineage(self.node, remotes, local)
        self.restart = RestartStepPredictor(self.node, self.copies, self.rollback, local)
        self.notes = LeaderReplyRecorder(self.node.leader_view, local)
        self._history = history or MachineHistory()
        self.directories = StepDirectoryActions(
            local,
            remotes,
            must_stay=self.node.must_stay,
            choose=self._least_valuable,
            surplus=lambda: self.node.surplus,
            keep=str(keep),
            history=self._history,
            changes=changes,
        )
        self.images = ImageWriter(slots, local, self.directories, writers=writers)
        self._changes = changes
        self._spawn = spawn
        self._starting: dict[EpochId, asyncio.Future[None]] = {}
        self._seldom = RareWarning(_COMMITTED_S)
        self.feed(Scanned(in_doubt=True))

    @property
    def has_no_pending_writes(self) -> bool:
        """Whether no sealed image is being written, and what was written is committed where
        possible."""
        return self.images.idle and self.node.has_no_pending_writes

    @property
    def is_leader_silent(self) -> bool:
        """Whether the run's leader has not answered for too long."""
        return self.node.leader_view.is_leader_silent(time.monotonic())

    @property
    def leader_answers(self) -> bool:
        """Whether the run's leader answers. It will then say when it has heard of all machines."""
        return self.node.leader_view.replied_at is not None and not self.is_leader_silent

    # --- events in, actions out --------------------------------------------------------------

    def feed(self, event: Event) -> list[Publish | Retire]:
        """Tell the node what happened. Starts writes at once. Returns the other actions; they may
        wait, because the node repeats them."""
        left: list[Publish | Retire] = []
        for action in self.node.step(event, time.monotonic()):
            match action:
                case Write():
                    self._spawn(self._write(action), f"write {action.id} {action.rank}")
                case Alarm():
                    _log(action)
                case StepCommittedOnTier(tier=Tier.LOCAL):
                    # Seldom: the lines that matter must not scroll out of the log.
                    if (
                        suppressed := self._seldom.suppressed_count_if_due("step.committed")
                    ) is not None:
                        info("step.committed", step=str(action.id), lines_suppressed=suppressed)
                case StepCommittedOnTier():
                    pass
                case PersistInterval():
                    info("persist.interval_changed", steps=action.steps, limited_by=action.limit)
                    self._history.note(EventKind.INTERVAL, count=action.steps, text=action.limit)
                case _:
                    left.append(action)
        return left

    def record_leader_alarm(self, alarm: Alarm) -> None:
        """The leader's ledger has raised an alarm."""
        if self.node.record_alarm(alarm):
            _log(alarm)

    async def report_holdings_to_node(self) -> None:
        """Tell the node what this machine holds, and do what it then says."""
        await self.directories.apply_actions(self.feed(self.copies.report_all_ranks()))

    def get_current_ledger(self) -> Ledger:
        """The ledger with the newest list, to be queried. Actions that the node asks for are left
        for later."""
        if self.copies.is_remote_report_stale:  # `refresh_remotes` is about to tell it anyway
            self.feed(self.copies.report_of_remotes())
        self.feed(self.copies.report_all_ranks())
        return self.node.ledger

    async def delete_deferred_steps(self) -> None:
        """Delete the steps that were kept because they were being read, once they no longer are.
        Runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if not all(map(self.node.must_stay, self.node.deferred)):
                await self.report_holdings_to_node()

    def _least_valuable(self, full: VolumeFull) -> list[StepId]:
        self.get_current_ledger()
        return [action.id for action in self.feed(full)]

    async def _write(self, write: Write) -> None:
        self.images.running.add(write)
        try:
            written = await self.images.write(write)
            ended = WriteEnded(write.rank, write.id, written is not None)
            if written is not None:
                self.wrote(written.shard)
                ended = replace(
                    ended,
                    drive=self.local_shards.volumes.home_volume(write.rank),
                    seconds=written.seconds,
                    size_bytes=written.shard.size_bytes,
                )
            # No await since the end is known: the node must pin the next image before its slot can
            # be assigned.
            self.feed(ended)
            self._changes.ring()
            if written is not None:
                await self.report_holdings_to_node()
        finally:
            self.images.running.discard(write)
            self._changes.ring()

    def wrote(self, shard: LocalShard) -> None:
        """Record a durable shard. `refresh` then acts on it."""
        self.local_shards.add(shard)
        self.remotes.notify_local_change()
        self._changes.ring()

    # --- what is there -----------------------------------------------------------------------

    async def scan_volumes(self) -> None:
        """Scan the volumes. Afterwards the ledger knows the result."""
        drive_bytes = await self.local_shards.scan()
        self.feed(Scanned(in_doubt=self.local_shards.in_doubt, drive_bytes=drive_bytes or None))
        for epoch in self.local_shards.run_record.epochs:
            self.feed(EpochStarted(epoch))
        await self.report_holdings_to_node()
        self._changes.ring()

    async def refresh_remotes(self, *, refresh: bool = False) -> None:
        """Ask the remote tiers what they hold, and tell the ledger.

        `refresh`: see `RemoteInventory.scan`.
        """
        first = not self.remotes.scanned
        if not await self.remotes.scan(refresh=refresh) and not first:
            return
        await self.directories.apply_actions(self.feed(self.copies.report_of_remotes()))
        self._changes.ring()

    async def reject_copy(
        self, source: ShardSource, error: Exception, *, step_id: StepId | None = None
    ) -> None:
        """This copy could not be used. If it was on a volume, it was quarantined, and the volumes
        are scanned anew. `step_id`: of the step whose base it is; None if it is an image."""
        rank, step_id = source.shard.rank, step_id or source.shard.step_id
        if source.tier is not Tier.LOCAL:
            self.remotes.reject_copy(source, error, step_id=step_id)
            self.feed(
                Reported(ranks=combine_rank_reports({rank: self.remotes.build_rank_report(rank)}))
            )
            self._changes.ring()
        elif self.local_shards.find_durable_shard(rank, step_id) is not None:
            self.local_shards.mark_shard_lost(rank, step_id)  # unless the scan finds it sound
            await self.scan_volumes()

    async def apply_reply(self, reply: ReportReply) -> None:
        """Apply the leader's answer: publish commits, and delete steps that nobody needs."""
        view = self.node.leader_view
        before = (view.commit, view.last_reply.plan)
        self.rollback.apply_reply(reply)
        self.restart.add_failures(reply.failures)
        if reply.archive is not None:  # before the same reply retires it
            self.remotes.request_archiving(reply.archive)
        actions = self.feed(
            LastReply(
                commit=reply.committed.get(str(Tier.LOCAL)),
                commits=frozenset(reply.commits),
                memory=reply.committed.get(str(Tier.MEMORY)),
                plan=reply.plan,
                pinned=frozenset(reply.pinned),
                retire=frozenset(reply.retire),
            )
        )
        if self.local_shards.scanned:
            await self.directories.apply_actions(actions)
        await self.notes.take(at_once=False)
        if before != (view.commit, view.last_reply.plan):
            self._changes.ring()

    # --- epochs ------------------------------------------------------------------------------

    async def start_epoch(self, epoch: Epoch, *, asked: int | None = None) -> None:
        """Begin the epoch that all ranks agreed on; durably recorded on return. `asked`: the step
        that the script named. Raises StorageError."""
        if (starting := self._starting.get(epoch.id)) is None:
            starting = asyncio.ensure_future(self._start_epoch(epoch, asked))
            self._starting[epoch.id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(epoch.id, None))
        await asyncio.shield(starting)

    async def _start_epoch(self, epoch: Epoch, asked: int | None) -> None:
        epoch, change_record = (
            self.epochs.add_fork_origin(epoch),
            self.local_shards.update_run_record,
        )
        # First of all, because the epoch makes newer commits, for which this step would go.
        if (
            kept := self.rollback.find_script_requested_step(epoch.parent, asked)
        ) != self.rollback.asked:
            await change_record(lambda record: replace(record, asked=kept))
            self.rollback.asked = kept
        if kept is not None:
            self.feed(Flush({kept}))  # it may be in memory alone
        if unrecorded := self.epochs.unrecorded_epochs(epoch):
            await change_record(lambda record: record.with_added_epochs(*unrecorded))
        self.epochs.current = epoch
        self.rollback.epoch_began(epoch)
        await self.directories.apply_actions(self.feed(EpochStarted(epoch)))
        info("epoch.started", epoch=str(epoch.id), parent=epoch.parent and str(epoch.parent))

    # --- asking ------------------------------------------------------------------------------

    def was_committed(self, step_id: StepId) -> bool:
        """Whether this very step is committed, and published if this machine holds it; or was,
        until it expired."""
        if self.local_shards.has_been_published(step_id):
            return True
        known = (self.node.leader_view.commit, *self.node.last_reply.commits)
        return step_id not in self.local_shards.shards and step_id in known

    def make_run_facts(self, changed: Callable[[], None]) -> RunFacts:
        """What remote tiers ask. `changed`: to be called when they have something new."""
        view = self.node.leader_view
        return RunFacts(
            local=self._local_inventory,
            pinned=self.restart.get_pinned_steps,
            commit=lambda: view.commit,
            outgrown=self.epochs.has_own_commit,
            life=self.epochs.find_training_epoch,
            strangers=self.epochs.find_foreign_epochs,
            meet=self.epochs.record_foreign_epochs,
            changed=changed,
        )

    def _local_inventory(self) -> LocalInventory:
        """What remote tiers compare their lists with. A published step counts as a commit even if
        the leader's newest reply no longer names it."""
        shards, is_dead = self.local_shards.shards, self.node.is_dead
        alive = {step_id: held for step_id, held in shards.items() if not is_dead(step_id)}
        commits = self.local_shards.ever_published().union(self.node.commits())
        return LocalInventory(shards=alive, commits=frozenset(alive) & commits)


def _log(alarm: Alarm) -> None:
    warn("alarm.raised", kind=str(alarm.kind), message=alarm.text)
