"""The archive as a `RemoteTier`: sends due steps, writes their records, retires, and reads back.

What is due follows from two lists: the committed steps of which shards are here, and what the store
holds. They are compared anew whenever one of them changes, and from time to time. One coroutine
does all the sending, one shard at a time. So it never competes with itself, and the parts in flight
bound its memory. Whatever fails is tried again later, based on what is there then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from keepstep.core.retention import Retention
from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep_sidecar.config.archive import ArchiveConfig
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.tiers.archive.backlog import Backlog
from keepstep_sidecar.tiers.archive.fork import AncestorTier
from keepstep_sidecar.tiers.archive.index import Survey, Surveyor, inventory, source
from keepstep_sidecar.tiers.archive.retention import expired, names_of, unkept
from keepstep_sidecar.tiers.archive.store import Store, Stored, open_store
from keepstep_sidecar.tiers.archive.twin import found
from keepstep_sidecar.tiers.archive.upload import Gone, Sender, Unreadable
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.tiers.tier import Inventory, RemoteShard, RemoteTier, TierStatus, Traffic
from keepstep_sidecar.volume.scan import LocalShard

_THREADS = 3
_SOONEST_S, _LATEST_S = 1.0, 60.0
_IDLE_S = 60.0
_SLOW_BYTES_S = 50e6


def _no_epochs() -> tuple[Epoch, ...]:
    return ()


class ArchiveTier(RemoteTier):
    """All methods belong to one event loop.

    `epochs`: returns all epochs that the run knows to be its own; called again each time.
    `retry_s`: the shortest and the longest pause after a failed attempt. `patience_s`: how long to
    wait for a twin's file of a few bytes.
    """

    tier = Tier.ARCHIVE

    def __init__(
        self,
        config: ArchiveConfig,
        store: Store,
        *,
        run: str,
        persist_base: int = 1,
        epochs: Callable[[], Iterable[Epoch]] = _no_epochs,
        retry_s: tuple[float, float] = (_SOONEST_S, _LATEST_S),
        patience_s: float = 30.0,
    ) -> None:
        self.config, self.store, self.run_name = config, store, run
        self._epochs = epochs
        self._retry_s = retry_s
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-archive")
        self._surveyor = Surveyor(store, run)
        self._sender = Sender(
            store=store, run=run, executor=self._executor, patience_s=self._patience_s
        )
        self._patience, self._drained_at = patience_s, math.inf
        self._backlog = Backlog(config.base(persist_base))
        self._unsettled: dict[StepId, int] = {}
        self._unasked: set[StepId] = set()
        """Those of `_unsettled` for which it was not asked, since our shards were sent, whether all
        shards are there."""
        self._traffic = Traffic()
        self._trouble = ""
        self._attempts = 0
        self._polls = 0
        self._sending: StepId | None = None
        self._first_rank = False
        self._listed, self._listed_at = Survey(), time.monotonic()
        self._complete: frozenset[StepId] = frozenset()
        self._had: set[StepId] = set()
        """All steps that were ever complete."""
        self._sent: dict[StepId, float] = {}
        self._refused: set[StepId] = set()
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    # --- reading -----------------------------------------------------------------------------

    async def look(self) -> Inventory:
        """See `RemoteTier.look`. If there are only steps that cannot be used, the answer is UNKNOWN
        and names them."""
        try:
            survey = await self._survey()
        except KeepstepError as error:
            return Inventory(answer=Answer.UNKNOWN, reason=str(error))
        if survey.conflict:
            return Inventory(answer=Answer.UNKNOWN, reason=survey.conflict)
        where = self.store.where
        return inventory(
            survey.complete,
            run=self.run_name,
            where=where,
            epochs=survey.epochs,
            reason=_reason(survey, where),
        )

    async def _survey(self) -> Survey:
        began = time.monotonic()
        survey = await self._surveyor.survey(self._epochs())
        self._listed, self._listed_at = survey, began
        self._complete = frozenset(one.id for one in survey.complete)
        self._had |= self._complete
        self._backlog.wanted -= self._complete
        for id in self._complete & self._sent.keys():
            del self._sent[id]
        self.wake()
        return survey

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        received = self._traffic.count_received
        return [source(self.store, shard, run=self.run_name, received=received)]

    # --- what happens here -------------------------------------------------------------------

    def wake(self) -> None:
        held = self._settled_here()
        self._first_rank = self._first_rank or any(0 in shards for shards in held.values())
        pace = self._sending is not None and not self._trouble
        if not self.facts.managed:
            self._backlog.stand_in(self.facts.local().commits)
        before = set(self._backlog.waiting())
        self._backlog.compare(held, self._done(held), now=time.monotonic(), blame_pace=pace)
        waiting = set(self._backlog.waiting())
        if waiting - before:  # a step that waited before waits for the pause after a failure
            self._wake.set()
        if before - waiting:
            self._progress.set()

    def _settled_here(self) -> dict[StepId, Mapping[int, LocalShard]]:
        """Steps that are committed, or that lie before the run's newest commit. A pod that seldom
        hears from the operator is told only of the newest commit, when the others have already
        archived and retired the steps before it. A step that some rank never wrote stays partial in
        the archive until retention removes it."""
        local, newest = self.facts.local(), self.facts.commit()
        return {
            id: shards
            for id, shards in local.shards.items()
            if id in local.commits
            or (newest is not None and id.epoch == newest.epoch and id < newest)
        }

    def _done(self, held: Mapping[StepId, Mapping[int, LocalShard]]) -> set[StepId]:
        """The steps of which nothing is to be sent: whole there, sent and listed, or not kept."""
        self._refused &= held.keys()
        self._sent = {id: at for id, at in self._sent.items() if id in held}
        files = {one.id: one.files for one in self._listed.steps}
        done = self._refused | (self._complete & held.keys())
        for id, sent_at in self._sent.items():
            if sent_at >= self._listed_at or _all_there(held[id].values(), files.get(id, {})):
                done.add(id)
        left = held.keys() - done - self._backlog.wanted
        if due := [id for id in left if self._backlog.due(id)]:
            done |= unkept(self._listed, self._retention(), due, epochs=self._epochs())
        return done

    def _retention(self) -> Retention:
        kept = self.config.retention
        return replace(kept, pinned=kept.pinned.union(self.facts.pinned() or ()))

    def want(self, id: StepId) -> None:
        """Archive this step although it is not due: it is the last one of a run, or a client waits
        for it. Every sidecar of the run must be told."""
        if id not in self._complete | self._backlog.wanted:
            self._backlog.wanted.add(id)
            self.wake()
            self._wake.set()

    def had(self, id: StepId) -> bool:
        return id in self._had

    def in_use(self, id: StepId) -> bool:
        # An archive that cannot be reached holds up no deletion.
        return self._sending == id or (not self._trouble and self._backlog.next() == id)

    # --- sending -----------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self._wake.clear()
            pause_s = await self._attempt()
            self._progress.set()
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: it loses a cancellation that comes just as it ends (Python 3.11).
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def _attempt(self) -> float:
        """Do all that can be done now. Returns after how many seconds to look again."""
        try:
            await self._work()
        except KeepstepError as error:
            self._failed(error)
            return self._later_s(self._attempts)
        self._works()
        self._polls += 1
        return self._later_s(self._polls) if self._unsettled else _IDLE_S

    def _works(self) -> None:
        if self._trouble:
            say("archive works again", where=self.store.where)
        self._trouble, self._attempts = "", 0

    def _failed(self, error: KeepstepError) -> None:
        self._traffic.failures += 1
        self._attempts += 1
        if self._trouble != str(error):
            warn("archive", where=self.store.where, reason=str(error))
        self._trouble = str(error)

    def _later_s(self, times: int) -> float:
        """A pause that doubles each time, with a random part so that sidecars retry separately."""
        soonest, latest = self._retry_s
        return random.uniform(0.5, 1.0) * min(latest, soonest * 2.0 ** min(times, 16))

    async def _work(self) -> None:
        # Survey after a failure also if all waiting steps were retired: only an answer ends the
        # trouble.
        overdue = time.monotonic() - self._listed_at >= _IDLE_S
        if self._backlog.waiting() or self._trouble or overdue:
            survey = await self._survey()
            if survey.conflict:
                raise StorageError(survey.conflict)
        while waiting := self._backlog.waiting():
            await self._send(waiting[0])
            await self._settle()
        await self._settle()

    async def _send(self, id: StepId) -> None:
        shards = self._backlog.shards(id)
        self._sending = id
        try:
            if id not in self._complete:
                for found in shards:
                    await self._send_shard(found)
                self._unsettled[id] = shards[0].world
                self._unasked.add(id)
        except (Gone, Unreadable, ImageError) as error:
            # Retired or damaged here, or there is another writer's image: sending again changes
            # nothing.
            self._refused.add(id)
            self._backlog.sent(id)
            if not isinstance(error, Gone):
                raise
            return
        finally:
            self._sending = None
        self._sent[id] = time.monotonic()
        self._backlog.sent(id)
        self._polls = 0
        self._progress.set()

    async def _send_shard(self, found: LocalShard) -> None:
        began = time.monotonic()
        sent_bytes = await self._sender.send(found)
        if sent_bytes:
            self._works()  # not after the whole backlog: if steps come as fast, that never ends
            self._traffic.count_sent(sent_bytes, time.monotonic() - began)

    def _patience_s(self, size_bytes: int) -> float:
        """How long to wait for a twin's file of this size: as long as a slow store may take. When a
        pod must end, at most a third of its remaining time."""
        left_s = max(0.0, self._drained_at - time.monotonic())
        return min(self._patience + size_bytes / _SLOW_BYTES_S, left_s / 3)

    async def _settle(self) -> None:
        """Complete the steps that wait for shards of other sidecars, or for their record."""
        for id, world in sorted(self._unsettled.items()):
            try:
                settled = await self._sender.complete(id, world=world, epochs=self._epochs())
                self._unasked.discard(id)
                if not settled:
                    continue
            except ImageError:
                del self._unsettled[id]
                raise
            del self._unsettled[id]
            await self._archived(id)

    async def _archived(self, id: StepId) -> None:
        say("archived", step=str(id), where=self.store.where)
        for older in [one for one in self._unsettled if one < id]:
            del self._unsettled[older]  # what is missing of it will never come
        self._complete |= {id}
        self._had.add(id)
        self.facts.changed()
        if self._first_rank:
            await self.expire()

    async def expire(self) -> tuple[StepId, ...]:
        """Delete what the policy does not keep; one sidecar of the run does so. Raises
        StorageError.

        Returns the deleted steps.
        """
        survey, pinned = await self._survey(), self.facts.pinned()
        if pinned is None:  # one of them may be pinned: wait until the operator has named the pins
            return ()
        doomed = expired(survey, self._retention(), epochs=self._epochs(), now=time.time())
        for step in doomed:
            await self.store.delete(names_of(step, self.run_name))
            say("retired from the archive", step=str(step.id))
        gone = tuple(step.id for step in doomed)
        self._complete -= set(gone)
        return gone

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        self._drained_at = time.monotonic() + timeout_s
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                # The sidecar that sends the last shard of a step writes its record.
                while (
                    self._backlog.waiting()
                    or self._unasked & self._unsettled.keys()
                    or (whole and self._unsettled)
                ):
                    if self._trouble and not whole:
                        return False
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        finally:
            self._drained_at = math.inf
        return True

    # --- telling -----------------------------------------------------------------------------

    def status(self) -> TierStatus:
        return TierStatus(
            tier=Tier.ARCHIVE,
            where=self.store.where,
            **vars(self._traffic),
            backlog=self._backlog.backlog(),
            behind_s=self._backlog.behind_s(time.monotonic()),
            trouble=self._trouble,
        )

    async def close(self) -> None:
        await self.store.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _all_there(shards: Iterable[LocalShard], files: Mapping[str, Stored]) -> bool:
    """Whether all shards are there, as far as a listing tells. (A twin's difference was compared
    when it was sent.)"""
    return all(
        (one := found(files, world=shard.world).get(shard.rank)) is not None
        and (one.of is not None or one.stored.bytes == shard.size_bytes)
        for shard in shards
    )


def _reason(survey: Survey, where: str) -> str:
    """Why the run must not silently start anew: there are unusable steps. '' if there are none."""
    if survey.faults:
        return "; ".join(survey.faults)
    if survey.steps and not survey.complete:
        return f"{where} holds step {survey.steps[-1].id} in part only, and none that is whole"
    return ""


# --- from the configuration ------------------------------------------------------------------


def remote_tiers(
    config: Config,
    *,
    epochs: Callable[[], Iterable[Epoch]],
) -> tuple[ArchiveTier | AncestorTier, ...]:
    """The tiers of the configured archive: none, the archive, or also another run's part of it from
    which this run begins.

    `epochs`: returns what is known to be the run's own. Raises UsageError. The store is not asked.
    """
    if config.archive_config is None:
        return ()
    own = ArchiveTier(
        config.archive_config,
        open_store(config.archive_config),
        run=config.run,
        persist_base=config.persist_base,
        epochs=epochs,
    )
    if config.fork is None:
        return (own,)
    store = open_store(config.archive_config)
    return (own, AncestorTier(store, config.fork, run=config.run, epochs=epochs))
