"""A bank: the slots of one rank and one layout. Ties `SlotTable`'s states to slot files.

Index i of the table is file i here. Slots found unsealed after a restart are *orphans*, outside
of the table: a trainer that is still alive may be filling one, and says so with its next lease.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from keepstep.image import ControlPage, Layout
from keepstep.slots import SlotState, SlotTable
from keepstep.steps import StepId, Tier
from keepstep_sidecar.memory import SlotFile

_generations = itertools.count(1)


@dataclass(frozen=True)
class Use:
    """What a slot is used for now. `generation` None: assigned before this sidecar started, so
    any is believed. `tier`: where its image came from."""

    generation: int | None = 0
    tier: Tier = Tier.MEMORY


@dataclass(frozen=True)
class Assigned:
    """A slot that the trainer fills from now on. `lost`: the step that it held until now."""

    index: int
    generation: int
    lost: StepId | None


class Bank:
    """`wanted`: slots that there shall be; they are made in the background, one by one."""

    def __init__(self, layout: Layout, *, wanted: int = 0) -> None:
        self.layout = layout
        self.wanted = wanted
        self.failure = ""
        self.table = SlotTable(0)
        self.files: list[SlotFile] = []
        self.orphans: dict[str, SlotFile] = {}
        self._uses: list[Use] = []

    # --- slots come and go -------------------------------------------------------------------

    def add(self, file: SlotFile) -> int:
        """One more slot, empty. Returns its index."""
        self.files.append(file)
        self._uses.append(Use())
        return self.table.add()

    def adopt(self, file: SlotFile, control: ControlPage | None) -> None:
        """A slot that was there when the sidecar started; `control`: its seal, if valid."""
        if control is None:
            self.orphans[file.name] = file
        else:
            self.table.adopt(self.add(file), control.id)

    def admit_orphans(self) -> None:
        """Nobody can be filling these slots: use them."""
        for file in self.orphans.values():
            self.add(file)
        self.orphans.clear()

    def drop_orphans(self) -> list[SlotFile]:
        """Somebody might be filling these slots: they are not used again. Returns them."""
        dropped = list(self.orphans.values())
        self.orphans.clear()
        return dropped

    def replace(self, index: int, file: SlotFile) -> SlotFile:
        """Put a new file in the place of an assigned slot, whose old one cannot be trusted."""
        old, self.files[index] = self.files[index], file
        self.table.release(index)
        return old

    def shrink(self, keep: int) -> list[SlotFile]:
        """Give up every slot but those with the newest `keep` images. Returns the files.

        Keeps what is pinned or being filled, too."""
        newest = set(self.table.sealed()[-keep:]) if keep else set()
        kept = [
            index
            for index, slot in enumerate(self.table.slots)
            if slot.pinned or slot.live in newest or slot.state is SlotState.LOADING
        ]
        given_up = [file for index, file in enumerate(self.files) if index not in kept]
        table, files, uses = SlotTable(0), self.files, self._uses
        self.files, self._uses = [], []
        for index in kept:
            self._carry_over(table, self.table.slots[index].id)
            self.files.append(files[index])
            self._uses.append(uses[index])
        given_up += self.drop_orphans()
        self.table, self.wanted = table, len(self.files)
        return given_up

    def _carry_over(self, table: SlotTable, id: StepId | None) -> None:
        index = table.add()
        if id is not None:
            table.adopt(index, id)

    # --- the trainer fills -------------------------------------------------------------------

    def assign(self) -> Assigned | None:
        """The next slot to fill, or None while there is none."""
        if (index := self.table.assign()) is None:
            return None
        generation = next(_generations)
        self._uses[index] = Use(generation)
        return Assigned(index, generation, self.table.slots[index].id)

    def assigned(self) -> Assigned | None:
        """The slot that is being filled, as `assign` gave it."""
        if (index := self.table.assigned) is None:
            return None
        return Assigned(index, self._uses[index].generation or 0, None)

    def hold(self, name: str) -> bool:
        """A live trainer fills this slot since before the sidecar started. False: not one of ours.

        Call it before anything else is assigned.
        """
        if file := self.orphans.pop(name, None):
            index = self.add(file)
        elif (found := self.index_of(name)) is not None:
            index = found
        else:
            return False
        if self.table.assigned != index:
            self._assign_exactly(index)
            self._uses[index] = Use(None)
        return True

    def _assign_exactly(self, index: int) -> None:
        # `assign` takes the first empty slot, so the empty ones before it step aside
        self.table.release(index)
        aside = []
        while (other := self.table.reserve()) != index and other is not None:
            aside.append(other)
        self.table.release(index)
        assert self.table.assign() == index
        for other in aside:
            self.table.release(other)

    def fills(self, name: str, generation: int) -> int | None:
        """The index of the slot, if it is being filled in this use of it."""
        index = self.index_of(name)
        if index is None or self.table.slots[index].state is not SlotState.ASSIGNED:
            return None
        return index if self._uses[index].generation in (None, generation) else None

    def used(self, index: int, generation: int) -> bool:
        """Whether this is the slot's newest use."""
        return self._uses[index].generation in (None, generation)

    def seal(self, index: int, id: StepId, *, tier: Tier = Tier.MEMORY) -> None:
        """The image in this slot is complete. `tier`: where it came from."""
        self._uses[index] = Use(self._uses[index].generation, tier)
        self.table.seal(index, id)

    # --- asking ------------------------------------------------------------------------------

    def index_of(self, name: str) -> int | None:
        return next((i for i, file in enumerate(self.files) if file.name == name), None)

    def tier(self, index: int) -> Tier:
        """Where the image in this slot came from."""
        return self._uses[index].tier

    @property
    def size_bytes(self) -> int:
        """Memory that this bank takes, once all wanted slots are made."""
        return max(self.wanted, len(self.files) + len(self.orphans)) * self.layout.size_bytes
