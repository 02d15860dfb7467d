"""Which slot of a rank is filled next, and which images are kept meanwhile.

A slot is a shared-memory buffer that holds one image. The table knows only states: no memory, no
files, no clock. The owner of the buffers tells it what happened and obeys `assign`.

An assigned slot still holds its old image until the trainer zeroes the slot's control page. The
trainer does so in stream order, after the step's global collective. So an attempt that dies before
that leaves the old image whole, and `release(slot, keep=...)` takes it back.

`assign` takes an empty slot, else one with a dead image, else the one with the oldest image. It
never takes

    - while another slot is assigned: at most one image of a rank is unsealed;
    - a pinned one: somebody reads it;
    - a protected one: it waits until the other ranks have sealed one more.

So while nothing is pinned, a lock-step run with two slots that dies loses one finished step at
most, if all its ranks are on this machine: only these are known to `protect_steps`. With three it
does so, and never waits for the drive, while one image of each rank is pinned: a third step begins
while the first is written and the second is the newest. Ranks of several machines need one more
(docs/protocol.md). So the last slot is made when a reader is first in the way
(`waits_for_reader`). With a single slot, what has still to be written is protected instead: a crash
in the middle of a copy falls back to the newest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from keepstep.steps import StepId, StrEnum


class SlotState(StrEnum):
    """`ASSIGNED`: being filled by the trainer. `LOADING`: being filled by a restore.
    `REMOVED`: the slot no longer exists; the other slots keep their indices."""

    EMPTY = "empty"
    ASSIGNED = "assigned"
    LOADING = "loading"
    SEALED = "sealed"
    REMOVED = "removed"


@dataclass(frozen=True)
class SlotRow:
    """One slot. `id`: the step whose image it holds when sealed, or *still* holds when assigned or
    loading.

    `dead`: the image was sealed, but will never be restored, so the slot counts as empty.
    """

    state: SlotState = SlotState.EMPTY
    id: StepId | None = None
    pins: int = 0
    dead: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the image is being read: by the persister, or by a trainer that restores it."""
        return self.pins > 0

    @property
    def restorable_step(self) -> StepId | None:
        """The step that can be restored from this slot now, or None."""
        return self.id if self.state is SlotState.SEALED and not self.dead else None


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds. `ended`: its trainer is gone and seals nothing more."""

    held: frozenset[StepId]
    ended: bool = False

    def may_have(self, step_id: StepId) -> bool:
        """It has this step, or may still seal it."""
        return step_id in self.held or not (self.ended or any(step_id < held for held in self.held))


def newest_common_step(ranks: Sequence[RankMemory]) -> StepId | None:
    """The newest step that every rank holds."""
    each = [rank.held for rank in ranks]
    return max(frozenset.intersection(*each), default=None) if each else None


def steps_to_protect(ranks: Sequence[RankMemory]) -> frozenset[StepId]:
    """What to `protect_steps`: the newest step that all ranks hold, and newer ones that all may
    come to hold.

    The newer ones belong to it: with the common step alone, a rank that is ahead while its oldest
    image is pinned would give up the very step that the others are about to seal.
    """
    common = newest_common_step(ranks)
    known = frozenset[StepId]().union(*(rank.held for rank in ranks))
    newer = {step_id for step_id in known if common is None or step_id > common}
    kept = {step_id for step_id in newer if all(rank.may_have(step_id) for rank in ranks)}
    return frozenset(kept if common is None else {common, *kept})


class SlotTable:
    """The slots of one rank and one layout. A slot is named by its index."""

    def __init__(self, count: int) -> None:
        self._slots = [SlotRow() for _ in range(count)]
        self._protected: frozenset[StepId] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> tuple[SlotRow, ...]:
        return tuple(self._slots)

    @property
    def assigned_slot_index(self) -> int | None:
        """The slot that the trainer fills now, or None."""
        return next((i for i, slot in self._with(SlotState.ASSIGNED)), None)

    def add(self) -> int:
        """Add an empty slot (slots are created in the background). Returns its index."""
        self._slots.append(SlotRow())
        return len(self._slots) - 1

    def remove(self, index: int) -> None:
        """Mark this slot as removed. Raises ValueError if it is pinned."""
        if self._slots[index].pinned:
            raise ValueError(f"slot {index} is pinned: a reader has {self._slots[index].id}")
        self._slots[index] = SlotRow(SlotState.REMOVED)

    # --- filling -------------------------------------------------------------------------

    def assign(self, *, keep: int = 0) -> int | None:
        """The slot to fill next, or None: wait until a seal, release or unpin, then ask again.

        `slots[i].id` names the image that the slot held, if any. That image counts as overwritten.
        `keep`: the newest `keep` images are protected, too.
        """
        if self.assigned_slot_index is not None or (victim := self._victim(keep)) is None:
            return None
        self._slots[victim] = replace(self._slots[victim], state=SlotState.ASSIGNED)
        return victim

    def waits_for_reader(self, *, keep: int = 0) -> bool:
        """Whether `assign` has no slot because an image is read that would be next."""
        waits = self.assigned_slot_index is None and self._victim(keep) is None
        return waits and bool(self._unprotected(keep))

    def restore_assignment(self, index: int) -> None:
        """Mark this slot as assigned, because a live trainer was found filling it. Raises
        ValueError if another slot is assigned or this one is pinned."""
        if self.assigned_slot_index not in (None, index) or self._slots[index].pinned:
            raise ValueError(f"slot {index} cannot be the one that is filled")
        self._slots[index] = replace(self._slots[index], state=SlotState.ASSIGNED)

    def seal(self, index: int, step_id: StepId) -> None:
        """The image in this slot is complete. Raises ValueError unless the slot is assigned or
        loading."""
        slot = self._slots[index]
        if slot.state not in (SlotState.ASSIGNED, SlotState.LOADING):
            raise ValueError(f"slot {index} is {slot.state}: only a slot that is filled is sealed")
        self._slots[index] = replace(slot, state=SlotState.SEALED, id=step_id, dead=False)

    def release(self, index: int, keep: StepId | None = None) -> None:
        """The slot is no longer being filled. `keep`: the step whose image its control page still
        seals, None if there is no valid seal.

        A sealed slot that is not pinned may be released, too, with `keep` None. Its image is
        dropped. Raises ValueError if the slot cannot be released.
        """
        slot = self._slots[index]
        sealed = slot.state is SlotState.SEALED and keep is not None
        if slot.pinned or sealed or slot.state is SlotState.REMOVED:
            raise ValueError(f"slot {index} cannot be released: {slot}")
        state = SlotState.EMPTY if keep is None else SlotState.SEALED
        dead = slot.dead and keep == slot.id and keep is not None
        self._slots[index] = replace(slot, state=state, id=keep, dead=dead)

    def adopt(self, index: int, step_id: StepId) -> None:
        """Take over an image that was found with a valid seal after a restart. Raises ValueError
        unless the slot is empty."""
        if self._slots[index].state is not SlotState.EMPTY:
            raise ValueError(f"slot {index} is {self._slots[index].state}, not empty")
        self._slots[index] = SlotRow(SlotState.SEALED, step_id)

    def reserve_slot_for_load(self, expendable: Container[StepId] = frozenset()) -> int | None:
        """A slot to load an image into without destroying a candidate, or None. `seal` it later.

        The slot is empty or dead, or else the oldest one sealed with a step in `expendable`. It is
        never pinned.
        """
        free = self._free()
        spare = [
            (slot.id, i)
            for i, slot in enumerate(self._slots)
            if slot.restorable_step
            and slot.id
            and not slot.pinned
            and slot.restorable_step in expendable
        ]
        index = free[0] if free else min(spare)[1] if spare else None
        if index is not None:
            self._slots[index] = replace(self._slots[index], state=SlotState.LOADING)
        return index

    # --- keeping -------------------------------------------------------------------------

    def pin(self, index: int) -> None:
        """Keep this sealed image until `unpin`. Pins are counted. Raises ValueError unless the slot
        is sealed."""
        slot = self._slots[index]
        if slot.state is not SlotState.SEALED:
            raise ValueError(f"slot {index} is {slot.state}: only a sealed image can be pinned")
        self._slots[index] = replace(slot, pins=slot.pins + 1)

    def unpin(self, index: int) -> None:
        """Take one pin back. Raises ValueError when there is none."""
        slot = self._slots[index]
        if not slot.pins:
            raise ValueError(f"slot {index} is not pinned")
        self._slots[index] = replace(slot, pins=slot.pins - 1)

    def protect_steps(self, ids: Iterable[StepId]) -> None:
        """Keep these (`steps_to_protect`). Replaces what was protected before: the newest one at
        first."""
        self._protected = frozenset(ids)

    def mark_dead_images(self, dead: Callable[[StepId], bool]) -> tuple[StepId, ...]:
        """Mark the images of dead steps, so that they are overwritten first. Returns their steps,
        oldest first."""
        forgotten = []
        for i, slot in enumerate(self._slots):
            if slot.restorable_step and dead(slot.restorable_step):
                forgotten.append(slot.restorable_step)
                self._slots[i] = replace(slot, dead=True)
        return tuple(sorted(forgotten))

    # --- asking --------------------------------------------------------------------------

    def find_slot(self, step_id: StepId) -> int | None:
        """The index of the slot with this sealed, live image, or None."""
        return next(
            (i for i, slot in enumerate(self._slots) if slot.restorable_step == step_id), None
        )

    def list_sealed_steps(self) -> list[StepId]:
        """The steps of the live images, oldest first."""
        return sorted({slot.restorable_step for slot in self._slots if slot.restorable_step})

    # --- inside --------------------------------------------------------------------------

    def _with(self, state: SlotState) -> list[tuple[int, SlotRow]]:
        return [(i, slot) for i, slot in enumerate(self._slots) if slot.state is state]

    def _free(self) -> list[int]:
        """Indices of unpinned slots without a live image, the empty ones before the dead ones."""
        empty = [i for i, _ in self._with(SlotState.EMPTY)]
        dead = [i for i, slot in self._with(SlotState.SEALED) if slot.dead and not slot.pinned]
        return empty + dead

    def _unprotected(self, keep: int) -> list[tuple[StepId, int]]:
        """(step, index) of the live images that nobody needs, oldest first."""
        sealed, protected = self.list_sealed_steps(), self._protected
        kept = {*sealed[-1:]} if protected is None else {*protected}
        kept.update(sealed[-keep:] if keep else ())
        slots = enumerate(self._slots)
        return sorted(
            (slot.restorable_step, i)
            for i, slot in slots
            if slot.restorable_step and slot.restorable_step not in kept
        )

    def _victim(self, keep: int) -> int | None:
        if free := self._free():
            return free[0]
        return next((i for _, i in self._unprotected(keep) if not self._slots[i].pinned), None)
