"""What the slot table refuses, so that a host's mistake shows before it destroys an image."""

from __future__ import annotations

import pytest

from keepstep.core.slot_table import SlotState, SlotTable
from keepstep.steps import EpochId, StepId


def _id(step: int) -> StepId:
    return StepId(EpochId(1, "0" * 8), step)


def _staged(count: int, *steps: int) -> SlotTable:
    table = SlotTable(count)
    for step in steps:
        index = table.assign()
        assert index is not None
        table.seal(index, _id(step))
    return table


def test_only_a_slot_that_is_filled_can_be_sealed() -> None:
    with pytest.raises(ValueError, match="only a slot that is filled"):
        SlotTable(2).seal(0, _id(1))


def test_a_slot_with_a_reader_cannot_be_released_or_removed() -> None:
    table = _staged(2, 1)
    table.pin(0)
    with pytest.raises(ValueError, match="cannot be released"):
        table.release(0)
    with pytest.raises(ValueError, match="a reader has"):
        table.remove(0)


def test_an_unsealed_slot_cannot_be_pinned_and_pins_are_counted() -> None:
    table = _staged(2, 1)
    with pytest.raises(ValueError, match="only a sealed image"):
        table.pin(1)
    table.pin(0)
    table.pin(0)
    table.unpin(0)
    assert table.slots[0].pinned
    table.unpin(0)
    with pytest.raises(ValueError, match="not pinned"):
        table.unpin(0)


def test_adopting_an_image_into_a_sealed_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="not empty"):
        _staged(2, 1).adopt(0, _id(2))


def test_a_running_trainer_keeps_the_slot_that_it_fills_across_a_sidecar_restart() -> None:
    table = SlotTable(3)
    table.adopt(0, _id(1))
    table.restore_assignment(1)
    assert table.assigned_slot_index == 1
    assert table.assign() is None
    with pytest.raises(ValueError, match="cannot be the one"):
        table.restore_assignment(2)
    table.seal(1, _id(2))
    assert table.list_sealed_steps() == [_id(1), _id(2)]


def test_a_removed_slot_is_never_used_again_and_the_other_indices_stay() -> None:
    table = _staged(3, 1, 2)
    table.remove(0)
    assert table.assign() == 2
    assert table.slots[0].state is SlotState.REMOVED
    assert table.find_slot(_id(2)) == 1
    with pytest.raises(ValueError, match="cannot be released"):
        table.release(0)


def test_slots_that_are_created_in_the_background_are_used_as_soon_as_they_exist() -> None:
    table = SlotTable(0)
    assert table.assign() is None
    assert table.add() == 0
    assert table.assign() == 0


def test_neither_of_the_newest_two_images_is_overwritten_while_slots_are_still_being_created() -> (
    None
):
    table = _staged(2, 1, 2)
    assert table.assign(keep=2) is None, "a crash would find no step in common"
    table.add()
    assert table.assign(keep=2) == 2
    table.seal(2, _id(3))
    assert table.assign(keep=2) == 0, "the third newest"


def test_a_save_overwrites_one_of_the_newest_two_images_when_no_more_slots_can_be_created() -> None:
    assert _staged(2, 1, 2).assign() == 0
