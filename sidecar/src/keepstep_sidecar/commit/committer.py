"""What is durable on this machine, and what follows from it: commits, retirement, epochs.

Hosts the ledger. Its duties as a host (docs/ledger.md): report what is there whenever that changes,
record an epoch durably before the ledger hears of it, obey `Committed` and `Retire`. A commit is a
property of storage: nothing here makes one, `publish` only shows it to stock readers.

In a run that spans several pods this ledger never sees a complete step. What it then knows of
commits, and what may be deleted, comes from the operator (`run_view`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from keepstep.core.ledger import (
    Alarm,
    Committed,
    EpochStarted,
    Event,
    Ledger,
    LedgerConfig,
    Reported,
    Retire,
    Standing,
)
from keepstep.core.readiness import NEVER
from keepstep.core.retention import Retention
from keepstep.errors import KeepstepError, StorageError, VersionError
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.commit.epochs import Ancestry, line
from keepstep_sidecar.commit.eviction import Evictions
from keepstep_sidecar.commit.inventory import Reach, Remotes, Stock, Telling
from keepstep_sidecar.commit.restore_from import Rollback
from keepstep_sidecar.commit.run_view import Notes, RunView
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.restore_from import Wish
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.tiers.source import LocalReader, Origin, RemoteOrigin
from keepstep_sidecar.tiers.tier import Depot, Keeper
from keepstep_sidecar.volume.scan import LocalShard, Scan
from keepstep_sidecar.volume.volume_set import VolumeSet

T = TypeVar("T")
_log = logging.getLogger("keepstep.sidecar")


class Committer:
    """The shards of this machine and the ledger over shards and slots.

    `busy`: steps that are being written now; they are not retired meanwhile.
    """

    def __init__(
        self,
        volumes: VolumeSet,
        keeper: SlotPool,
        *,
        keep: Retention,
        executor: Executor,
        changes: Changes,
        busy: Callable[[StepId], bool],
        reader: LocalReader,
        remotes: Remotes,
        told: bool = False,
        wish: Wish | None = None,
    ) -> None:
        """`told`: an operator sees the whole run, and decides what is deleted. `wish`: what to go
        back to."""
        self.volumes = volumes
        self.stock = Stock()
        self.shards, self.published = self.stock.shards, self.stock.published
        self.committed_at: float | None = None
        self.alarms: dict[str, None] = {}
        self.unreadable = ""
        self.scan_failed = ""
        self.scanned_at = NEVER
        self.epoch: Epoch | None = None
        self.remotes = remotes
        self.telling = Telling(keeper, self.stock, remotes)
        self.evictions = Evictions(keep)
        self.reach = Reach(self.shards, keeper, remotes, reader)
        self.ledger = Ledger(
            LedgerConfig(
                tiers=(Tier.MEMORY, Tier.LOCAL, *remotes.tiers),
                retention={Tier.LOCAL: keep},
            )
        )
        self._executor = executor
        self._changes = changes
        self._busy = busy
        self.run_view = RunView(told=told, clock=time.monotonic)
        self.notes = Notes(self.run_view, volumes, self.blocking)
        self.rollback = Rollback(wish, volumes.epochs)
        self.ancestry = Ancestry(remotes, self._commits, self.epochs)
        self._hooks = Hooks(remotes.depots)
        self._opening: Counter[StepId] = Counter()
        self._starting: dict[EpochId, asyncio.Future[None]] = {}
        self._actions = asyncio.Lock()

    async def blocking(self, work: Callable[[], T]) -> T:
        """Run a blocking call on the one thread that changes names on the volumes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    @property
    def scanned(self) -> bool:
        """Whether it is known what lies on the volumes."""
        return self.scanned_at != NEVER

    # --- what is there -----------------------------------------------------------------------

    async def scan(self) -> None:
        """Look at the volumes; afterwards `scanned` is true and the ledger knows it all.

        Never raises for what lies there: `scan_failed` says why it cannot be told, "" when it can.
        """
        before, unreadable = self.stock.known(), ""
        try:
            scan, aside = await self.blocking(self._survey)
        except Exception as error:  # whatever it is: silence would look like an empty volume
            unreadable, scan, aside = f"the volumes cannot be scanned: {error}", Scan(), 0
            if not isinstance(error, StorageError):
                _log.exception("scan failed")
        # with nothing awaited from here on: what is lost is never merely absent
        self.unreadable = self.scan_failed = unreadable
        self.stock.replace(scan.shards, before=before)
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
        for epoch in self.volumes.epochs():
            self.ledger.apply(EpochStarted(epoch))
        self.scanned_at = min(self.scanned_at, time.monotonic())
        self.telling.silent = bool(self.unreadable)
        self._hooks.durable(self.stock.all())
        await self.refresh()
        self._changes.ring()

    async def look_beyond(self, *, anew: bool = False) -> None:
        """Ask the depots what they hold; the ledger hears of it. `anew`: see `Remotes.look`."""
        first = not self.remotes.looked
        if not await self.remotes.look(anew=anew) and not first:
            return
        await self._tell(self.telling.beyond())
        self._changes.ring()

    async def distrust(self, origin: Origin, error: Exception) -> None:
        """This copy could not be used; one on a volume was quarantined, and is looked for anew."""
        if isinstance(origin, RemoteOrigin):
            self.remotes.distrust(origin, error)
            ranks = {origin.rank: self.remotes.report(origin.rank)}
            self._remember(self.ledger.apply(Reported(ranks=ranks)))
            self._changes.ring()
        elif self.stock.holds(origin.rank, origin.id) is not None:
            await self.scan()

    def _survey(self) -> tuple[Scan, int]:
        """What is there, and how many files are in quarantine afterwards."""
        scan = self.volumes.scan()
        return scan, sum(volume.quarantined() for volume in self.volumes.volumes)

    def ranks(self) -> list[int]:
        """Every rank of which something is or was here."""
        return self.telling.ranks()

    async def refresh(self, *, grown: bool = False) -> None:
        """Report to the ledger and do what it says. `grown`: a shard was added."""
        await self._tell(self.telling.here())
        if grown and self.run_view.silent:
            async with self._actions:
                held, commit = self._live(), self.last_commit()
                await self._retire_all(self.run_view.unwatched(held, commit=commit))

    def look(self) -> Ledger:
        """The ledger with the newest report, for questions; what it asks for is done later."""
        if self.telling.beyond_is_stale:  # `look_beyond` is just about to tell it
            self._remember(self.ledger.apply(self.telling.beyond()))
        self._remember(self.ledger.apply(self.telling.here()))
        return self.ledger

    # --- what happens ------------------------------------------------------------------------

    async def hear(self, reply: ReportReply) -> None:
        """The operator's answer: commits are published, and what nobody needs is deleted."""
        before = (self.run_view.commit, self.run_view.plan)
        self.run_view.hear(reply)
        self.rollback.hear(reply)
        if self.scanned:
            async with self._actions:
                await self._publish_committed()
                await self._retire_all(self.run_view.retired(list(self.shards)))
        await self.notes.take(at_once=False)
        if before != (self.run_view.commit, self.run_view.plan):
            self._changes.ring()

    def wrote(self, shard: LocalShard) -> None:
        """A shard is durable; `refresh` draws the conclusions."""
        self.stock.add(shard)
        self._hooks.durable((shard,))
        self._changes.ring()

    async def start_epoch(self, epoch: Epoch) -> None:
        """All ranks agreed on this epoch; durable on return. Raises StorageError."""
        if (starting := self._starting.get(epoch.id)) is None:
            starting = asyncio.ensure_future(self._start_epoch(epoch))
            self._starting[epoch.id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(epoch.id, None))
        await asyncio.shield(starting)

    async def _start_epoch(self, epoch: Epoch) -> None:
        epoch = self.ancestry.named(epoch)
        known = self.epochs(epoch)
        # not the ledger's: it also knows epochs that other pods told of, and only memory has those
        if not set(known) <= set(self.volumes.epochs()):
            await self.blocking(lambda: self.volumes.save_epochs(*known))
        self.epoch = epoch
        self.rollback.began(epoch)
        await self._tell(EpochStarted(epoch))
        self._hooks.forget([id for id in self.shards if self.ledger.is_dead(id)])
        say("epoch started", epoch=str(epoch.id), parent=epoch.parent and str(epoch.parent))

    def epochs(self, *begun: Epoch) -> tuple[Epoch, ...]:
        """All that is surely this run's own: on record here, told by its other pods, or `begun`
        now; and what those went on from, whoever tells of that."""
        own = (*self.remotes.told_by(Tier.PEER), *self.volumes.epochs(), *begun)
        return line(own, self.ledger.epochs)

    def see_epoch(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.epoch is None or self.epoch.id < epoch.id:
            self.epoch = epoch

    def opening(self, id: StepId, *, on: bool) -> None:
        """This step is being read: it is not retired meanwhile. Counted."""
        self._opening[id] += 1 if on else -1
        if not self._opening[id]:
            del self._opening[id]

    async def make_room(self, size_bytes: int, *, evictions: int) -> bool:
        """Let go of copies kept for others, else of the fewest steps that nobody needs, so that so
        much can be written. False when there was nothing.

        `evictions`: how many there had been when the write began that found no room. If there are
        more now, somebody else has made room meanwhile.
        """
        if await self._hooks.make_room(size_bytes):
            return True
        async with self._actions:
            if self.evictions.count != evictions:
                return True
            missing = size_bytes - await self.blocking(self.volumes.free_bytes)
            doomed = self._least_wanted(missing)
            self.evictions.note(doomed)
            retired = await self._retire_all(doomed)
            self.evictions.count += len(doomed)
            return retired

    def _least_wanted(self, missing_bytes: int) -> tuple[StepId, ...]:
        pinned = self.run_view.pinned
        surplus = self.look().expendable(Tier.LOCAL, Retention(last=1, pinned=pinned))
        unfinished = set(surplus).difference(self.ledger.committed(Tier.LOCAL))
        if not surplus and self.run_view.told:
            surplus = self.run_view.crowded_out(self._live(), commit=self.last_commit())
        free = [id for id in surplus if not self._in_use(id)]
        return self.evictions.choose(
            self.shards,
            free,
            unfinished=unfinished,
            missing_bytes=missing_bytes,
            written_at=self.ledger.written_at(self.shards),
        )

    # --- the ledger's wishes -----------------------------------------------------------------

    async def _tell(self, event: Event) -> None:
        actions = [*self.ledger.apply(event)]
        self._remember(actions)
        async with self._actions:
            if not self.run_view.told:
                await self._retire_all(one.id for one in actions if isinstance(one, Retire))
            await self._publish_committed()

    async def _retire_all(self, ids: Iterable[StepId]) -> bool:
        """Retire these steps, but those in use. False when there was nothing to do."""
        self.evictions.see(committed=sum(id in self.shards for id in self._commits()))
        doomed = [id for id in ids if id in self.shards and not self._in_use(id)]
        for id in doomed:
            await self._retire(id)
        return bool(doomed)

    def _in_use(self, id: StepId) -> bool:
        wanted = self.rollback.names(id)
        return wanted or self._busy(id) or id in self._opening or self._hooks.in_use(id)

    def pinned(self) -> frozenset[StepId] | None:
        """Steps that stay everywhere; None while the operator has not said."""
        if not self.run_view.pins_known:
            return None
        return self.run_view.pinned.union(filter(self.rollback.names, self.reach.ids()))

    def wanted(self) -> StepId | None:
        """The step that a person wants to go back to, where it is known here."""
        return self.rollback.resolve(self.ledger.whole(), self._restorable())

    def _restorable(self) -> list[StepId]:
        return [id for id in self.reach.ids() if self.ledger.lineage.restorable(id)]

    def _remember(self, actions: Iterable[object]) -> None:
        for action in actions:
            if isinstance(action, Alarm):
                warn("alarm", kind=str(action.kind), text=action.text)
                self.alarms[action.text] = None
            elif isinstance(action, Committed) and action.tier is Tier.LOCAL:
                say("committed", step=str(action.id))

    async def _publish_committed(self) -> None:
        """Level-triggered, so that a commit which was announced to nobody is not forgotten."""
        for id in self._commits():
            if id not in self.published and id in self.shards:
                await self._publish(id)
            if id in self.shards:
                self._hooks.committed(id, self.shards[id])

    async def _publish(self, id: StepId) -> None:
        try:
            path = await self.blocking(lambda: self.volumes.publish(id))
        except KeepstepError as error:
            warn("not published", step=str(id), reason=str(error))
            return
        if path is None:
            return
        self.stock.show(id, path)
        self.committed_at = path.stat().st_mtime  # its last shard got its name then
        self._changes.ring()

    async def _retire(self, id: StepId) -> None:
        self.stock.drop(id)
        self._hooks.forget((id,))
        try:
            freed = await self.blocking(lambda: self.volumes.retire(id))
        except KeepstepError as error:
            warn("not retired", step=str(id), reason=str(error))
            return
        say("retired", step=str(id), bytes=freed)

    # --- asking ------------------------------------------------------------------------------

    def _commits(self) -> list[StepId]:
        """Steps that are known to be committed: seen here to be complete, told by the operator, or
        shown to readers by an earlier sidecar that was told."""
        told = self.stock.ever_published() if self.run_view.told else set()
        told |= self.run_view.commits
        if self.run_view.commit is not None:
            told.add(self.run_view.commit)
        beyond = {id for id in told if self.ledger.lineage.restorable(id)}
        return sorted({*self.ledger.committed(Tier.LOCAL), *beyond})

    def last_commit(self) -> StepId | None:
        """The newest step that is known to be committed, and not dead."""
        return max(self._commits(), default=None)

    def _live(self) -> list[StepId]:
        """Steps on the volumes that the newest epoch goes on from."""
        standing = self.ledger.lineage.standing
        return [id for id in self.shards if standing(id) is Standing.LIVE]

    def was_committed(self, id: StepId) -> bool:
        """This very step is committed and, where it is held, visible; or was until it expired."""
        if self.stock.was_published(id):
            return True
        return id not in self.shards and id in (self.run_view.commit, *self.run_view.commits)


# --- what remote tiers are told --------------------------------------------------------------
#
# What depots hear of this machine's volumes.


class Hooks:
    """Level-triggered: a commit is told once a life, and again when its shards are others."""

    def __init__(self, depots: Sequence[Depot]) -> None:
        self._depots = tuple(depots)
        self._told: dict[StepId, frozenset[int]] = {}

    def durable(self, found: Iterable[LocalShard]) -> None:
        """These shards are on the volumes."""
        for one in found if self._depots else ():
            for depot in self._depots:
                depot.durable(one)

    def committed(self, id: StepId, shards: Mapping[int, LocalShard]) -> None:
        """The step is committed; its files lie where they will stay."""
        if self._depots and self._told.get(id) != (ranks := frozenset(shards)):
            self._told[id] = ranks
            for depot in self._depots:
                depot.committed(id, dict(shards))

    def forget(self, ids: Collection[StepId]) -> None:
        """Dead, or deleted here."""
        for id in ids:
            self._told.pop(id, None)
        for depot in self._depots if ids else ():
            depot.forget(ids)

    def in_use(self, id: StepId) -> bool:
        """Some depot reads a shard of this step."""
        return any(depot.in_use(id) for depot in self._depots)

    async def make_room(self, size_bytes: int) -> bool:
        """Copies that are kept for others go first. False when there was nothing to let go."""
        keepers = [one for one in self._depots if isinstance(one, Keeper)]
        return any([await one.make_room(size_bytes) for one in keepers])
