"""With three slots a crash costs at most one finished step if one sidecar serves all ranks, with
four in any case; with fewer, more. The last of them may come when it is needed. Visits all states.

The model is a lock-step run of trainers and sidecars with all their interleavings: each rank's copy
ends early or late (lazy), ranks ask for slots ahead of time, and a worst-case persister pins any
one image of a rank for any time. After each move, a restart would find the sealed slots if all
processes died now. Of the steps that all ranks have saved, at most the newest may be missing there.

States are relative to the slowest rank, and all steps far behind it count as the same. So there are
finitely many states, and the search visits all of them instead of a random sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from keepstep.core.slot_table import (
    RankMemory,
    SlotRow,
    SlotState,
    SlotTable,
    newest_common_step,
    steps_to_protect,
)
from keepstep.steps import EpochId, StepId

_EPOCH = EpochId(1, "0" * 8)
_LONG_AGO = -4
"""The relative step that stands for all older steps. It never counts as a step in common."""
_NONE = -100


@dataclass(frozen=True)
class Rank:
    """`saved`: the step of the last `save`. `next_slot`: a slot that the rank asked for and has not
    zeroed yet. `filling`: the slot that the copy of `saved` fills, None once it is sealed. `bytes`:
    the seals in memory. `protected`: see `SlotTable.protect_steps`."""

    slots: tuple[SlotRow, ...]
    bytes: tuple[int | None, ...]
    saved: int
    next_slot: int | None = None
    filling: int | None = None
    protected: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rules:
    """What is possible. `pins`: the persister may pin one image per rank. `zeroed_early`: a victim
    is zeroed as soon as it is assigned, without waiting for the collective (a bug of a trainer).
    `protects`: at each move the host protects the images that are worth keeping, as `Node` does for
    the ranks of one machine; else each rank is on another machine. `postponed`: the last slot is
    made when a reader is in the way. `lost`: how many finished steps may be missing."""

    slots: int
    pins: bool = True
    lazy: bool = True
    zeroed_early: bool = False
    protects: bool = True
    postponed: bool = False
    lost: int = 1


State = tuple[Rank, ...]


def _table(rank: Rank) -> SlotTable:
    table = SlotTable(0)
    table._slots = list(rank.slots)
    table.protect_steps(map(_id, rank.protected))
    return table


def _moves(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    slowest = min(rank.saved for rank in state)
    for i, rank in enumerate(state):
        for name, moved in _rank_moves(rank, rules, slowest):
            after = (*state[:i], moved, *state[i + 1 :])
            yield f"rank {i} {name}", _protecting(after) if rules.protects else after


def _protecting(state: State) -> State:
    kept = steps_to_protect(
        [RankMemory(frozenset(_table(rank).list_sealed_steps())) for rank in state]
    )
    return tuple(replace(rank, protected=frozenset(map(_number, kept))) for rank in state)


def _rank_moves(rank: Rank, rules: Rules, slowest: int) -> Iterator[tuple[str, Rank]]:
    if rank.next_slot is None and rank.filling is None:
        table, grows = _table(rank), len(rank.slots) < rules.slots
        keep = 2 if grows and not rules.protects else 0
        if (index := table.assign(keep=keep)) is not None:
            bytes_ = _put(rank.bytes, index, None) if rules.zeroed_early else rank.bytes
            yield "asks ahead", replace(rank, slots=table.slots, bytes=bytes_, next_slot=index)
        elif grows and table.waits_for_reader(keep=keep):
            table.add()
            yield "gets its last slot", replace(rank, slots=table.slots, bytes=(*rank.bytes, None))
    if rank.filling is not None:
        yield "seals", _sealed(rank)
    # The collective of the next step needs every rank to have returned from the last save. The
    # fence before the optimizer needs the rank's own copy to be sealed. Only then does the rank
    # zero the victim.
    elif rank.next_slot is not None and rank.saved == slowest:
        saved = _saved(rank)
        yield "saves", saved if rules.lazy else _sealed(saved)
    if rules.pins:
        yield from _pin_moves(rank)


def _pin_moves(rank: Rank) -> Iterator[tuple[str, Rank]]:
    pinned = [i for i, slot in enumerate(rank.slots) if slot.pinned]
    table = _table(rank)
    for i in pinned:
        table.unpin(i)
        yield "is written", replace(rank, slots=table.slots)
    if not pinned:
        for i, slot in enumerate(rank.slots):
            if slot.state is SlotState.SEALED:
                table = _table(rank)
                table.pin(i)
                yield f"writes slot {i}", replace(rank, slots=table.slots)


def _saved(rank: Rank) -> Rank:
    assert rank.next_slot is not None
    bytes_ = _put(rank.bytes, rank.next_slot, None)
    step = rank.saved + 1
    return replace(rank, saved=step, bytes=bytes_, filling=rank.next_slot, next_slot=None)


def _sealed(rank: Rank) -> Rank:
    assert rank.filling is not None
    table = _table(rank)
    table.seal(rank.filling, _id(rank.saved))
    bytes_ = _put(rank.bytes, rank.filling, rank.saved)
    return replace(rank, slots=table.slots, bytes=bytes_, filling=None)


def _put(values: tuple[int | None, ...], index: int, value: int | None) -> tuple[int | None, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _id(step: int) -> StepId:
    return StepId(_EPOCH, step - _LONG_AGO)  # the model has negative steps, but ids must not


def _number(step_id: StepId) -> int:
    return step_id.step + _LONG_AGO


def _relative(state: State) -> State:
    """The same state with the slowest rank at step 0, and with the slots in a fixed order."""
    base = min(rank.saved for rank in state)
    return tuple(_shifted(rank, base) for rank in state)


def _shifted(rank: Rank, base: int) -> Rank:
    def moved(step: int) -> int:
        return max(step - base, _LONG_AGO)

    slots = tuple(replace(s, id=s.id and _id(moved(_number(s.id)))) for s in rank.slots)
    bytes_ = tuple(None if step is None else moved(step) for step in rank.bytes)
    order = sorted(range(len(slots)), key=lambda i: (str(slots[i]), str(bytes_[i]), i))
    return Rank(
        slots=tuple(slots[i] for i in order),
        bytes=tuple(bytes_[i] for i in order),
        saved=rank.saved - base,
        next_slot=None if rank.next_slot is None else order.index(rank.next_slot),
        filling=None if rank.filling is None else order.index(rank.filling),
        protected=frozenset(map(moved, rank.protected)),
    )


def _common(state: State) -> set[int]:
    each = [{step for step in rank.bytes if step is not None} for rank in state]
    return {step for step in set.intersection(*each) if step > _LONG_AGO}


def _start(rules: Rules, ranks: int) -> State:
    """The state right after a restore: each rank's first slot holds the restored step."""
    empty = rules.slots - rules.postponed - 1
    slots = (SlotRow(SlotState.SEALED, _id(0)), *[SlotRow()] * empty)
    return (Rank(slots, (0, *[None] * empty), saved=0),) * ranks


def search(
    rules: Rules, ranks: int = 2, *, each: Callable[[State], None] = lambda state: None
) -> tuple[int, list[str] | None]:
    """(states visited, the shortest way to a state that would lose more finished steps than
    `rules.lost`, or None). Calls `each` for each state."""
    start = _relative(_start(rules, ranks))
    previous: dict[State, tuple[str, State] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        each(state)
        finished = min(rank.saved for rank in state)
        if max(_common(state), default=_NONE) < finished - rules.lost:
            return len(previous), _way(state, previous)
        for name, moved in _moves(state, rules):
            if (known := _relative(moved)) not in previous:
                previous[known] = (name, state)
                queue.append(known)
    return len(previous), None


def _way(state: State, previous: dict[State, tuple[str, State] | None]) -> list[str]:
    names: list[str] = []
    while (step := previous[state]) is not None:
        name, state = step
        names.append(name)
    return names[::-1]


@pytest.mark.parametrize("protects", [True, False])
def test_with_four_slots_one_finished_step_is_lost_at_most(protects: bool) -> None:
    visited, window = search(Rules(slots=4, protects=protects))
    assert window is None
    assert visited > 1000, "the search must not end early"


def test_protecting_only_the_newest_common_step_could_lose_two_steps(monkeypatch) -> None:
    """A rank that is ahead would then give up the step that the others are about to seal."""

    def common_alone(ranks: Sequence[RankMemory]) -> frozenset[StepId]:
        return frozenset([newest_common_step(ranks)]) - {None}

    monkeypatch.setattr(f"{__name__}.steps_to_protect", common_alone)
    assert search(Rules(slots=4))[1] is not None


@pytest.mark.parametrize(
    "rules",
    [
        Rules(slots=4),
        Rules(slots=3),
        Rules(slots=3, pins=False),
        Rules(slots=2, pins=False),
        Rules(slots=3, postponed=True),
        Rules(slots=4, postponed=True, protects=False),
    ],
    ids=str,
)
def test_no_rank_waits_for_the_drive(rules: Rules) -> None:
    search(rules, each=lambda state: _assert_goes_on(state, rules))


def _assert_goes_on(state: State, rules: Rules) -> None:
    names = [name for name, _ in _moves(state, rules)]
    own = ("asks ahead", "gets its last slot", "seals", "saves")
    assert any(name.endswith(own) for name in names), state


def test_the_newest_common_step_is_kept_while_another_rank_seals_nothing() -> None:
    held = [frozenset({_id(2)}), frozenset({_id(2), _id(3), _id(4), _id(5)})]
    assert steps_to_protect([RankMemory(steps) for steps in held]) == held[1]
    table = SlotTable(4)
    for index, step_id in enumerate(sorted(held[1])):
        table.adopt(index, step_id)
    table.protect_steps(steps_to_protect([RankMemory(steps) for steps in held]))
    assert table.assign() is None, "each of them may be the next common step"
    table.protect_steps(steps_to_protect([RankMemory(held[0] | {_id(9)}), RankMemory(held[1])]))
    assert table.slots[table.assign() or 0].id == _id(3), "the other rank has passed these"


def test_other_ranks_do_not_wait_for_a_rank_whose_trainer_has_ended() -> None:
    ended = RankMemory(frozenset({_id(2)}), ended=True)
    ahead = RankMemory(frozenset({_id(2), _id(3), _id(4)}))
    assert steps_to_protect([ended, ahead]) == {_id(2)}


def test_three_slots_suffice_while_nothing_is_pinned() -> None:
    assert search(Rules(slots=3, pins=False))[1] is None


def test_three_ranks_need_no_more_slots_than_two() -> None:
    assert search(Rules(slots=3, pins=False), ranks=3)[1] is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_three_slots_on_one_machine_one_finished_step_is_lost_at_most(ranks: int) -> None:
    visited, window = search(Rules(slots=3), ranks)
    assert window is None
    assert visited > 50 * ranks, "the search must not end early"


def test_three_slots_with_one_pinned_can_lose_two_finished_steps_across_machines() -> None:
    _, window = search(Rules(slots=3, protects=False))
    assert window is not None
    assert any("writes" in move for move in window), "it takes a pin"
    assert window[-1].endswith("saves"), "the window opens when a victim is zeroed"


def test_four_slots_can_lose_two_steps_if_victims_are_zeroed_before_the_collective() -> None:
    _, window = search(Rules(slots=4, zeroed_early=True, protects=False))
    assert window is not None
    assert window[-1].endswith("asks ahead")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_slots_suffice_on_one_machine_while_nothing_is_pinned(ranks: int) -> None:
    visited, window = search(Rules(slots=2, pins=False), ranks)
    assert window is None
    assert visited > 5 * ranks, "the search must not end early"


def test_two_slots_leave_a_window_across_machines_even_without_pins() -> None:
    _, window = search(Rules(slots=2, pins=False, protects=False))
    assert window is not None
    assert window[-1].endswith("saves")


@pytest.mark.parametrize(
    "rules",
    [Rules(slots=3, postponed=True), Rules(slots=4, postponed=True, protects=False)],
    ids=str,
)
def test_the_last_slot_may_come_when_a_reader_is_in_the_way(rules: Rules) -> None:
    grown: set[int] = set()
    _, window = search(rules, each=lambda state: grown.update(len(rank.slots) for rank in state))
    assert window is None
    assert grown == {rules.slots - 1, rules.slots}


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_two_slots_a_rank_waits_for_the_drive_or_nothing_is_in_common(ranks: int) -> None:
    """Whatever the table does, because a third step must begin while the first is written and the
    second is the newest: three images at once."""
    waits: list[State] = []

    def each(state: State) -> None:
        names = [name for name, _ in _moves(state, Rules(slots=2))]
        if all(name.endswith(("is written", "writes slot 0", "writes slot 1")) for name in names):
            waits.append(state)

    _, window = search(Rules(slots=2), ranks, each=each)
    assert waits or window


def test_two_slots_lose_one_step_at_most_if_images_are_copied_before_save_returns() -> None:
    assert search(Rules(slots=2, pins=False, lazy=False))[1] is None
