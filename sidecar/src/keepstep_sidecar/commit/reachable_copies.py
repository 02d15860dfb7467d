"""Who holds which shards: `LocalShards` for this machine's volumes, `RemoteInventory` beyond it.

`ReachableCopies` puts both and the slots together: what the ledger is told, and where a copy can be
read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from keepstep.core.commit_rule import (
    RankReport,
    ReportedTier,
    combine_rank_reports,
    each_rank,
    is_full,
)
from keepstep.core.ledger import Reported
from keepstep.core.node import Listed
from keepstep.core.restore_vote import NEVER, Offer
from keepstep.core.shard import NO_RANKS, Ranks, Shard
from keepstep.errors import ImageError, VersionError
from keepstep.steps import NEAREST_FIRST, Epoch, StepId, Tier, TierAnswer, merge_epochs
from keepstep_sidecar.concurrency import OnThread
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteShard, RemoteTier
from keepstep_sidecar.tiers.source import ShardSource, local_source
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.run_tree import LocalShard, VolumeScan
from keepstep_sidecar.volume.volume import VolumeSet

if TYPE_CHECKING:  # they are only imported where they are configured
    from keepstep_sidecar.tiers.archive.tier import AncestorTier, ArchiveTier
    from keepstep_sidecar.tiers.peer.tier import PeerTier

_PAST_STEPS = 10_000
_log = logging.getLogger("keepstep.sidecar")

_Known = Mapping[tuple[StepId, int], LocalShard]


class LocalShards:
    """The shards that the last scan found, updated by later writes, publishes and deletions.

    `unreadable`: why more may lie on the volumes; '' when all is known. `scan_failed`: what could
    not be scanned. `in_doubt`: there may be whole shards that are not known. `scanned_at`: when it
    was first known what lies there. `committed_at`: when the newest step became durable that was
    published, in unix seconds.
    """

    def __init__(self, volumes: VolumeSet, blocking: OnThread) -> None:
        """`blocking`: runs a call on the one thread that changes names on the volumes."""
        self.volumes = volumes
        self.blocking = blocking
        self.shards: dict[StepId, dict[int, LocalShard]] = {}
        self.published: dict[StepId, str] = {}
        self.unreadable = self.scan_failed = ""
        self.in_doubt = True
        self.scanned_at = NEVER
        self.committed_at: float | None = None
        self._past: dict[StepId, tuple[frozenset[int], bool]] = {}

    # --- changing ----------------------------------------------------------------------------

    async def scan(self) -> int:
        """Scan the volumes. Returns the size of their drives in bytes.

        Never raises because of what lies there. A volume that cannot be read hides nothing of the
        others, and takes nothing from what is known.
        """
        before, drive_bytes = self._known(), 0
        try:
            scan, aside, drive_bytes = await self.blocking(self._survey)
        except Exception as error:  # any error: silence would look like an empty volume
            _log.exception("volume.scan_crashed")
            roots = [volume.root for volume in self.volumes.volumes]
            reason = str(error) or type(error).__name__
            scan, aside = VolumeScan(unread=dict.fromkeys(roots, reason)), 0
        # No await from here on: lost shards must never be seen as merely absent.
        reasons = "; ".join(dict.fromkeys(scan.unread.values()))
        failed = f"the volumes cannot be scanned: {reasons}" if scan.unread else ""
        self.unreadable = self.scan_failed = failed
        hidden = (
            shard for shard in self.all() if self.volumes.volume_of(shard.path).root in scan.unread
        )
        self._replace((*scan.shards, *hidden), before=before)
        for refused in scan.problems:
            warn(
                "shard.refused",
                path=str(refused.path),
                error=str(refused.error),
                moved_to=refused.moved_to and str(refused.moved_to),
            )
        newer = [problem for problem in scan.problems if isinstance(problem.error, VersionError)]
        if newer:
            self.unreadable = f"{newer[0].path} was written by a newer keepstep; upgrade this one"
        elif aside:
            self.unreadable = "shards lie in quarantine (keepstep verify tells why)"
        self.in_doubt = bool(newer or self.scan_failed)
        self.scanned_at = min(self.scanned_at, time.monotonic())
        return drive_bytes

    def _survey(self) -> tuple[VolumeScan, int, int]:
        """The scan of all volumes, the number of files in quarantine after it, and the size of the
        drives."""
        scan = self.volumes.scan()
        read = [volume for volume in self.volumes.volumes if volume.root not in scan.unread]
        return (
            scan,
            sum(volume.count_quarantined_files() for volume in read),
            self.volumes.measure_total_bytes(),
        )

    async def update_run_record(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """See `VolumeSet.change_record`."""
        await self.blocking(lambda: self.volumes.change_record(change))

    def note_all_removed(self) -> None:
        """Somebody removed all shards."""
        self._replace((), before=self._known())

    def _known(self) -> _Known:
        return {(shard.step_id, shard.rank): shard for shard in self.all()}

    def _replace(self, found: Iterable[LocalShard], *, before: _Known) -> None:
        """Take over the shards that a scan found. `before`: those known when it began. A shard that
        was written, published or deleted during the scan keeps its newer state."""
        now, scanned = self._known(), {(shard.step_id, shard.rank): shard for shard in found}
        newer = {key: shard for key, shard in now.items() if before.get(key) is not shard}
        gone = before.keys() - now.keys()
        self.shards.clear()
        for key, shard in {**scanned, **newer}.items():
            if key not in gone or key in newer:
                self.add(shard)
        for step_id in self.published.keys() - self.shards.keys():
            del self.published[step_id]

    def add(self, shard: LocalShard) -> None:
        self.shards.setdefault(shard.step_id, {})[shard.rank] = shard

    async def publish_step(self, step_id: StepId) -> bool:
        """Show the step to readers. False if nothing of it lies here. Raises KeepstepError."""
        made_of = [shard.path for shard in self.get_durable_shards(step_id).values()]
        if not made_of:  # a scan in between no longer found it
            return False
        path = await self.blocking(lambda: self.volumes.publish_step(step_id, made_of=made_of))
        if path is None:
            return False
        self.published[step_id] = str(path)
        self.committed_at = path.stat().st_mtime  # when its last shard got its name
        self.shards[step_id] = {
            rank: _as_published(found) for rank, found in self.get_durable_shards(step_id).items()
        }
        return True

    async def delete_step(self, step_id: StepId) -> int:
        """Delete the step. Returns the bytes freed. Raises KeepstepError."""
        self.forget_step(step_id)
        return await self.blocking(lambda: self.volumes.delete_step(step_id))

    def mark_shard_lost(self, rank: int, step_id: StepId) -> None:
        """This rank's shard of the step is damaged. Until a scan is through nobody knows what is
        left, so it is lost, never merely absent."""
        self.unreadable = f"step {step_id} is damaged; the volumes are scanned"
        held = self.shards.get(step_id, {})
        held.pop(rank, None)
        if not held:
            self.shards.pop(step_id, None)
            self.published.pop(step_id, None)

    def forget_step(self, step_id: StepId) -> None:
        """The step is about to be deleted. Remember what it was, for clients that ask later."""
        self._past[step_id] = frozenset(self.shards.pop(step_id, ())), step_id in self.published
        self.published.pop(step_id, None)
        while len(self._past) > _PAST_STEPS:
            del self._past[next(iter(self._past))]

    # --- asking ------------------------------------------------------------------------------

    @property
    def run_record(self) -> RunRecord:
        """What the volumes have on record."""
        return self.volumes.record

    @property
    def scanned(self) -> bool:
        """Whether the volumes were scanned, so that it is known what lies on them."""
        return self.scanned_at != NEVER

    @property
    def bytes_by_step(self) -> dict[StepId, int]:
        """The bytes that each step takes on the volumes."""
        return {
            step_id: sum(shard.size_bytes for shard in held.values())
            for step_id, held in self.shards.items()
        }

    def all(self) -> list[LocalShard]:
        return [shard for held in self.shards.values() for shard in held.values()]

    def get_durable_shards(self, step_id: StepId) -> Mapping[int, LocalShard]:
        """By rank, the durable shards of the step."""
        return self.shards.get(step_id, {})

    def find_durable_shard(self, rank: int, step_id: StepId) -> LocalShard | None:
        """This rank's durable shard of the step."""
        return self.get_durable_shards(step_id).get(rank)

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """The rank's shards for the ledger, oldest step first."""
        return tuple(held[rank] for _, held in sorted(self.shards.items()) if rank in held)

    def world_size_of_rank(self, rank: int) -> int:
        """The world size that the rank's newest shard names; 0 if there is no shard."""
        newest = max(
            (step_id for step_id, held in self.shards.items() if rank in held), default=None
        )
        return self.shards[newest][rank].world if newest is not None else 0

    def has_been_durable(self, rank: int, step_id: StepId) -> bool:
        """Whether this step is durable for the rank, or was until it was deleted."""
        return (
            rank in self.get_durable_shards(step_id)
            or rank in self._past.get(step_id, ((), False))[0]
        )

    def has_been_published(self, step_id: StepId) -> bool:
        """Whether this step is visible to readers, or was until it was deleted."""
        return step_id in self.published or self._past.get(step_id, ((), False))[1]

    def ever_published(self) -> set[StepId]:
        """Steps that were committed, whether or not all of their shards are still there."""
        return {
            step_id
            for step_id, held in self.shards.items()
            if any(f.published for f in held.values())
        }


def _as_published(found: LocalShard) -> LocalShard:
    """The same shard at the path to which `publish_step` moved it, out of `pending/`."""
    directory = found.path.parent
    if directory.parent.name != "pending":
        return replace(found, published=True)
    return replace(
        found, path=directory.parent.parent / directory.name / found.path.name, published=True
    )


# --- remote tiers ----------------------------------------------------------------------------
#
# What remote tiers hold, as last seen, in the order in which a restore prefers it.
#
# For a remote tier that does not answer, the inventory keeps what the tier was last seen to hold (a
# restore will find out whether it is still there). But the answer of such a tier is UNKNOWN: no run
# may start anew because an archive was unreachable.


_NOT_ASKED = Inventory(answer=TierAnswer.UNKNOWN, reason="it was not asked yet")
_TOO_EARLY = Inventory(
    answer=TierAnswer.UNKNOWN, reason="not before it is known what this run has of its own"
)


class RemoteInventory:
    """The remote tiers of this sidecar. `scanned`: each was asked at least once. `index`: increases
    when what they hold is seen to have changed."""

    def __init__(
        self,
        *others: RemoteTier,
        peers: PeerTier | None = None,
        archive: ArchiveTier | None = None,
        ancestor: AncestorTier | None = None,
    ) -> None:
        remote_tiers = [
            *others,
            *(remote_tier for remote_tier in (peers, archive, ancestor) if remote_tier is not None),
        ]
        self.remote_tiers = tuple(
            sorted(remote_tiers, key=lambda tier: NEAREST_FIRST.index(tier.tier))
        )  # nearest first
        self.peers, self.archive, self.ancestor = peers, archive, ancestor
        self.scanned = not remote_tiers
        self.index = 0
        self._inventories = dict.fromkeys(self.remote_tiers, _NOT_ASKED)
        self._refused: set[ShardSource] = set()
        self._at: dict[StepId, dict[int, list[ShardSource]]] = {}
        self._of_rank: dict[int, dict[Tier, list[Shard]]] = {}
        self._scanning: asyncio.Task[bool] | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The kinds of the configured remote tiers, nearest first."""
        return tuple(dict.fromkeys(tier.tier for tier in self.remote_tiers))

    def has_tier(self, tier: Tier) -> bool:
        return tier in self.tiers

    # --- looking -----------------------------------------------------------------------------

    async def scan(self, *, refresh: bool = False) -> bool:
        """Ask every remote tier what it holds. Returns whether anything changed.

        A call during a running query waits for the answers to that query. With `refresh` it waits
        for the answers to a query that begins after the call.
        """
        if refresh and self._scanning is not None and not self._scanning.done():
            await asyncio.wait({self._scanning})
        if self._scanning is None or self._scanning.done():
            self._scanning = asyncio.create_task(self._scan(), name="look at remote tiers")
        return await asyncio.shield(self._scanning)

    async def _scan(self) -> bool:
        answers = await asyncio.gather(*(tier.scan() for tier in self.remote_tiers))
        found, last = dict(zip(self.remote_tiers, answers, strict=True)), self._inventories
        others = [
            inventory.answer for tier, inventory in found.items() if tier is not self.ancestor
        ]
        if self.ancestor is not None and TierAnswer.UNKNOWN in others:
            # ignore the other run's step until it is known what this run has itself
            found[self.ancestor] = _TOO_EARLY
        self._inventories = {
            tier: _with_last_seen(new, last[tier], tier.may_hold) for tier, new in found.items()
        }
        for tier, new in self._inventories.items():
            if new.answer is TierAnswer.UNKNOWN and new.reason != last[tier].reason:
                warn("tier.unreachable", tier=str(tier.tier), error=new.reason)
        changed = not self.scanned or self._inventories != last
        self.scanned = True
        if changed:
            self._index()
        return changed

    def reject_copy(self, source: ShardSource, error: Exception, *, step_id: StepId) -> None:
        """This copy, of step `step_id` or of its base, could not be used. A copy that failed
        verification is not offered any more. A copy that was out of reach may be reachable the next
        time."""
        damaged, shard = isinstance(error, ImageError), source.shard
        warn(
            "restore.copy_refused" if damaged else "restore.copy_unreachable",
            tier=str(source.tier),
            source=source.where,
            rank=shard.rank,
            step=str(step_id),
            error=str(error),
        )
        if damaged:
            self._refused.add(source)
            for remote_tier in self.remote_tiers:
                if remote_tier.tier is source.tier:
                    remote_tier.exclude_source(source, step_id)
            self._index()

    def _index(self) -> None:
        self.index += 1
        self._at, self._of_rank = {}, {}
        for remote_tier, inventory in self._inventories.items():
            for shard in inventory.shards:
                sources = [at for at in remote_tier.sources(shard) if self._is_sound(at)]
                if sources:
                    self._at.setdefault(shard.step_id, {}).setdefault(shard.rank, []).extend(
                        sources
                    )
                    tiers = self._of_rank.setdefault(shard.rank, {})
                    tiers.setdefault(shard.tier, []).append(shard)

    def _is_sound(self, source: ShardSource) -> bool:
        return source not in self._refused and source.beside not in self._refused

    # --- what is sent there ------------------------------------------------------------------

    def request_archiving(self, step_id: StepId) -> None:
        """Have this step archived, whether it is due or not."""
        if self.archive is not None:
            self.archive.request(step_id)

    def notify_local_change(self) -> None:
        """Tell the remote tiers that what this machine holds has changed."""
        for remote_tier in self.remote_tiers:
            remote_tier.wake()

    def is_step_being_sent(self, step_id: StepId) -> bool:
        """Whether some remote tier reads a local shard of this step."""
        return any(tier.replicator.is_step_in_transfer(step_id) for tier in self.remote_tiers)

    async def delete_kept_copies(self, size_bytes: int) -> bool:
        """Delete copies that are kept for other pods. False if there was nothing to delete."""
        return self.peers is not None and await self.peers.free_volume_space(size_bytes)

    # --- asking ------------------------------------------------------------------------------

    @property
    def step_ids(self) -> Iterable[StepId]:
        return self._at.keys()

    @property
    def ranks(self) -> Iterable[int]:
        """Every rank of which a remote tier holds something."""
        return self._of_rank.keys()

    def find_copies_by_rank(self, step_id: StepId) -> dict[int, list[ShardSource]]:
        """rank -> its copies of this step, nearest first."""
        return self._at.get(step_id, {})

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch that any remote tier knows, oldest first."""
        return merge_epochs(epoch for each in self._inventories.values() for epoch in each.epochs)

    def list_epochs_on_tier(self, tier: Tier) -> tuple[Epoch, ...]:
        """The epochs that remote tiers of this kind know."""
        return tuple(epoch for _, inventory in self._of_kind(tier) for epoch in inventory.epochs)

    def _of_kind(self, tier: Tier) -> list[tuple[RemoteTier, Inventory]]:
        return [
            (each, inventory) for each, inventory in self._inventories.items() if each.tier is tier
        ]

    @property
    def complete_steps(self) -> frozenset[StepId]:
        """Steps of which a remote tier itself says that it holds all shards."""
        return frozenset().union(*(inventory.complete for inventory in self._inventories.values()))

    @property
    def name_conflict_message(self) -> str:
        """Why another run of this name may train now; '' if none does."""
        return "" if self.archive is None else self.archive.name_conflict_message

    @property
    def unknown_reason(self) -> str:
        """Why it is not known what the remote tiers hold; '' when it is known."""
        return "; ".join(filter(None, map(self.why_unknown, self.tiers)))

    def why_unknown(self, tier: Tier) -> str:
        """Why it is not known what one kind of tier holds; '' when it is known."""
        return "; ".join(
            f"{remote_tier.status().where}: {inventory.reason or 'it does not answer'}"
            for remote_tier, inventory in self._of_kind(tier)
            if inventory.answer is TierAnswer.UNKNOWN
        )

    def build_rank_report(self, rank: int) -> RankReport:
        """What remote tiers hold of a rank, as a report for the ledger."""
        here = self._of_rank.get(rank, {})
        found = {tier: ReportedTier.from_shards(tuple(here.get(tier, ()))) for tier in self.tiers}
        for tier, inventory in self._inventories.items():
            if inventory.answer is TierAnswer.UNKNOWN:
                found[tier.tier] = replace(found[tier.tier], answer=TierAnswer.UNKNOWN)
        return found


def _with_last_seen(
    new: Inventory, old: Inventory, may_hold: Callable[[RemoteShard], bool]
) -> Inventory:
    """`new`, with those of the old contents that may still be there if the tier did not answer."""
    if new.answer is not TierAnswer.UNKNOWN or new.shards:
        return new
    left = tuple(filter(may_hold, old.shards))
    return replace(new, shards=left, epochs=old.epochs, complete=old.complete)


# --- all copies ------------------------------------------------------------------------------


class ReachableCopies:
    """The copies within reach: in slots, on volumes, on remote tiers. Sends no requests, decides
    nothing.

    A rank that lost its last copy must be reported to the ledger as empty. If it were left out, the
    ledger would keep what it heard before. So every rank that was here once stays in the reports.
    """

    def __init__(self, local: LocalShards, pool: SlotPool, remotes: RemoteInventory) -> None:
        self._local = local
        self._pool = pool
        self._remotes = remotes
        self._ranks: set[int] = set()
        self._remote_ranks: set[int] = set()
        self._index_seen = remotes.index

    # --- what the ledger is told -------------------------------------------------------------

    def report_all_ranks(self) -> Listed:
        """What is held of every rank that this machine knows."""
        return Listed(
            ranks={rank: self.of_rank(rank) for rank in self.list_ranks_ever_held()},
            published=self._local.ever_published(),
            shown=self._local.published,
        )

    def of_rank(self, rank: int) -> RankReport:
        """What is held of one rank, on all tiers."""
        slots = self._pool.ranks.get(rank)
        sealed = (
            [slots.find(step_id) for step_id in slots.list_sealed_steps()]
            if slots is not None
            else []
        )
        memory, local = tuple(at.shard for at in sealed if at), self._local.of_rank(rank)
        is_known = self._local.scanned and not self._local.unreadable
        nothing = TierAnswer.NONE if is_known else TierAnswer.UNKNOWN
        return {
            Tier.MEMORY: ReportedTier.from_shards(memory),
            Tier.LOCAL: ReportedTier.from_shards(local, nothing=nothing),
            **self._remotes.build_rank_report(rank),
        }

    def report_of_remotes(self) -> Reported:
        """What remote tiers hold, for every rank of which they ever held something. For ranks known
        on this machine, `here` reports it too."""
        self._index_seen = self._remotes.index
        self._remote_ranks.update(self._remotes.ranks)
        ranks = {rank: self._remotes.build_rank_report(rank) for rank in self._remote_ranks}
        return Reported(ranks=combine_rank_reports(ranks), epochs=self._remotes.epochs)

    @property
    def is_remote_report_stale(self) -> bool:
        """Whether the remote inventory changed since `report_of_remotes` was called."""
        return self._index_seen != self._remotes.index

    def list_ranks_ever_held(self) -> list[int]:
        """Every rank of which this machine holds or held something."""
        self._ranks.update(self._pool.ranks, *self._local.shards.values())
        return sorted(self._ranks)

    def world_size_of_rank(self, rank: int) -> int:
        """The world size from the rank's trainer, else from its newest shard; 0 without both."""
        slots = self._pool.ranks.get(rank)
        if slots is not None and slots.world:
            return slots.world
        return self._local.world_size_of_rank(rank)

    def newest_in_memory(self, rank: int, default: StepId) -> StepId:
        slots = self._pool.ranks.get(rank)
        return max(slots.list_sealed_steps() if slots is not None else (), default=default)

    # --- where copies are --------------------------------------------------------------------

    def sources_of_shard(self, step_id: StepId, rank: int) -> list[ShardSource]:
        """The copies of the saved rank's shard beyond memory, nearest first; for the number of a
        base (`Layout.number`), those of the base."""
        world = self.world_of(step_id) or 0
        if 0 < world <= rank:
            bases = (origin.beside for origin in self.sources_of_shard(step_id, rank - world))
            return [base for base in bases if base is not None]
        local, beyond = (
            self._local.find_durable_shard(rank, step_id),
            self._remotes.find_copies_by_rank(step_id).get(rank, ()),
        )
        if local is None:
            return list(beyond)
        return [local_source(self._local.volumes, local), *beyond]

    def nearest_tier(self, step_id: StepId, rank: int) -> Tier | None:
        """The nearest tier that holds the image."""
        if self._pool.find(rank, step_id) is not None:
            return Tier.MEMORY
        origins = self.sources_of_shard(step_id, rank)
        return origins[0].tier if origins else None

    def copies_at_rest(self, step_id: StepId) -> Iterator[tuple[Tier, Shard]]:
        """The copies beyond memory; of those beyond this machine each rank's nearest."""
        yield from (
            (Tier.LOCAL, found) for found in self._local.get_durable_shards(step_id).values()
        )
        for places in self._remotes.find_copies_by_rank(step_id).values():
            yield places[0].tier, places[0].shard

    def _copies(self, step_id: StepId) -> Iterator[tuple[Tier, Shard]]:
        """All of these, and those in memory: with the tier that they came from."""
        yield from (
            (at.source_tier, at.shard) for at in self._pool.find_slots_by_rank(step_id).values()
        )
        yield from self.copies_at_rest(step_id)

    def ranks_at_rest(self, step_id: StepId) -> list[int]:
        """Saved ranks of which some tier beyond memory holds a shard."""
        return sorted({shard.rank for _, shard in self.copies_at_rest(step_id)})

    def ranks_of(self, step_id: StepId) -> tuple[int, ...]:
        """Saved ranks of which any copy is within reach."""
        return tuple(sorted({shard.rank for _, shard in self._copies(step_id)}))

    def one_of_twins(
        self, step_id: StepId, ranks: Iterable[int], *, known: Iterable[int]
    ) -> list[int]:
        """`ranks` in their order, without each rank that has a twin in `known` or earlier in the
        result. Considers images beyond memory only."""
        alike = {
            shard.rank: shard.alike for _, shard in reversed(list(self.copies_at_rest(step_id)))
        }
        reading, needed = set(known), list[int]()
        for rank in ranks:
            if reading.isdisjoint(alike.get(rank, NO_RANKS)):
                needed.append(rank)
                reading.add(rank)
        return needed

    def ids(self) -> set[StepId]:
        """Every step of which any copy is within reach."""
        sealed = (
            step_id for slots in self._pool.ranks.values() for step_id in slots.list_sealed_steps()
        )
        return {*self._local.shards, *self._remotes.step_ids, *sealed}

    def world_of(self, step_id: StepId) -> int | None:
        """How many ranks saved the step; None when that is unknown or copies disagree."""
        worlds = {shard.world for _, shard in self._copies(step_id)}
        return worlds.pop() if len(worlds) == 1 else None

    def offers(self, whole: Iterable[StepId]) -> tuple[Offer, ...]:
        """Of the steps in `whole` (as the ledger calls them), those of which every byte of every
        rank is within reach, oldest first.

        A rank whose own image is gone is covered by a twin, whose image has the very same boxes.
        """
        found = [self._offer(step_id) for step_id in sorted(self.ids().intersection(whole))]
        return tuple(offer for offer in found if offer is not None)

    def _offer(self, step_id: StepId) -> Offer | None:
        if (world := self.world_of(step_id)) is None:
            return None
        found, reached = 0, self._reached(step_id)
        for tier in NEAREST_FIRST:
            found |= reached.get(tier, 0)
            if is_full(found, world):
                return Offer(id=step_id, tier=tier, world=world, images=self._images(step_id))
        return None

    def list_partial_offers(self, ids: Iterable[StepId]) -> tuple[Offer, ...]:
        """What is within reach of each of these steps, oldest first."""
        found = []
        for step_id in sorted(ids):
            reached, world = self._reached(step_id), self.world_of(step_id)
            if reached and world is not None:
                ranks, tier = 0, max(reached, key=NEAREST_FIRST.index)
                for there in reached.values():
                    ranks |= there
                covered, images = Ranks.of(each_rank(ranks)), self._images(step_id)
                found.append(
                    Offer(id=step_id, tier=tier, world=world, ranks=covered, images=images)
                )
        return tuple(found)

    def _images(self, step_id: StepId) -> Ranks:
        return Ranks.of(self.ranks_of(step_id))

    def _reached(self, step_id: StepId) -> dict[Tier, int]:
        """By tier, the ranks whose boxes are within reach there, as a bitmap."""
        reached: dict[Tier, int] = {}
        for tier, shard in self._copies(step_id):
            reached[tier] = reached.get(tier, 0) | 1 << shard.rank | shard.alike.bits
        return reached
