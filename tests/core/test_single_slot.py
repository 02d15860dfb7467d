"""With a single slot an image is overwritten as soon as it is durable on every rank of its machine.
The drives of two machines differ: they must not stage different steps in turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from keepstep.core.ledger import EpochStarted
from keepstep.core.node import (
    Action,
    ImagesSettled,
    Node,
    Overwritten,
    RanksServed,
    Sealed,
    WriteEnded,
)
from keepstep.core.schedule import PersistCostMeasurements, StepGrid, Write
from keepstep.core.slot_table import SlotTable
from keepstep.steps import Epoch, EpochId, StepId

EPOCH = EpochId(1, "0000000a")
RANKS = 2


@dataclass
class OneSlot:
    """The slot of a rank, as `Node` sees it."""

    table: SlotTable
    settled: bool = True

    def slot_tables(self) -> list[SlotTable]:
        return [self.table]


@dataclass
class Machine:
    """Two ranks whose drive takes `write_steps` training steps to write an image of each."""

    first: int
    write_steps: float
    paced: bool
    now: float = 0.0
    writes: list[tuple[float, Write]] = field(default_factory=list)
    durable: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = {self.first + at: SlotTable(1) for at in range(RANKS)}
        self.slots = {rank: OneSlot(table) for rank, table in self.tables.items()}
        pacing = PersistCostMeasurements() if self.paced else None
        self.node = Node(self.slots, grid=StepGrid(1), pacing=pacing)
        self.node.step(EpochStarted(Epoch(EPOCH, None)))
        self.node.step(RanksServed(frozenset(self.tables), 1))
        for rank in self.tables:
            self.node.step(ImagesSettled(rank))

    def begin(self, actions: tuple[Action, ...]) -> None:
        began = [action for action in actions if isinstance(action, Write)]
        self.writes += [(self.now + self.write_steps, write) for write in began]

    def until(self, now: float) -> None:
        """Let the writes end that end until then."""
        while due := sorted((at, write.rank) for at, write in self.writes if at <= now):
            at, rank = due[0]
            (ended,) = (
                entry for entry in self.writes if entry[:1] == (at,) and entry[1].rank == rank
            )
            self.writes.remove(ended)
            self.now, write = at, ended[1]
            self.durable.setdefault(write.id.step, set()).add(rank)
            event = WriteEnded(rank, write.id, True, seconds=self.write_steps, size_bytes=1)
            self.begin(self.node.step(event, at))
        self.now = now

    def save(self, step: int) -> None:
        """What trainer and sidecar do at a save."""
        if step % self.node.planner.grid.newest_interval:
            return
        for rank, table in self.tables.items():
            held = table.slots[0].restorable_step
            index = table.assign()
            if index is None:
                self.node.missed(step)
                continue
            if held is not None:
                everywhere = self.durable.get(held.step, set()) >= self.tables.keys()
                alike = all(other.find_slot(held) is not None for other in self.tables.values())
                assert everywhere or not alike, f"step {held.step} was overwritten too early"
                self.begin(self.node.step(Overwritten(rank, held), self.now))
            table.seal(index, StepId(EPOCH, step))
            self.begin(self.node.step(Sealed(rank, StepId(EPOCH, step)), self.now))

    @property
    def durable_steps(self) -> set[int]:
        return {step for step, ranks in self.durable.items() if ranks >= self.tables.keys()}


@pytest.mark.parametrize("paced", [True, False])
@pytest.mark.parametrize(
    "write_steps", [(0.4, 0.4), (0.4, 2.6), (1.5, 2.5), (3.3, 11.0), (7.9, 8.1)]
)
def test_machines_with_different_drives_make_the_same_steps_durable(
    write_steps: tuple[float, float], paced: bool
) -> None:
    machines = [
        Machine(first, seconds, paced)
        for first, seconds in zip((0, RANKS), write_steps, strict=True)
    ]
    steps = 400
    for step in range(1, steps):
        for machine in machines:
            machine.until(float(step))
            machine.save(step)
    commits = sorted(set.intersection(*(machine.durable_steps for machine in machines)))
    gaps = [later - earlier for earlier, later in pairwise(commits)]
    slowest = max(write_steps)
    assert commits[-1] > steps - 8 * max(1.0, slowest)
    assert max(gaps) <= 8 * max(1.0, slowest), gaps


def test_an_image_waits_in_its_slot_until_every_rank_of_the_machine_has_written_it() -> None:
    machine = Machine(0, 3.0, paced=False)
    machine.save(1)
    assert all(table.assign() is None for table in machine.tables.values())
    first = machine.writes.pop(0)[1]
    machine.begin(machine.node.step(WriteEnded(first.rank, first.id, True), 3.0))
    assert machine.tables[first.rank].assign() is None, "the other rank still writes it"
    second = machine.writes.pop(0)[1]
    machine.begin(machine.node.step(WriteEnded(second.rank, second.id, True), 3.1))
    assert all(table.assign() == 0 for table in machine.tables.values())


def test_a_machine_whose_memory_shrinks_to_a_single_slot_follows_its_rule_from_then_on() -> None:
    machine = Machine(0, 3.0, paced=False)
    machine.node.step(RanksServed(frozenset(machine.tables), 2))
    assert not machine.node.has_single_slot
    machine.node.step(RanksServed(frozenset(machine.tables), 1))
    machine.save(1)
    for _, write in list(machine.writes):
        machine.begin(machine.node.step(WriteEnded(write.rank, write.id, True), 3.0))
    assert all(table.assign() == 0 for table in machine.tables.values()), "durable on both ranks"


def test_an_image_that_cannot_be_written_does_not_hold_its_slot() -> None:
    machine = Machine(0, 3.0, paced=False)
    machine.save(1)
    for _, write in list(machine.writes):
        machine.begin(machine.node.step(WriteEnded(write.rank, write.id, False), 3.0))
    assert all(table.assign() == 0 for table in machine.tables.values())
