"""What a trainer asks when it restores: a vote, an image, and that its epoch is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from keepstep.core.history import EventKind
from keepstep.core.restore_vote import Candidates, Ready, VoteFacts, Wait, vote_readiness
from keepstep.errors import KeepstepError
from keepstep.steps import IN_POD, StepId
from keepstep.wire.member_reports import ReportedRestore
from keepstep.wire.trainer import (
    CandidatesRequest,
    OpenedStep,
    RestoredRequest,
    RestoreStepRequest,
    ScriptFailedRequest,
    VoteRefusedRequest,
)
from keepstep_sidecar.api.saving import SaveHandlers
from keepstep_sidecar.commit.leader_state_record import ReportingState
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.log import info, warn

_RESTORES_KEPT = 16

_RESCUE_S = 10.0

_ASK_AGAIN_S = 0.5
"""How often to ask peers and archive while a vote waits for what they hold."""


@dataclass(eq=False)
class VoteScheduler:
    """Lets a rank vote when it is time. `view`: returns what is known now for the vote of a rank.
    `waits`: for each waiting rank, why it may not vote yet."""

    view: Callable[[int], VoteFacts]
    ask_tiers: Callable[[], Awaitable[None]]
    changes: ChangeNotifier
    waits: dict[int, str] = field(default_factory=dict)

    async def await_readiness(self, rank: int, *, timeout_s: float) -> None:
        """Return when the rank may vote, or after `timeout_s`."""
        began = time.monotonic()
        ends = began + timeout_s

        def decide() -> Ready | Wait:
            return vote_readiness(time.monotonic(), self.view(rank), began)

        try:
            while isinstance(wait := decide(), Wait) and time.monotonic() < ends:
                self._note(rank, wait.why)
                await self._pause(wait, decide, min(wait.until, ends) - time.monotonic())
        finally:
            self.waits.pop(rank, None)

    async def _pause(self, wait: Wait, decide: Callable[[], Ready | Wait], left_s: float) -> None:
        if not wait.ask:
            await self.changes.until(lambda: decide() != wait, timeout_s=left_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self.ask_tiers()
        await self.changes.until(lambda: decide() == Ready(), timeout_s=min(left_s, _ASK_AGAIN_S))

    def _note(self, rank: int, why: str) -> None:
        if self.waits.get(rank) != why:
            self.waits[rank] = why
            self.changes.ring()


@dataclass(eq=False)
class RestoreHandlers:
    """The trainer's side of a restore. `restores`: the last restores, for the reports. `refusals`:
    by rank, how often the vote refused since then; `refused`: why. `repair`: see
    `SidecarService.repair_memory`."""

    saving: SaveHandlers
    remote_tiers: RemoteTiers
    leader: ReportingState
    restores: list[ReportedRestore] = field(default_factory=list)
    refusals: dict[int, int] = field(default_factory=dict)
    refused: str = ""
    repair: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        saving = self.saving
        self.leases, self.slots, self.node_host = saving.leases, saving.slots, saving.node_host
        self.restorer, self.history, self.changes = saving.restorer, saving.history, saving.changes
        self.votes = VoteScheduler(self._vote_view, self.remote_tiers.scan, self.changes)
        self._local_shards = self.node_host.local_shards

    def _vote_view(self, rank: int) -> VoteFacts:
        held = any(
            candidate.tier in IN_POD
            for candidate in self.restorer.list_own_candidates(rank).values()
        )
        return self.remote_tiers.get_vote_facts(held=held, replied_at=self.leader.tried_at)

    async def candidates(self, request: CandidatesRequest) -> Candidates:
        """What the rank could restore. Raises SidecarError `starting` when the scan is not done,
        `run-taken` when another run of this name trains."""
        lease = self.leases.require_lease(request.lease)
        await self.votes.await_readiness(lease.rank, timeout_s=request.timeout_s)
        await self._rescue_images()
        if not self._local_shards.scanned:
            raise refusal_error("starting", "the volumes are still being scanned; ask again")
        if contested := self.node_host.remotes.name_conflict_message:
            warn("run.name_conflict", rank=lease.rank, reason=contested)
            raise refusal_error("run-taken", contested)
        return self.restorer.candidates(lease)

    async def load_step_into_slot(self, request: RestoreStepRequest) -> OpenedStep:
        """Bring a step into a slot, verified; see `Restorer.open`."""
        lease = self.leases.require_lease(request.lease)
        await self._rescue_images()
        return await self.restorer.open(
            lease, request.id, timeout_s=request.timeout_s, bad=request.bad
        )

    async def _rescue_images(self) -> None:
        """Images of which others removed the names lie on the drive when this returns."""
        ends = time.monotonic() + _RESCUE_S
        while self.repair is not None and self.slots.damaged_ranks():
            try:
                return await self.repair()
            except (KeepstepError, OSError) as error:
                if time.monotonic() >= ends:
                    raise refusal_error("starting", f"memory cannot be made: {error}") from error
            await asyncio.sleep(_ASK_AGAIN_S)  # the watch makes the directory above within a second

    async def restored(self, request: RestoredRequest) -> None:
        """All ranks agreed on this epoch. It is durably recorded on return."""
        lease = self.leases.require_lease(request.lease)
        lost = self._lost_steps(lease.rank, request.epoch.parent)
        self.saving.update_served_ranks(
            all_present=True
        )  # it has voted, and so has every rank here
        await self.node_host.start_epoch(request.epoch, asked=request.asked)
        lease.training = True
        self.saving.unequal_steps.epoch_began(request.epoch.id, time.monotonic())
        self.saving.check_ranks_save_same_steps()
        self._note(lease.rank, request, lost)
        self.saving.restarts.restored(
            lease.rank, seconds=request.seconds, epoch=request.epoch, tier=request.tier
        )
        self.restorer.release_opened_image(lease.rank)
        self.refusals, self.refused = {}, ""
        info(
            "restore.finished" if request.epoch.parent else "restore.nothing_found",
            rank=lease.rank,
            epoch=str(request.epoch.id),
            duration_s=round(request.seconds, 3),
            step=request.epoch.parent and str(request.epoch.parent),
            tier=request.tier and str(request.tier),
        )
        self.changes.ring()

    async def record_refused_vote(self, request: VoteRefusedRequest) -> None:
        """The vote refused, and the trainer ends."""
        rank = self.leases.require_lease(request.lease).rank
        self.refusals[rank] = self.refusals.get(rank, 0) + 1
        self.refused = request.reason
        warn("restore.refused", rank=rank, refusals=self.refusals[rank], reason=request.reason)
        self.changes.ring()

    async def failed(self, request: ScriptFailedRequest) -> None:
        """The script failed by itself. The failure is durably recorded on return, if any volume can
        be written."""
        lease = self.leases.require_lease(request.lease)
        warn("script.failed", rank=lease.rank, step=str(request.id), error=request.reason)
        self.history.note(EventKind.FAILED, rank=lease.rank, step=request.id, text=request.reason)
        await self.node_host.restart.note_failure(request.id)
        self.changes.ring()

    def _note(self, rank: int, request: RestoredRequest, lost: int) -> None:
        noted = ReportedRestore(
            rank=rank,
            epoch=self.node_host.epochs.add_fork_origin(request.epoch),
            tier=request.tier,
            seconds=request.seconds,
            at=time.time(),
            lost_steps=lost,
        )
        others = [
            restore
            for restore in self.restores
            if (restore.rank, restore.epoch.id) != (rank, request.epoch.id)
        ]
        self.restores = [*others, noted][-_RESTORES_KEPT:]

    def _lost_steps(self, rank: int, parent: StepId | None) -> int:
        """How many steps the rank had staged here after the step that it goes on from."""
        known = {
            *self.slots.rank(rank).list_sealed_steps(),
            self.saving.get_rank_counters(rank).staged,
        }
        known |= {step_id for step_id, held in self._local_shards.shards.items() if rank in held}
        if parent is None:
            return 0
        later = [
            step_id.step
            for step_id in known
            if step_id is not None and step_id.epoch == parent.epoch
        ]
        return max(0, max(later, default=0) - parent.step)
