"""A bank: the slots of one rank and one layout. Ties `SlotTable`'s states to slot files.

Index i of the table is file i here. Slots found unsealed after a restart are *orphans*, outside
of the table: a trainer that is still alive may be filling one, and says so with its next lease.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
        self._gone: set[int] = set()

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

    def drop_orphans(self, which: Callable[[SlotFile], bool] = lambda file: True) -> list[SlotFile]:
        """Somebody might be filling these slots: they are not used again. Returns them."""
        dropped = [file for file in self.orphans.values() if which(file)]
        for file in dropped:
            del self.orphans[file.name]
        return dropped

    def abandon(self, index: int) -> SlotFile:
        """Give up the slot that is being filled: a straggler may still write there."""
        self.table.release(index)
        for other in self._reserve_until(index):
            self.table.release(other)
        self._gone.add(index)
        return self.files[index]

    def lose(self, index: int) -> bool:
        """Others took this slot's name or bytes: it is not used again. False while somebody reads
        or loads it; ask again then."""
        slot = self.table.slots[index]
        if slot.pinned or slot.state is SlotState.LOADING:
            return False
        self.table.remove(index)
        self._gone.add(index)
        self.files[index].unlink()
        return True

    def give_up(self, *, keep: int) -> list[SlotFile]:
        """Give up every slot but those with the newest `keep` images, and what is in use.

        Returns the files; their indices are never used again.
        """
        sealed = self.table.sealed()
        expendable = sealed[:-keep] if keep else sealed
        given_up = self.drop_orphans()
        while (index := self.table.reserve(expendable)) is not None:
            # stays "loading" for good, so that no index of a slot in use ever changes
            self._gone.add(index)
            given_up.append(self.files[index])
        self.wanted = len(self.files) - len(self._gone)
        return given_up

    # --- the trainer fills -------------------------------------------------------------------

    def assign(self) -> Assigned | None:
        """The next slot to fill, or None while there is none.

        While slots are still being made, rather wait for one than give up one of the newest two
        images: a crash would find no step in common.
        """
        if self.count < self.wanted and not self._has_spare():
            return None
        if (index := self.table.assign()) is None:
            return None
        generation = next(_generations)
        self._uses[index] = Use(generation)
        return Assigned(index, generation, self.table.slots[index].id)

    def _has_spare(self) -> bool:
        """Whether a slot can be filled without the loss of one of the newest two images."""
        newest = self.table.sealed()[-2:]
        return any(
            slot.state in (SlotState.EMPTY, SlotState.SEALED)
            and not slot.pinned
            and slot.live not in newest
            for slot in self.table.slots
        )

    def assigned(self) -> Assigned | None:
        """The slot that is being filled, as `assign` gave it."""
        if (index := self.table.assigned) is None:
            return None
        return Assigned(index, self._uses[index].generation or 0, None)

    def hold(self, name: str) -> bool:
        """A live trainer fills this slot since before the sidecar started. False: not one of ours,
        or somebody reads the image that it held, as nobody had claimed it.

        Call it before anything else is assigned.
        """
        if file := self.orphans.pop(name, None):
            index = self.add(file)
        elif (found := self.index_of(name)) is not None:
            index = found
        else:
            return False
        if self.table.slots[index].pinned:
            return False
        if self.table.assigned != index:
            self._assign_exactly(index)
            self._uses[index] = Use(None)
        return True

    def _assign_exactly(self, index: int) -> None:
        # `assign` takes the first empty slot, so the empty ones before it step aside
        self.table.release(index)
        aside = self._reserve_until(index)
        self.table.release(index)
        assert self.table.assign() == index
        for other in aside:
            self.table.release(other)

    def _reserve_until(self, index: int) -> list[int]:
        """Reserve empty slots in the table's order, up to this one. Returns those before it."""
        before: list[int] = []
        while (other := self.table.reserve()) != index:
            assert other is not None
            before.append(other)
        return before

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
        return next(
            (i for i, file in enumerate(self.files) if i not in self._gone and file.name == name),
            None,
        )

    def tier(self, index: int) -> Tier:
        """Where the image in this slot came from."""
        return self._uses[index].tier

    @property
    def size_bytes(self) -> int:
        """Memory that this bank takes, once all wanted slots are made."""
        return max(self.wanted, self.count) * self.layout.size_bytes

    @property
    def count(self) -> int:
        """Slots that are there."""
        return len(self.files) - len(self._gone) + len(self.orphans)

    def present(self) -> Iterator[tuple[int, SlotFile]]:
        """(index, file) of the slots that are there, orphans left out."""
        return ((i, file) for i, file in enumerate(self.files) if i not in self._gone)

    def all(self) -> Iterator[SlotFile]:
        """The files that are there, orphans too."""
        yield from (file for _, file in self.present())
        yield from self.orphans.values()
