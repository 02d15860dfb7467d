"""Everything in memory: per rank its banks, from the first look at the directory to the last.

The shared-memory directory is the truth: a sidecar that starts finds there what it or another one
left, and goes on. All methods but `adopt_all` are quick and run on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.slots import SlotState
from keepstep.steps import StepId
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.memory import (
    SlotFile,
    entered,
    is_unfinished,
    make_rank_directory,
    rank_directories,
    rank_directory,
    slot_number,
)


@dataclass
class RankSlots:
    """One rank's banks by layout id. `current`: the layout that the trainer fills now.

    `settled`: its trainer said which slots it holds, or there is none; before that, an image found
    at start may be about to be overwritten, so nobody else reads it.
    """

    rank: int
    world: int = 0
    banks: dict[str, Bank] = field(default_factory=dict)
    current: Bank | None = None
    settled: bool = False
    warning: str = ""

    def find(self, id: StepId) -> tuple[Bank, int] | None:
        """The slot with this sealed, live image."""
        for bank in self.banks.values():
            if (index := bank.table.holds(id)) is not None:
                return bank, index
        return None

    def named(self, name: str) -> tuple[Bank, int] | None:
        """The slot with this name."""
        for bank in self.banks.values():
            if (index := bank.index_of(name)) is not None:
                return bank, index
        return None

    def sealed(self) -> list[StepId]:
        """Live images of all banks, oldest first."""
        return sorted({id for bank in self.banks.values() for id in bank.table.sealed()})

    def filling(self) -> tuple[Bank, int] | None:
        """The slot that the trainer fills now."""
        for bank in self.banks.values():
            if (index := bank.table.assigned) is not None:
                return bank, index
        return None

    @property
    def taken_bytes(self) -> int:
        return sum(bank.size_bytes for bank in self.banks.values())


class Slotkeeper:
    """The memory of one run on this machine."""

    def __init__(self, memory_dir: Path, *, run: str) -> None:
        self.memory_dir = memory_dir
        self.ranks: dict[int, RankSlots] = {}
        self.world = 0
        """Of the newest trainer, 0 before the first."""
        self._run = run

    def rank(self, rank: int) -> RankSlots:
        """The slots of a rank, none when it is new."""
        if rank not in self.ranks:
            self.make_directory(rank)
            self.ranks[rank] = RankSlots(rank)
        return self.ranks[rank]

    def make_directory(self, rank: int) -> None:
        """For the rank's slots, unless it is there. Raises OSError."""
        make_rank_directory(rank_directory(self.memory_dir, rank))

    @property
    def made_bytes(self) -> int:
        """Memory that all slots take now."""
        return sum(len(file.view) for file in self.files())

    def gone_bytes(self, world: int) -> int:
        """Memory of ranks that a smaller world does not have: not free before its first images."""
        gone = (slots for rank, slots in self.ranks.items() if rank >= world)
        return sum(one.taken_bytes for one in gone)

    def _running(self) -> dict[int, RankSlots]:
        """Ranks with slots, without those that a smaller world does not have."""
        return {
            rank: one
            for rank, one in self.ranks.items()
            if one.banks and (not self.world or rank < self.world)
        }

    def files(self) -> Iterator[SlotFile]:
        for slots in self.ranks.values():
            for bank in slots.banks.values():
                yield from bank.all()

    # --- start and end -----------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Map every slot that an earlier sidecar left; remove what has a slot's name and is none.

        Whatever a trainer put there ends nothing but itself. Blocks.
        """
        for rank, directory in rank_directories(self.memory_dir).items():
            slots = self.rank(rank)
            with entered(directory) as fd:
                names = sorted(os.listdir(fd))
                for name in filter(is_unfinished, names):
                    _remove(name, fd)
            for name in names:
                if slot_number(name) is not None:
                    self._adopt(slots, directory / name)

    def _adopt(self, slots: RankSlots, path: Path) -> None:
        try:
            file = SlotFile.adopt(path)
        except Exception as error:  # also what a parser trips over is no slot
            warn("slot refused", rank=slots.rank, path=str(path), reason=str(error))
            with contextlib.suppress(OSError), entered(path.parent) as fd:
                _remove(path.name, fd)
            return
        layout, control = file.layout, file.control()
        if layout.rank != slots.rank:
            warn("slot refused", rank=slots.rank, path=str(path), reason="of another rank")
            file.unlink()
            return
        if control is not None and (control.run != self._run or control.layout != layout.id):
            file.erase()
            control = None
        bank = slots.banks.setdefault(layout.id, Bank(layout))
        bank.adopt(file, control)
        slots.world = layout.world
        say("slot adopted", rank=slots.rank, slot=file.name, step=control and str(control.id))

    def settle(self, rank: int, *, holding: tuple[str, ...], trusted: bool) -> tuple[str, ...]:
        """The rank's trainer says which slots it fills; returns those that it may go on with.

        `trusted`: it is the one that had them before, or nobody has; what it does not fill is
        free. Otherwise a straggler may still write there, so these files are given up.
        """
        slots = self.rank(rank)
        held = tuple(name for name in holding if self._hold(slots, name))
        for bank in slots.banks.values():
            if trusted:
                bank.admit_orphans()
            else:
                self.unlink(bank.drop_orphans())
        slots.settled = True
        return held

    def _hold(self, slots: RankSlots, name: str) -> bool:
        already = slots.filling()
        if already is not None:
            bank, index = already
            return bank.files[index].name == name
        return any(bank.hold(name) for bank in slots.banks.values())

    # --- asking ------------------------------------------------------------------------------

    def sound(self, rank: int, id: StepId, *, bad: Collection[str] = ()) -> tuple[Bank, int] | None:
        """The slot with this image, if it still verifies: one that does not is a candidate no more.

        `bad`: paths of slots that a trainer could not use.
        """
        slots = self.rank(rank)
        while (at := slots.find(id)) is not None:
            bank, index = at
            file = bank.files[index]
            told = "a trainer could not use it" if str(file.path) in bad else ""
            if not (why := told or file.ails(id, run=self._run)):
                return at
            warn("image refused", rank=rank, step=str(id), path=str(file.path), reason=why)
            if not (file.lacks() and bank.lose(index)):
                bank.table.forget(lambda one: one == id)
        return None

    def damaged(self) -> list[RankSlots]:
        """Ranks whose directory, or a slot's name or bytes, somebody else has removed. A few system
        calls for each slot: it is asked for all the time."""
        return [slots for slots in self.ranks.values() if self._is_damaged(slots)]

    def _is_damaged(self, slots: RankSlots) -> bool:
        if not _is_directory(rank_directory(self.memory_dir, slots.rank)):
            return True
        return any(file.lacks() for bank in slots.banks.values() for file in bank.all())

    def drop_damaged(self, slots: RankSlots, *, cut_off_only: bool = False) -> None:
        """Drop the slots that others damaged, but those that somebody still reads.

        `cut_off_only`: keep what has lost its name only, as its image is whole.
        """

        def lost(file: SlotFile) -> bool:
            return (file.cut_off if cut_off_only else bool(file.lacks())) and _say_lost(file)

        for bank in slots.banks.values():
            for index in [index for index, file in bank.present() if lost(file)]:
                bank.lose(index)
            for file in bank.drop_orphans(lost):
                file.unlink()

    # --- changes -----------------------------------------------------------------------------

    def take_back(self, rank: int) -> StepId | None:
        """The trainer has died: its unfinished slot is free. Returns the step in it, if sealed.

        It may have died between the seal and the report, or before it zeroed the slot.
        """
        slots = self.rank(rank)
        if (filling := slots.filling()) is None:
            return None
        bank, index = filling
        control = bank.files[index].control()
        keep = control.id if control is not None and control.run == self._run else None
        if keep is None:
            bank.files[index].erase()
        bank.table.release(index, keep=keep)
        return keep

    def protect_common(self) -> StepId | None:
        """Tell every table the newest step that all ranks hold. Returns that step."""
        held = [set(slots.sealed()) for slots in self._running().values()]
        common = max(set.intersection(*held), default=None) if held else None
        for slots in self.ranks.values():
            for bank in slots.banks.values():
                bank.table.protect(() if common is None else (common,))
        return common

    def holds_old_layouts(self, slots: RankSlots) -> bool:
        """Whether this rank, or one that is gone, has slots that nobody fills any more."""
        return len(slots.banks) > 1 or any(
            one.banks and rank >= slots.world for rank, one in self.ranks.items()
        )

    def drop_old_layouts(self, common: StepId, *, alive: Collection[int] = ()) -> None:
        """A newer common step exists: slots of layouts that hold nothing newer are freed, and those
        of ranks that the world does not have any more. `alive`: ranks with a trainer, which may
        fill their slots whatever world another one was in."""
        running = {*self._running(), *alive}
        for rank, slots in self.ranks.items():
            for key, bank in list(slots.banks.items()):
                newest = max(bank.table.sealed(), default=None)
                # a straggler of a rank that is gone may fill its slot: it writes into nothing
                states = {SlotState.LOADING} | ({SlotState.ASSIGNED} if rank in running else set())
                busy = any(slot.pinned or slot.state in states for slot in bank.table.slots)
                used = slots.current is None or bank is slots.current
                if busy or (used and rank in running):
                    continue
                if newest is None or newest < common:
                    del slots.banks[key]
                    slots.current = None if bank is slots.current else slots.current
                    bank.wanted = 0
                    self.unlink([*bank.files, *bank.drop_orphans()])

    def unlink(self, files: list[SlotFile]) -> None:
        """Remove slots for good."""
        for file in files:
            say("slot removed", level=logging.DEBUG, slot=file.name)
            file.unlink()

    def forget_all(self) -> None:
        """Free all memory: the run has ended."""
        for slots in self.ranks.values():
            for bank in slots.banks.values():
                bank.wanted = 0
                self.unlink([*bank.files, *bank.orphans.values()])
            with contextlib.suppress(OSError):
                rank_directory(self.memory_dir, slots.rank).rmdir()
        self.ranks.clear()


def _say_lost(file: SlotFile) -> bool:
    warn("slot lost", rank=file.layout.rank, path=str(file.path), lost=file.lacks())
    return True


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _remove(name: str, directory: int) -> None:
    """Take a name from a rank's directory; of a link only the name goes. A directory stays."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
