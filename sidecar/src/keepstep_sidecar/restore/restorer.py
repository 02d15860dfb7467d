"""Tells what a rank can restore, and brings it into memory, verified, before the rank asks.

The ledger's plan is a hint that saves time: the shard that it names is read and hashed while the
trainer still imports torch. The trainers' own vote decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from keepstep.core.restore_vote import MOST_EPOCHS, Candidate, Candidates, Offer
from keepstep.errors import ImageError, NoMemoryError, StorageError, few
from keepstep.steps import StepId, Tier, TierAnswer
from keepstep.wire.trainer import RESTORE_TIMEOUT_ENV, OpenedStep
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.leases import Lease, serves_all_ranks
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.slot_pool import PooledSlot, RankSlots
from keepstep_sidecar.restore.chunk_buffers import ChunkBuffers
from keepstep_sidecar.restore.fetcher import MemoryImageLoader
from keepstep_sidecar.restore.sources import ImageSourceHandlers
from keepstep_sidecar.volume.volume import Volume


@dataclass(eq=False)
class Restorer:
    """Candidates, prefetch and the opening of images, for every rank of this machine.
    `fleeting`, `way_out`: see `Candidates`."""

    prefetcher: MemoryImageLoader
    image_sources: ImageSourceHandlers
    chunk_buffers: ChunkBuffers
    _: KW_ONLY
    fleeting: bool = False
    way_out: str = ""
    _pins: dict[int, PooledSlot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefetcher = self.prefetcher
        self.pool, self.node_host = prefetcher.pool, prefetcher.node_host
        self.changes, self.leases = prefetcher.changes, prefetcher.leases
        self._ledger = self.node_host.node.ledger
        self._copies, self._local_shards = self.node_host.copies, self.node_host.local_shards
        self._remotes, self._epochs = self.node_host.remotes, self.node_host.epochs
        self._restart, self._rollback = self.node_host.restart, self.node_host.rollback

    # --- candidates --------------------------------------------------------------------------

    def candidates(self, lease: Lease) -> Candidates:
        """What this rank may vote for. Call it once the scan is done.

        If this sidecar serves all ranks, it leaves out steps that cannot be restored because some
        rank lacks them. A step that was never complete was never kept: if there are only such
        steps, the answer is NONE. But if a step *was* committed and is no longer whole, the answer
        is UNKNOWN, so that the run does not silently start over.
        """
        for step_id in self.pool.rank(lease.rank).list_sealed_steps():
            self.pool.find_verified(lease.rank, step_id)
        ledger = self.node_host.get_current_ledger()
        hidden = self._hidden()
        offers = self._copies.offers(set(ledger.list_reachable_steps()) - hidden)
        held = {
            step_id: candidate
            for step_id, candidate in self.list_own_candidates(lease.rank).items()
            if step_id not in hidden
        }
        if serves_all_ranks(lease.request):
            whole = {*ledger.committed(Tier.MEMORY), *(offer.id for offer in offers)}
            # A step of another world size stays on the list: the vote reports the difference.
            held = {
                step_id: candidate
                for step_id, candidate in held.items()
                if step_id in whole or candidate.world != lease.world
            }
            parts: tuple[Offer, ...] = ()
        else:
            # what this sidecar can add to steps that only several sidecars together have
            left = self._copies.ids().difference(hidden, (offer.id for offer in offers))
            parts = self._copies.list_partial_offers(
                step_id for step_id in left if not ledger.is_dead(step_id)
            )
        planned = self._restart.plan()
        answer, reason = (TierAnswer.STEPS, "")
        if not held and not offers:
            answer, reason = self._why_nothing(lease, parts)
        return Candidates(
            answer=answer,
            candidates=tuple(held[step_id] for step_id in sorted(held)),
            highest_epoch=ledger.highest_epoch(),
            plan=planned.id if planned else None,
            reason=reason,
            offers=offers,
            failures=self._restart.list_all_known_failures(),
            trusted=tuple(sorted(self._restart.pinned_steps)),
            never_whole=self._never_whole() if answer is TierAnswer.NONE else "",
            parts=parts,
            epochs=ledger.epochs[-MOST_EPOCHS:],
            fleeting=self.fleeting or self._rollback.gone_for_good,
            begin_again=self._rollback.begin_again,
            way_out=self.way_out,
            **self._rollback_fields(),
        )

    def _never_whole(self) -> str:
        """The steps that a fresh start leaves behind, as text."""
        by_ranks = dict[tuple[int, ...], list[int]]()
        for step_id in sorted(self._copies.ids()):
            if not self._ledger.is_dead(step_id):
                by_ranks.setdefault(self._copies.ranks_of(step_id), []).append(step_id.step)
        return "; ".join(
            f"{_span(steps)} of rank{'s' * (len(ranks) > 1)} {few(list(map(str, ranks)), 8)} alone"
            for ranks, steps in by_ranks.items()
        )

    def _hidden(self) -> set[StepId]:
        """Steps of another run from which this run must not begin, or no longer may."""
        in_doubt = bool(self._local_shards.unreadable or self._failed())
        return {
            step_id
            for step_id in self._copies.ids()
            if self._epochs.must_hide(step_id, in_doubt=in_doubt)
        }

    def _failed(self) -> list[Volume]:
        """Volumes whose content could not be determined."""
        volumes = self._local_shards.volumes.volumes
        return [volume for volume in volumes if volume.failed and not volume.read_only]

    def _rollback_fields(self) -> dict[str, Any]:
        """The step that a person wants to go back to. Other steps are still listed, so that the
        vote can tell what there is. Another sidecar may not know of the wish."""
        if (request := self._rollback.request) is None:
            return {}
        return {"wanted": str(request), "limit": self._restart.rollback_target(), "exact": True}

    def list_own_candidates(self, rank: int) -> dict[StepId, Candidate]:
        """The rank's own images, each on its nearest tier, without dead steps."""
        slots = self.pool.rank(rank)
        dead, found = self._ledger.is_dead, {}
        for step_id in self._copies.ids():
            if not dead(step_id) and (candidate := self._candidate(slots, step_id)) is not None:
                found[step_id] = candidate
        return found

    def _candidate(self, slots: RankSlots, step_id: StepId) -> Candidate | None:
        if (at := slots.find(step_id)) is not None:
            return Candidate(id=step_id, tier=at.source_tier, world=at.layout.world)
        for origin in self._copies.sources_of_shard(step_id, slots.rank):
            return Candidate(id=step_id, tier=origin.tier, world=origin.shard.world)
        return None

    def _why_nothing(self, lease: Lease, parts: Collection[Offer]) -> tuple[TierAnswer, str]:
        if self._local_shards.unreadable:
            return TierAnswer.UNKNOWN, self._local_shards.unreadable
        if failed := self._failed():
            return TierAnswer.UNKNOWN, f"{failed[0].root}: {failed[0].failed}"
        if self._remotes.unknown_reason:
            return TierAnswer.UNKNOWN, self._remotes.unknown_reason
        if refusal := self._epochs.explain_fork_refusal():
            return TierAnswer.UNKNOWN, refusal
        if parts:
            return TierAnswer.STEPS, ""
        kept = {
            step_id for step_id in self._remotes.complete_steps if not self._ledger.is_dead(step_id)
        }
        if committed := self._local_shards.ever_published() | kept:
            newest = max(committed)
            return TierAnswer.UNKNOWN, (
                f"step {newest} of {self._copies.world_of(newest)} ranks was committed, but it"
                f" is not whole any more: {self._ledger.why_unusable(newest)}"
            )
        return self._of_other_worlds(lease)

    def _of_other_worlds(self, lease: Lease) -> tuple[TierAnswer, str]:
        """Steps that another number of ranks saved may be all that is left of a long run, committed
        or not. This rank must not claim that they were never kept."""
        copies, ledger = self._copies, self._ledger
        left = [step_id for step_id in copies.ids() if not ledger.is_dead(step_id)]
        others = [step_id for step_id in left if copies.world_of(step_id) != lease.world]
        if not others:
            return TierAnswer.NONE, ""
        newest = max(others)
        saved = f"{copies.world_of(newest) or 'different numbers of'} ranks"
        return TierAnswer.UNKNOWN, (
            f"step {newest} was saved by {saved}, while {lease.world} are running, and it is not "
            f"whole: {ledger.why_unusable(newest)}"
        )

    # --- ahead of time -----------------------------------------------------------------------

    async def prefetch(self) -> None:
        """Bring the planned step into memory for every rank here that will restore it."""
        self.node_host.get_current_ledger()
        if (planned := self._restart.plan()) is None:
            return
        here = set(self._copies.list_ranks_ever_held()) - self.pool.moved
        async with asyncio.TaskGroup() as group:
            for rank, tier in planned.tiers.items():
                own = rank in here and rank not in planned.by_twins
                if own and tier is not Tier.MEMORY and self.leases.is_rank_awaiting_restore(rank):
                    group.create_task(self._prefetch(planned.id, rank), name=f"prefetch {rank}")

    async def _prefetch(self, step_id: StepId, rank: int) -> None:
        try:
            await self.prefetcher.bring_image(step_id, rank)
        except (ImageError, StorageError, NoMemoryError) as error:
            warn("restore.prefetch_failed", rank=rank, step=str(step_id), error=str(error))

    # --- open --------------------------------------------------------------------------------

    async def open(
        self, lease: Lease, step_id: StepId, *, timeout_s: float, bad: str = ""
    ) -> OpenedStep:
        """Put the verified image of this step into a slot, pinned until `release`.

        `bad`: path of a slot that was opened before, but that the trainer could not use. Raises
        SidecarError: `unknown-step`, `not-verified` (the shard is quarantined: vote again),
        `no-slot`.
        """
        self.release_opened_image(lease.rank)
        slots = self.pool.rank(lease.rank)
        self.prefetcher.agreed[lease.rank] = step_id
        self.changes.ring()
        if self.pool.find_verified(lease.rank, step_id, bad={bad}) is None:
            await self._fetch(lease, step_id, timeout_s=timeout_s)
        self.leases.require_lease(lease.token)  # nobody would release the image of one that ended
        slot = slots.find(step_id)
        assert slot is not None, f"step {step_id} of rank {slots.rank} is gone"
        slot.pin()
        self._pins[lease.rank] = slot
        base = self.pool.find_base_slot(slot)
        return OpenedStep(
            path=str(slot.file.path),
            tier=slot.source_tier,
            base=str(base.file.path) if base else "",
        )

    async def _fetch(self, lease: Lease, step_id: StepId, *, timeout_s: float) -> None:
        if not self._copies.sources_of_shard(step_id, lease.rank):
            raise refusal_error(
                "unknown-step", f"rank {lease.rank} does not hold step {step_id} here"
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self.prefetcher.bring_image(step_id, lease.rank)
        except (ImageError, StorageError) as error:
            raise refusal_error("not-verified", f"step {step_id}: {error}") from error
        except NoMemoryError as error:
            raise refusal_error("no-slot", str(error)) from error
        except TimeoutError as error:
            text = (
                f"step {step_id} could not be read in {timeout_s:g} s; raise {RESTORE_TIMEOUT_ENV}"
            )
            raise refusal_error(
                "no-slot", f"{text} in the training process's environment"
            ) from error

    def release_opened_image(self, rank: int) -> None:
        """The rank has copied the image that it opened, or has given up."""
        self.prefetcher.agreed.pop(rank, None)
        self.image_sources.release(rank)
        self.chunk_buffers.release(rank)
        if pinned := self._pins.pop(rank, None):
            pinned.unpin()
            self.changes.ring()


def _span(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
