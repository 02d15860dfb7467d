"""The tables of states at the head of three modules, and what stands there, agree with the code.

A module of tests that imports one of the fixtures compares all that its tests do with a table.
"""

from __future__ import annotations

import re
import sys
import weakref
from itertools import product
from typing import get_args

import pytest

from keepstep.core import node
from keepstep.save import save_thread, snapshot
from keepstep.save.snapshot import ImageOutcome, PendingImage
from keepstep_sidecar.volume import volume
from tests.harness import ROOT
from tests.volume.points import FAULT_POINTS


@pytest.mark.parametrize(
    ("module", "table"),
    [(node, node.STEP), (save_thread, save_thread.IMAGE), (volume, volume.SHARD)],
)
def test_every_documented_state_has_an_explanation_and_names_existing_functions_and_tests(
    module, table
):
    states = {word for row in table for word in f"{row.states}, {row.after}".split(", ")}
    text, _, never = module.__doc__.partition("What may never happen")
    assert set(re.findall("`([a-z ]+)`:", text)) == states - {"any"}
    for place in (place for row in table for place in row.where.split(", ")):
        of_class, _, function = place.partition(".")
        assert callable(getattr(getattr(module, of_class), function)), place
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert all(f"def {name}(" in written for name in re.findall(r"`(\w+_\w+)`", never))


def test_the_state_tables_cover_all_node_events_verdicts_and_fault_points():
    events = {event for row in node.STEP for event in row.event.split(", ")}
    assert events == {event.__name__ for event in get_args(node.Event)}
    assert {row.after for row in save_thread.IMAGE} > {verdict.value for verdict in ImageOutcome}
    points = [point for point in FAULT_POINTS if not re.match("history|record|load|peer", point)]
    assert points == [row.event for row in volume.SHARD if "." in row.event]


def moves(rows):
    return {move for row in rows for move in product(*(cell.split(", ") for cell in row))}


@pytest.fixture(autouse=True, scope="module")
def watched_node():
    real, known = node.Node.step, moves((row.states, row.event, row.after) for row in node.STEP)
    # slots are a live view: memory changes before the event that says so
    known |= moves([("absent, staged", event, "absent, staged") for _, event, _ in known])
    seen = weakref.WeakKeyDictionary()

    def step(self, event, now=0.0):
        actions, states, name = real(self, event, now), seen.setdefault(self, {}), type(event)
        tables = (table for slots in self._slots.values() for table in slots.slot_tables())
        staged = {step_id for table in tables for step_id in table.list_sealed_steps()}
        here = self._here()
        in_state = {
            "retiring": {action.id for action in actions if isinstance(action, node.Retire)}
            | {
                step_id
                for step_id in states
                if states[step_id] == "retiring" and name is not node.Listed
            },
            "published": here & self._shown,
            "committed": here & {*self.commits()},
            "writing": {step_id for _, step_id in self._writing},
            "durable": here,
            "staged": staged,
        }
        for step_id in {*states, *staged, *here}:
            before = states.get(step_id, "absent")
            states[step_id] = next(
                (state for state, ids in in_state.items() if step_id in ids), "absent"
            )
            move = before, name.__name__, states[step_id]
            assert before == states[step_id] or known & {move, ("any", *move[1:])}, move
        return actions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.Node, "step", step)
        yield


def state_of(held):
    if held is None or (image := held.pending) is None:
        return "none" if held is None else "taken" if held.taken else "at hand"
    return "sealed" if image.sealed and image.verdict is ImageOutcome.VALID else image.verdict.value


@pytest.fixture(autouse=True, scope="module")
def watched_save_thread():
    """Also compares which function moves an image on."""
    rows = moves((row.states, row.where, row.after) for row in save_thread.IMAGE)
    known = {(state, name.partition(".")[2], after) for state, name, after in rows}
    wrong = set()

    def moved(before, frame, after):
        move = before, frame.f_code.co_name, after
        by_product = frame.f_code.co_filename in (save_thread.__file__, snapshot.__file__)
        if before != after and by_product and not known & {move, ("any", *move[1:])}:
            wrong.add(move)

    def hold(self, held):
        before, self.__dict__["_held"] = state_of(self.__dict__.get("_held")), held
        moved(before, sys._getframe(1), state_of(held))

    def change(self, name, value):
        if was_made := "sealed" in self.__dict__:
            before, frame = (
                state_of(held := save_thread.HeldSlot(self.slot, pending=self)),
                sys._getframe(1),
            )
        object.__setattr__(self, name, value)
        if was_made:
            by = frame.f_back if frame.f_code.co_name == "finish_with_outcome" else frame
            moved(before, by, state_of(held))

    with pytest.MonkeyPatch.context() as patch:
        held = property(lambda self: self.__dict__["_held"], hold)
        patch.setattr(save_thread.SaveThread, "_held", held, raising=False)
        patch.setattr(PendingImage, "__setattr__", change)
        yield
    assert not wrong
