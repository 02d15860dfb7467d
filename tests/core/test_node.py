"""What a node decides at the word of the run's leader, and when its drive is full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.ledger import EpochStarted
from keepstep.core.node import (
    SILENT_AFTER_S,
    Action,
    Flush,
    ImagesSettled,
    LastReply,
    Listed,
    Node,
    Publish,
    RanksServed,
    Retire,
    Sealed,
    TrainerDied,
    VolumeFull,
    WriteEnded,
)
from keepstep.core.retention import Retention
from keepstep.core.schedule import StepGrid, Write
from keepstep.core.shard import Shard
from keepstep.core.slot_table import SlotTable
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from tests.core.test_states import watched_node  # noqa: F401

EPOCH = EpochId(1, "0000000a")


def step(number: int) -> StepId:
    return StepId(EPOCH, number)


def steps(numbers: Iterable[int]) -> frozenset[StepId]:
    return frozenset(map(step, numbers))


def node(*, alone: bool = False, last: int = 2) -> Node:
    made = Node({}, grid=StepGrid(1), keep=Retention(last=last), alone=alone)
    made.step(EpochStarted(Epoch(EPOCH, None)))
    return made


def listed(*numbers: int, world: int = 2, shown: Iterable[int] = ()) -> Listed:
    """A listing in which rank 0 has these steps on its drive. `shown`: steps that readers see."""
    shards = [Shard(step_id=step(number), rank=0, world=world, root="r") for number in numbers]
    local = replace(ReportedTier.from_shards(shards), answer=TierAnswer.STEPS)
    report = {Tier.LOCAL: local, Tier.MEMORY: ReportedTier.from_shards(())}
    return Listed(ranks={0: report}, shown=steps(shown))


def retired(actions: Iterable[Action]) -> list[int]:
    return [action.id.step for action in actions if isinstance(action, Retire)]


def published(actions: Iterable[Action]) -> list[int]:
    return [action.id.step for action in actions if isinstance(action, Publish)]


def leader_reply(
    commit: int | None = 10, *, retire: Iterable[int] = (), pinned: Iterable[int] = ()
) -> LastReply:
    return LastReply(
        commit=None if commit is None else step(commit),
        retire=steps(retire),
        pinned=steps(pinned),
    )


def test_a_retirement_order_of_the_leader_deletes_only_steps_older_than_the_last_commit() -> None:
    state = node()
    state.step(listed(9, 10, 11))
    assert retired(state.step(leader_reply(10, retire=(8, 9, 10, 11)))) == [9]


def test_pinned_steps_are_kept_although_the_leader_orders_their_retirement() -> None:
    state = node()
    state.step(listed(8, 9, 10))
    assert retired(state.step(leader_reply(10, retire=(8, 9), pinned=(8,)))) == [9]


def test_publishing_a_step_that_the_leader_has_committed_is_retried_until_it_succeeds() -> None:
    state = node()
    state.step(listed(9, 10))
    assert published(state.step(leader_reply(10))) == [10]
    assert published(state.step(listed(9, 10))) == [10], "nobody has shown it yet"
    assert published(state.step(listed(9, 10, shown=(10,)))) == []


def test_an_older_commit_in_a_reply_of_a_restarted_leader_is_ignored() -> None:
    state = node()
    state.step(leader_reply(10))
    for older in (9, None):
        state.step(leader_reply(older))
        assert state.leader_view.commit == step(10)


def test_the_leader_counts_as_silent_a_minute_after_its_last_reply() -> None:
    view = node().leader_view
    now = SILENT_AFTER_S + 1
    assert view.is_leader_silent(now)
    view.update(leader_reply(), now)
    assert not view.is_leader_silent(now)


def test_a_full_drive_deletes_as_few_steps_as_possible_and_never_the_newest_commit() -> None:
    state = node(alone=True, last=3)
    sizes = {step(number): 100 for number in (1, 2, 3, 4)}
    state.step(listed(1, 2, 3, 4, world=1))
    assert retired(state.step(VolumeFull(50, sizes))) == [1]
    assert state.shortage_text == "", "the policy does not keep it"
    assert retired(state.step(VolumeFull(150, sizes))) == [1, 2]
    assert "the newest 3" in state.shortage_text
    assert retired(state.step(VolumeFull(900, sizes))) == [1, 2, 3], "never the newest commit"


def test_a_full_drive_deletes_the_newest_proven_step_last() -> None:
    state = node(alone=True, last=2)
    held = (40, 80, 120, 123, 124)
    sizes = {step(number): 100 for number in held}
    state.step(listed(*held, world=1))
    assert retired(state.step(VolumeFull(150, sizes))) == [40, 120]
    assert retired(state.step(VolumeFull(900, sizes))) == [40, 120, 123, 80]


def test_a_full_drive_of_one_pod_of_many_keeps_the_commit_its_pins_and_its_newest_two() -> None:
    held = (4, 5, 10, 11, 12, 13, 14)
    state = node()
    state.step(listed(*held))
    state.step(leader_reply(10, pinned=(5, 11)))
    sizes = {step(number): 100 for number in held}
    assert retired(state.step(VolumeFull(900, sizes))) == [4, 12]


class OneRank:
    settled = True

    def __init__(self, *held: int) -> None:
        self.table = SlotTable(4)
        for index, number in enumerate(held):
            self.table.adopt(index, step(number))

    def slot_tables(self) -> tuple[SlotTable, ...]:
        return (self.table,)


def test_a_node_with_a_silent_leader_drops_steps_between_last_commit_and_newest_two() -> None:
    node = Node({0: OneRank(14)}, grid=StepGrid(1))
    node.step(EpochStarted(Epoch(EPOCH, None)))
    node.step(listed(4, 5, 10, 11, 12, 13))
    node.step(leader_reply(10, pinned=(5, 11)))
    assert retired(node.step(listed(4, 5, 10, 11, 12, 13), SILENT_AFTER_S + 1)) == []
    assert node.step(RanksServed(frozenset({0}), 4)) == (Write(0, step(14)),)
    node.step(WriteEnded(0, step(14)))
    assert retired(node.step(listed(4, 5, 10, 11, 12, 13, 14), SILENT_AFTER_S + 1)) == [12]


def test_the_step_that_all_ranks_restored_is_kept_without_a_commit_notice() -> None:
    restored = StepId(EpochId(0, "0000000b"), 10)
    node = Node({0: OneRank(14)}, grid=StepGrid(1))
    node.step(EpochStarted(Epoch(restored.epoch, None)))
    node.step(EpochStarted(Epoch(EPOCH, restored)))
    held = listed(11, 12, 13)
    older = ReportedTier.from_shards([Shard(step_id=restored, rank=0, world=2, root="r")])
    shards = (*older.shards, *held.ranks[0][Tier.LOCAL].shards)
    local = replace(older, shards=shards)
    node.step(Listed(ranks={0: {Tier.LOCAL: local, Tier.MEMORY: ReportedTier.from_shards(())}}))
    node.step(RanksServed(frozenset({0}), 4))
    node.step(WriteEnded(0, step(14)))
    fourth = Shard(step_id=step(14), rank=0, world=2, root="r")
    local = replace(older, shards=(*shards, *ReportedTier.from_shards([fourth]).shards))
    actions = node.step(Listed(ranks={0: {Tier.LOCAL: local}}), SILENT_AFTER_S + 1)
    gone = [action.id for action in actions if isinstance(action, Retire)]
    assert gone == [step(11), step(12)]


def test_a_failed_write_is_retried_only_by_a_final_flush() -> None:
    node = Node({0: OneRank(9)}, grid=StepGrid(1))
    node.step(EpochStarted(Epoch(EPOCH, None)))
    assert node.step(RanksServed(frozenset({0}), 4)) == (Write(0, step(9)),)
    assert node.step(WriteEnded(0, step(9), ok=False)) == ()
    assert node.step(Sealed(0, step(9))) == ()
    assert node.step(Flush({step(9)})) == (), "whoever waits for a step asks again and again"
    assert node.step(Flush(newest=1)) == (Write(0, step(9)),)
    assert node.step(WriteEnded(0, step(9))) == ()
    assert node.planner.is_written_by_all(step(9))


def test_a_rank_waits_for_another_one_only_while_that_has_a_trainer() -> None:
    ahead, behind = OneRank(2, 3, 4, 5), OneRank(2)
    node = Node({0: ahead, 1: behind}, grid=StepGrid(100))
    node.step(EpochStarted(Epoch(EPOCH, None)))
    node.step(RanksServed(frozenset({0, 1}), 4))
    assert ahead.table.assign() is None, "3, 4 and 5 may all be the next common step"
    node.step(TrainerDied(1))
    victim = ahead.table.assign()
    assert victim is not None
    assert ahead.table.slots[victim].id == step(3), "the common step stays"
    ahead.table.release(victim, keep=step(3))
    node.step(ImagesSettled(1))
    assert ahead.table.assign() is None, "a trainer has come that may seal them"
