"""Everything in memory: per rank its banks, from the first look at the directory to the last.

The shared-memory directory is the truth: a sidecar that starts finds there what it or another one
left, and goes on. All methods but `adopt_all` are quick and run on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.errors import ImageError
from keepstep.slots import SlotState
from keepstep.steps import StepId
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.memory import SlotFile, rank_directory, slot_number

_RANK_PREFIX = "rank-"
_DIRECTORY_MODE = 0o2770
"""Trainers of the same group fill slots, whoever their user is; nobody else may look."""


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
            directory = rank_directory(self.memory_dir, rank)
            directory.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):  # another user's sidecar made it
                directory.chmod(_DIRECTORY_MODE)
            self.ranks[rank] = RankSlots(rank)
        return self.ranks[rank]

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
                yield from (file for _, file in bank.present())
                yield from bank.orphans.values()

    # --- start and end -----------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Map every slot that an earlier sidecar left; remove what is none. Blocks."""
        for directory in sorted(self.memory_dir.glob(f"{_RANK_PREFIX}*")):
            with contextlib.suppress(ValueError):
                slots = self.rank(int(directory.name.removeprefix(_RANK_PREFIX)))
                for path in sorted(directory.iterdir()):
                    self._adopt(slots, path)

    def _adopt(self, slots: RankSlots, path: Path) -> None:
        if slot_number(path.name) is None:
            path.unlink()  # never finished
            return
        try:
            file = SlotFile.adopt(path)
        except (ImageError, OSError) as error:
            warn("slot refused", rank=slots.rank, path=str(path), reason=str(error))
            path.unlink(missing_ok=True)
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
