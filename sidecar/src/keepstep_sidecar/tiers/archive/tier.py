"""The archive as a `RemoteTier`: sends due steps, writes their records, retires, and reads back.

Multiples of a base are due, and steps for which a client waits. Every sidecar sends its own ranks'
shards of the *same* steps without asking the others (`replicator.next_step_to_send`), one shard at
a time. So it never competes with itself, and the parts in flight bound its memory.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.commit_rule import StepLiveness, trace_lineage
from keepstep.core.retention import Retention
from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.steps import Epoch, StepId, Tier, TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig, Config, Fork
from keepstep_sidecar.log import info
from keepstep_sidecar.tiers.archive.heartbeats import RunHeartbeats
from keepstep_sidecar.tiers.archive.index import (
    ArchiveContents,
    ArchivedStep,
    Surveyor,
    archive_source_of,
    expired_steps,
    inventory_of,
    names_to_delete,
    step_prefix,
    steps_policy_would_delete,
)
from keepstep_sidecar.tiers.archive.step_record import choose_file_per_rank
from keepstep_sidecar.tiers.archive.store import Store, StoredObject, open_store
from keepstep_sidecar.tiers.archive.upload import ArchiveSender
from keepstep_sidecar.tiers.remote_tier import (
    Inventory,
    LocalInventory,
    RemoteShard,
    RemoteTier,
    TierStatus,
)
from keepstep_sidecar.tiers.replicator import DueShards, Key
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.run_tree import LocalShard, ShardName


@dataclass
class _Unsettled:
    """A step without its record. `asked`: whether it was asked, since our shards were sent, if all
    shards are there."""

    world: int
    asked: bool = False


class ArchiveTier(RemoteTier):
    """The archive of one run: also the one `Place` of its replicator. All methods belong to one
    event loop.

    `epochs`: returns all epochs that the run knows to be its own; called again each time.
    `retry_s`: as in `Replicator`. `patience_s`: how long to wait for a twin's file of a few bytes.
    """

    tier = Tier.ARCHIVE
    fresh_s = 1.0

    def __init__(
        self,
        config: ArchiveConfig,
        store: Store,
        *,
        run: str,
        persist_base: int = 1,
        epochs: Callable[[], Iterable[Epoch]] = tuple,
        retry_s: tuple[float, float] = (1.0, 60.0),
        patience_s: float = 30.0,
    ) -> None:
        super().__init__(due=self._due, places=lambda: {store.where: self}, retry_s=retry_s)
        self.config, self.where = config, store.where
        self._epochs = epochs
        self._base = config.step_interval(persist_base)
        self._surveyor = Surveyor(store, run)
        self._sender = ArchiveSender(store=store, run=run, patience_s=patience_s)
        self._lives = RunHeartbeats(store, run)
        self._requested: set[StepId] = set()
        """Steps to be archived that are no multiples of `_base`."""
        self._held_before: set[StepId] = set()
        self._unsettled: dict[StepId, _Unsettled] = {}
        """The steps of which our shards are there, but no record yet."""
        self._first_rank = False
        self._listed = ArchiveContents()
        self._complete: frozenset[StepId] = frozenset()
        self._had: set[StepId] = set()
        """All steps that were ever complete."""
        self._damaged: set[str | None] = set()
        """Roots of what may be damaged there. Bases with these are sent again."""

    # --- reading -----------------------------------------------------------------------------

    async def scan(self) -> Inventory:
        """See `RemoteTier.scan`. If there are only steps that cannot be used, the answer is UNKNOWN
        and names them."""
        try:
            survey = await self._survey()
        except KeepstepError as error:
            return Inventory(answer=TierAnswer.UNKNOWN, reason=str(error))
        if survey.conflict:
            return Inventory(answer=TierAnswer.UNKNOWN, reason=survey.conflict)
        strangers = self.facts.strangers(survey.epochs)
        return inventory_of(
            survey.complete_steps,
            run=self._sender.run,
            epochs=tuple(epoch for epoch in survey.epochs if epoch.id not in strangers),
            reason=_reason(survey, self.where),
        )

    async def _survey(self) -> ArchiveContents:
        survey = await self._surveyor.survey(self._epochs())
        await self._watch_lives(survey)
        if conflict := survey.conflict or await self._another(survey) or self.name_conflict_message:
            survey = replace(survey, conflict=conflict)
        self._listed = survey
        self._complete = frozenset(step.id for step in survey.complete_steps)
        self._had |= self._complete
        self._requested -= self._complete
        self.wake()
        return survey

    @property
    def name_conflict_message(self) -> str:
        """A message while a run of this name may train of which this one knows nothing; else ''. A
        vote waits for that, and fails if it does. The leader decides for all machines; with an
        operator, which says who belongs to a run, nobody has to."""
        decides = self.facts.leads and not self.facts.operated
        return self._lives.unknown if decides and not self.facts.life() else ""

    async def _watch_lives(self, survey: ArchiveContents) -> None:
        known = {epoch.id for epoch in self._epochs()} | self.facts.strangers(())
        await self._lives.check_for_foreign_run(survey.lives, known)

    async def _another(self, survey: ArchiveContents) -> str:
        """A message if another run of this name has steps there, of an epoch that began while this
        one trained; else ''. It is on record from then on."""
        steps = {step.id.epoch for step in survey.steps if step.record}
        if not (met := self.facts.strangers(survey.epochs) & steps):
            return ""
        await self.facts.meet(met)
        return (
            f"{self.where}/{self._sender.run} is used by another run named {self._sender.run!r}:"
            f" its epoch {min(met)} began there while this run trained. This run's own steps stay"
            " on its volumes; in the archive it writes and deletes nothing more. Give one of the"
            " two another archive or another name, or end the other one and delete the directories"
            f" {min(met)}-* there"
        )

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        received = self.replicator.traffic.count_received
        return [
            archive_source_of(self._sender.store, shard, run=self._sender.run, received=received)
        ]

    def exclude_source(self, source: ShardSource, step_id: StepId) -> None:
        """See `RemoteTier.exclude_source`."""
        base = source.shard.base  # it may be this that is damaged
        self._damaged.add(source.shard.root if base is None else base.root)

    def was_archived(self, step_id: StepId) -> bool:
        """Whether the whole step is there, or was until it expired."""
        return step_id in self._had

    # --- what is due -------------------------------------------------------------------------

    def _due(self) -> DueShards:
        """Of the steps that are committed and here, those that belong into the archive."""
        if self._listed.conflict:  # nothing is sent, so nobody waits for it
            return DueShards()
        local = self.facts.local()
        held = self._settled_here(local)
        self._first_rank = self._first_rank or any(0 in shards for shards in held.values())
        self._requested -= self._held_before - held.keys()
        self._held_before = set(held)
        steps = {
            step_id for step_id in held.keys() - self._complete if step_id.step % self._base == 0
        }
        steps -= steps_policy_would_delete(
            self._listed, self._retention(), steps, epochs=self._epochs()
        )
        owed = frozenset(steps | (self._requested & held.keys()))
        return DueShards(
            shards={step_id: held[step_id] for step_id in owed}, owed=owed, settled=owed
        )

    def _settled_here(self, local: LocalInventory) -> dict[StepId, Mapping[int, LocalShard]]:
        """Steps that are committed, or that lie before the run's newest commit. A machine that
        seldom hears from the leader is told only of the newest commit, when the others have already
        archived and retired the steps before it. A step that some rank never wrote stays partial in
        the archive until retention removes it."""
        newest = self.facts.commit()
        return {
            step_id: shards
            for step_id, shards in local.shards.items()
            if step_id in local.commits
            or (newest is not None and step_id.epoch == newest.epoch and step_id < newest)
        }

    def _retention(self) -> Retention:
        kept = self.config.retention
        return replace(kept, pinned=kept.pinned.union(self.facts.pinned() or ()))

    def request(self, step_id: StepId) -> None:
        """Archive this step although it is not due: it is the last one of a run, or a client waits
        for it. Every sidecar of the run must be told, because each sends its own ranks' shards."""
        if step_id not in self._complete:
            self._requested.add(step_id)
            self.wake()

    # --- sending -----------------------------------------------------------------------------

    async def list_held_shards(self, sent: Collection[Key]) -> set[Key]:
        """Of the shards that were sent, those that are listed in their size. Others are sent even
        if they are listed, because only that compares their content."""
        survey = await self._survey()
        if survey.conflict:
            raise StorageError(survey.conflict)
        listed = {step.id: step.files for step in survey.steps}
        shards = [shard for held in self.replicator.due.shards.values() for shard in held.values()]
        there = (shard for shard in shards if _is_there(shard, listed.get(shard.step_id, {})))
        return {(shard.step_id, shard.rank) for shard in there}.intersection(sent)

    async def write_shard(self, shard: LocalShard) -> int | None:
        return await self._sender.send(shard, bases=self._bases_like(shard))

    def _bases_like(self, shard: LocalShard) -> Iterator[str]:
        """The whole files in the archive that are the base of this shard, those of the newest step
        first."""
        if shard.base is None or shard.base.root in self._damaged:
            return
        for step in reversed(self._listed.complete_steps):
            record = step.record
            if record is None or not shard.rank < record.world or shard.rank in record.base_twins:
                continue
            if (archived := record.shards[shard.rank]).base == shard.base:
                name = ShardName.of(archived).base_shard_name
                yield f"{step_prefix(record.run, step.id)}/{name.file}"

    async def complete_and_prune_copies(self, sent: Collection[LocalShard]) -> bool:
        """Complete the steps that wait for shards of other sidecars, or for their record."""
        for shard in sent:
            self._unsettled[shard.step_id] = _Unsettled(shard.world)
        for step_id, pending in sorted(self._unsettled.items()):
            try:
                settled = await self._sender.write_step_record(
                    step_id, world=pending.world, epochs=self._epochs()
                )
            except ImageError:
                del self._unsettled[step_id]
                raise
            pending.asked = True
            if settled:
                await self._archived(step_id)
        return not self._unsettled

    async def _archived(self, step_id: StepId) -> None:
        info("archive.step_uploaded", step=str(step_id), target=self.where)
        del self._unsettled[step_id]
        for older in [
            at for at, pending in self._unsettled.items() if at < step_id and pending.asked
        ]:
            del self._unsettled[older]  # the sidecar that sends what is missing completes it
        self._complete |= {step_id}
        self._had.add(step_id)
        self.facts.changed()
        if self._first_rank:
            await self.delete_expired()

    def has_copied_all(self, *, whole: bool) -> bool:
        return all(pending.asked and not whole for pending in self._unsettled.values())

    async def delete_expired(self) -> tuple[StepId, ...]:
        """Delete what the policy does not keep; one sidecar of the run does so. Raises
        StorageError.

        Returns the deleted steps.
        """
        survey, pinned = await self._survey(), self.facts.pinned()
        if pinned is None:  # one of them may be pinned: wait until the leader has named the pins
            return ()
        doomed = expired_steps(survey, self._retention(), epochs=self._epochs(), now=time.time())
        for step in doomed:
            await self._sender.store.delete(names_to_delete(step, self._sender.run))
            info("archive.step_deleted", step=str(step.id))
        gone = tuple(step.id for step in doomed)
        self._complete -= set(gone)
        return gone

    def status(self) -> TierStatus:
        found = super().status()
        return replace(found, trouble=self._listed.conflict or found.trouble)

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """See `RemoteTier.drain`. The sidecar that sends the last shard of a step writes its
        record."""
        self._sender.until = time.monotonic() + timeout_s
        try:
            return await super().drain(timeout_s=timeout_s, whole=whole)
        finally:
            self._sender.until = math.inf

    async def run(self) -> None:
        """See `RemoteTier.run`. The leader says that the run lives."""

        def life() -> Epoch | None:
            return self.facts.life() if self.facts.leads else None

        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(), name="send to the archive")
            group.create_task(self._lives.keep(life, lambda: tuple(self._epochs())), name="live")

    async def close(self) -> None:
        await self._lives.close()
        await self._sender.store.close()
        self._sender.close()


def _is_there(shard: LocalShard, files: Mapping[str, StoredObject]) -> bool:
    """Whether the shard is there, as far as a listing tells. (A twin's difference was compared when
    it was sent.)"""
    for part, is_base in ((shard, False), (shard.base, True)):
        there = choose_file_per_rank(files, world=shard.world, is_base=is_base).get(shard.rank)
        if part is None:
            continue
        if there is None or (there.of is None and there.stored.bytes != part.size_bytes):
            return False
    return True


def _reason(survey: ArchiveContents, where: str) -> str:
    """Why the run must not silently start anew: there are unusable steps. '' if there are none."""
    if survey.faults:
        return "; ".join(survey.faults)
    if survey.steps and not survey.complete_steps:
        return f"{where} holds step {survey.steps[-1].id} in part only, and none that is whole"
    return ""


# --- another run's archive ------------------------------------------------------------------------
#
# It is only read: nothing is written or deleted below the other run's directory, and nothing there
# shows the reading. So the other run may expire the step at any time. This run then does not begin
# from another step instead.


_STEPS_NAMED = 5


class AncestorTier(RemoteTier):
    """`run`: the name of this run. `epochs`: returns its own epochs.

    `ancestor`: the other run. A run that has nothing of its own begins from one of its steps
    instead of at step 0, so only where step 0 would be allowed. `ids`: all steps of the other run
    that were ever offered.
    """

    tier = Tier.ARCHIVE

    def __init__(
        self,
        store: Store,
        fork: Fork,
        *,
        run: str,
        epochs: Callable[[], Iterable[Epoch]] = tuple,
    ) -> None:
        super().__init__()
        self.ancestor, self.where = fork.run, f"{store.where}/{fork.run}"
        self._store, self._fork, self._own, self._epochs = store, fork, run, epochs
        self.ids: frozenset[StepId] = frozenset()
        self._trouble = ""
        self._surveyor = Surveyor(store, fork.run)

    async def scan(self) -> Inventory:
        """See `RemoteTier.scan`. A missing step makes the answer UNKNOWN: no reason for step 0."""
        if self.facts.outgrown():
            return Inventory(answer=TierAnswer.NONE)
        try:
            survey = await self._surveyor.survey()
            found = [] if survey.conflict else self._chosen(survey)
            why = "" if found else survey.conflict or self._why_not(survey)
        except KeepstepError as error:
            found, why = [], str(error)
        self._trouble = why and f"this run shall begin from {self._fork}, but {why}"
        self.ids |= {step.id for step in found}
        return inventory_of(found, run=self.ancestor, reason=self._trouble)

    def _chosen(self, survey: ArchiveContents) -> list[ArchivedStep]:
        """The chosen step, of those that no later life of the other run left behind."""
        whole = {step.id: step for step in survey.complete_steps}
        lineage = trace_lineage(
            {epoch.id: epoch for epoch in survey.epochs}, seen={step_id.epoch for step_id in whole}
        )
        alive = {
            step_id for step_id in whole if lineage.step_liveness(step_id) is StepLiveness.LIVE
        }
        return [
            whole[step_id]
            for step_id in self._fork.filter_matching_steps(whole, alive, self._epochs())
        ]

    def _why_not(self, survey: ArchiveContents) -> str:
        if not survey.steps:
            return f"{self._store.where} holds no run {self.ancestor!r}"
        for step in survey.steps:
            if step.fault and self._fork.filter_matching_steps([step.id], [step.id], ()):
                return step.fault
        there = sorted((step.id for step in survey.complete_steps), reverse=True)[:_STEPS_NAMED]
        named = ", ".join(map(str, there)) or "none that is whole"
        return f"{self.where} does not hold that step whole; there is {named}"

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """In memory the image is this run's: a restarted sidecar would erase another run's
        image."""
        return [archive_source_of(self._store, shard, run=self.ancestor, adopted_by=self._own)]

    def status(self) -> TierStatus:
        trouble = "" if self.facts.outgrown() else self._trouble
        return replace(super().status(), trouble=trouble)

    async def close(self) -> None:
        await self._store.close()


# --- from the configuration ------------------------------------------------------------------


def build_archive_tiers(
    config: Config, archive: ArchiveConfig, *, epochs: Callable[[], Iterable[Epoch]]
) -> tuple[ArchiveTier, AncestorTier | None]:
    """The archive, and the part of it of another run from which this run begins, if it is a fork.

    `epochs`: returns what is known to be the run's own. Raises UsageError. The store is not asked.
    """
    own = ArchiveTier(
        archive,
        open_store(archive),
        run=config.run,
        persist_base=config.persist_grid_interval,
        epochs=epochs,
    )
    if config.fork is None:
        return own, None
    return own, AncestorTier(open_store(archive), config.fork, run=config.run, epochs=epochs)
