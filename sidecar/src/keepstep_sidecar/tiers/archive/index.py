"""What an archive holds of a run: directories of steps, as their `step.json` and a listing tell.

    <archive>/<run>/<step>/rank-00000-of-00002.safetensors
    <archive>/<run>/<step>/rank-00001-of-00002.twin-of-00000     where it differs from that one
    <archive>/<run>/<step>/step.json                        last: now the step is archived
    <archive>/<run>/lives/<epoch>.json                      renewed while its trainers live

A step is archived when its record is sound and exactly its files are there. Anything else is
reported and left alone.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keepstep.core.commit_rule import StepLiveness, trace_lineage
from keepstep.core.retention import Retention, steps_to_retire, unneeded_steps
from keepstep.core.shard import Shard
from keepstep.errors import ImageError
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer, merge_epochs
from keepstep_sidecar.concurrency import gather_limited, run_blocking
from keepstep_sidecar.tiers.archive import heartbeats
from keepstep_sidecar.tiers.archive import step_record as records
from keepstep_sidecar.tiers.archive.archive_source import IN_FLIGHT, ArchiveSource, ShardObject
from keepstep_sidecar.tiers.archive.step_record import StepRecord, is_twin_name
from keepstep_sidecar.tiers.archive.store import Store, StoredObject
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteShard
from keepstep_sidecar.volume.run_tree import is_base, is_shard, is_step

RECORDS_BYTES = 16 << 20
"""The records of one run that are read, from the newest step on. The newest one always is. Parsed,
they take up to six times as much of the memory that the sidecar has beside the slots."""
TOO_LARGE = f"not read: the record of a step has at most {records.LIMIT_BYTES >> 20} MiB"
TOO_MUCH = f"not read, because the records of newer steps take {RECORDS_BYTES >> 20} MiB already"


@dataclass(frozen=True, kw_only=True)
class ArchivedStep:
    """A step's directory. `fault`: why a step with a record must not be restored; '' if it may be.

    `files`: by their names in the directory.
    """

    id: StepId
    files: Mapping[str, StoredObject]
    record: StepRecord | None = None
    fault: str = ""

    @property
    def complete(self) -> bool:
        return self.record is not None and not self.fault

    @property
    def has_no_record(self) -> bool:
        """No record (any more): being sent, being deleted, or given up half-way."""
        return self.record is None and not self.fault

    @property
    def shard_files(self) -> list[str]:
        """Names of the files of shards, without those of bases."""
        return [name for name in self.keepstep_files if name.startswith("rank-")]

    @property
    def keepstep_files(self) -> list[str]:
        """Names of keepstep's own files, without the record."""
        return sorted(
            file for file in self.files if is_shard(file) or is_base(file) or is_twin_name(file)
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files of shards and bases. A base counts for each step, also where the
        archive has one file for all of them."""
        return sum(self.files[name].bytes for name in self.keepstep_files)

    @property
    def image_bytes(self) -> int:
        """Bytes of all images of a complete step and of their bases; what twins share counts for
        each of them."""
        assert self.record is not None
        shards = self.record.shards
        return sum(
            shard.size_bytes + (shard.base.size_bytes if shard.base else 0) for shard in shards
        )


@dataclass(frozen=True, kw_only=True)
class ArchiveContents:
    """Steps in ascending order. `conflict`: two runs share this place; '' if they do not. `lives`:
    what each epoch renews while its trainers live."""

    steps: tuple[ArchivedStep, ...] = ()
    conflict: str = ""
    lives: Mapping[EpochId, StoredObject] = field(default_factory=dict)

    @property
    def complete_steps(self) -> tuple[ArchivedStep, ...]:
        return tuple(step for step in self.steps if step.complete)

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """All epochs in the records, oldest first."""
        records = (step.record for step in self.steps if step.record)
        return merge_epochs(epoch for record in records for epoch in record.epochs)

    @property
    def fork_origin(self) -> str:
        """`RUN/STEP` of the other run from which this run began; '' if it is not a fork."""
        found = (f"{epoch.origin}/{epoch.parent}" for epoch in self.epochs if epoch.origin)
        return next(found, "")

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(step.fault for step in self.steps if step.fault)


def step_prefix(run: str, step_id: StepId) -> str:
    return f"{run}/{step_id}"


def remote_shards(step: ArchivedStep, *, run: str) -> tuple[RemoteShard, ...]:
    """The shards of a complete step."""
    record = step.record
    assert record is not None
    prefix = step_prefix(run, step.id)

    def remote(shard: Shard) -> RemoteShard:
        twin = record.twins.get(shard.rank)
        rest = None if twin is None else remote(record.shards[twin.rank])
        base = None if shard.base is None else remote_base(shard.base)
        return placed(replace(shard, base=base), record.find_shard_file(shard), rest)

    def remote_base(base: Shard) -> RemoteShard:
        twin = record.base_twins.get(base.rank)
        other = None if twin is None else record.shards[twin.rank].base
        rest = None if other is None else remote_base(other)
        return placed(base, record.find_shard_file(base, is_base=True), rest)

    def placed(shard: Shard, file: tuple[str, int], rest: RemoteShard | None) -> RemoteShard:
        place = ShardObject(name=f"{prefix}/{file[0]}", stored_bytes=file[1], rest=rest)
        return RemoteShard.from_shard(shard, tier=Tier.ARCHIVE, key=place)

    return tuple(map(remote, record.shards))


def make_shard_of_one_object(shard: Shard, stored: StoredObject) -> RemoteShard:
    """A shard whose object contains all of it."""
    place = ShardObject(name=stored.name, stored_bytes=stored.bytes)
    return RemoteShard.from_shard(shard, tier=Tier.ARCHIVE, key=place)


def inventory_of(
    complete: Sequence[ArchivedStep],
    *,
    run: str,
    epochs: tuple[Epoch, ...] = (),
    reason: str = "",
) -> Inventory:
    """The inventory of complete steps. If there are none, a reason makes the answer UNKNOWN."""
    nothing = TierAnswer.UNKNOWN if reason else TierAnswer.NONE
    return Inventory(
        answer=TierAnswer.STEPS if complete else nothing,
        shards=tuple(shard for step in complete for shard in remote_shards(step, run=run)),
        epochs=epochs,
        complete=frozenset(step.id for step in complete),
        reason=reason,
    )


def archive_source_of(
    store: Store,
    shard: RemoteShard,
    *,
    run: str,
    adopted_by: str = "",
    received: Callable[[int, float], None] = lambda size_bytes, seconds: None,
) -> ArchiveSource:
    """The source from which such a shard is read. Call it on the event loop."""
    place: ShardObject = shard.key
    beside = None
    if isinstance(shard.base, RemoteShard):
        beside = archive_source_of(
            store, shard.base, run=run, adopted_by=adopted_by, received=received
        )
    return ArchiveSource(
        shard=shard,
        where=f"{store.where}/{place.name}",
        run=run,
        place=place,
        rest=None if place.rest is None else archive_source_of(store, place.rest, run=run),
        beside=beside,
        store=store,
        loop=asyncio.get_running_loop(),
        received=received,
        adopted_by=adopted_by,
    )


_Key = tuple[str, str]
"""A record's name and etag."""
_Found = StepRecord | str
"""A record, or why it is none. Not the error itself: its traceback would keep what was read."""


@dataclass
class Surveyor:
    """Lists the run's directory. Records are read again only when they changed."""

    store: Store
    run: str
    _known: dict[_Key, _Found] = field(default_factory=dict)

    async def survey(self, own: Iterable[Epoch] = ()) -> ArchiveContents:
        """The steps of the run. `own`: epochs that the run itself knows. Raises StorageError."""
        listed = await self.store.list_below(self.run)
        by_step: defaultdict[StepId, dict[str, StoredObject]] = defaultdict(dict)
        of_lives = dict[str, StoredObject]()
        for stored in listed:
            directory, _, name = stored.name.removeprefix(f"{self.run}/").partition("/")
            if is_step(directory) and "/" not in name:
                by_step[StepId.parse(directory)][name] = stored
            elif directory == heartbeats.DIRECTORY:
                of_lives[name] = stored
        newest_first = (files for _, files in sorted(by_step.items(), reverse=True))
        records_there = [entry for files in newest_first if (entry := files.get(records.NAME))]
        read_bytes = itertools.accumulate(
            entry.bytes if entry.bytes <= records.LIMIT_BYTES else 0 for entry in records_there
        )
        reads = [
            functools.partial(self._read, stored, total)
            for stored, total in zip(records_there, read_bytes, strict=True)
        ]
        # Only from this listing: another survey with an older listing may be under way.
        found = self._known = dict(await gather_limited(reads, most=IN_FLIGHT))
        steps = tuple(
            self._judge(step_id, files, found) for step_id, files in sorted(by_step.items())
        )
        conflict = self._conflict(steps, own)
        return ArchiveContents(
            steps=steps, conflict=conflict, lives=heartbeats.find_heartbeats(of_lives)
        )

    async def _read(self, stored: StoredObject, total_bytes: int) -> tuple[_Key, _Found]:
        """The record of a step. `total_bytes`: of it and the records of all newer steps."""
        key = stored.name, stored.etag
        path = f"{self.store.where}/{stored.name}"
        if stored.bytes > records.LIMIT_BYTES:
            return key, f"{path}: {TOO_LARGE}"
        if total_bytes > max(RECORDS_BYTES, stored.bytes):
            return key, f"{path}: {TOO_MUCH}"
        if (known := self._known.get(key)) is not None:
            return key, known
        data = bytearray(stored.bytes)
        try:
            await self.store.read_range(stored.name, 0, memoryview(data))
            parse = functools.partial(StepRecord.from_json, data, path=path)
            return key, await run_blocking(None, parse)
        except ImageError as error:
            return key, str(error)

    def _judge(
        self, step_id: StepId, files: Mapping[str, StoredObject], known: Mapping[_Key, _Found]
    ) -> ArchivedStep:
        """Describe a directory whose record, if it has one, was read."""
        if (stored := files.get(records.NAME)) is None:
            return ArchivedStep(id=step_id, files=files)
        found = known[stored.name, stored.etag]
        if isinstance(found, str):
            return ArchivedStep(id=step_id, files=files, fault=found)
        fault = self._fault(step_id, files, found)
        return ArchivedStep(id=step_id, files=files, record=found, fault=fault)

    def _fault(self, step_id: StepId, files: Mapping[str, StoredObject], record: StepRecord) -> str:
        place = f"{self.store.where}/{step_prefix(self.run, step_id)}"
        if (record.run, record.id) != (self.run, step_id):
            return f"{place}/{records.NAME} is of run {record.run!r}, step {record.id}"
        listed = record.files
        for name, size_bytes in listed.items():
            if (stored := files.get(name)) is None:
                return f"{place}/{name} is missing"
            if stored.bytes != size_bytes:
                return f"{place}/{name} has {stored.bytes} bytes, not {size_bytes}"
        foreign = [name for name in files if name.endswith(".safetensors") and name not in listed]
        if foreign:
            return f"{place}/{foreign[0]} does not belong to the step; move it away"
        return ""

    def _conflict(self, steps: Iterable[ArchivedStep], own: Iterable[Epoch]) -> str:
        """A message if there are two families of epochs that began separately; else ''."""
        own = tuple(own)
        histories = [step.record.epochs for step in steps if step.record and step.complete]
        found = epoch_families_with_root([*histories, own])
        if len(found) < 2:
            return ""
        ours = {epoch.id for epoch in own}
        names = [
            f"epoch {max(family)}" + (" (this run)" if family & ours else "") for family in found
        ]
        return (
            f"{self.store.where}/{self.run} is shared by two runs named {self.run!r}:"
            f" {' and '.join(names)}; neither goes on from the other. Give one of them another"
            " archive or another name; nothing was deleted"
        )


# --- epochs of one run -----------------------------------------------------------------------
#
# Epochs are kin when one is the parent of the other, or when one record lists both. But a fork is
# no kin of the run that it began from; otherwise all forks of a step would be kin. Two families in
# one archive are two runs that share a name. To restore in one run what the other saved would mix
# two models. So neither run is restored, and nothing is deleted.


def epoch_families(records: Iterable[Iterable[Epoch]]) -> list[frozenset[EpochId]]:
    """The families among these records (one per step, and one for the run itself), oldest first."""
    found: list[set[EpochId]] = []
    for record in records:
        kin = {epoch_id for epoch in record for epoch_id in _mentioned(epoch)}
        if not kin:
            continue
        related = [family for family in found if family & kin]
        found = [family for family in found if not family & kin]
        found.append(kin.union(*related))
    return sorted(map(frozenset, found), key=min)


def epoch_families_with_root(records: Iterable[Iterable[Epoch]]) -> list[frozenset[EpochId]]:
    """The families whose beginning is known. A family without a known beginning may be a later part
    of any of them: a pod that was replaced knows only the epochs since then."""
    lines = [tuple(record) for record in records]
    roots = {
        epoch.id for record in lines for epoch in record if epoch.parent is None or epoch.origin
    }
    return [family for family in epoch_families(lines) if family & roots]


def _mentioned(epoch: Epoch) -> Iterable[EpochId]:
    if epoch.parent is None or epoch.origin:
        return (epoch.id,)
    return (epoch.id, epoch.parent.epoch)


# --- what may be deleted --------------------------------------------------------------------------
#
# The record is deleted first. From then on the step is not archived, whatever is left of it.


ABANDONED_S = 3600.0
"""This long after the last file of a step arrived, no sidecar is still sending the others."""


def expired_steps(
    survey: ArchiveContents,
    policy: Retention,
    *,
    epochs: Iterable[Epoch],
    now: float,
) -> tuple[ArchivedStep, ...]:
    """Steps to be deleted, oldest first. `epochs`: all that are known of the run. `policy`: with
    all pins.

    Never deleted are the newest complete step that can be restored, pinned steps, steps that cannot
    be judged, and anything in a place that two runs share. Dead steps are deleted once the life
    that left them behind has a step there.
    """
    if survey.conflict:
        return ()
    standing = _standing(survey, epochs)
    live = [step.id for step in survey.complete_steps if standing[step.id] is StepLiveness.LIVE]
    if not live:
        return ()
    complete = {step.id for step in survey.complete_steps}
    dead = {step_id for step_id in complete if standing[step_id] is StepLiveness.DEAD}
    abandoned = [step.id for step in survey.steps if _abandoned(step, now)]
    doomed = {
        *steps_to_retire(live, policy, written_at=_written_at(survey)),
        *unneeded_steps(live, policy, dead=dead, unfinished=abandoned),
    }
    return tuple(step for step in survey.steps if step.id in doomed)


def steps_policy_would_delete(
    survey: ArchiveContents, policy: Retention, ids: Iterable[StepId], *, epochs: Iterable[Epoch]
) -> set[StepId]:
    """Those of `ids` (live steps that are not in the archive) that the policy would delete."""
    standing = _standing(survey, epochs)
    live = [step.id for step in survey.complete_steps if standing[step.id] is StepLiveness.LIVE]
    written = _written_at(survey)
    return {
        step_id
        for step_id in ids
        if step_id in steps_to_retire([*live, step_id], policy, written_at=written)
    }


def _standing(survey: ArchiveContents, epochs: Iterable[Epoch]) -> dict[StepId, StepLiveness]:
    known = {epoch.id: epoch for epoch in (*survey.epochs, *epochs)}
    lineage = trace_lineage(known, seen={step.id.epoch for step in survey.steps})
    return {step.id: lineage.step_liveness(step.id) for step in survey.steps}


def _written_at(survey: ArchiveContents) -> dict[StepId, float]:
    return {step.id: step.record.written_at for step in survey.complete_steps if step.record}


def _abandoned(step: ArchivedStep, now: float) -> bool:
    """Whether only a part was sent, long ago. A step with a faulty record is for people to
    judge. A base that other steps link to is as young as the newest of them, so it counts only
    where there is nothing else."""
    own = [file for name, file in step.files.items() if not is_base(name)]
    files = own or step.files.values()
    return step.has_no_record and all(now - file.modified_at > ABANDONED_S for file in files)


def names_to_delete(step: ArchivedStep, run: str) -> tuple[str, ...]:
    """The names to delete of a step, in this order. Files that are not keepstep's stay."""
    ours = [name for name in (records.NAME, *step.keepstep_files) if name in step.files]
    return tuple(f"{run}/{step.id}/{name}" for name in ours)
