"""What trainers ask while they train: a lease, slots, that their images are recorded, and to wait
until steps are kept.

All but the waits runs once per training step and rank, so it touches no disk and lists no
directory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace

from keepstep.core.history import EventKind
from keepstep.core.node import Flush, ImagesSettled, Overwritten, RanksServed, Sealed, TrainerDied
from keepstep.core.schedule import RankStepComparison
from keepstep.core.staging_interval import StageIntervalChooser
from keepstep.errors import NoMemoryError, SidecarError
from keepstep.steps import State, StepId, Tier
from keepstep.wire.status import Uncaught
from keepstep.wire.trainer import (
    DiscardSlotRequest,
    Flushed,
    LayoutAccepted,
    LayoutRequest,
    LeaseGranted,
    LeaseRequest,
    ReleaseSlotsRequest,
    SkippedRequest,
    SlotGranted,
    SlotRequest,
    StagedRequest,
    UncaughtRequest,
    Waited,
    WaitRequest,
    WarningRequest,
)
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.history import MachineHistory, RestartTimer
from keepstep_sidecar.leases import (
    Lease,
    Leases,
    check_protocol,
    check_rank,
    infer_served_rank_count,
    parse_layout,
)
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.memory.slot_allocator import SLOTS, SlotAllocator
from keepstep_sidecar.memory.slot_pool import PooledSlot, RankSlots, SlotPool, SlotSet
from keepstep_sidecar.restore.restorer import Restorer

_TOGETHER_S = 30.0
"""Errors of several ranks within this time are those of one life."""


@dataclass(eq=False)
class SaveHandlers:
    """The trainer's side of the protocol, except restores and waits."""

    config: Config
    _: KW_ONLY
    slots: SlotPool
    node_host: NodeHost
    allocator: SlotAllocator
    leases: Leases
    restorer: Restorer
    changes: ChangeNotifier
    history: MachineHistory
    counters: dict[int, SaveCounters] = field(default_factory=dict)
    library: str = ""
    refused: dict[int, str] = field(default_factory=dict)
    changed_at: float = field(default_factory=time.monotonic)
    _last: dict[int, Lease] = field(default_factory=dict)
    unequal_steps: RankStepComparison = field(default_factory=RankStepComparison)
    unequal: str = ""
    leased_at: float | None = None
    uncaught: Uncaught | None = None

    def __post_init__(self) -> None:
        self._stage = StageIntervalChooser(durable_every=self.config.durable_step_divisor)
        self._node, self._epochs = self.node_host.node, self.node_host.epochs
        self._copies, self._local_shards = self.node_host.copies, self.node_host.local_shards
        self.restarts = RestartTimer(self.history)

    @property
    def stage_every(self) -> int:
        """Steps from one staged step to the next. With a single slot it is those from one durable
        step to the next: the drives of all machines then choose from the same grid."""
        steps = self._stage.steps if self.config.stages_by_cost else self.config.base_stage_interval
        if self._node.has_single_slot:
            durable_every = self._node.planner.grid.newest_interval
            steps = max(steps, math.gcd(durable_every, *self.config.milestones))
        return steps

    # --- lease -------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest, *, peer_pid: int) -> tuple[Lease, LeaseGranted]:
        """A trainer asks for its rank. Raises SidecarError `protocol` or `rank-taken`."""
        check_rank(request)
        try:
            check_protocol(request)
        except SidecarError as error:
            self.refused[request.rank] = str(error)
            self.changes.ring()
            raise
        self.refused.pop(request.rank, None)
        self.library, self.changed_at = request.library, time.monotonic()
        ranks_here = infer_served_rank_count(
            request, environment=os.environ, alone=self.config.alone
        )
        request = replace(request, local_world=ranks_here)
        lease = await self.leases.take(request, peer_pid=peer_pid)
        self.unequal_steps.note_trainer_joined(lease.rank, time.monotonic())
        self.leased_at = time.time()
        self._stage.reset_costs()
        self.restarts.connected(lease.rank, lease.attempt, age_s=request.age_s)
        try:
            held = await self._settle(lease)
        except BaseException:  # cancelled, because the trainer has gone already
            self.leases.end(lease)
            raise
        info(
            "trainer.connected",
            rank=lease.rank,
            world_size=lease.world,
            pid=request.pid,
            attempt=lease.attempt,
        )
        return lease, LeaseGranted(
            lease=lease.token,
            run=self.config.run,
            huge_pages_dir=str(self.slots.directories.huge or ""),
            stage_every=self.stage_every,
            stage_trials=self.config.stages_by_cost and self._stage.can_stage_every_second_step,
            held=held,
            archive=self.config.archive is not None,
        )

    async def _settle(self, lease: Lease) -> tuple[str, ...]:
        """Find out which slots this trainer fills, and take back those that its predecessor
        filled."""
        slots = self.slots.rank(lease.rank)
        before = self._last.get(lease.rank)
        same = before is not None and before.attempt == lease.attempt
        dead = before is not None and (
            same or slots.filling() is None or await self.leases.is_certainly_dead(before)
        )
        # a trainer that has gone while this waited leaves the slot to the next one, as it was
        self._last[lease.rank] = lease
        filling = slots.filling()
        if filling is not None and before is not None:
            if same and filling.file.name in lease.request.holding:
                pass
            elif dead:
                self._take_back(lease.rank)
            else:
                self.slots.unlink([filling.slot_set.abandon_slot(filling.index)])
                self.allocator.fill(filling.slot_set)
        if before is not None:
            self.leases.stop_watching(before)
        if before is not None and not same:
            self.slots.unlink(slots.bases.drop_unsealed())
        slots.world = self.slots.world = lease.world
        held = self.slots.settle(
            lease.rank, holding=lease.request.holding, trusted=same or bool(lease.request.holding)
        )
        for slot_set in slots.slot_sets.values():
            self.allocator.fill(slot_set)  # a restore may wait for one of those given up just now
        self.update_served_ranks()
        self.node_host.feed(ImagesSettled(lease.rank))
        self.changes.ring()
        return held

    async def end_trainer_lease(self, lease: Lease, *, released: bool = False) -> None:
        """A trainer's connection or process is gone; `released`: it said goodbye before."""
        if not self.leases.end(lease):
            return
        self.changed_at = time.monotonic()
        self.restarts.ended(lease.rank, lease.attempt, released=released)
        self.unequal_steps.record_trainer_exit(lease.rank, closed=released)
        self.check_ranks_save_same_steps()
        info("trainer.disconnected", rank=lease.rank, pid=lease.request.pid, closed=released)
        self.restorer.release_opened_image(lease.rank)
        self.node_host.feed(TrainerDied(lease.rank))
        if await self.leases.is_certainly_dead(lease) and self._last.get(lease.rank) is lease:
            self._take_back(lease.rank)
            # an image that was found is no sign of life
            self.node_host.feed(TrainerDied(lease.rank))

    def _take_back(self, rank: int) -> None:
        kept = self.slots.free_unfinished_slot(rank)
        if kept is not None and not self._node.is_dead(kept):
            self.node_host.feed(Sealed(rank, kept))
        self.changes.ring()

    def update_served_ranks(self, *, all_present: bool = False) -> None:
        """Tell the node which ranks are served here: those with a trainer, and those with slots,
        unless they moved to another machine. `all_present`: see `_see_moved`."""
        self._see_moved(all_present=all_present)
        ranks = {rank for rank, slots in self.slots.ranks.items() if slots.slot_sets}
        ranks -= self.slots.moved
        ranks |= {rank for rank in self._last if self.leases.of(rank)}
        ranks |= self.unequal_steps.released_ranks  # without it no step of this epoch will be whole
        worlds = [lease.world for lease in self._last.values() if not lease.ended]
        fewest = min(
            (rank.current.target for rank in self.slots.ranks.values() if rank.current),
            default=SLOTS,
        )
        if self._local_shards.scanned:  # before the scan it is unknown what is already durable
            here = frozenset(rank for rank in ranks if not worlds or rank < max(worlds))
            self.node_host.feed(RanksServed(here, fewest))

    def _see_moved(self, *, all_present: bool) -> None:
        """Find out which ranks that were here train on another machine now. Otherwise no step
        would become durable: the node would wait for their images, too.

        This is known once all trainers of this machine have come, by their number or because the
        ranks began an epoch (`all_present`). It holds until such a rank's trainer comes after all.
        """
        leased = {rank: self.leases.of(rank) for rank in self.leases.ranks}
        most = max((lease.request.local_world for lease in leased.values() if lease), default=0)
        if all_present or 0 < most <= len(leased):
            self.slots.moved = frozenset({*self.slots.ranks, *self._copies.list_ranks_ever_held()})
        self.slots.moved -= leased.keys()

    # --- layout ------------------------------------------------------------------------------

    def layout(self, request: LayoutRequest) -> LayoutAccepted:
        """Set the layout of this rank's images. Its slots are made in the background.

        Raises NoMemoryError when not one slot fits, SidecarError `bad-image` or `memory-busy`.
        """
        lease = self.leases.require_lease(request.lease)
        layout = parse_layout(request.header)
        if (layout.rank, layout.world) != (lease.rank, lease.world):
            raise refusal_error(
                "bad-image",
                f"a layout of rank {layout.rank} of {layout.world}, but this lease is for rank"
                f" {lease.rank} of {lease.world}",
            )
        base = parse_layout(request.base) if request.base else None
        if layout.is_base or (
            base and (base.image_index, base.world) != (lease.rank + lease.world, lease.world)
        ):
            raise refusal_error("bad-image", f"no base of rank {lease.rank} of {lease.world}")
        slots = self.slots.rank(lease.rank)
        slot_set = slots.slot_sets.get(layout.id) or SlotSet(layout)
        filling = slots.filling()
        if filling is not None and filling.slot_set is not slot_set and not request.filling:
            self._take_back(lease.rank)
        lacking = slots.bases.set_base_layout(base, request.base_step)
        try:
            slots.warning = self.allocator.set_slot_count(slots, slot_set, lease)
        except NoMemoryError as error:
            slots.warning = str(error)
            self.changes.ring()
            raise
        if lacking is not None:
            self.allocator.fill(lacking)
        if slots.current is not None and slots.current is not slot_set:
            slots.current.target = slots.current.count  # no trainer fills more of these
        slots.slot_sets[layout.id] = slots.current = slot_set
        self.allocator.fill(slot_set)
        self.update_served_ranks()
        return LayoutAccepted(
            layout=layout.id,
            slots=slot_set.target,
            slot_bytes=layout.size_bytes,
            warning=slots.warning,
        )

    # --- slots -------------------------------------------------------------------------------

    async def slot(self, request: SlotRequest) -> SlotGranted:
        """The next slot to fill; waits for one. A repeated request gets the same slot."""
        lease = self.leases.require_lease(request.lease)
        slots = self.slots.rank(lease.rank)
        if slots.current is None or slots.current.layout.id != request.layout:
            raise refusal_error("unknown-layout", "register this layout first (POST /v1/layout)")
        granted = SlotGranted(slot=None)

        def given() -> bool:
            nonlocal granted
            if lease.ended:
                return True
            granted = self._next(slots)
            return granted.slot is not None

        await self.changes.until(given, timeout_s=request.timeout_s)
        sets = (slots.current, slots.bases.current)
        failure = next(
            (slot_set.failure for slot_set in sets if slot_set is not None and slot_set.failure), ""
        )
        if granted.slot is None and failure:
            raise refusal_error("no-memory", failure)
        return granted

    def _next(self, slots: RankSlots) -> SlotGranted:
        """The slot that is being filled, or a new one, or none for now."""
        slot_set, filling = slots.current, slots.filling()
        if slot_set is None:
            return SlotGranted(slot=None)
        if filling is not None and filling.slot_set is not slot_set:
            self._take_back(slots.rank)  # a slot of the former layout: the trainer has moved on
        base = slots.bases.find_current_base_file()
        if base is None and slots.bases.current is not None:
            return SlotGranted(slot=None)  # it is being made
        changes = self.config.stages_by_cost or self._node.has_single_slot
        stage_every = self.stage_every if changes else 0
        assigned = slot_set.find_assigned_slot() or slot_set.assign()
        if assigned is None:
            if slot_set.needs_last_slot:
                self.allocator.make_last(slot_set)
            return SlotGranted(slot=None, stage_every=stage_every)
        if assigned.lost is not None and slots.find(assigned.lost) is None:
            self.node_host.feed(Overwritten(slots.rank, assigned.lost))
        file = slot_set.files[assigned.index]
        return SlotGranted(
            slot=file.name,
            path=str(file.path),
            generation=assigned.generation,
            others=tuple(
                str(slot_file.path)
                for _, slot_file in slot_set.iterate_files_without_orphans()
                if slot_file is not file
            ),
            base="" if base is None else str(base.path),
            stage_every=stage_every,
        )

    def staged(self, request: StagedRequest) -> SlotGranted:
        """An image is complete. Returns the next slot, if there is one right now.

        Raises SidecarError `stale-slot` (the slot is no longer this trainer's to fill) or
        `bad-image`.
        """
        lease = self.leases.require_lease(request.lease)
        lease.training = True
        try:
            slots, step_id = self.slots.rank(lease.rank), StepId(request.epoch.id, request.step)
        except ValueError as error:
            raise refusal_error("bad-request", str(error)) from None
        slot = self._filled(slots, request, step_id)
        lease.saved = True
        if slot.assigned:
            self._seal(slots, request, slot)
            if request.cost is not None and self.config.stages_by_cost:
                self._choose_interval(lease, request.cost)
        return self._next(slots)

    def _choose_interval(self, lease: Lease, cost: float) -> None:
        if self._stage.record_rank_cost(lease.rank, cost, ranks=len(self.leases.ranks)):
            steps = self._stage.steps
            info("stage.interval_changed", steps=steps, rank=lease.rank, cost=round(cost, 4))
            self.changes.ring()

    def _filled(self, slots: RankSlots, request: StagedRequest, step_id: StepId) -> PooledSlot:
        if (slot := slots.named(request.slot)) is None:
            raise refusal_error("stale-slot", f"{request.slot} is not a slot of rank {slots.rank}")
        if not (
            slot.is_current_generation(request.generation)
            and (slot.assigned or slot.restorable_step == step_id)
        ):
            raise refusal_error("stale-slot", f"{request.slot} was given to another lease since")
        control = slot.file.control()
        if control is None or control.step_id != step_id or control.run != self.config.run:
            raise refusal_error(
                "bad-image", f"{request.slot} does not seal step {step_id} of this run"
            )
        if not slots.register_base_reference(slot, control):
            raise refusal_error("bad-image", f"the base that step {step_id} refers to is not here")
        return slot

    def _seal(self, slots: RankSlots, request: StagedRequest, slot: PooledSlot) -> None:
        step_id = StepId(request.epoch.id, request.step)
        slot.seal(step_id)
        counters = self.get_rank_counters(slots.rank)
        counters.saves += 1
        counters.blocked_s += request.blocked_s
        counters.copy_s += request.copy_s
        counters.staged = step_id
        counters.unkept = None
        self._epochs.note_living_epoch(request.epoch)
        self.uncaught = None
        self.restarts.staged(slots.rank, step_id, blocked_s=request.blocked_s)
        info("step.staged", level=logging.DEBUG, rank=slots.rank, step=str(step_id))
        self.node_host.feed(Sealed(slots.rank, step_id))
        self.unequal_steps.staged(slots.rank, step_id, time.monotonic())
        self.check_ranks_save_same_steps()
        self.slots.unlink(slots.free_unused_bases())
        if self.slots.holds_old_layouts(slots):
            alive = [rank for rank in self.slots.ranks if self.leases.of(rank)]
            common, moved = self._node.find_newest_common_step(), self.slots.moved
            if self.slots.drop_old_layouts(common, alive=alive) and moved:
                self._grow()
        self.changes.ring()

    def _grow(self) -> None:
        """Make the slots for which there was no room before."""
        for rank, slots in self.slots.ranks.items():
            lease, current = self.leases.of(rank), slots.current
            if lease is None or current is None:
                continue
            if current.target < self.allocator.target_slots(lease):
                slots.warning = self.allocator.set_slot_count(slots, current, lease)
                self.allocator.fill(current)
        self.update_served_ranks()

    def discard(self, request: DiscardSlotRequest) -> SlotGranted:
        """The image is not valid, so its slot is free. Returns the next slot, as `staged` does."""
        lease = self.leases.require_lease(request.lease)
        slots = self.slots.rank(lease.rank)
        slot = slots.named(request.slot)
        if slot is not None and slot.assigned and slot.is_current_generation(request.generation):
            slot.file.invalidate_image()
            slot.finish_filling()
            counters = self.get_rank_counters(lease.rank)
            counters.discarded += 1
            counters.lose(request.step, request.reason)
            self.unequal_steps.record_unstaged_steps(lease.rank, request.step, time.monotonic())
            self.history.record_lost_saves(
                EventKind.DISCARDED, rank=lease.rank, step=request.step, reason=request.reason
            )
            warn("step.discarded", rank=lease.rank, step=request.step, reason=request.reason)
            self.changes.ring()
        return self._next(slots)

    async def release(self, request: ReleaseSlotsRequest) -> None:
        """The trainer says goodbye. A slot that it was given still holds what it held before."""
        lease = self.leases.require_lease(request.lease)
        lease.died = True
        await self.end_trainer_lease(lease, released=True)

    def warning(self, request: WarningRequest) -> None:
        """A trainer has something to tell the run's user."""
        lease = self.leases.require_lease(request.lease)
        lease.warning = request.text
        warn("trainer.warned", rank=lease.rank, message=request.text)
        self.changes.ring()

    def on_uncaught_error(self, request: UncaughtRequest) -> None:
        """An error ends a script. Of ranks that end together, the error that repeats counts."""
        leases = [lease for rank in self.leases.ranks if (lease := self.leases.of(rank))]
        saved = any(lease.request.pid == request.pid and lease.saved for lease in leases)
        repeats = request.repeats and not saved
        now, known = time.time(), self.uncaught
        if repeats or known is None or not known.repeats or now - known.at > _TOGETHER_S:
            self.uncaught = Uncaught(reason=request.reason, at=now, repeats=repeats)

    def skipped(self, request: SkippedRequest) -> None:
        """Record saves that could not be staged."""
        lease = self.leases.require_lease(request.lease)
        counters = self.get_rank_counters(lease.rank)
        counters.lose(request.step, request.reason, unkeepable=request.unkeepable)
        reasons = counters.skipped
        reasons[request.reason] = reasons.get(request.reason, 0) + request.count
        self.unequal_steps.record_unstaged_steps(
            lease.rank, request.step, time.monotonic(), count=request.count
        )
        self._node.missed(request.step)
        self.history.record_lost_saves(
            EventKind.SKIPPED,
            rank=lease.rank,
            step=request.step,
            reason=request.reason,
            count=request.count,
        )

    def list_unstaged_warnings(self) -> list[str]:
        """Warnings about trainers of which no step is staged although they save."""
        lost = {
            rank: counter.unkept for rank, counter in self.counters.items() if self.leases.of(rank)
        }
        now = time.monotonic()
        return [
            missed.warning(rank, now=now) for rank, missed in lost.items() if missed is not None
        ]

    def check_ranks_save_same_steps(self) -> None:
        """Find out whether the ranks here save different steps (`unequal` says so, '' if not). All
        ranks are told through their leases."""
        found = self.unequal_steps.difference(time.monotonic())
        text = "" if found is None else str(found)
        if text != self.unequal:
            self.unequal = text
            if text:
                warn("save.ranks_diverged", reason=text)
            self.changes.ring()

    def get_rank_counters(self, rank: int) -> SaveCounters:
        """A rank's counters."""
        return self.counters.setdefault(rank, SaveCounters())


# --- counters --------------------------------------------------------------------------------


_UNKEPT_S = 60.0


@dataclass(frozen=True)
class UnkeptSaves:
    """Saves that were not kept since a step was staged: the first of them, when it was reported
    (monotonic), and why the last one is not kept. `unkeepable`: the state itself cannot be kept."""

    step: int
    at: float
    reason: str
    unkeepable: bool = False

    def warning(self, rank: int, *, now: float) -> str:
        """The warning about it; '' as long as the next save may well be kept."""
        if not self.unkeepable and now - self.at < _UNKEPT_S:
            return ""
        return f"rank {rank}: no step was staged since step {self.step} was not: {self.reason}"


@dataclass
class SaveCounters:
    """Counters of one rank since the sidecar started. `staged`: the newest step that the rank
    sealed. `unkept`: what was lost since; None if nothing was."""

    saves: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    copy_s: float = 0.0
    staged: StepId | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    unkept: UnkeptSaves | None = None

    def lose(self, step: int, reason: str, *, unkeepable: bool = False) -> None:
        """A step was saved, and is not staged."""
        first = self.unkept or UnkeptSaves(step, time.monotonic(), reason)
        self.unkept = replace(first, reason=reason, unkeepable=unkeepable)


# --- waits -----------------------------------------------------------------------------------


_NEWEST = 2
"""Two: whatever dies between their seals, every rank has sealed one of the two."""


@dataclass(eq=False)
class StepLongPoll:
    """Long polls on the state of steps."""

    saving: SaveHandlers
    remote_tiers: RemoteTiers
    awaited: int = 0
    """How many trainers wait for a commit now."""

    def __post_init__(self) -> None:
        saving = self.saving
        self.leases, self.slots, self.changes = saving.leases, saving.slots, saving.changes
        self.node_host = saving.node_host
        self._node, self._images = self.node_host.node, self.node_host.images
        self._local_shards, self._remotes = self.node_host.local_shards, self.node_host.remotes

    async def wait(self, request: WaitRequest) -> Waited:
        """Wait until the step has the state. Raises SidecarError `bad-request` for a wrong
        state."""
        lease = self.leases.require_lease(request.lease)
        reached = self._predicate(lease, request)
        if request.flush and not reached():
            self.node_host.feed(Flush({request.id}))
        counters = self.saving.get_rank_counters(lease.rank)

        def settled() -> bool:
            # A step that could not be written is not tried again. Only a later step can help.
            failed = self._images.failed == request.id == counters.staged
            return reached() or failed or self._overtaken(lease.rank, request.id)

        deadline = time.monotonic() + request.timeout_s
        with self._counted(request.state):
            await self.changes.until(settled, timeout_s=request.timeout_s)
        if reached() and request.state == State.ARCHIVED:
            self._remotes.request_archiving(request.id)
            return await self._archived(request.id, deadline - time.monotonic())
        if reached():
            return Waited(reached=True)
        if self._overtaken(lease.rank, request.id):
            reason = f"step {request.id} was overwritten by later ones before it was written"
            return Waited(reached=False, reason=reason, final=True)
        return Waited(reached=False, reason=self._missing(request.id))

    async def _archived(self, step_id: StepId, left_s: float) -> Waited:
        """Wait until the archive has all that it is to have of a committed step, which it was told
        of. This may not include the step: a step that is damaged here, or was deleted before its
        turn, is not sent."""
        deadline, tiers = time.monotonic() + max(0.0, left_s), self.remote_tiers
        if await tiers.drain(timeout_s=max(0.0, left_s), tier=Tier.ARCHIVE):
            if not tiers.archived(step_id):
                await tiers.scan(refresh=True)  # an earlier life may have brought it there
            if unknown := self._remotes.why_unknown(Tier.ARCHIVE):
                left_s = deadline - time.monotonic()
                await self.changes.until(lambda: tiers.archived(step_id), timeout_s=left_s)
            if tiers.archived(step_id):
                return Waited(reached=True)
            reason = (
                f"step {step_id} is not in the archive, and is not sent: a shard of it is damaged"
                " here,"
                " or was deleted before its turn (the sidecar's log tells); wait for a later step"
            )
            return Waited(reached=False, reason=unknown or reason, final=not unknown)
        archive = self.remote_tiers.statuses()[Tier.ARCHIVE]
        why = archive.trouble or f"{archive.backlog} shards are on their way"
        return Waited(reached=False, reason=f"the archive is behind: {why}")

    @contextmanager
    def _counted(self, state: str) -> Iterator[None]:
        """Count a wait for a commit: perhaps only the leader knows of that commit."""
        commits = int(state in (State.COMMITTED, State.ARCHIVED))
        self.awaited += commits
        if commits:
            self.changes.ring()
        try:
            yield
        finally:
            self.awaited -= commits

    def _predicate(self, lease: Lease, request: WaitRequest) -> Callable[[], bool]:
        rank, step_id = lease.rank, request.id
        try:
            state = State(request.state)
        except ValueError as error:
            raise refusal_error("bad-request", str(error)) from error
        if state is State.STAGED:
            return lambda: self._staged(rank, step_id)
        if state is State.DURABLE:
            return lambda: self._local_shards.has_been_durable(rank, step_id)
        if state is State.ARCHIVED and not self._remotes.has_tier(Tier.ARCHIVE):
            raise refusal_error(
                "bad-request", "this sidecar has no archive; start it with --archive"
            )
        return lambda: self.node_host.was_committed(step_id)

    def _overtaken(self, rank: int, step_id: StepId) -> bool:
        """Whether the step is neither in memory nor on a volume, and never will be."""
        newest = self.saving.get_rank_counters(rank).staged
        later = newest is not None and newest.epoch == step_id.epoch and newest > step_id
        gone = (
            later
            and not self._staged(rank, step_id)
            and not self._node.is_step_being_written(step_id)
        )
        return gone and not self._local_shards.has_been_durable(rank, step_id)

    def _staged(self, rank: int, step_id: StepId) -> bool:
        return (
            self.saving.get_rank_counters(rank).staged == step_id
            or self.slots.rank(rank).find(step_id) is not None
            or self._local_shards.find_durable_shard(rank, step_id) is not None
        )

    def _missing(self, step_id: StepId) -> str:
        """Why the step has not reached the wanted state."""
        if self._images.trouble:
            return self._images.trouble
        if self.saving.unequal:
            return self.saving.unequal
        unstaged: list[int] = []
        unwritten: list[int] = []
        for rank in sorted(self.slots.list_current_rank_slots()):
            if self._local_shards.find_durable_shard(rank, step_id) is None:
                (unwritten if self._staged(rank, step_id) else unstaged).append(rank)
        if unstaged:
            return f"step {step_id} was not staged, or not kept, by ranks {unstaged}"
        if unwritten:
            return f"step {step_id} is staged, but not yet durable for ranks {unwritten}"
        if self.node_host.is_leader_silent:
            return (
                f"step {step_id} is durable here; the leader, which knows the other machines,"
                " is silent"
            )
        return f"step {step_id} is durable here, but not committed: some rank of the run lacks it"

    async def wait_until_committed(
        self, steps: tuple[StepId, ...], *, timeout_s: float
    ) -> StepId | None:
        """Wait until the last of these steps is committed or time is up. Returns the newest
        committed one of them; None if none is."""
        with self._counted(State.COMMITTED):
            await self.changes.until(
                lambda: self.node_host.was_committed(steps[-1]), timeout_s=timeout_s
            )
        return max(filter(self.node_host.was_committed, steps), default=None)

    async def persist_newest_steps(self, *, timeout_s: float) -> Flushed:
        """Make the newest two steps that all ranks here hold durable. Best effort, in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not await self.changes.until(lambda: self._local_shards.scanned, timeout_s=timeout_s):
            return Flushed(reason="the volumes are still being scanned")
        for rank, slots in self.slots.ranks.items():
            if not slots.settled and self.leases.of(rank) is None:
                slots.settled = True  # its trainer never came back: the images are final
                self.node_host.feed(ImagesSettled(rank))
        self.saving.update_served_ranks()
        self.node_host.feed(Flush(newest=_NEWEST))
        steps = self._node.list_steps_held_by_local_ranks()[-_NEWEST:]
        left_s = deadline - asyncio.get_running_loop().time()
        await self.changes.until(lambda: self.node_host.has_no_pending_writes, timeout_s=left_s)
        here, holds = self.slots.list_current_rank_slots(), self._local_shards.find_durable_shard
        durable = tuple(
            step_id for step_id in steps if all(holds(rank, step_id) is not None for rank in here)
        )
        missing = [step_id for step_id in steps if step_id not in durable]
        return Flushed(steps=durable, reason=self._missing(missing[-1]) if missing else "")

    async def wait_for_writes(self, *, timeout_s: float) -> bool:
        """Wait until nothing is being written. Returns False when the time is up."""
        return await self.changes.until(
            lambda: self.node_host.has_no_pending_writes, timeout_s=timeout_s
        )
