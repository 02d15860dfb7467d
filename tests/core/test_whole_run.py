"""A whole run as a state machine: ranks, a node that decides for them, votes, kills at any point.

The real code makes all decisions: `Node` and `Leader` are what the sidecar runs. Memory and disk
are sets of names here, which the node's actions change. The expected result is computed from these
sets alone, in a much simpler way (`WholeRun.restorable`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import keepstep.core.retention
from keepstep.core.commit_rule import (
    RankReport,
    ReportedTier,
    combine_rank_reports,
    merge_equal_reports,
)
from keepstep.core.ledger import EpochStarted, Ledger, Reported, RestorePlan
from keepstep.core.node import (
    Event,
    Flush,
    LastReply,
    Listed,
    Node,
    Overwritten,
    Publish,
    RanksServed,
    Retire,
    Sealed,
    TrainerDied,
    WriteEnded,
)
from keepstep.core.restore_vote import Candidate, Candidates, choose_step
from keepstep.core.retention import Retention
from keepstep.core.schedule import StepGrid, Write
from keepstep.core.shard import Ranks, Shard
from keepstep.core.slot_table import SlotTable
from keepstep.errors import NothingCommonError, RestoreError
from keepstep.leader.leader import Leader
from keepstep.steps import Epoch, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import MemberReport, Report, ReportedRanks
from keepstep.wire.run_reports import RunPolicy
from tests.core.test_states import watched_node  # noqa: F401

_KEEP = Retention(last=2)
_NEVER_WHOLE_KEPT = keepstep.core.retention.NEVER_WHOLE_KEPT


@dataclass
class Rank:
    """One rank. The seals of its slots are in memory, and its shards are on disk. The rest belongs
    to processes.

    `saved`: the step of the last `save` of this life. `filling`: the slot of its unsealed copy.
    """

    seals: list[StepId | None]
    table: SlotTable
    shards: set[StepId] = field(default_factory=set)
    saved: int = -1
    next_slot: int | None = None
    filling: int | None = None
    newest: StepId | None = None
    settled: bool = True

    def slot_tables(self) -> tuple[SlotTable, ...]:
        return (self.table,)

    @property
    def filled(self) -> int | None:
        """The slot that the trainer has, whether it has zeroed it or not."""
        return self.next_slot if self.filling is None else self.filling

    def in_memory(self) -> set[StepId]:
        return {step_id for step_id in self.seals if step_id is not None}


class WholeRun(RuleBasedStateMachine):
    """The run. The world is small, so that rare interleavings become likely."""

    @initialize(
        world=st.sampled_from([2, 3]),
        slots=st.sampled_from([2, 3, 4]),
        every=st.sampled_from([1, 2]),
        never_whole_kept=st.sampled_from([0, 4]),
    )
    def begin(self, world: int, slots: int, every: int, never_whole_kept: int) -> None:
        keepstep.core.retention.NEVER_WHOLE_KEPT = never_whole_kept
        self.slots, self.grid = slots, StepGrid(every)
        self.ranks = [Rank([None] * slots, SlotTable(slots)) for _ in range(world)]
        self.epochs_on_disk: list[Epoch] = []
        self.alive: set[StepId] = set()  # steps that no later life left behind
        self.epoch: Epoch | None = None  # of the live trainers
        self.failed: set[StepId] = set()  # steps with a failed write, which is not tried again
        self.unharmed = True  # nothing that a restart relies on was lost
        self.left_out = False  # a copy was discarded before this life had a step in common
        self.slow = False  # the leader's answer comes with the next one
        self._start_sidecar()

    def teardown(self) -> None:
        keepstep.core.retention.NEVER_WHOLE_KEPT = _NEVER_WHOLE_KEPT

    # --- the sidecar ---------------------------------------------------------------------

    def _start_sidecar(self) -> None:
        self.writing: dict[int, StepId] = {}
        self.shown: set[StepId] = set()  # what this sidecar has shown to readers
        self.read: set[StepId] = set()  # steps that are being read from the drive
        for rank in self.ranks:
            rank.table = SlotTable(self.slots)
            for index, step_id in enumerate(rank.seals):
                if step_id is not None:
                    rank.table.adopt(index, step_id)
        self.node = Node(
            dict(enumerate(self.ranks)),
            grid=self.grid,
            keep=_KEEP,
            alone=True,
            in_use=lambda step_id: step_id in self.read,
        )
        policy = RunPolicy(keep=_KEEP, outlives_pod=False, restarts=False)
        self.leader, self.reports = Leader(life="", nodes=1, policy=policy), 0
        self.late: LastReply | None = None
        for epoch in self.epochs_on_disk:
            self._feed(EpochStarted(epoch))
        for rank in self.ranks:
            if (held := rank.filled) is not None:
                rank.table.restore_assignment(
                    held
                )  # its live trainer names the slot with its next lease
        self._list()
        self._feed(RanksServed(frozenset(range(len(self.ranks))), self.slots))
        if self.epoch is None:
            for number in range(len(self.ranks)):
                self._feed(TrainerDied(number))

    def _feed(self, event: Event) -> None:
        for action in self.node.step(event):
            if isinstance(action, Write):
                self._begin_write(action)
            elif isinstance(action, Retire):
                assert action.id not in self.read
                assert self._is_not_needed(action.id), "some rank might have completed it"
                for number in action.ranks:
                    self.ranks[number].shards.discard(action.id)
            elif isinstance(action, Publish):
                assert all(action.id in rank.shards for rank in self.ranks), "shown, but not whole"
                self.shown.add(action.id)

    def _is_not_needed(self, step_id: StepId) -> bool:
        """Whether a newer step is committed, or some rank never can have this step again."""
        committed = self.node.ledger.watermark(Tier.LOCAL)
        if step_id not in self.alive or (committed is not None and step_id < committed):
            return True
        return any(not self._may_have(rank, step_id) for rank in self.ranks)

    def _may_have(self, rank: Rank, step_id: StepId) -> bool:
        if step_id in rank.in_memory() | rank.shards:
            return True
        if self.epoch is None or self.epoch.id != step_id.epoch:
            return False
        return rank.saved < step_id.step or self._copied(rank) == step_id

    def _begin_write(self, write: Write) -> None:
        rank = self.ranks[write.rank]
        index = rank.table.find_slot(write.id)
        assert index is not None, "asked to write what is not there"
        assert rank.table.slots[index].pinned, "and nobody may be given its slot meanwhile"
        assert write.rank not in self.writing, "one write of a rank at a time"
        self.writing[write.rank] = write.id

    def _copied(self, rank: Rank) -> StepId | None:
        """The image that the rank's trainer is copying now; None if there is none."""
        copies = self.epoch is not None and rank.filling is not None
        return StepId(self.epoch.id, rank.saved) if copies and self.epoch else None

    def _reports(self) -> list[Reported]:
        world = len(self.ranks)
        return [
            Reported(ranks=combine_rank_reports({number: _report(number, rank, world)}))
            for number, rank in enumerate(self.ranks)
        ]

    def _list(self) -> None:
        for _ in range(2):
            self._list_once()
            self._ask_leader()
        self._list_once()  # shows what was retired

    def _list_once(self) -> None:
        for number, rank in enumerate(self.ranks):  # each rank as it is then
            held = {number: _report(number, rank, len(self.ranks))}
            self._feed(Listed(ranks=held, shown=self.shown))

    def _ask_leader(self) -> None:
        """The run of one machine is led as any other."""
        world, self.reports = len(self.ranks), self.reports + 1
        report = Report(
            sidecar="test",
            started_at=1.0,
            sequence=self.reports,
            ready=True,
            epochs=tuple(self.epochs_on_disk),
            ranks=merge_equal_reports(
                ReportedRanks(
                    ranks=Ranks.of((number,)),
                    world=world,
                    alive=self.epoch is not None,
                    tiers=dict(_report(number, rank, world)),
                )
                for number, rank in enumerate(self.ranks)
            ),
        )
        self.leader.take(0, MemberReport(life="", nodes=1, report=report), at=0.0)
        self.leader.draw_conclusions(at=0.0)
        reply = self.leader.news(0)
        assert reply is not None
        leader_answer = LastReply(
            commit=reply.reply.committed.get(str(Tier.LOCAL)),
            commits=frozenset(reply.reply.commits),
            plan=reply.reply.plan,
            retire=frozenset(reply.reply.retire),
        )
        answer, self.late = (self.late, leader_answer) if self.slow else (leader_answer, None)
        if answer is not None:
            self._feed(answer)

    @rule(slow=st.booleans())
    def the_leader_is_slow_or_quick(self, slow: bool) -> None:
        self.slow = slow

    # --- training ------------------------------------------------------------------------

    def _training(self) -> bool:
        return self.epoch is not None

    @precondition(_training)
    @rule(moves=st.lists(st.integers(0, 4), min_size=10, max_size=90), writes_fail=st.booleans())
    def the_run_moves_on(self, moves: list[int], writes_fail: bool) -> None:
        """Each number is a move of one rank; numbers beyond the last rank are moves of the
        writer."""
        for move in moves:
            if move < len(self.ranks):
                self._move(move, self.ranks[move])
            elif self.writing:
                writers = sorted(self.writing)
                self._end_write(writers[move % len(writers)], ok=not (writes_fail and move == 4))

    def _move(self, number: int, rank: Rank) -> None:
        if rank.filling is not None:
            self._seal(number, rank)
        elif rank.next_slot is None:
            self._ask(number, rank)
        elif rank.saved == min(rank.saved for rank in self.ranks):
            # Every rank has returned from the last save, and this rank's copy is sealed. Only now
            # does this rank zero the victim.
            rank.saved += 1
            rank.seals[rank.next_slot] = None
            rank.filling, rank.next_slot = rank.next_slot, None

    def _ask(self, number: int, rank: Rank) -> None:
        if (index := rank.table.assign()) is None:
            return
        rank.next_slot = index
        if (lost := rank.table.slots[index].id) is not None:
            self._feed(Overwritten(number, lost))
            self._list()

    def _seal(self, number: int, rank: Rank) -> None:
        assert self.epoch is not None
        assert rank.filling is not None
        step_id = StepId(self.epoch.id, rank.saved)
        assert rank.newest is None or step_id > rank.newest, "steps never go back within an epoch"
        rank.seals[rank.filling] = rank.newest = step_id
        rank.table.seal(rank.filling, step_id)
        rank.filling = None
        self.alive.add(step_id)
        self._feed(Sealed(number, step_id))
        self._list()

    @precondition(_training)
    @rule(number=st.integers(0, 2))
    def a_copy_is_discarded(self, number: int) -> None:
        """A tensor changed before it was copied. The slot becomes free, and the step is never
        sealed."""
        number %= len(self.ranks)
        rank = self.ranks[number]
        if rank.filling is not None:
            rank.table.release(rank.filling)
            rank.filling = None
            self.left_out = True

    @precondition(_training)
    @rule(number=st.integers(0, 2))
    def a_rank_saves_no_step_where_the_others_do(self, number: int) -> None:
        rank = self.ranks[number % len(self.ranks)]
        if rank.filling is None and rank.saved == min(rank.saved for rank in self.ranks):
            rank.saved += 1
            self.left_out = True

    # --- writing -------------------------------------------------------------------------

    def _end_write(self, number: int, *, ok: bool = True) -> None:
        rank, step_id = self.ranks[number], self.writing.pop(number)
        if ok:
            assert step_id in rank.in_memory(), "written whole, though never sealed"
            rank.shards.add(step_id)
        else:
            self.failed.add(step_id)
        self._feed(WriteEnded(number, step_id, ok))
        self._list()

    def _end_all_writes(self) -> None:
        while self.writing:
            self._end_write(min(self.writing))

    @rule()
    def a_person_asks_to_flush(self) -> None:
        self._feed(Flush())

    @rule()
    def a_flush_makes_the_newest_common_step_durable(self) -> None:
        self._feed(Flush())
        common = (
            set.intersection(*(set(rank.table.list_sealed_steps()) for rank in self.ranks))
            - self.failed
        )
        self._end_all_writes()
        newest = self.node.ledger.watermark(Tier.LOCAL)
        assert not common or (newest is not None and newest >= max(common))

    # --- reading -------------------------------------------------------------------------

    @rule(number=st.integers(0, 3))
    def a_reader_reads_a_step_from_the_drive(self, number: int) -> None:
        steps = sorted(self.ranks[0].shards)
        self.read = {steps[number]} if number < len(steps) else set()
        self._list()

    @rule()
    def a_step_that_was_kept_for_a_reader_goes_after_it(self) -> None:
        self.read, self.slow = set(), False
        self._list()
        kept = [
            step_id
            for step_id in self.node.ledger.expendable(Tier.LOCAL, _KEEP)
            if self._on_disk(step_id)
        ]
        assert all(self.node.is_step_being_written(step_id) for step_id in kept)

    def _on_disk(self, step_id: StepId) -> bool:
        return any(step_id in rank.shards for rank in self.ranks)

    # --- faults --------------------------------------------------------------------------

    @precondition(_training)
    @rule(trainers=st.booleans(), sidecar=st.booleans())
    def processes_are_killed(self, trainers: bool, sidecar: bool) -> None:
        if trainers:
            self._kill_trainers()
        if sidecar:
            self._start_sidecar()

    def _kill_trainers(self) -> None:
        self.epoch = None
        for number, rank in enumerate(self.ranks):
            if (held := rank.filled) is not None:
                kept = rank.seals[held]
                rank.table.release(held, keep=kept)
                if (
                    kept is not None and rank.table.find_slot(kept) is not None
                ):  # else the step is dead
                    self._feed(Sealed(number, kept))
            rank.filling = rank.next_slot = None
            self._feed(TrainerDied(number))
        self._list()

    @precondition(lambda self: not self._training())
    @rule(number=st.integers(0, 2), disk=st.booleans())
    def a_rank_loses_its_memory(self, number: int, disk: bool) -> None:
        rank = self.ranks[number % len(self.ranks)]
        rank.seals = [None] * self.slots
        self.unharmed = False
        if disk:
            rank.shards.clear()
        self._start_sidecar()

    # --- restoring -----------------------------------------------------------------------

    def restorable(self, excluded: set[StepId]) -> StepId | None:
        """The step that must be restored, from the bytes alone: the newest step that is not dead
        and that all ranks hold."""
        each = [rank.in_memory() | rank.shards for rank in self.ranks]
        return max((set.intersection(*each) & self.alive) - excluded, default=None)

    def _votes(self) -> list[Candidates]:
        return [self._vote(rank) for rank in self.ranks]

    def _vote(self, rank: Rank) -> Candidates:
        memory = set(rank.table.list_sealed_steps())
        found = {
            step_id for step_id in memory | rank.shards if not self.node.ledger.is_dead(step_id)
        }
        return Candidates(
            answer=TierAnswer.STEPS if found else TierAnswer.NONE,
            candidates=tuple(
                Candidate(
                    id=step_id,
                    tier=Tier.MEMORY if step_id in memory else Tier.LOCAL,
                    world=len(self.ranks),
                )
                for step_id in sorted(found)
            ),
            highest_epoch=self.node.ledger.highest_epoch(),
        )

    @precondition(lambda self: not self._training())
    @rule(failing=st.integers(0, 5))
    def the_trainers_start(self, failing: int) -> None:
        expected = self.restorable(set())
        plan = self.node.ledger.plan(range(len(self.ranks)))
        assert (plan.id if isinstance(plan, RestorePlan) else None) == expected
        excluded: set[StepId] = set()
        if failing == 0 and expected is not None:
            excluded = {expected}  # some rank's digests do not match
            self.unharmed = False
            expected = self.restorable(excluded)
        try:
            decision = choose_step(self._votes(), excluded)
        except (NothingCommonError, RestoreError):
            assert expected is None, "there was a step that all could restore"
            lost = not self.unharmed or self.left_out
            assert lost or self.slots < 3, "three slots, and nothing was lost"
            self._remove_the_run()
            return
        assert decision.id == expected
        assert decision.epoch_number > self.node.ledger.highest_epoch()
        if decision.id is not None:
            self._load(decision.id)
        self._begin_epoch(decision.make_epoch("0" * 8))

    def _remove_the_run(self) -> None:
        """A user has read the error and starts the run from nothing."""
        for rank in self.ranks:
            rank.seals = [None] * self.slots
            rank.shards.clear()
        self._start_sidecar()

    def _load(self, step_id: StepId) -> None:
        for rank in self.ranks:
            if rank.table.find_slot(step_id) is None:
                # There is always a slot: newer images are dead once all have agreed on this step.
                index = rank.table.reserve_slot_for_load(
                    {sealed for sealed in rank.table.list_sealed_steps() if sealed != step_id}
                )
                while index is None and self.writing:  # the other slots are being written
                    self._end_write(min(self.writing))
                    index = rank.table.reserve_slot_for_load(
                        {sealed for sealed in rank.table.list_sealed_steps() if sealed != step_id}
                    )
                assert index is not None
                rank.seals[index] = step_id
                rank.table.seal(index, step_id)

    def _begin_epoch(self, epoch: Epoch) -> None:
        self.epochs_on_disk.append(epoch)
        self.epoch, self.left_out = epoch, False
        self._feed(EpochStarted(epoch))
        parent = epoch.parent
        if parent is not None:
            self.alive = {step_id for step_id in self.alive if step_id <= parent}
        for rank in self.ranks:
            rank.saved = parent.step if parent else -1
        self._list()

    # --- what always holds ---------------------------------------------------------------

    @invariant()
    def three_slots_leave_a_step_in_common_in_memory(self) -> None:
        if self.epoch is None or self.slots < 3:
            return
        began = self.epoch.parent is not None or all(
            rank.newest is not None and rank.newest.epoch == self.epoch.id for rank in self.ranks
        )
        common = set.intersection(*(rank.in_memory() for rank in self.ranks)) & self.alive
        self.left_out &= not common
        assert common or not began or (self.left_out and self.epoch.parent is None)

    @invariant()
    def what_all_ranks_wrote_is_committed_and_nothing_else(self) -> None:
        on_disk = set.intersection(*(rank.shards for rank in self.ranks)) & self.alive
        assert set(self.node.ledger.committed(Tier.LOCAL)) == on_disk

    @invariant()
    def the_order_of_reports_does_not_matter(self) -> None:
        other = Ledger()
        for report in reversed(self._reports()):
            other.apply(report)
        for epoch in reversed(self.epochs_on_disk):
            other.apply(EpochStarted(epoch))
        ranks = range(len(self.ranks))
        assert other.plan(ranks) == self.node.ledger.plan(ranks)
        assert other.committed(Tier.LOCAL) == self.node.ledger.committed(Tier.LOCAL)

    @invariant()
    def a_rank_has_one_unsealed_and_one_written_image_at_most(self) -> None:
        for rank in self.ranks:
            assert sum(slot.pins for slot in rank.table.slots) <= 1

    @invariant()
    def the_newest_commit_is_never_retired(self) -> None:
        if not self.unharmed:
            self.newest_commit = None
        newest = self.node.ledger.watermark(Tier.LOCAL)
        before = getattr(self, "newest_commit", None)
        if before is not None and before in self.alive:
            assert newest is not None
            assert newest >= before
        self.newest_commit = newest


def _report(number: int, rank: Rank, world: int) -> RankReport:
    memory, local = sorted(rank.table.list_sealed_steps()), sorted(rank.shards)
    return {
        Tier.MEMORY: ReportedTier.from_shards(
            tuple(Shard(step_id=step_id, rank=number, world=world) for step_id in memory)
        ),
        Tier.LOCAL: ReportedTier.from_shards(
            tuple(Shard(step_id=step_id, rank=number, world=world, root="r") for step_id in local)
        ),
    }


TestWholeRun = WholeRun.TestCase
TestWholeRun.settings = settings(max_examples=60, stateful_step_count=60, print_blob=True)
