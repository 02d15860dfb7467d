"""Executes what `core.node` decides (writes, publishes, retires) and tells the node what happens.

Its duties as a host (docs/ledger.md): list what this machine holds whenever that changes, record an
epoch durably before the ledger hears of it, and do what the node says. A commit is a property of
storage. Nothing here makes a commit; `publish` only shows it to stock readers. In a run that spans
several pods, no node sees a complete step. The operator then tells each node which steps are
committed (`operator_view`).

A slot is pinned while it is written to a volume, so no trainer fills it meanwhile. One exception
cannot be excluded: a new sidecar finds an image while its trainer is about to fill the slot. But a
trainer zeroes the seal before it writes anything else. So a seal that is still there after the
write proves that the bytes were whole. A file without that proof is quarantined.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep.core.history import Kind
from keepstep.core.ledger import Alarm, Committed, EpochStarted, Ledger, Reported, Retire
from keepstep.core.node import (
    Event,
    Flush,
    Full,
    Heard,
    Listed,
    Node,
    Pace,
    Publish,
    Sealed,
    Wrote,
)
from keepstep.core.persist_planner import Write
from keepstep.core.readiness import NEVER
from keepstep.core.retention import Retention
from keepstep.core.schedule import Grid, Pacing
from keepstep.core.suspicion import WITHIN, Doubt
from keepstep.errors import KeepstepError, NoSpaceError, UsageError, VersionError
from keepstep.image import ControlPage
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.commit.epochs import Ancestry, line
from keepstep_sidecar.commit.eviction_status import EvictionStatus
from keepstep_sidecar.commit.inventory import (
    CopyLocator,
    LedgerReports,
    LocalShards,
    RemoteInventory,
)
from keepstep_sidecar.commit.operator_link import OperatorNotes
from keepstep_sidecar.commit.restore_from import Rollback
from keepstep_sidecar.commit.script_failures import ScriptFailures
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.restore_from import Wish
from keepstep_sidecar.history import History
from keepstep_sidecar.log import Seldom, say, warn
from keepstep_sidecar.memory.slot_pool import Slot, SlotPool
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.tiers.tier import LocalInventory
from keepstep_sidecar.volume.scan import LocalShard, Scan
from keepstep_sidecar.volume.volume import Written
from keepstep_sidecar.volume.volume_set import VolumeSet
from keepstep_sidecar.volume.writer import CUT_OFF

Spawn = Callable[[Coroutine[Any, Any, None], str], None]
T = TypeVar("T")

_COMMITTED_S = 60.0
"""How often a commit is logged."""
_log = logging.getLogger("keepstep.sidecar")

_SWEEP_S = 1.0
"""How often to check whether steps that were kept because they were being read still are."""


@dataclass
class WriteTotals:
    """Bytes and seconds of all writes since the start, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0


class Committer:
    """The shards of this machine, and the node that decides about them.

    `trouble`: why the last write failed, '' after a write that succeeded. `failed`: the step of the
    last failed write.
    """

    def __init__(
        self,
        volumes: VolumeSet,
        slots: SlotPool,
        *,
        remotes: RemoteInventory,
        names: Executor,
        writers: Sequence[Executor],
        changes: Changes,
        spawn: Spawn,
        keep: Retention,
        grid: Grid,
        pacing: Pacing | None = None,
        managed: bool = False,
        wish: Wish | None = None,
        history: History | None = None,
    ) -> None:
        """`names`: an executor of one thread, which changes names on the volumes. `writers`: for
        each volume an executor of one thread. So a drive writes one image at a time, and no drive
        is idle while another has a queue. `pacing`: None when a person chose which steps are
        persisted. `managed`: an operator sees the whole run and decides what is deleted. `wish`:
        the step to go back to."""
        self.volumes = volumes
        self.history = history or History()
        self.pacing = pacing
        self.local_shards = LocalShards()
        self.shards, self.published = self.local_shards.shards, self.local_shards.published
        self.committed_at: float | None = None
        self.alarms: dict[str, None] = {}
        self.unreadable = ""
        self.scan_failed = ""
        self._hidden = True
        self.scanned_at = NEVER
        self.epoch: Epoch | None = None
        self.totals = WriteTotals()
        self.trouble = ""
        self.failed: StepId | None = None
        self.remotes = remotes
        self.ledger_reports = LedgerReports(slots, self.local_shards, remotes)
        self.evictions = EvictionStatus(keep)
        self.locator = CopyLocator(self.shards, slots, remotes, volumes)
        self.node = Node(
            slots.ranks,
            grid=grid,
            tiers=(Tier.MEMORY, Tier.LOCAL, *remotes.tiers),
            keep=keep,
            managed=managed,
            began=time.monotonic(),
            in_use=self._in_use,
            may_write=lambda id: self.ancestry.writes(id),
            in_doubt=lambda: self._hidden,
        )
        self.operator_view = self.node.operator_view
        self.notes = OperatorNotes(self.operator_view, volumes, self.blocking)
        self.rollback = Rollback(wish, volumes.epochs, asked=volumes.asked())
        self.script_failures = ScriptFailures(volumes, self.blocking)
        self.ancestry = Ancestry(remotes, self.node.commits, self.epochs)
        self._slots = slots
        self._names = names
        self._writers = writers
        self._changes = changes
        self._told = Seldom(_COMMITTED_S)
        self._spawn = spawn
        self._opening: Counter[StepId] = Counter()
        self._starting: dict[EpochId, asyncio.Future[None]] = {}
        self._ending: set[Write] = set()
        self._retired = 0
        self._actions = asyncio.Lock()

    @property
    def ledger(self) -> Ledger:
        return self.node.ledger

    @property
    def scanned(self) -> bool:
        """Whether the volumes were scanned, so that it is known what lies on them."""
        return self.scanned_at != NEVER

    @property
    def idle(self) -> bool:
        """Whether no sealed image is being written, and what was written is committed where
        possible."""
        return not self._ending and self.node.idle

    @property
    def silent(self) -> bool:
        """Whether there is an operator that has not answered for too long."""
        return self.operator_view.silent(time.monotonic())

    @property
    def operator_answers(self) -> bool:
        """Whether an operator answers. It will then say when it has heard of all pods."""
        return self.operator_view.heard_at is not None and not self.silent

    def busy(self, id: StepId) -> bool:
        """Whether this step is on its way to the volumes."""
        return self.node.busy(id) or any(write.id == id for write in self._ending)

    async def blocking(self, work: Callable[[], T]) -> T:
        """Run a blocking call on the one thread that changes names on the volumes."""
        return await asyncio.get_running_loop().run_in_executor(self._names, work)

    # --- events in, actions out --------------------------------------------------------------

    def feed(self, event: Event) -> list[Publish | Retire]:
        """Tell the node what happened. Starts writes at once. Returns the other actions; they may
        wait, because the node repeats them."""
        if isinstance(event, Sealed) and self.pacing is not None:
            self.pacing.sealed(event.id, time.monotonic())
        left: list[Publish | Retire] = []
        for action in self.node.step(event, time.monotonic()):
            match action:
                case Write():
                    self._spawn(self._write(action), f"write {action.id} {action.rank}")
                case Alarm():
                    warn("alarm", kind=str(action.kind), text=action.text)
                    self.alarms[action.text] = None
                case Committed():
                    if action.tier is Tier.LOCAL:
                        self._tell_committed(action.id)
                case _:
                    left.append(action)
        return left

    def _tell_committed(self, id: StepId) -> None:
        """Log a commit once a minute: the lines that matter must not scroll out of the log."""
        if (left_out := self._told.due("committed")) is not None:
            say("committed", step=str(id), not_logged=left_out)

    async def refresh(self) -> None:
        """Tell the node what this machine holds, and do what it then says."""
        await self._carry_out(self.feed(self._listed()))

    def look(self) -> Ledger:
        """The ledger with the newest list, to be queried. Actions that the node asks for are left
        for later."""
        if self.ledger_reports.beyond_is_stale:  # `look_beyond` is about to tell it anyway
            self.feed(self.ledger_reports.beyond())
        self.feed(self._listed())
        return self.ledger

    def _listed(self) -> Listed:
        ranks, published = self.ledger_reports.here().ranks, self.local_shards.ever_published()
        return Listed(ranks=ranks, published=published, shown=self.published)

    async def _carry_out(self, actions: Iterable[Publish | Retire]) -> None:
        """Level-triggered: an action that fails, or whose step is in use, is decided anew later."""
        async with self._actions:
            commits = self.node.commits()
            self.evictions.see(committed=sum(id in self.shards for id in commits))
            here = [action for action in actions if action.id in self.shards]
            for action in here:
                if isinstance(action, Publish):
                    await self._publish(action.id)
            # Before any deletion: the same reply that tells of a commit may retire the step.
            self.remotes.wake()
            for action in here:
                if isinstance(action, Retire) and not self._must_stay(action.id):
                    await self._retire(action.id)

    async def sweep(self) -> None:
        """Delete the steps that were kept because they were being read, once they no longer are.
        Runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if not all(map(self._must_stay, self.node.deferred)):
                await self.refresh()

    def _must_stay(self, id: StepId) -> bool:
        return self.node.busy(id) or self._in_use(id)

    def _in_use(self, id: StepId) -> bool:
        """Whether this step is being read, or is one that a person wants to go back to."""
        return self.rollback.names(id) or id in self._opening or self.remotes.in_use(id)

    def opening(self, id: StepId, *, on: bool) -> None:
        """Mark that a read of this step begins (`on`) or ends. The step is not retired while any
        read is open."""
        self._opening[id] += 1 if on else -1
        if not self._opening[id]:
            del self._opening[id]

    # --- what is there -----------------------------------------------------------------------

    async def scan(self) -> None:
        """Scan the volumes. Afterwards `scanned` is true, and the ledger knows the result.

        Never raises because of what lies there. `scan_failed` says what could not be scanned, ""
        when all was. A volume that cannot be read hides nothing of the others, and takes nothing
        from what is known.
        """
        before = self.local_shards.known()
        try:
            scan, aside = await self.blocking(self._survey)
        except Exception as error:  # any error: silence would look like an empty volume
            _log.exception("scan failed")
            roots = [volume.root for volume in self.volumes.volumes]
            scan, aside = Scan(unread=dict.fromkeys(roots, str(error))), 0
        # No await from here on: lost shards must never be seen as merely absent.
        reasons = "; ".join(dict.fromkeys(scan.unread.values()))
        self.unreadable = self.scan_failed = reasons and f"the volumes cannot be scanned: {reasons}"
        hidden = (
            one
            for one in self.local_shards.all()
            if self.volumes.holder(one.path).root in scan.unread
        )
        self.local_shards.replace((*scan.shards, *hidden), before=before)
        for refused in scan.problems:
            warn(
                "shard refused",
                path=str(refused.path),
                reason=str(refused.error),
                moved_to=refused.moved_to and str(refused.moved_to),
            )
        newer = [one for one in scan.problems if isinstance(one.error, VersionError)]
        if newer:
            self.unreadable = f"{newer[0].path} was written by a newer keepstep; upgrade this one"
        elif aside:
            self.unreadable = "shards lie in quarantine (keepstep verify tells why)"
        self._hidden = bool(newer or self.scan_failed)
        for epoch in self.volumes.epochs():
            self.feed(EpochStarted(epoch))
        self.scanned_at = min(self.scanned_at, time.monotonic())
        self.ledger_reports.silent = bool(self.unreadable)
        await self.refresh()
        self._changes.ring()

    def _survey(self) -> tuple[Scan, int]:
        """The scan of all volumes, and the number of files in quarantine after it."""
        scan = self.volumes.scan()
        if self.pacing is not None:
            self.pacing.drive_bytes = self.volumes.drive_bytes() or None
        read = [volume for volume in self.volumes.volumes if volume.root not in scan.unread]
        return scan, sum(volume.quarantined() for volume in read)

    async def look_beyond(self, *, anew: bool = False) -> None:
        """Ask the remote tiers what they hold, and tell the ledger.

        `anew`: see `RemoteInventory.look`.
        """
        first = not self.remotes.looked
        if not await self.remotes.look(anew=anew) and not first:
            return
        await self._carry_out(self.feed(self.ledger_reports.beyond()))
        self._changes.ring()

    async def reject(self, source: ShardSource, error: Exception) -> None:
        """This copy could not be used. If it was on a volume, it was quarantined, and the volumes
        are scanned anew."""
        rank = source.shard.rank
        if source.tier is not Tier.LOCAL:
            self.remotes.reject(source, error)
            self.feed(Reported(ranks={rank: self.remotes.report(rank)}))
            self._changes.ring()
        elif self.local_shards.holds(rank, source.shard.step_id) is not None:
            # Lost, never merely absent: until the scan is through nobody knows what is left.
            self.unreadable = f"step {source.shard.step_id} is damaged; the volumes are scanned"
            self.ledger_reports.silent = True
            self.local_shards.lose(rank, source.shard.step_id)  # unless the scan finds it sound
            await self.scan()

    async def hear(self, reply: ReportReply) -> None:
        """Apply the operator's answer: publish commits, and delete steps that nobody needs."""
        before = (self.operator_view.commit, self.operator_view.word.plan)
        self.rollback.hear(reply)
        self.script_failures.hear(reply.failures)
        if reply.archive is not None:  # before the same reply retires it
            self.remotes.want(reply.archive)
        actions = self.feed(
            Heard(
                commit=reply.committed.get(str(Tier.LOCAL)),
                commits=frozenset(reply.commits),
                memory=reply.committed.get(str(Tier.MEMORY)),
                plan=reply.plan,
                pinned=frozenset(reply.pinned),
                retire=frozenset(reply.retire),
            )
        )
        if self.scanned:
            await self._carry_out(actions)
        await self.notes.take(at_once=False)
        if before != (self.operator_view.commit, self.operator_view.word.plan):
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
        epoch = self.ancestry.named(epoch)
        await self._keep_asked(self.rollback.asked_for(epoch.parent, asked))
        known = self.epochs(epoch)
        # Not the ledger's epochs: it also knows epochs that other pods told of, which lie only in
        # memory.
        if not set(known) <= set(self.volumes.epochs()):
            await self.blocking(lambda: self.volumes.save_epochs(*known))
        self.epoch = epoch
        self.rollback.began(epoch)
        await self._carry_out(self.feed(EpochStarted(epoch)))
        say("epoch started", epoch=str(epoch.id), parent=epoch.parent and str(epoch.parent))

    async def _keep_asked(self, id: StepId | None) -> None:
        """Before the epoch begins, because it makes newer commits, for which this step would go."""
        if id != self.rollback.asked:
            await self.blocking(lambda: self.volumes.save_asked(id))
            self.rollback.asked = id
        if id is not None:
            self.feed(Flush({id}))  # it may be in memory alone

    def epochs(self, *begun: Epoch) -> tuple[Epoch, ...]:
        """All epochs that are certainly this run's own: those recorded here, told by the run's
        other pods, or in `begun`. Includes their ancestors, whichever source knows them."""
        own = (*self.remotes.told_by(Tier.PEER), *self.volumes.epochs(), *begun)
        return line(own, self.ledger.epochs)

    def see_epoch(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.epoch is None or self.epoch.id < epoch.id:
            self.epoch = epoch

    # --- Write -------------------------------------------------------------------------------

    async def _write(self, write: Write) -> None:
        self._ending.add(write)
        if self.pacing is not None:
            self.pacing.began()
        try:
            shard = await self._persist(write)
            if shard is not None:
                self.wrote(shard)
            # No await since the end is known: the node must pin the next image before its slot can
            # be assigned.
            self.feed(Wrote(write.rank, write.id, shard is not None))
            self._pace(write.id)
            self._changes.ring()
            if shard is not None:
                await self.refresh()
        finally:
            self._ending.discard(write)
            if self.pacing is not None:
                self.pacing.ended()
            self._changes.ring()

    def _pace(self, id: StepId) -> None:
        """If this step has become durable, choose the interval to the next step anew."""
        if self.pacing is None or not self.node.planner.is_durable(id):
            return
        before, interval = self.pacing.interval, self.pacing.durable(id, self.epochs())
        if interval is not None and (before is None or before.steps != interval.steps):
            say("persist interval", steps=interval.steps, limit=interval.limit)
            self.history.note(Kind.INTERVAL, count=interval.steps, text=interval.limit)
            self.feed(Pace(interval.steps))

    async def _persist(self, write: Write) -> LocalShard | None:
        """Write the shard and return it, durable; None if that failed. Never raises an Exception,
        because the node must hear of the end in any case."""
        try:
            slot = self._slots.rank(write.rank).find(write.id)
            control = None if slot is None else slot.file.control()
            if slot is not None and slot.file.cut_off:
                raise UsageError(CUT_OFF)
            if slot is None or control is None or control.id != write.id:
                return None
            written = await self._write_with_room(slot, control)
            if slot.file.control() == control:
                self._count(written)
                return written.shard
            path = written.shard.path
            warn("overwritten while it was written", path=str(path))
            await self.blocking(lambda: self.volumes.quarantine(path, "overwritten"))
        except Exception as error:
            if str(error) != self.trouble:  # an error that hits every step is logged once
                warn("not persisted", rank=write.rank, step=str(write.id), reason=str(error))
            self.trouble, self.failed = str(error), write.id
        return None

    async def _write_with_room(self, slot: Slot, control: ControlPage) -> Written:
        write = functools.partial(self.volumes.write, slot.file.view, slot.layout, control)
        drive = self._writers[self.volumes.lane(control.rank)]
        while True:
            retired = self._retired
            try:
                return await asyncio.get_running_loop().run_in_executor(drive, write)
            except NoSpaceError:
                if not await self._make_room(slot.layout.size_bytes, retired=retired):
                    raise

    def _count(self, written: Written) -> None:
        self.trouble = ""
        self.totals.bytes += written.shard.size_bytes
        self.totals.seconds += written.seconds
        if self.pacing is not None:
            shard, drive = written.shard, self.volumes.lane(written.shard.rank)
            self.pacing.wrote(
                shard.step_id, drive=drive, seconds=written.seconds, size_bytes=shard.size_bytes
            )
        say(
            "durable",
            rank=written.shard.rank,
            step=str(written.shard.step_id),
            bytes=written.shard.size_bytes,
            seconds=round(written.seconds, 4),
            level=logging.DEBUG,
        )

    def wrote(self, shard: LocalShard) -> None:
        """Record a durable shard. `refresh` then acts on it."""
        self.local_shards.add(shard)
        self.remotes.wake()
        self._changes.ring()

    async def _make_room(self, size_bytes: int, *, retired: int) -> bool:
        """Make room for `size_bytes`: delete copies kept for other pods, else the fewest steps that
        nobody needs. False if there was nothing to delete.

        `retired`: the count of retired steps when the failed write began. If the count is higher
        now, there may be room again.
        """
        if await self.remotes.make_room(size_bytes):
            return True
        async with self._actions:
            if self._retired != retired:
                return True
            missing = size_bytes - await self.blocking(self.volumes.free_bytes)
            self.look()
            sizes = {
                id: sum(shard.size_bytes for shard in held.values())
                for id, held in self.shards.items()
            }
            doomed = [action.id for action in self.feed(Full(missing, sizes))]
            self.evictions.note(doomed)
            for id in doomed:
                await self._retire(id)
                self.history.evicted(id)
            self.evictions.count += len(doomed)
            return bool(doomed)

    # --- Publish, Retire ---------------------------------------------------------------------

    async def _publish(self, id: StepId) -> None:
        made_of = [shard.path for shard in self.shards.get(id, {}).values()]
        if not made_of:  # a scan in between no longer found it
            return
        try:
            path = await self.blocking(lambda: self.volumes.publish(id, made_of=made_of))
        except KeepstepError as error:
            warn("not published", step=str(id), reason=str(error))
            return
        if path is None:
            return
        self.local_shards.show(id, path)
        self.history.committed(id)
        self.committed_at = path.stat().st_mtime  # when its last shard got its name
        self._changes.ring()

    async def _retire(self, id: StepId) -> None:
        self.local_shards.drop(id)
        self.remotes.wake()
        try:
            freed = await self.blocking(lambda: self.volumes.retire(id))
        except KeepstepError as error:
            warn("not retired", step=str(id), reason=str(error))
            return
        self._retired += 1  # not earlier: a write that found no room before this must still make it
        say("retired", level=logging.DEBUG, step=str(id), bytes=freed)

    # --- asking ------------------------------------------------------------------------------

    def local_inventory(self) -> LocalInventory:
        """What remote tiers compare their lists with. A published step counts as a commit even if
        the operator's newest reply no longer names it."""
        alive = {id: dict(one) for id, one in self.shards.items() if not self.ledger.is_dead(id)}
        commits = self.local_shards.ever_published().union(self.node.commits())
        return LocalInventory(shards=alive, commits=frozenset(alive) & commits)

    def ranks(self) -> list[int]:
        """Every rank of which this machine holds or held something."""
        return self.ledger_reports.ranks()

    def last_commit(self) -> StepId | None:
        """The newest step that is known to be committed and is not dead."""
        return self.node.last_commit()

    def was_committed(self, id: StepId) -> bool:
        """Whether this very step is committed, and published if this machine holds it; or was,
        until it expired."""
        if self.local_shards.was_published(id):
            return True
        told = (self.operator_view.commit, *self.operator_view.word.commits)
        return id not in self.shards and id in told

    def pinned(self) -> frozenset[StepId] | None:
        """Steps that no tier may delete; None until the operator has named them."""
        if not self.operator_view.pins_known:
            return None
        return self.operator_view.word.pinned.union(filter(self.rollback.names, self.locator.ids()))

    def wanted(self) -> StepId | None:
        """The step that a person wants to go back to, if this machine knows it."""
        held = [id for id in self.locator.ids() if self.ledger.lineage.restorable(id)]
        return self.rollback.resolve(self.ledger.whole(), held)

    def doubt(self) -> Doubt:
        """Which steps are suspect and which are proven, as far as this machine knows."""
        kept = {id for id in self.locator.ids() if not self.ledger.is_dead(id)}
        failures = self.script_failures.known(self.ledger)
        return Doubt.of(failures, kept, self.operator_view.word.pinned)

    def suspicion(self) -> str:
        """A message: which steps a restore passes over, and why; '' when none is suspect."""
        if not self.script_failures or (since := self.doubt().since) is None:
            return ""
        back = self.instead()
        return (
            f"step {since} and later ones are suspect: the script failed twice within {WITHIN}"
            " steps after it was restored; the next restore goes on from "
            + (f"step {back}" if back is not None else "the newest nonetheless, as none is older")
            + ", unless a person names another one (--restore-from, spec.restoreFrom) or pins it"
        )

    def instead(self) -> StepId | None:
        """The step to go back to instead, if the newest whole step is suspect; else None."""
        if not self.script_failures:
            return None
        whole = self.ledger.whole()
        left = self.doubt().left(whole)
        return max(left) if len(left) < len(whole) else None
