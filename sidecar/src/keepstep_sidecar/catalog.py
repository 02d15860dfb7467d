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
from collections import Counter
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
    Retire,
    Standing,
)
from keepstep.reports import ReportReply
from keepstep.retention import Retention
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.hooks import Hooks
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.origins import LocalReader, Origin, RemoteOrigin
from keepstep_sidecar.overview import Overview
from keepstep_sidecar.reach import Reach
from keepstep_sidecar.remotes import Remotes
from keepstep_sidecar.rollback import Rollback, Wish
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
        reader: LocalReader,
        remotes: Remotes,
        told: bool = False,
        wish: Wish | None = None,
    ) -> None:
        """`told`: an operator sees the whole run, and decides what is deleted. `wish`: what to go
        back to."""
        self.volumes = volumes
        self.shards: dict[StepId, dict[int, Found]] = {}
        self.published: dict[StepId, str] = {}
        self.committed_at: float | None = None
        self.alarms: dict[str, None] = {}
        self.unreadable = ""
        self.scanned = False
        self.epoch: Epoch | None = None
        self.remotes = remotes
        self.reach = Reach(self.shards, keeper, remotes, reader)
        self.ledger = Ledger(
            LedgerConfig(
                tiers=(Tier.MEMORY, Tier.LOCAL, *remotes.tiers),
                retention={Tier.LOCAL: Retention(last=keep)},
            )
        )
        self._keeper = keeper
        self._executor = executor
        self._changes = changes
        self._busy = busy
        self.overview = Overview(told=told, clock=time.monotonic)
        self.overview.remember(volumes.last_commit())
        self.rollback = Rollback(wish, volumes.epochs)
        self._noted = self.overview.commit
        self._noted_at = -_NOTE_EVERY_S
        self._ranks: set[int] = set()
        self._remote_ranks: set[int] = set()
        self._index_told = remotes.index
        self._hooks = Hooks(remotes.depots)
        self._opening: Counter[StepId] = Counter()
        self._starting: dict[EpochId, asyncio.Future[None]] = {}
        self._actions = asyncio.Lock()

    async def blocking(self, work: Callable[[], T]) -> T:
        """Run a blocking call on the one thread that changes names on the volumes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- what is there -----------------------------------------------------------------------

    async def scan(self) -> None:
        """Look at the volumes; afterwards `scanned` is true and the ledger knows it all."""
        try:
            scan, aside = await self.blocking(self._survey)
        except StorageError as error:
            self.unreadable, scan, aside = str(error), Scan(), 0
        # with nothing awaited from here on: what is lost is never merely absent
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
        elif aside:
            self.unreadable = "shards lie in quarantine (keepstep verify tells why)"
        for epoch in self.volumes.epochs():
            self.ledger.apply(EpochStarted(epoch))
        self.scanned = True
        self._hooks.durable(one for held in self.shards.values() for one in held.values())
        await self.refresh()
        self._changes.ring()

    async def look_beyond(self) -> None:
        """Ask the depots what they hold; the ledger hears of it."""
        first = not self.remotes.looked
        if not await self.remotes.look() and not first:
            return
        await self._tell(self._report_beyond())
        self._changes.ring()

    def _report_beyond(self) -> Reported:
        self._index_told = self.remotes.index
        ranks = {rank: self.remotes.report(rank) for rank in self._beyond()}
        return Reported(ranks=ranks, epochs=self.remotes.epochs)

    def _beyond(self) -> set[int]:
        """Ranks of which depots hold or held something: one whose last copy went must be reported
        as empty. What is told of ranks that are here is told with everything else, too."""
        self._remote_ranks.update(self.remotes.ranks)
        return self._remote_ranks

    async def distrust(self, origin: Origin, error: Exception) -> None:
        """This copy could not be used; one on a volume was quarantined, and is looked for anew."""
        if isinstance(origin, RemoteOrigin):
            self.remotes.distrust(origin, error)
            ranks = {origin.rank: self.remotes.report(origin.rank)}
            self._remember(self.ledger.apply(Reported(ranks=ranks)))
            self._changes.ring()
        elif self.holds(origin.rank, origin.id) is not None:
            await self.scan()

    def _survey(self) -> tuple[Scan, int]:
        """What is there, and how many files are in quarantine afterwards."""
        scan = self.volumes.scan()
        return scan, sum(volume.quarantined() for volume in self.volumes.volumes)

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
            memory = [_in_slot(*at) for id in slots.sealed() if (at := slots.find(id))]
        local = [_held(held[rank]) for _, held in sorted(self.shards.items()) if rank in held]
        beyond = self.remotes.report(rank)
        return RankReport(
            sealed={Tier.MEMORY: tuple(memory), Tier.LOCAL: tuple(local), **beyond.sealed},
            answers={
                Tier.MEMORY: Answer.STEPS if memory else Answer.NONE,
                Tier.LOCAL: Answer.STEPS if local else self._local_answer(),
                **beyond.answers,
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
        if self._index_told != self.remotes.index:  # `look_beyond` is just about to tell it
            self._remember(self.ledger.apply(self._report_beyond()))
        self._remember(self.ledger.apply(self.report()))
        return self.ledger

    def newest_in_memory(self, rank: int, default: StepId) -> StepId:
        slots = self._keeper.ranks.get(rank)
        return max(slots.sealed() if slots is not None else (), default=default)

    # --- what happens ------------------------------------------------------------------------

    async def hear(self, reply: ReportReply) -> None:
        """The operator's answer: commits are published, and what nobody needs is deleted."""
        before = (self.overview.commit, self.overview.plan)
        self.overview.hear(reply)
        self.rollback.hear(reply)
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
        self._hooks.durable((found,))
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
        self.rollback.began(epoch)
        await self._tell(EpochStarted(epoch))
        self._hooks.forget([id for id in self.shards if self.ledger.is_dead(id)])
        say("epoch started", epoch=str(epoch.id), parent=epoch.parent and str(epoch.parent))

    def see_epoch(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.epoch is None or self.epoch.id < epoch.id:
            self.epoch = epoch

    def opening(self, id: StepId, *, on: bool) -> None:
        """This step is being read: it is not retired meanwhile. Counted."""
        self._opening[id] += 1 if on else -1
        if not self._opening[id]:
            del self._opening[id]

    async def make_room(self, size_bytes: int) -> bool:
        """Let go of copies kept for others, else retire all that the newest commit makes
        expendable. False when there was nothing."""
        if await self._hooks.make_room(size_bytes):
            return True
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
        wanted = self.rollback.names(id)
        return wanted or self._busy(id) or id in self._opening or self._hooks.in_use(id)

    def pinned(self) -> frozenset[StepId]:
        """Steps that stay everywhere."""
        return self.overview.pinned.union(filter(self.rollback.names, self.reach.ids()))

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
        self.published[id] = str(path)
        self.shards[id] = {
            rank: _as_published(found) for rank, found in self.shards.get(id, {}).items()
        }
        self.committed_at = path.stat().st_mtime  # its last shard got its name then
        self._changes.ring()

    async def _retire(self, id: StepId) -> None:
        self.shards.pop(id, None)
        self.published.pop(id, None)
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


def _in_slot(bank: Bank, index: int) -> Held:
    id = bank.table.slots[index].id
    assert id is not None
    return Held(id=id, world=bank.layout.world, twins=bank.layout.twins)


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
