"""All slots in memory, by rank and slot set, from the sidecar's start to its end.

The shared-memory directory is the truth: a sidecar that starts adopts the slots that it finds
there. All methods except `adopt_all` are quick and run on the event loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.core.slot_table import SlotState, SlotTable
from keepstep.image import BaseRef, ControlPage, Layout
from keepstep.steps import StepId, Tier
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.memory.slot_directories import SlotDirectories, open_rank_directory
from keepstep_sidecar.memory.slot_file import SlotFile, is_unfinished_slot_name, slot_number


@dataclass
class RankSlots:
    """One rank's slot sets by layout id. `current`: the layout that the trainer fills now.

    `settled`: the rank's trainer has said which slots it holds, or there is no trainer. Before
    that, a trainer may be about to overwrite an image that was found at the start, so nothing else
    reads it.
    """

    rank: int
    world: int = 0
    slot_sets: dict[str, SlotSet] = field(default_factory=dict)
    bases: BaseSlots = field(default_factory=lambda: BaseSlots())
    current: SlotSet | None = None
    settled: bool = False
    warning: str = ""

    def slot_tables(self) -> list[SlotTable]:
        """The tables of all slot sets, which say which slot is filled next."""
        return [slot_set.table for slot_set in self.slot_sets.values()]

    def find(self, step_id: StepId) -> PooledSlot | None:
        """The slot with this sealed, live image; None if there is none."""
        return self._first(lambda slot_set: slot_set.table.find_slot(step_id))

    def named(self, name: str) -> PooledSlot | None:
        """The slot with this name; None if there is none."""
        return self._first(lambda slot_set: slot_set.index_of(name))

    def filling(self) -> PooledSlot | None:
        """The slot that the trainer fills now; None if there is none."""
        return self._first(lambda slot_set: slot_set.table.assigned_slot_index)

    def _first(self, where: Callable[[SlotSet], int | None]) -> PooledSlot | None:
        found = ((slot_set, where(slot_set)) for slot_set in self.slot_sets.values())
        return next((PooledSlot(at, index) for at, index in found if index is not None), None)

    def list_sealed_steps(self) -> list[StepId]:
        """Live images of all slot sets, oldest first."""
        return sorted(
            {
                step_id
                for slot_set in self.slot_sets.values()
                for step_id in slot_set.table.list_sealed_steps()
            }
        )

    @property
    def reserved_bytes(self) -> int:
        sizes = (slot_set.target_size_bytes for slot_set in self.slot_sets.values())
        return sum(sizes) + self.bases.size_bytes

    def register_base_reference(self, slot: PooledSlot, control: ControlPage) -> bool:
        """The image in this slot is sealed with `control`. False if the base that it refers to is
        not here."""
        if control.base is not None and self.bases.find(control.base) is None:
            return False
        slot.slot_set.uses[slot.index] = replace(slot.slot_set.uses[slot.index], base=control.base)
        return True

    def free_unused_bases(self) -> list[SlotFile]:
        """Give up the bases to which no image refers any more, but not the one to which the
        trainer's next image will. Returns their files."""
        return self.bases.give_up_besides(
            use.base
            for slot_set in self.slot_sets.values()
            for use, slot in zip(slot_set.uses, slot_set.table.slots, strict=True)
            if slot.state is not SlotState.REMOVED
        )


class SlotPool:
    """The slots of one run on this machine."""

    def __init__(self, directories: SlotDirectories, *, run: str) -> None:
        self.directories = directories
        self.ranks: dict[int, RankSlots] = {}
        self.world = 0
        """World size of the newest trainer, 0 before the first."""
        self.moved: frozenset[int] = frozenset()
        """Ranks that were here and now train on another machine: the machines of a run may come
        back in another order."""
        self._run = run

    def rank(self, rank: int) -> RankSlots:
        """The slots of a rank; an empty `RankSlots` for a new rank."""
        if rank not in self.ranks:
            self.directories.make(rank)
            self.ranks[rank] = RankSlots(rank)
        return self.ranks[rank]

    def find(self, rank: int, step_id: StepId) -> PooledSlot | None:
        """The slot with this image; None if there is none."""
        return self.ranks[rank].find(step_id) if rank in self.ranks else None

    def find_slots_by_rank(self, step_id: StepId) -> dict[int, PooledSlot]:
        """By rank, the slots with an image of this step."""
        return {rank: at for rank, slots in self.ranks.items() if (at := slots.find(step_id))}

    @property
    def made_bytes(self) -> int:
        """Bytes that all slots take now."""
        return sum(len(file.view) for file in self.files())

    def list_departed_slot_sets(self, world: int) -> list[SlotSet]:
        """The slot sets of ranks that a world of this size does not have, or that moved to another
        machine. They are not free before the first images of those that train here."""
        found = self.ranks.items()
        gone = (slots for rank, slots in found if rank >= world or rank in self.moved)
        return [other for slots in gone for other in slots.slot_sets.values()]

    def list_current_rank_slots(self) -> dict[int, RankSlots]:
        """Ranks with slots, without ranks that the current, smaller world does not have, and
        without those that moved to another machine."""
        return {
            rank: of_rank
            for rank, of_rank in self.ranks.items()
            if of_rank.slot_sets
            and rank not in self.moved
            and (not self.world or rank < self.world)
        }

    def files(self) -> Iterator[SlotFile]:
        for slots in self.ranks.values():
            for slot_set in (*slots.slot_sets.values(), *slots.bases.sets.values()):
                yield from slot_set.iter_files()

    # --- start and end -----------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Map every slot that an earlier sidecar left. Remove files that have a slot's name but are
        not slots.

        Whatever a trainer put there, a bad file affects only itself. Blocks.
        """
        for rank, directory in list(self.directories.found()):
            slots = self.rank(rank)
            try:
                with open_rank_directory(directory) as fd:
                    names = sorted(os.listdir(fd))
                    for name in filter(is_unfinished_slot_name, names):
                        _remove(name, fd)
            except OSError as error:  # a trainer made the directory for itself
                warn("slot.unreadable", rank=rank, path=str(directory), error=str(error))
                continue
            slot_names = [name for name in names if slot_number(name) is not None]
            found = [self._mapped(slots, directory / name) for name in slot_names]
            # bases first: an image is adopted with its base
            for file in sorted(filter(None, found), key=lambda file: not file.layout.is_base):
                self._adopt(slots, file)
            self.unlink(slots.free_unused_bases())

    def _mapped(self, slots: RankSlots, path: Path) -> SlotFile | None:
        try:
            file = SlotFile.adopt(path)
        except Exception as error:  # any error of a parser means that it is not a slot
            warn("slot.file_discarded", rank=slots.rank, path=str(path), reason=str(error))
            with contextlib.suppress(OSError), open_rank_directory(path.parent) as fd:
                _remove(path.name, fd)
            return None
        if file.layout.rank != slots.rank:
            warn("slot.file_discarded", rank=slots.rank, path=str(path), reason="of another rank")
            file.unlink()
            return None
        return file

    def _adopt(self, slots: RankSlots, file: SlotFile) -> None:
        layout, control = file.layout, file.control()
        if control is not None and (control.run != self._run or control.layout != layout.id):
            file.invalidate_image()
            control = None
        if layout.is_base:
            if not slots.bases.adopt(file, control):
                file.unlink()  # a trainer that was filling it will fill another one
            return
        if control is not None and control.base and slots.bases.find(control.base) is None:
            warn("slot.file_discarded", rank=slots.rank, slot=file.name, reason="its base is gone")
            file.invalidate_image()
            control = None
        slot_set = slots.slot_sets.setdefault(layout.id, SlotSet(layout))
        slot_set.adopt(file, control)
        slots.world = layout.world
        info("slot.adopted", rank=slots.rank, slot=file.name, step=control and str(control.step_id))

    def settle(self, rank: int, *, holding: tuple[str, ...], trusted: bool) -> tuple[str, ...]:
        """The rank's trainer says which slots it fills. Returns the slots with which it may go on.

        `trusted`: this trainer had the slots before, or no trainer had them. Slots that it does not
        fill are then free. Otherwise a straggler may still write to them, so those files are given
        up.
        """
        slots = self.rank(rank)
        held = tuple(name for name in holding if self._hold(slots, name))
        for slot_set in slots.slot_sets.values():
            if trusted:
                slot_set.admit_orphans()
            else:
                self.unlink(slot_set.drop_orphans())
        slots.settled = True
        return held

    def _hold(self, slots: RankSlots, name: str) -> bool:
        if (already := slots.filling()) is not None:
            return already.file.name == name
        return any(slot_set.restore_assignment(name) for slot_set in slots.slot_sets.values())

    # --- asking ------------------------------------------------------------------------------

    def find_verified(
        self, rank: int, step_id: StepId, *, bad: Collection[str] = ()
    ) -> PooledSlot | None:
        """The slot with this image, if it still verifies. Otherwise the image is no candidate any
        more.

        `bad`: paths of slots that a trainer could not use.
        """
        slots = self.rank(rank)
        while (slot := slots.find(step_id)) is not None:
            file = slot.file
            rejected = "a trainer could not use it" if str(file.path) in bad else ""
            if not (
                why := rejected
                or file.damage_text(step_id, run=self._run)
                or self._base_damage(slot, bad)
            ):
                return slot
            warn(
                "slot.image_refused", rank=rank, step=str(step_id), path=str(file.path), reason=why
            )
            if not (file.describe_damage() and slot.slot_set.discard_slot(slot.index)):
                slot.slot_set.table.mark_dead_images(lambda sealed: sealed == step_id)
        return None

    def find_base_slot(self, slot: PooledSlot) -> PooledSlot | None:
        """The slot with the base to which the image in `slot` refers; None if it has none."""
        return None if slot.base is None else self.rank(slot.layout.rank).bases.find(slot.base)

    def _base_damage(self, slot: PooledSlot, bad: Collection[str]) -> str:
        """Why the base of this image cannot be used; '' when it can, or there is none."""
        if (ref := slot.base) is None:
            return ""
        if (base := self.find_base_slot(slot)) is None:
            return "its base is gone"
        rejected = "a trainer could not use it" if str(base.file.path) in bad else ""
        why = rejected or base.file.damage_text(ref.step, run=self._run)
        return why and f"its base: {why}"

    def damaged_ranks(self) -> list[RankSlots]:
        """Ranks of which the directory, or the name or bytes of a slot, were removed by others.
        Makes only a few system calls for each slot, because it is called all the time."""
        return [
            slots
            for slots in self.ranks.values()
            if self.directories.is_directory_missing(slots.rank)
            or any(
                self._lacks(file)
                for each in (*slots.slot_sets.values(), *slots.bases.sets.values())
                for file in each.iter_files()
            )
        ]

    def _lacks(self, file: SlotFile) -> str:
        """What the file lost by others' doing, or "trainers that see it"; '' when nothing."""
        unseen = file.huge and self.directories.huge is None
        return "trainers that see it" if unseen else file.describe_damage()

    def drop_damaged(self, slots: RankSlots, *, cut_off_only: bool = False) -> None:
        """Drop the slots that others damaged, except slots that are still being read.

        `cut_off_only`: keep slots that lost only their name, because their image is whole.
        """

        def lost(file: SlotFile) -> bool:
            if not (file.is_cut_off if cut_off_only else self._lacks(file)):
                return False
            what = self._lacks(file)
            warn("slot.lost", rank=file.layout.rank, path=str(file.path), missing=what)
            return True

        for slot_set in slots.slot_sets.values():
            for index in [
                index for index, file in slot_set.iterate_files_without_orphans() if lost(file)
            ]:
                slot_set.discard_slot(index)
            for file in slot_set.drop_orphans(lost):
                file.unlink()
        for lost_step in slots.bases.drop(lost):
            for slot_set in slots.slot_sets.values():
                slot_set.discard_images_of_base(lost_step)

    # --- changes -----------------------------------------------------------------------------

    def free_unfinished_slot(self, rank: int) -> StepId | None:
        """The trainer has died, so free its unfinished slot. Returns the step in it, if sealed.

        The trainer may have died between seal and report, or before it zeroed the slot.
        """
        slots = self.rank(rank)
        if (filling := slots.filling()) is None:
            return None
        control = filling.file.control()
        keep = control.step_id if control is not None and control.run == self._run else None
        if (
            control is not None
            and keep is not None
            and not slots.register_base_reference(filling, control)
        ):
            keep = None
        if keep is None:
            filling.file.invalidate_image()
        filling.finish_filling(keep=keep)
        return keep

    def holds_old_layouts(self, slots: RankSlots) -> bool:
        """Whether this rank, or a rank that is gone, has slots that no trainer fills any more."""
        return len(slots.slot_sets) > 1 or any(
            of_rank.slot_sets and (rank >= slots.world or rank in self.moved)
            for rank, of_rank in self.ranks.items()
        )

    def drop_old_layouts(self, common: StepId | None, *, alive: Collection[int] = ()) -> bool:
        """Free the slots of layouts that hold nothing newer than `common`, the step that all ranks
        have in common, and the slots of ranks that the world no longer has, or that moved to
        another machine. `alive`: ranks with a trainer, which may fill their slots whatever world
        another trainer was in. Returns whether any were freed."""
        freed = False
        if common is None:
            return freed
        running = {*self.list_current_rank_slots(), *alive}
        for rank, slots in self.ranks.items():
            for key, slot_set in list(slots.slot_sets.items()):
                newest = max(slot_set.table.list_sealed_steps(), default=None)
                # A straggler of a rank that is gone may still fill its slot. It then writes to
                # memory that nothing reads.
                states = {SlotState.LOADING} | ({SlotState.ASSIGNED} if rank in running else set())
                busy = any(slot.pinned or slot.state in states for slot in slot_set.table.slots)
                used = slots.current is None or slot_set is slots.current
                if busy or (used and rank in running):
                    continue
                if newest is None or newest < common:
                    del slots.slot_sets[key]
                    slots.current = None if slot_set is slots.current else slots.current
                    slot_set.target = 0
                    self.unlink([*slot_set.files, *slot_set.drop_orphans()])
                    freed = True
            self.unlink(slots.free_unused_bases())
        return freed

    def unlink(self, files: list[SlotFile]) -> None:
        """Remove the files of slots."""
        for file in files:
            info("slot.removed", level=logging.DEBUG, slot=file.name)
            file.unlink()

    def free_all_slots(self) -> None:
        """Free all memory: the run has ended."""
        for slots in self.ranks.values():
            for slot_set in slots.slot_sets.values():
                slot_set.target = 0
                self.unlink([*slot_set.files, *slot_set.orphans.values()])
            self.unlink([file for slot_set in slots.bases.sets.values() for file in slot_set.files])
            self.directories.remove(slots.rank)
        self.ranks.clear()


def _remove(name: str, directory: int) -> None:
    """Remove a name from a rank's directory; of a link, only the name. A directory stays."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


# --- slots of one layout ---------------------------------------------------------------------
#
# A slot set: the slots of one rank and one layout. It ties `SlotTable`'s states to slot files.
#
# Index i of the table is file i here. Slots that were found unsealed after a restart are *orphans*,
# which are not in the table. A live trainer may be filling one; it says so with its next lease.


_generations = itertools.count(1)


@dataclass(frozen=True)
class Assignment:
    """What a slot is used for now. `generation` None: the slot was assigned before this sidecar
    started, so any generation is accepted. `tier`: where its image came from. `base`: to what the
    image refers that the slot holds or, while it is filled, held."""

    generation: int | None = 0
    tier: Tier = Tier.MEMORY
    base: BaseRef | None = None


@dataclass(frozen=True)
class AssignedSlot:
    """A slot that the trainer fills from now on. `lost`: the step that the slot held until now."""

    index: int
    generation: int
    lost: StepId | None


@dataclass(frozen=True)
class PooledSlot:
    """One slot: its place in its slot set, which does not change while the slot is used."""

    slot_set: SlotSet
    index: int

    @property
    def file(self) -> SlotFile:
        return self.slot_set.files[self.index]

    @property
    def layout(self) -> Layout:
        return self.slot_set.layout

    @property
    def shard(self) -> Shard:
        """The shard that its image is. Only for a slot that holds one."""
        assert self.restorable_step is not None
        return Shard(
            step_id=self.restorable_step,
            rank=self.layout.rank,
            world=self.layout.world,
            size_bytes=self.layout.size_bytes,
            alike=self.layout.identical_ranks,
        )

    @property
    def source_tier(self) -> Tier:
        """Where its image came from."""
        return self.slot_set.uses[self.index].tier

    @property
    def restorable_step(self) -> StepId | None:
        """The step that can be restored from this slot now; None if there is none."""
        return self.slot_set.table.slots[self.index].restorable_step

    @property
    def base(self) -> BaseRef | None:
        """The base to which its image refers, if it does."""
        return self.slot_set.uses[self.index].base

    @property
    def assigned(self) -> bool:
        """Whether the trainer fills this slot."""
        return self.slot_set.table.assigned_slot_index == self.index

    def is_current_generation(self, generation: int) -> bool:
        """Whether `generation` is the slot's newest use."""
        return self.slot_set.uses[self.index].generation in (None, generation)

    def seal(self, step_id: StepId, *, tier: Tier = Tier.MEMORY) -> None:
        """The image is complete. `tier`: where the image came from."""
        uses = self.slot_set.uses
        uses[self.index] = replace(uses[self.index], tier=tier)
        self.slot_set.table.seal(self.index, step_id)

    def finish_filling(self, *, keep: StepId | None = None) -> None:
        """The slot is no longer filled; see `SlotTable.release`."""
        self.slot_set.table.release(self.index, keep=keep)

    def pin(self) -> None:
        """Keep the image until `unpin`. Pins are counted."""
        self.slot_set.table.pin(self.index)

    def unpin(self) -> None:
        self.slot_set.table.unpin(self.index)


class SlotSet:
    """The slots of one rank and one layout. `target`: how many there shall be; missing slots are
    made in the background, one by one. `postponed`: the last of them waits until a reader is in the
    way of the next step. `shared_run`: ranks of other machines train, too, and it is unknown what
    these have sealed."""

    def __init__(self, layout: Layout, *, target: int = 0) -> None:
        self.layout = layout
        self.target = target
        self.postponed = self.shared_run = False
        self.failure = ""
        self.table = SlotTable(0)
        self.files: list[SlotFile] = []
        self.orphans: dict[str, SlotFile] = {}
        self.uses: list[Assignment] = []

    # --- slots come and go -------------------------------------------------------------------

    def add(self, file: SlotFile) -> int:
        """Add an empty slot. Returns its index."""
        self.files.append(file)
        self.uses.append(Assignment())
        return self.table.add()

    def adopt(self, file: SlotFile, control: ControlPage | None) -> None:
        """Add a slot that existed when the sidecar started. `control`: its seal, if valid."""
        if control is None:
            self.orphans[file.name] = file
        else:
            index = self.add(file)
            self.table.adopt(index, control.step_id)
            self.uses[index] = Assignment(base=control.base)

    def admit_orphans(self) -> None:
        """Use the orphans: no trainer can be filling them."""
        for file in self.orphans.values():
            self.add(file)
        self.orphans.clear()

    def drop_orphans(self, which: Callable[[SlotFile], bool] = lambda file: True) -> list[SlotFile]:
        """Stop using the orphans that `which` selects, because a trainer might be filling them.
        Returns them."""
        dropped = [file for file in self.orphans.values() if which(file)]
        for file in dropped:
            del self.orphans[file.name]
        return dropped

    def abandon_slot(self, index: int) -> SlotFile:
        """Give up the slot that is being filled, because a straggler may still write to it."""
        self.table.release(index)
        self.table.remove(index)
        return self.files[index]

    def discard_slot(self, index: int) -> bool:
        """Give up a slot that lost its name or bytes. Returns False while the slot is being read or
        loaded; the caller tries again later."""
        slot = self.table.slots[index]
        if slot.pinned or slot.state is SlotState.LOADING:
            return False
        self.table.remove(index)
        self.files[index].unlink()
        return True

    def discard_images_of_base(self, step: StepId) -> None:
        """Images that refer to the base of this step are no candidates any more."""
        uses = zip(self.table.slots, self.uses, strict=True)
        lost = {slot.restorable_step for slot, use in uses if use.base and use.base.step == step}
        self.table.mark_dead_images(lost.__contains__)

    def give_up_slots(self, *, keep: int) -> list[SlotFile]:
        """Give up all slots except those with the newest `keep` images and those in use.

        Returns their files. Their indices are never used again.
        """
        sealed = self.table.list_sealed_steps()
        expendable = sealed[:-keep] if keep else sealed
        given_up = self.drop_orphans()
        while (index := self.table.reserve_slot_for_load(expendable)) is not None:
            self.table.remove(index)
            given_up.append(self.files[index])
        self.target = len(self._there())
        return given_up

    # --- the trainer fills -------------------------------------------------------------------

    def assign(self) -> AssignedSlot | None:
        """The next slot to fill; None while there is none."""
        if (index := self.table.assign(keep=self._keep)) is None:
            return None
        generation = next(_generations)
        self.uses[index] = Assignment(generation, base=self.uses[index].base)
        return AssignedSlot(index, generation, self.table.slots[index].id)

    @property
    def needs_last_slot(self) -> bool:
        """Whether the next step waits for the slot that was postponed."""
        return self.postponed and self.table.waits_for_reader(keep=self._keep)

    @property
    def _keep(self) -> int:
        """How many of the newest images are not given up while slots are missing: without these two
        ranks of other machines might find no step in common, even while the last slot waits."""
        return 2 if self.count < (self.target if self.shared_run else self.needed_count) else 0

    def find_assigned_slot(self) -> AssignedSlot | None:
        """The slot that is being filled, as `assign` returned it; None if there is none."""
        if (index := self.table.assigned_slot_index) is None:
            return None
        return AssignedSlot(index, self.uses[index].generation or 0, None)

    def restore_assignment(self, name: str) -> bool:
        """A live trainer has been filling this slot since before the sidecar started. Returns False
        if the slot is not in this slot set, if its former image is being read because no trainer
        had claimed the slot, or if the trainer fills another slot.

        Call it before any other slot is assigned.
        """
        if file := self.orphans.pop(name, None):
            index = self.add(file)
        elif (found := self.index_of(name)) is not None:
            index = found
        else:
            return False
        assigned = self.table.assigned_slot_index
        if self.table.slots[index].pinned or assigned not in (None, index):
            return False
        if assigned is None:
            self.table.restore_assignment(index)
            self.uses[index] = Assignment(None, base=self.uses[index].base)
        return True

    # --- asking ------------------------------------------------------------------------------

    def index_of(self, name: str) -> int | None:
        return next(
            (index for index in self._there() if self.files[index].name == name),
            None,
        )

    @property
    def needed_count(self) -> int:
        """How many slots are to be made now."""
        return self.target - self.postponed

    @property
    def target_size_bytes(self) -> int:
        """Bytes that this slot set takes once all its slots are made."""
        return max(self.target, self.count) * self.layout.size_bytes

    @property
    def count(self) -> int:
        """How many slots there are, orphans included."""
        return len(self._there()) + len(self.orphans)

    def _there(self) -> list[int]:
        """Indices of slots that were not given up. The index of a slot in use never changes."""
        slots = enumerate(self.table.slots)
        return [index for index, slot in slots if slot.state is not SlotState.REMOVED]

    def iterate_files_without_orphans(self) -> Iterator[tuple[int, SlotFile]]:
        """(index, file) of all slots without orphans."""
        return ((index, self.files[index]) for index in self._there())

    def iter_files(self) -> Iterator[SlotFile]:
        """The files of all slots, orphans included."""
        yield from (file for _, file in self.iterate_files_without_orphans())
        yield from self.orphans.values()


# --- bases -----------------------------------------------------------------------------------
#
# A base is filled once, sealed, and never filled again: images refer to it. So its slot is free or
# sealed, and is given up as soon as neither an image nor the trainer's next one refers to it.


class BaseSlots:
    """The bases of one rank, by layout id. The trainer's images refer to `current`: to the base of
    `step` there, or, if that is None, to one that the trainer has still to fill."""

    def __init__(self) -> None:
        self.sets: dict[str, SlotSet] = {}
        self.current: SlotSet | None = None
        self.step: StepId | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that they take once all wanted ones are made."""
        return sum(slot_set.target_size_bytes for slot_set in self.sets.values())

    def set_base_layout(self, layout: Layout | None, step: StepId | None) -> SlotSet | None:
        """From now on the trainer's images refer to a base of this layout, or to none. `step`: the
        one that it has filled. Returns the set in which a slot must be made, if one must."""
        self.current, self.step = None, None
        if layout is None:
            return None
        slot_set = self.current = self.sets.setdefault(layout.id, SlotSet(layout))
        if step is not None and slot_set.table.find_slot(step) is not None:
            self.step = step
        elif self._empty(slot_set) is None:
            slot_set.target, slot_set.failure = slot_set.count + 1, ""
            return slot_set
        return None

    def find_current_base_file(self) -> SlotFile | None:
        """The file of the base to which the trainer's next image refers; None while it is made."""
        if self.current is None:
            return None
        empty, step = self._empty(self.current), self.step
        index = empty if step is None else self.current.table.find_slot(step)
        return None if index is None else self.current.files[index]

    def find(self, ref: BaseRef) -> PooledSlot | None:
        """The slot with this base, which its trainer may just have sealed."""
        if (slot_set := self.sets.get(ref.layout)) is None:
            return None
        if (index := slot_set.table.find_slot(ref.step)) is None:
            index = self._empty(slot_set)
            if index is None or not ref.matches_control_page(slot_set.files[index].control()):
                return None
            slot_set.table.adopt(index, ref.step)
            if slot_set is self.current:
                self.step = ref.step
        return PooledSlot(slot_set, index)

    def adopt(self, file: SlotFile, control: ControlPage | None) -> bool:
        """Take over a base that existed when the sidecar started; False if it is not sealed."""
        if control is None:
            return False
        self.sets.setdefault(file.layout.id, SlotSet(file.layout)).adopt(file, control)
        return True

    def give_up_besides(self, refs: Iterable[BaseRef | None]) -> list[SlotFile]:
        """Give up all bases but these and the current one. Returns their files."""
        kept: set[tuple[str, StepId | None]] = {(ref.layout, ref.step) for ref in refs if ref}
        if self.current is not None:
            kept.add((self.current.layout.id, self.step))
        given_up: list[SlotFile] = []
        for key, slot_set in list(self.sets.items()):
            for index, file in list(slot_set.iterate_files_without_orphans()):
                slot = slot_set.table.slots[index]
                if slot.state is not SlotState.LOADING and (key, slot.restorable_step) not in kept:
                    slot_set.table.remove(index)
                    given_up.append(file)
            if slot_set is not self.current:
                slot_set.target = slot_set.count
                if not slot_set.count:
                    del self.sets[key]
        return given_up

    def drop(self, lost: Callable[[SlotFile], bool]) -> list[StepId]:
        """Give up the bases that `lost` selects. Returns the steps that first referred to them."""
        steps: list[StepId] = []
        for slot_set in self.sets.values():
            for index, file in list(slot_set.iterate_files_without_orphans()):
                if slot_set.table.slots[index].state is not SlotState.LOADING and lost(file):
                    steps += filter(None, [slot_set.table.slots[index].restorable_step])
                    slot_set.table.remove(index)
                    file.unlink()
        return steps

    def drop_unsealed(self) -> list[SlotFile]:
        """The trainer that was to fill it has died: give it up. Returns the files."""
        self.current = self.step = None
        given_up = []
        for slot_set in self.sets.values():
            while (index := self._empty(slot_set)) is not None:
                slot_set.table.remove(index)
                given_up.append(slot_set.files[index])
            slot_set.target = slot_set.count
        return given_up

    def _empty(self, slot_set: SlotSet) -> int | None:
        slots = enumerate(slot_set.table.slots)
        return next((at for at, slot in slots if slot.state is SlotState.EMPTY), None)
