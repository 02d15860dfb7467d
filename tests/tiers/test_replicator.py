"""Which step is sent next, to a buddy or an archive, when not all can be."""

from __future__ import annotations

import random
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.steps import EpochId, StepId
from keepstep_sidecar.tiers.replicator import DueShards, next_step_to_send
from keepstep_sidecar.volume.run_tree import LocalShard

HELD = {0: cast("LocalShard", object())}
STEPS = st.builds(
    lambda epoch, step: StepId(EpochId(epoch, "0" * 8), step), st.integers(1, 2), st.integers(0, 8)
)


def at(step: int, *, epoch: int = 1) -> StepId:
    return StepId(EpochId(epoch, "0" * 8), step)


def due(*ids: StepId) -> DueShards:
    return DueShards(shards=dict.fromkeys(ids, HELD), owed=frozenset(ids), settled=frozenset(ids))


def best(*ids: StepId, after: StepId | None = None) -> StepId | None:
    return next_step_to_send(due(*ids), ids, after=after)


@given(ids=st.lists(STEPS, unique=True), chance=st.randoms())
def test_members_with_the_same_steps_in_another_order_send_the_same_step(
    ids: list[StepId], chance: random.Random
) -> None:
    assert best(*chance.sample(ids, len(ids))) == best(*ids)


@given(first=st.integers(1, 1000), count=st.integers(1, 16), more=st.integers(0, 16))
def test_a_member_with_a_slower_link_sends_only_steps_that_faster_members_also_send(
    first: int, count: int, more: int
) -> None:
    """It chooses among more steps: either the same one, or one that the others were past."""
    few = [at(step) for step in range(first, first + count)]
    many = few + [at(first + count + later) for later in range(more)]
    assert best(*many) == best(*few) or best(*many) not in few


def test_the_next_step_to_send_is_on_the_coarsest_grid_of_the_newest_epoch() -> None:
    def step_of(*steps: int) -> int:
        chosen = best(*map(at, steps))
        return chosen.step if chosen else -1

    assert (step_of(5, 6, 7), step_of(4, 12), step_of(*range(9, 40)), step_of(3)) == (6, 12, 32, 3)
    assert best(at(3, epoch=2), at(64)) == at(3, epoch=2)


def test_older_steps_are_sent_oldest_first_when_there_is_no_newer_one() -> None:
    assert best(at(5), at(6), at(7), after=at(8)) == at(5)
    assert best(at(5), at(6), at(9), after=at(8)) == at(9)
    assert best(after=at(8)) is None


def test_the_newest_step_is_sent_first_after_an_outage() -> None:
    ids = frozenset(map(at, (64, 65, 66)))
    due = DueShards(shards=dict.fromkeys(ids, HELD), owed=ids, settled=ids)
    assert next_step_to_send(due, ids, after=at(63), outage=True) == at(66)
    assert next_step_to_send(due, ids - {at(66)}, after=at(66)) == at(64)


def test_the_oldest_step_is_sent_first_while_members_still_lack_steps() -> None:
    owed = frozenset({at(7), at(8), at(9)})
    waiting = DueShards(shards=dict.fromkeys(owed, HELD), owed=owed)
    assert next_step_to_send(waiting, owed, after=None) == at(7)


def slow_member(*, phase: int, takes: int, every: int, steps: int) -> set[StepId]:
    """What a member sends whose transfers take `takes` commits, while its volumes keep two steps
    and the step that is in use."""
    kept: list[StepId] = []
    sent: set[StepId] = set()
    sending: StepId | None = None

    def following() -> StepId | None:
        return best(
            *(step_id for step_id in kept if step_id not in sent), after=max(sent, default=None)
        )

    for number in range(1, steps):
        kept.append(at(number * every))
        needed = (sending, following())
        kept = [step_id for step_id in kept if step_id in kept[-2:] or step_id in needed]
        if (number + phase) % takes == 0:
            sent |= {sending} if sending is not None else set()
            sending = following()
    return sent


@settings(max_examples=25)
@given(
    takes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    phases=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    every=st.integers(1, 1000),
)
def test_members_with_different_slow_links_still_send_the_same_steps(
    takes: tuple[int, int], phases: tuple[int, int], every: int
) -> None:
    """Otherwise each would send other steps, and none would ever be whole."""
    ours, theirs = (
        slow_member(phase=phase, takes=take, every=every, steps=150)
        for phase, take in zip(phases, takes, strict=True)
    )
    rarest = 150 // (4 * max(takes))
    assert len(ours & theirs) >= rarest
