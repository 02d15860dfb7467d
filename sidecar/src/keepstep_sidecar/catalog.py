"""What is durable on this machine, and what follows from it: commits, retirement, epochs.

Hosts the ledger. Its duties as a host (docs/ledger.md): report what is there whenever that changes,
record an epoch durably before the ledger hears of it, obey `Committed` and `Retire`. A commit is a
property of storage: nothing here makes one, `publish` only shows it to stock readers.

In a run that spans several pods this ledger never sees a complete step. What it then knows of
commits, and what may be deleted, comes from the operator (`overview`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from keepstep.errors import KeepstepError, StorageError, VersionError
from keepstep.image import ControlPage, Layout
from keepstep.ledger import (
    Alarm,
    Committed,
    EpochStarted,
    Event,
    Held,
    Ledger,
    LedgerConfig,
    RankReport,
    Reported,
    RestorePlan,
    Retire,
    Standing,
)
from keepstep.reports import ReportReply
from keepstep.retention import Retention
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.overview import Overview
from keepstep_sidecar.scan import Found, Scan
from keepstep_sidecar.slotkeeper import Slotkeeper
from keepstep_sidecar.volume import Written
from keepstep_sidecar.volumes import VolumeSet

T = TypeVar("T")

_NOTE_EVERY_S = 10.0
"""Published directories tell of commits, too; the note is for the pod that has lost its shards."""


class Catalog:
    """The shards of this machine and the ledger over shards and slots.

    `busy`: steps that are being written now; they are not retired meanwhile.
    """

    def __init__(
        self,
        volumes: VolumeSet,
        keeper: Slotkeeper,
        *,
        keep: int,
        executor: Executor,
        changes: Changes,
        busy: Callable[[StepId], bool],
        told: bool = False,
    ) -> None:
        """`told`: an operator sees the whole run, and decides what is deleted."""
        self.volumes = volumes
        self.shards: dict[StepId, dict[int, Found]] = {}
        self.published: dict[StepId, str] = {}
        self.committed_at: float | None = None
        self.alarms: dict[str, None] = {}
        self.unreadable = ""
        self.scanned = False
        self.epoch: Epoch | None = None
        self.ledger = Ledger(LedgerConfig(retention={Tier.LOCAL: Retention(last=keep)}))
        self._keeper = keeper
        self._executor = executor
        self._changes = changes
        self._busy = busy
        self.overview = Overview(told=told, clock=time.monotonic)
        self.overview.remember(volumes.last_commit())
        self._noted = self.overview.commit
        self._noted_at = -_NOTE_EVERY_S
        self._ranks: set[int] = set()
        self._opening: set[StepId] = set()
        self._starting: dict[EpochId, asyncio.Future[None]] = {}
        self._actions = asyncio.Lock()

    async def blocking(self, work: Callable[[], T]) -> T:
        """Run a blocking call on the one thread that changes names on the volumes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- what is there -----------------------------------------------------------------------

    async def scan(self) -> None:
        """Look at the volumes; afterwards `scanned` is true and the ledger knows it all."""
        try:
            scan = await self.blocking(self.volumes.scan)
        except StorageError as error:
            self.unreadable, scan = str(error), Scan()
        self.shards.clear()
        for found in scan.shards:
            self.shards.setdefault(found.id, {})[found.rank] = found
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
        elif await self.blocking(self._quarantined):
            self.unreadable = "shards lie in quarantine (keepstep verify tells why)"
        for epoch in self.volumes.epochs():
            self.ledger.apply(EpochStarted(epoch))
        self.scanned = True
        await self.refresh()
        self._changes.ring()

    def _quarantined(self) -> int:
        return sum(volume.quarantined() for volume in self.volumes.volumes)

    def report(self) -> Reported:
        """All that this machine holds, of every rank that is known here."""
        return Reported(ranks={rank: self.rank_report(rank) for rank in self.ranks()})

    def ranks(self) -> list[int]:
        """Every rank of which something is or was here: one that lost its last copy must be
        reported as empty."""
        self._ranks.update(self._keeper.ranks, *self.shards.values())
        return sorted(self._ranks)

    def world(self, rank: int) -> int:
        """The world size that the rank's trainer or its newest image names, 0 for none."""
        slots = self._keeper.ranks.get(rank)
        if slots is not None and slots.world:
            return slots.world
        newest = max((id for id, held in self.shards.items() if rank in held), default=None)
        return self.shards[newest][rank].world if newest is not None else 0

    def rank_report(self, rank: int) -> RankReport:
        memory: list[Held] = []
        if (slots := self._keeper.ranks.get(rank)) is not None:
            memory = [Held(id=id, world=slots.world) for id in slots.sealed()]
        local = [_held(held[rank]) for _, held in sorted(self.shards.items()) if rank in held]
        return RankReport(
            sealed={Tier.MEMORY: tuple(memory), Tier.LOCAL: tuple(local)},
            answers={
                Tier.MEMORY: Answer.STEPS if memory else Answer.NONE,
                Tier.LOCAL: Answer.STEPS if local else self._local_answer(),
            },
        )

    def _local_answer(self) -> Answer:
        return Answer.UNKNOWN if self.unreadable or not self.scanned else Answer.NONE

    async def refresh(self, *, grown: bool = False) -> None:
        """Report to the ledger and do what it says. `grown`: a shard was added."""
        await self._tell(self.report())
        if grown and self.overview.silent:
            async with self._actions:
                held, commit = self._live(), self.last_commit()
                await self._retire_all(self.overview.unwatched(held, commit=commit))

    def look(self) -> Ledger:
        """The ledger with the newest report, for questions; what it asks for is done later."""
        self._remember(self.ledger.apply(self.report()))
        return self.ledger

    def plan(self) -> RestorePlan | None:
        """What would be restored now, if that is known."""
        newest = self.look().watermark(Tier.MEMORY)
        if (beyond := self._plan_beyond()) is not None and (newest is None or newest < beyond.id):
            return beyond
        if newest is None:
            return None
        worlds = {found.world for found in self.shards.get(newest, {}).values()}
        worlds |= {one.world for one in self._keeper.ranks.values() if one.find(newest)}
        plan = self.ledger.plan(range(max(worlds, default=0)))
        return plan if isinstance(plan, RestorePlan) else None

    def _plan_beyond(self) -> RestorePlan | None:
        """Where other ranks are elsewhere: the operator's plan for those ranks here that hold it.

        Else the last commit, for those that have nothing newer in memory: with that, and without
        an operator, only the vote can tell what the others have, too.
        """
        if (id := self.overview.plan) is not None and self.ledger.lineage.restorable(id):
            tiers = {rank: tier for rank in self.ranks() if (tier := self._nearest(rank, id))}
            if tiers:
                return RestorePlan(id, tiers)
        if (id := self.last_commit()) is None:
            return None
        tiers = {
            rank: tier
            for rank in self.ranks()
            if (tier := self._nearest(rank, id)) and id >= self._newest_in_memory(rank, id)
        }
        return RestorePlan(id, tiers) if tiers else None

    def _newest_in_memory(self, rank: int, default: StepId) -> StepId:
        slots = self._keeper.ranks.get(rank)
        return max(slots.sealed() if slots is not None else (), default=default)

    def _nearest(self, rank: int, id: StepId) -> Tier | None:
        slots = self._keeper.ranks.get(rank)
        if slots is not None and slots.find(id) is not None:
            return Tier.MEMORY
        return Tier.LOCAL if self.holds(rank, id) is not None else None

    # --- what happens ------------------------------------------------------------------------

    async def hear(self, reply: ReportReply) -> None:
        """The operator's answer: commits are published, and what nobody needs is deleted."""
        before = (self.overview.commit, self.overview.plan)
        self.overview.hear(reply)
        if self.scanned:
            async with self._actions:
                await self._publish_committed()
                await self._retire_all(self.overview.retired(list(self.shards)))
        await self.note_commit(at_once=False)
        if before != (self.overview.commit, self.overview.plan):
            self._changes.ring()

    async def note_commit(self, *, at_once: bool) -> None:
        """Write the last commit that was heard of into the run's record; not too often."""
        commit, now = self.overview.commit, time.monotonic()
        due = at_once or now - self._noted_at >= _NOTE_EVERY_S
        if commit is None or commit == self._noted or not due:
            return
        self._noted, self._noted_at = commit, now
        try:
            await self.blocking(lambda: self.volumes.save_commit(commit))
        except StorageError as error:
            warn("commit not noted", step=str(commit), reason=str(error))

    def wrote(self, written: Written, layout: Layout, control: ControlPage) -> None:
        """A shard is durable; `refresh` draws the conclusions."""
        found = Found(
            path=written.path,
            id=written.id,
            rank=written.rank,
            world=control.world,
            run=control.run,
            bytes=written.bytes,
            layout=layout,
            root=written.root,
            params_digest=written.sections.get("params"),
            published=False,
        )
        self.shards.setdefault(written.id, {})[written.rank] = found
        self._changes.ring()

    async def start_epoch(self, epoch: Epoch) -> None:
        """All ranks agreed on this epoch; durable on return. Raises StorageError."""
        if (starting := self._starting.get(epoch.id)) is None:
            starting = asyncio.ensure_future(self._start_epoch(epoch))
            self._starting[epoch.id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(epoch.id, None))
        await asyncio.shield(starting)

    async def _start_epoch(self, epoch: Epoch) -> None:
        if epoch not in self.ledger.epochs:
            await self.blocking(lambda: self.volumes.save_epoch(epoch))
        self.epoch = epoch
        await self._tell(EpochStarted(epoch))
        say("epoch started", epoch=str(epoch.id), parent=epoch.parent and str(epoch.parent))

    def see_epoch(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.epoch is None or self.epoch.id < epoch.id:
            self.epoch = epoch

    def opening(self, id: StepId, *, on: bool) -> None:
        """This step is being read: it is not retired meanwhile."""
        self._opening.add(id) if on else self._opening.discard(id)

    async def make_room(self) -> bool:
        """Retire all that the newest commit makes expendable. False when there was nothing."""
        pinned = self.overview.pinned
        surplus = self.look().expendable(Tier.LOCAL, Retention(last=1, pinned=pinned))
        if not surplus and self.overview.told:
            surplus = self.overview.crowded_out(self._live(), commit=self.last_commit())
        return await self._retire_all(surplus)

    # --- the ledger's wishes -----------------------------------------------------------------

    async def _tell(self, event: Event) -> None:
        actions = [*self.ledger.apply(event)]
        self._remember(actions)
        async with self._actions:
            if not self.overview.told:
                await self._retire_all(one.id for one in actions if isinstance(one, Retire))
            await self._publish_committed()

    async def _retire_all(self, ids: Iterable[StepId]) -> bool:
        """Retire these steps, but those in use. False when there was nothing to do."""
        doomed = [id for id in ids if id in self.shards and not self._in_use(id)]
        for id in doomed:
            await self._retire(id)
        return bool(doomed)

    def _in_use(self, id: StepId) -> bool:
        return self._busy(id) or id in self._opening

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

    async def _publish(self, id: StepId) -> None:
        try:
            path = await self.blocking(lambda: self.volumes.publish(id))
        except KeepstepError as error:
            warn("not published", step=str(id), reason=str(error))
            return
        if path is None:
            return
        self.published[id] = str(path)
        self.shards[id] = {
            rank: _as_published(found) for rank, found in self.shards.get(id, {}).items()
        }
        self.committed_at = path.stat().st_mtime  # its last shard got its name then
        self._changes.ring()

    async def _retire(self, id: StepId) -> None:
        self.shards.pop(id, None)
        self.published.pop(id, None)
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
        told = self.ever_published() if self.overview.told else set()
        if self.overview.commit is not None:
            told.add(self.overview.commit)
        beyond = {id for id in told if self.ledger.lineage.restorable(id)}
        return sorted({*self.ledger.committed(Tier.LOCAL), *beyond})

    def last_commit(self) -> StepId | None:
        """The newest step that is known to be committed, and not dead."""
        return max(self._commits(), default=None)

    def _live(self) -> list[StepId]:
        """Steps on the volumes that the newest epoch goes on from."""
        standing = self.ledger.lineage.standing
        return [id for id in self.shards if standing(id) is Standing.LIVE]

    def holds(self, rank: int, id: StepId) -> Found | None:
        """This rank's durable shard of the step."""
        return self.shards.get(id, {}).get(rank)

    def durable_from(self, rank: int, id: StepId) -> bool:
        """This or a later step of its epoch is durable for the rank."""
        return any(
            one.epoch == id.epoch and one >= id and rank in held
            for one, held in self.shards.items()
        )

    def committed_from(self, id: StepId) -> bool:
        """This or a later step of its epoch is committed and, where it is held, visible."""
        heard = self.overview.commit
        known = {*self.published, *({heard} if heard and heard not in self.shards else ())}
        return any(one.epoch == id.epoch and one >= id for one in known)

    def ever_published(self) -> set[StepId]:
        """Steps that were committed, whether or not all of their shards are still there."""
        return {id for id, held in self.shards.items() if any(f.published for f in held.values())}


def _held(found: Found) -> Held:
    return Held(
        id=found.id,
        world=found.world,
        root=found.root,
        params_digest=found.params_digest,
        twins=found.layout.twins,
    )


def _as_published(found: Found) -> Found:
    """The same shard where `publish` moved it: out of `pending/`."""
    directory = found.path.parent
    if directory.parent.name != "pending":
        return replace(found, published=True)
    return replace(
        found, path=directory.parent.parent / directory.name / found.path.name, published=True
    )
