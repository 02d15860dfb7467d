"""A run that leads itself, as a state machine: members, leaders, partitions, losses.

The real code makes all decisions: `Leader`, and on each machine a `Node` that is told of its
replies. Volumes are sets of names. A member has one connection; either side may notice its end
first, and a reply that has arrived may be acted on after the next leader has begun. What must hold
follows from the sets alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepstep.core.commit_rule import RankReport, ReportedTier
from keepstep.core.ledger import EpochStarted
from keepstep.core.node import Heard, Listed, Node, Publish, Retire
from keepstep.core.retention import Retention
from keepstep.core.schedule import Grid
from keepstep.core.shard import Shard
from keepstep.errors import UsageError
from keepstep.leader.leader import Leader
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import LeaderReply, MemberReport, Report, ReportedRank
from keepstep.wire.runs import RunPolicy
from keepstep_sidecar.report.report import changes


@dataclass
class Machine:
    """One machine with one rank. `known`: the last report, if its leader can go on from that one.
    `news`: a reply that has arrived. `leader`: to which it is connected; None: to none."""

    number: int
    shards: set[StepId] = field(default_factory=set)
    epochs: list[Epoch] = field(default_factory=list)
    life: int = 0
    scanned: bool = True
    sequence: int = 0
    known: Report | None = None
    news: LeaderReply | None = None
    leader: Leader | None = None
    shown: set[StepId] = field(default_factory=set)
    node: Node = field(init=False)


class LedRun(RuleBasedStateMachine):
    """Machine 0 hosts the leader; earlier leaders live on, with connections that they take to be
    there."""

    @initialize(nodes=st.integers(1, 3), keep=st.integers(1, 2))
    def begin(self, nodes: int, keep: int) -> None:
        self.keep = Retention(last=keep)
        self.machines = [Machine(number) for number in range(nodes)]
        self.lives = 0
        self.old: list[Leader] = []
        self.commit: StepId | None = None
        self.committed: set[StepId] = set()
        for one in self.machines:
            self._start(one)
        self._lead()
        self.epoch = Epoch(EpochId(1, "0" * 8), None)
        self.alive: set[StepId] = set()
        self._begin_epoch()

    # --- parts ---------------------------------------------------------------------------

    def _start(self, one: Machine) -> None:
        self.lives += 1
        one.life, one.sequence, one.scanned = self.lives, 0, False
        one.known = one.news = one.leader = None
        one.shown = set()
        one.node = Node({}, grid=Grid(1), keep=self.keep, alone=len(self.machines) == 1)
        for epoch in one.epochs:
            one.node.step(EpochStarted(epoch))

    def _lead(self) -> None:
        """The sidecar of machine 0 begins: nobody is connected to it."""
        own = self.machines[0]
        self.leader = Leader(
            life=f"{own.life}",
            nodes=len(self.machines),
            policy=RunPolicy(keep=self.keep, outlives_pod=False, restarts=False),
        )
        own.leader = self.leader

    def _begin_epoch(self) -> None:
        for one in self.machines:
            one.epochs.append(self.epoch)
            one.node.step(EpochStarted(self.epoch))
        parent = self.epoch.parent
        self.saved = {one.number: parent.step if parent else -1 for one in self.machines}

    def _whole(self) -> set[StepId]:
        return set.intersection(*(one.shards for one in self.machines)) & self.alive

    def _report(self, one: Machine) -> Report:
        held = ReportedTier.of(
            tuple(
                Shard(step_id=id, rank=one.number, world=len(self.machines), root="r")
                for id in sorted(one.shards)
            )
        )
        unknown = ReportedTier(answer=Answer.UNKNOWN)
        tiers: RankReport = {
            Tier.MEMORY: ReportedTier.of(()),
            Tier.LOCAL: held if one.scanned else unknown,
        }
        rank = ReportedRank(
            rank=one.number, world=len(self.machines), alive=True, tiers=dict(tiers)
        )
        one.sequence += 1
        return Report(
            sidecar="test",
            started_at=float(one.life),
            sequence=one.sequence,
            ready=one.scanned,
            epochs=tuple(one.epochs),
            ranks=(rank,),
        )

    def _do(self, one: Machine, actions: tuple[object, ...]) -> None:
        for action in actions:
            if isinstance(action, Retire):
                newer = {id for id in self._whole() if id > action.id}
                dead = action.id not in self.alive
                assert dead or newer, "a newer step is whole on all machines"
                one.shards.discard(action.id)
            elif isinstance(action, Publish):
                assert action.id in self.committed | self._whole(), "shown, but never whole"
                one.shown.add(action.id)

    def _list(self, one: Machine) -> None:
        held = ReportedTier.of(
            tuple(
                Shard(step_id=id, rank=one.number, world=len(self.machines), root="r")
                for id in sorted(one.shards)
            )
        )
        self._do(
            one, one.node.step(Listed(ranks={one.number: {Tier.LOCAL: held}}, shown=one.shown))
        )

    # --- training ------------------------------------------------------------------------

    @rule(number=st.integers(0, 2))
    def a_machine_writes_its_next_step(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        if self.saved[one.number] == min(self.saved.values()):  # steps are in lock step
            self.saved[one.number] += 1
            id = StepId(self.epoch.id, self.saved[one.number])
            self.alive.add(id)
            one.shards.add(id)
            if one.scanned:
                self._list(one)

    @rule()
    def the_trainers_start_again_from_the_newest_common_step(self) -> None:
        parent = max(self._whole(), default=None)
        if parent is not None:
            self.alive = {id for id in self.alive if id <= parent}
            self.epoch = Epoch(EpochId(self.epoch.id.number + 1, "0" * 8), parent)
            self._begin_epoch()

    # --- frames --------------------------------------------------------------------------

    @rule(number=st.integers(0, 2))
    def a_member_connects(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        if one.leader is None:
            one.leader = self.leader

    @rule(number=st.integers(0, 2))
    def a_report_arrives(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        if one.leader is None:
            return
        report = self._report(one)
        told, one.known = changes(one.known, report), None
        frame = MemberReport(life=f"{one.life}", nodes=len(self.machines), report=told)
        try:
            one.leader.take(one.number, frame, at=0.0)
        except UsageError:
            one.leader = None  # its former life still counts as connected
            return
        one.news = one.leader.news(one.number)
        assert one.news is not None
        assert one.news.answers == report.sequence
        assert not one.news.reply.retire or len(one.leader.connected) == len(self.machines)
        if one.news.reply.changes_since == report.sequence:
            one.known = report

    @rule(number=st.integers(0, 2))
    def something_is_news_to_a_member(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        if one.leader is not None and one.number in one.leader.connected:
            one.news = one.leader.news(one.number) or one.news

    @rule(number=st.integers(0, 2))
    def a_member_acts_on_what_has_arrived(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        told, one.news = one.news, None
        if told is None or not one.scanned:
            return
        knows = told.epoch is not None and told.epoch >= one.epochs[-1].id
        reply = told.reply if knows else replace(told.reply, retire=())
        heard = Heard(
            commit=reply.committed.get(str(Tier.LOCAL)),
            commits=frozenset(reply.commits),
            plan=reply.plan,
            retire=frozenset(reply.retire),
        )
        self._do(one, one.node.step(heard))

    @rule(number=st.integers(0, 2))
    def the_volumes_are_scanned(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        one.scanned = True
        self._list(one)

    @rule()
    def everything_settles(self) -> None:
        """All machines are connected and say all that they hold: nothing is left to be done."""
        for one in self.machines:
            self.the_volumes_are_scanned(one.number)
            self.leader.left(one.number)  # also of an earlier life that it takes to be connected
            one.leader, one.known = self.leader, None
        for _ in range(4):
            for one in self.machines:
                self.a_report_arrives(one.number)
                self.a_member_acts_on_what_has_arrived(one.number)
                self._list(one)
        assert self.leader.all_here
        whole = self._whole()
        assert len(whole) <= self.keep.last
        for one in self.machines:
            self.a_report_arrives(one.number)
            assert one.news is not None
            assert set(one.news.reply.commits) == whole

    # --- faults --------------------------------------------------------------------------

    @rule(number=st.integers(1, 2), noticed=st.booleans())
    def a_member_loses_its_connection(self, number: int, noticed: bool) -> None:
        """`noticed`: by the leader, too."""
        one = self.machines[number % len(self.machines)]
        if one.number and one.leader is not None:
            if noticed:
                one.leader.left(one.number)
            one.leader = one.known = None

    @rule(number=st.integers(0, 2))
    def a_leader_notices_the_end_of_a_connection(self, number: int) -> None:
        for leader in (self.leader, *self.old):
            for one in self.machines:
                if one.number == number and one.leader is not leader:
                    leader.left(number)

    @rule(number=st.integers(0, 2))
    def a_sidecar_is_killed(self, number: int) -> None:
        one = self.machines[number % len(self.machines)]
        if one.number and one.leader is not None:
            one.leader.left(one.number)
        self._start(one)
        if not one.number:
            self._new_leader()

    @rule(number=st.integers(0, 2))
    def a_machine_is_replaced_by_an_empty_one(self, number: int) -> None:
        """The old one may live on: if it led, so does its leader, with its members."""
        one = self.machines[number % len(self.machines)]
        one.shards = set()
        one.epochs = list(one.epochs[-1:])
        self._start(one)
        self.commit = None  # the loss of a drive may take it
        if not one.number:
            self._new_leader()

    def _new_leader(self) -> None:
        self.old.append(self.leader)
        self._lead()
        for one in self.machines[1:]:
            one.leader = one.known = None

    # --- what always holds ---------------------------------------------------------------

    @invariant()
    def the_newest_commit_is_never_retired(self) -> None:
        whole = self._whole()
        self.committed |= whole
        newest = max(whole, default=None)
        if self.commit is not None and self.commit in self.alive:
            assert newest is not None
            assert newest >= self.commit
        self.commit = newest


TestLedRun = LedRun.TestCase
TestLedRun.settings = settings(
    max_examples=200, stateful_step_count=80, print_blob=True, deadline=None
)
