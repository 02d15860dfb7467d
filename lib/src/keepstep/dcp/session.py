"""This process's connection to its sidecar, shared by all writers and readers of `keepstep.dcp`.

A rank has one lease, and its images have one epoch between two loads, so each process has one
session. It ends when the process exits, or with `close`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import torch

from keepstep.client.slot import Slot, SlotMapping
from keepstep.core.vote import Candidates
from keepstep.dcp.agreement import Agreed, Ballot
from keepstep.dcp.plan_items import LastSave, Staged
from keepstep.errors import NotDurableError, SlotUnavailable, UsageError
from keepstep.image import ControlPage, Layout, TensorSpec
from keepstep.image.extras import capacity_for
from keepstep.restore.collective import ask_candidates, begin_epoch
from keepstep.save.agent import Agent
from keepstep.save.snapshot import Pending, Verdict
from keepstep.state import accelerator
from keepstep.steps import Epoch, EpochId, State, StepId, Tier
from keepstep.wire.trainer import SOCKET_ENV

log = logging.getLogger("keepstep")

_CONNECT_S = 30.0
_SLOT_S = 600.0
_DURABLE_S = 1800.0


class Session:
    """The lease of one rank, its epoch and its layout."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._agent: Agent | None = None
        self._place: tuple[int, int] | None = None
        self._epoch: Epoch | None = None
        self._over: set[EpochId] = set()
        self._loaded: tuple[StepId, Tier] | None = None
        self._last_step = -1
        self.failed: set[StepId] = set()
        """Steps that a load could not read completely, since the last load that succeeded."""
        self.last: LastSave | None = None
        """What the writer remembers of the last save, as long as the lease lasts."""
        self.turn = threading.RLock()
        self.staged: Staged | None = None
        """What an `async_save` staged and no save writes yet. `claim` takes it away."""
        self._staged_at: dict[tuple[int, int], weakref.ref[memoryview]] = {}
        self._saved: StepId | None = None
        self._layout: Layout | None = None
        self._shape: tuple[Sequence[TensorSpec], str] | None = None

    @property
    def joined(self) -> bool:
        """Whether there is a lease, and an epoch to save in."""
        return self._agent is not None and self._epoch is not None

    def claim(self) -> Staged | None:
        """Take `staged` away, so that the save's own thread and the next save never both
        have it.
        """
        staged, self.staged = self.staged, None
        return staged

    def note_staged(self, slot: SlotMapping) -> None:
        """Note that an `async_save` has filled this slot, so that DCP has views of it."""
        self._staged_at[slot.address, slot.layout.size_bytes] = weakref.ref(slot.memory)

    def staged_ranges(self) -> list[tuple[int, int]]:
        """Addresses and sizes of all slots that an `async_save` ever filled and that are still
        mapped. Once a slot is unmapped, other tensors may lie at its addresses.
        """
        mapped = {at: memory for at, memory in self._staged_at.items() if memory() is not None}
        self._staged_at = mapped
        return list(mapped)

    def holds(self, taken: Slot) -> bool:
        """Whether this slot is still the taken one, and neither staged nor put back."""
        return self._agent is not None and self._agent.taken is taken

    @property
    def agent(self) -> Agent:
        """The agent of the lease. Raises UsageError before `join`."""
        if self._agent is None:
            raise UsageError("the session with the sidecar was closed in the middle of a save")
        return self._agent

    def meet(self, rank: int, world: int) -> None:
        """`join`, unless there is already a lease: an agreed place is better than a guessed one."""
        if self._agent is None:
            self.join(rank, world)

    def join(self, rank: int, world: int) -> None:
        """Hold the lease of this rank of this world. Raises SidecarError."""
        if self._agent is not None and self._place == (rank, world):
            return
        self._let_go()
        agent = Agent(self.socket_path, rank=rank, world=world)
        agent.connect(timeout_s=_CONNECT_S)
        self._agent, self._place = agent, (rank, world)

    def leave(self) -> None:
        """Give the lease back. The next save or load goes on from the step that was last loaded or
        saved.

        Either all ranks must do this, or none, because they go on from one step.
        """
        if self._saved is not None:
            self._loaded = (self._saved, Tier.LOCAL)
        self._let_go()

    def _let_go(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent = self._place = self._layout = self._shape = self.last = None
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            self._over.add(self._epoch.id)
        self._epoch = self._saved = None

    # --- looking and loading -----------------------------------------------------------------

    def candidates(self) -> Candidates:
        """What this rank's sidecar holds. Waits until the sidecar has looked at its volumes."""
        return ask_candidates(self.agent.session)

    def resume(self, id: StepId, tier: Tier) -> None:
        """Note that this step was loaded from `tier` as the run's own step: the next save begins an
        epoch that follows it.
        """
        self._loaded = (id, tier)
        self.failed.clear()
        self._end_epoch()

    # --- saving ------------------------------------------------------------------------------

    def ballot(self, step: int) -> Ballot:
        """The ballot of this rank before a save. Raises UsageError for a step that does not
        grow.
        """
        if self._epoch is not None and step <= self._last_step:
            raise UsageError(
                f"step {step} comes after step {self._last_step}: steps only grow; to go back,"
                " load the older step first"
            )
        highest = self._epoch.id.number if self._epoch else self.candidates().highest_epoch
        loaded = self._loaded[0] if self._loaded else None
        world = self._place[1] if self._epoch and self._place else 0
        return Ballot(
            step=step, epoch=self._epoch, world=world, loaded=loaded, highest_epoch=highest
        )

    def again(self, step: int, *, world: int) -> list[Agreed]:
        """The answer that `agree` would give to ranks that are all in this epoch. Raises UsageError
        if there is no epoch of this world.

        Needed for plans that a planner took from its cache, because they contain no ballots.
        """
        if self._epoch is None or self._place is None or self._place[1] != world:
            raise UsageError(
                "a cached plan is older than the last load, or of another group: make the planner"
                " anew"
            )
        epoch = self._epoch
        return [Agreed(step=step, epoch=epoch, rank=one, world=world) for one in range(world)]

    def begin(self, agreed: Agreed) -> None:
        """Become the rank that was agreed on, in the agreed epoch. Raises SidecarError,
        UsageError.
        """
        if agreed.epoch.id in self._over:
            raise UsageError(
                f"epoch {agreed.epoch.id} ended with a load: this plan is an old one that the"
                " planner cached; make the planner anew after a load"
            )
        before = self._place
        self.join(agreed.rank, agreed.world)
        if self._epoch == agreed.epoch and self._place == before:
            return
        tier = self._loaded[1] if self._loaded else None
        begin_epoch(self.agent.session, agreed.epoch, tier)
        self._epoch = agreed.epoch
        self._last_step = agreed.epoch.parent.step if agreed.epoch.parent else -1

    def slot(self, specs: Sequence[TensorSpec], skeleton: str, extras_bytes: int) -> Slot:
        """A slot for an image of these tensors. Waits for it; raises SlotUnavailable if none comes
        in time.

        Hand it back with `stage`, or with `agent.put_back`.
        """
        layout = self._layout
        if (
            layout is None
            or self._shape != (specs, skeleton)
            or layout.extras_capacity_bytes < extras_bytes
        ):
            assert self._place is not None
            rank, world = self._place
            layout = self._layout = Layout.build(
                specs,
                rank=rank,
                world=world,
                skeleton=skeleton,
                extras_capacity_bytes=capacity_for(extras_bytes),
            )
            self._shape = (specs, skeleton)
        self.agent.use_layout(layout)
        try:
            return self.agent.await_slot(timeout_s=_SLOT_S)
        except SlotUnavailable as error:
            rank = self.agent.session.rank
            raise SlotUnavailable(f"rank {rank}: no slot to save into: {error}") from None

    def stage(self, taken: Slot, agreed: Agreed, extras: bytes) -> None:
        """Seal the image whose tensors are in the slot; returns when it is durable.

        Raises NotDurableError.
        """
        mapping, agent = taken.mapping, self.agent
        id = StepId(agreed.epoch.id, agreed.step)
        mapping.write_extras(extras)
        control = ControlPage.staged(
            mapping.layout,
            run=agent.session.run,
            epoch=agreed.epoch,
            step=agreed.step,
            extras_bytes=len(extras),
            staged_at=time.time(),
        )
        pending = Pending(taken, control, guard=None)
        pending.copy()
        pending.judge()
        pending.seal()
        agent.submit(pending)
        self._last_step = agreed.step
        if not agent.drain(timeout_s=_SLOT_S) or pending.verdict is not Verdict.STAGED:
            raise NotDurableError(f"step {id} was not staged: {agent.stats.why_not()}")
        agent.session.wait(id, State.DURABLE, timeout_s=_DURABLE_S)
        self._saved = id

    def await_commit(self, id: StepId) -> None:
        """Return when the step is committed and visible to readers. Raises NotDurableError."""
        self.agent.session.wait(id, State.COMMITTED, timeout_s=_DURABLE_S)


_SESSION: Session | None = None


def session() -> Session:
    """The session of this process. Raises UsageError if KEEPSTEP_SOCKET names no sidecar."""
    global _SESSION
    socket_path = os.environ.get(SOCKET_ENV, "")
    if not socket_path:
        raise UsageError(
            f"{SOCKET_ENV} is not set: start the training with `keepstep run -- ...`, or read a"
            " step's directory: StorageReader(path)"
        )
    if _SESSION is None or _SESSION.socket_path != socket_path:
        close()
        _SESSION = Session(socket_path)
        _close_at_exit()
    return _SESSION


def close() -> None:
    """Give this rank's lease back.

    The next save or load takes a new lease, and a new epoch begins that follows the last step of
    this one. keepstep calls this when the process exits. A script needs it only to pass the rank on
    earlier.
    """
    if _SESSION is not None:
        _SESSION.leave()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(close)


# --- checkpoint ids --------------------------------------------------------------------------


_STEP = re.compile(r"^(?:.*[^0-9])?([0-9]{1,18})$")


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The number that an id is or ends with: `1200`, `"1200"`, `"out/step-1200/"`.

    Raises UsageError for an id without a number.
    """
    text = ""
    if isinstance(checkpoint_id, str | os.PathLike):
        text = os.path.basename(os.fspath(checkpoint_id).rstrip("/"))
    elif isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        text = str(checkpoint_id)
    if not (match := _STEP.match(text)):
        raise UsageError(
            f"no step in {checkpoint_id!r}: let it end with the step's number, such as"
            ' "out/step-1200", or give the step: StorageWriter(step=1200), StorageReader(step=1200)'
        )
    return int(match[1])


def names_step(checkpoint_id: object) -> bool:
    """Whether `step_of` finds a step in it."""
    try:
        step_of(checkpoint_id)  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


# --- the rank in DCP's group -----------------------------------------------------------------


def group_place(*, is_coordinator: bool, rank: int | None) -> tuple[int, int]:
    """This process's rank and world, as far as a storage plugin can know them before it sees the
    plans of all ranks. DCP tells the rank in its group (since torch 2.7), but not the size of the
    group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    own, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank is None:
        rank = 0 if is_coordinator else own
    # a coordinator that is not rank 0 of the job has `no_dist`, or a group of its own
    return (0, 1) if is_coordinator and own != 0 else (rank, world)


_EXECUTOR, _SAVER = "concurrent.futures.thread", "torch.distributed.checkpoint.state_dict_saver"


def warn_of_shared_group() -> None:
    """Warn before a `dcp.async_save` hangs because its thread exchanges plans on the gloo group on
    which the model trains.

    This runs within the save, in its thread. DCP does not tell a storage its group, so the group is
    looked up in the frame of DCP's own `save`.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    modules, given = set(), None
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        module = frame.f_globals.get("__name__", "")
        modules.add(module)
        if (module, frame.f_code.co_name) == (_SAVER, "save"):
            given = frame.f_locals
    if given is None or _EXECUTOR not in modules or given.get("no_dist"):
        return
    backends = torch.distributed.get_backend_config().split(",")
    shared = given.get("process_group") in (None, torch.distributed.group.WORLD)
    if shared and f"{accelerator.kind() or 'cpu'}:gloo" in backends:
        _warn_once()


@functools.cache
def _warn_once() -> None:
    log.warning(
        "keepstep: dcp.async_save exchanges its plans in a thread, on the default gloo group: if"
        " the model trains on that group meanwhile, both wait for each other for ever. Give it a"
        ' group of its own, made once: process_group=dist.new_group(backend="gloo")'
    )
