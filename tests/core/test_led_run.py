"""A run that leads itself, as a state machine: members, leaders, partitions, losses.

The real code makes all decisions: `Leader`, and on each machine a `Node` and the channel that tells
it what the leader says. Drives are sets of names. A member has one connection; either side may
notice its end first, and a reply that has arrived may be acted on after the next leader has begun.
A machine that was replaced may live on, with its drive, its leader and the members of that one.

What must hold follows from two things alone, in a much simpler way than in the code: what lies on
drives, and what each member has said to each leader last (`Word`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.ledger import EpochStarted
from keepstep.core.node import (
    Event,
    LastReply,
    Listed,
    Node,
    Overwritten,
    Publish,
    RanksServed,
    Retire,
    Sealed,
    WriteEnded,
)
from keepstep.core.retention import Retention, superseded_copies
from keepstep.core.schedule import StepGrid, Write
from keepstep.core.shard import Ranks, Shard
from keepstep.core.slot_table import SlotTable
from keepstep.errors import UsageError
from keepstep.leader.leader import Leader
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import LeaderReply, MemberReport, Report, ReportedRanks
from keepstep.wire.run_reports import RunPolicy
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.report.leader_channel import LinkChannel
from keepstep_sidecar.report.report import reduce_to_changes, report_other_pods_rank
from tests.core.test_states import watched_node  # noqa: F401
from tests.leader.runs import credentials

_SLOTS = 4
_NOWHERE = "127.0.0.1:1"
_CREDENTIALS = credentials(1)
_encode = msgspec.json.encode


@dataclass(frozen=True)
class Word:
    """The last whole word of a member to a leader: which steps of its own rank, and of the rank
    whose buddy it is, lie on its drive."""

    machine: Machine
    life: str
    sequence: int
    saved: StepId | None
    shards: frozenset[StepId]
    copies: frozenset[StepId]


@dataclass(eq=False)
class Host:
    """A leader. `words`: by node rank, what it was told; `live`: by node rank, the life whose
    connection it has not seen end and which has said everything on it."""

    leader: Leader
    words: dict[int, Word] = field(default_factory=dict)
    live: dict[int, str] = field(default_factory=dict)

    def left(self, number: int) -> None:
        self.leader.left(number)
        self.live.pop(number, None)


@dataclass(eq=False)
class Machine:
    """One machine with one rank; it keeps copies for the rank before it. `known`: the last report,
    if its leader can go on from that one. `reply`: a reply that has arrived. `to`: the leader to
    which it is connected. `hosts`: its own leader. `record`: the newest commit that it has noted on
    its drive."""

    number: int
    shards: set[StepId] = field(default_factory=set)
    copies: set[StepId] = field(default_factory=set)
    epochs: list[Epoch] = field(default_factory=list)
    record: StepId | None = None
    alive: bool = False
    saved: StepId | None = None
    # of a process of its sidecar
    life: str = ""
    scanned: bool = False
    sequence: int = 0
    known: Report | None = None
    reply: LeaderReply | None = None
    to: Host | None = None
    hosts: Host | None = None
    frames: list[tuple[Host, MemberReport, Word]] = field(default_factory=list)
    shown: set[StepId] = field(default_factory=set)
    slots: SlotTable = field(default_factory=lambda: SlotTable(_SLOTS))
    settled: bool = True
    node: Node = field(init=False)
    channel: LinkChannel = field(init=False)

    def slot_tables(self) -> tuple[SlotTable, ...]:
        return (self.slots,)


class LedRun(RuleBasedStateMachine):
    """Two or three machines. Machine 0 hosts the leader. `past`: replaced machines that live on."""

    @initialize(nodes=st.sampled_from([1, 2, 2, 3, 3]), keep=st.integers(1, 2))
    def begin(self, nodes: int, keep: int) -> None:
        self.keep, self.nodes = Retention(last=keep), nodes
        self.lives, self.now, self.number_of_epochs = 0, 0.0, 0
        self._begin_run()

    def _begin_run(self) -> None:
        """The run begins with nothing on any drive."""
        self.machines = [Machine(number) for number in range(self.nodes)]
        self.past: list[Machine] = []
        self.alive: set[StepId] = set()  # steps that no later life left behind
        self.ever_whole: set[StepId] = set()
        self.named: set[StepId] = set()  # commits, by any leader
        self.floor: StepId | None = None  # the newest step that was whole, but for lost drives
        for machine in self.machines:
            self._start(machine)
            self._scan(machine)
        self._begin_epoch(None)

    # --- parts ---------------------------------------------------------------------------

    def _all(self) -> list[Machine]:
        """All machines that there are."""
        return [*self.machines, *self.past]

    def _one(self, number: int) -> Machine:
        """Mostly a machine of the run, sometimes one that was replaced."""
        there = self._all()
        return there[number % len(there)]

    def _hosts(self) -> list[Host]:
        """All leaders that there are, the run's own first."""
        return [machine.hosts for machine in self._all() if machine.hosts is not None]

    def _start(self, machine: Machine) -> None:
        """Its sidecar begins."""
        self.lives += 1
        machine.life, machine.sequence, machine.scanned, machine.shown = (
            f"{self.lives}",
            0,
            False,
            set(),
        )
        machine.known, machine.reply, machine.to, machine.frames = None, None, None, []
        machine.slots = SlotTable(_SLOTS)
        machine.node = Node({machine.number: machine}, grid=StepGrid(1), keep=self.keep,
                        alone=self.nodes == 1,
                        began=self.now)  # fmt: skip
        machine.node.leader_view.remember(LastReply(commit=machine.record))
        for epoch in machine.epochs:
            self._feed(machine, EpochStarted(epoch))
        link = LeaderConnection(
            _NOWHERE, _CREDENTIALS, take=lambda frame: None, changed=lambda: None
        )
        machine.channel = LinkChannel(
            link,
            frame=self._frame(machine, Report(sidecar="", started_at=0.0, sequence=0)),
            changes=ChangeNotifier(),
            epoch=lambda: machine.epochs[-1].id if machine.epochs else None,
            leaves=lambda: False,
        )
        if machine.number == 0:
            self._lead(machine)

    def _lead(self, own: Machine) -> None:
        """Its sidecar hosts a new leader. To the one before, nobody is connected any more."""
        for machine in self._all():
            if own.hosts is not None and machine.to is own.hosts:
                machine.to = None
        policy = RunPolicy(keep=self.keep, outlives_pod=False, restarts=False)
        own.hosts = own.to = Host(Leader(life=own.life, nodes=self.nodes, policy=policy))

    def _frame(self, machine: Machine, report: Report) -> MemberReport:
        return MemberReport(life=machine.life, nodes=self.nodes, report=report)

    def _feed(self, machine: Machine, event: Event) -> None:
        for action in machine.node.step(event, self.now):
            if isinstance(action, Write):
                machine.shards.add(action.id)
                self._feed(machine, WriteEnded(machine.number, action.id))
            elif isinstance(action, Retire):
                self._retire(machine, action.id)
            elif isinstance(action, Publish):
                assert action.id in self._whole() | self.ever_whole, "shown, but never whole"
                machine.shown.add(action.id)

    def _retire(self, machine: Machine, step_id: StepId) -> None:
        machine.shards.discard(step_id)

    def _list(self, machine: Machine) -> None:
        if machine.scanned:
            held = {machine.number: {Tier.LOCAL: self._listed(machine.number, machine.shards)}}
            self._feed(machine, Listed(ranks=held, shown=machine.shown))

    def _listed(self, rank: int, ids: Iterable[StepId]) -> ReportedTier:
        return ReportedTier.from_shards(self._shards(rank, ids))

    def _shards(self, rank: int, ids: Iterable[StepId]) -> Iterator[Shard]:
        return (
            Shard(step_id=step_id, rank=rank, world=self.nodes, root="r") for step_id in sorted(ids)
        )

    def _before(self, number: int) -> int:
        """The rank of which this machine keeps copies."""
        return (number - 1) % self.nodes

    # --- what lies on drives ---------------------------------------------------------------

    def _on(self, drives: Iterable[Machine]) -> set[StepId]:
        """The live steps of which these drives have all shards."""
        found: dict[int, set[StepId]] = {rank: set() for rank in range(self.nodes)}
        for drive in drives:
            found[drive.number] |= drive.shards
            found[self._before(drive.number)] |= drive.copies
        return set.intersection(*found.values()) & self.alive

    def _whole(self) -> set[StepId]:
        found = self._on(self._all())
        self.ever_whole |= found
        return found

    # --- training ------------------------------------------------------------------------

    def _trains(self) -> bool:
        return all(machine.alive for machine in self.machines)

    def _save(self, machine: Machine, *, staged: bool = True) -> None:
        """Its next step, unless others lag behind: steps are in lock step. `staged`: otherwise its
        drive is too slow, and it leaves this step out."""
        parent = self.epoch.parent.step if self.epoch.parent is not None else -1
        reached = {
            each.number: parent if each.saved is None else each.saved.step for each in self.machines
        }
        if reached[machine.number] != min(reached.values()):
            return
        step_id = machine.saved = StepId(self.epoch.id, reached[machine.number] + 1)
        self.alive.add(step_id)
        if staged:
            self._stage(machine, step_id)
        self._whole()
        self._list(machine)

    def _stage(self, machine: Machine, step_id: StepId) -> None:
        index = machine.slots.assign()
        assert index is not None
        if (lost := machine.slots.slots[index].id) is not None:
            self._feed(machine, Overwritten(machine.number, lost))
        machine.slots.seal(index, step_id)
        self._feed(machine, Sealed(machine.number, step_id))

    @precondition(_trains)
    @rule(number=st.integers(0, 2), staged=st.sampled_from([True, True, False]))
    def a_machine_saves_its_next_step(self, number: int, staged: bool) -> None:
        self._save(self.machines[number % self.nodes], staged=staged)

    @precondition(_trains)
    @rule(steps=st.integers(1, 3))
    def the_run_trains_on(self, steps: int) -> None:
        for _ in range(steps):
            for machine in self.machines:
                self._save(machine)

    @rule()
    def the_trainers_start_again(self) -> None:
        """From the newest step that the run's machines have; from nothing if there is none, as a
        person says then."""
        parent = max(self._on(self.machines), default=None)
        if parent is None:
            if self.alive:
                self._begin_run()
            return
        self.alive = {step_id for step_id in self.alive if step_id <= parent}
        self._begin_epoch(parent)

    def _begin_epoch(self, parent: StepId | None) -> None:
        """Each restores the parent, and writes it where it is missing. No older word may take
        it."""
        self.floor = parent
        self.number_of_epochs += 1
        self.epoch = Epoch(EpochId(self.number_of_epochs, "0" * 8), parent)
        for machine in self.machines:
            machine.alive, machine.saved = True, None
            machine.epochs.append(self.epoch)
            self._feed(machine, RanksServed(frozenset({machine.number}), _SLOTS))
            if parent is not None and machine.slots.find_slot(parent) is None:
                spare = set(machine.slots.list_sealed_steps())
                index = machine.slots.reserve_slot_for_load(spare)
                assert index is not None
                machine.slots.seal(index, parent)
            self._feed(machine, EpochStarted(self.epoch))
            self._list(machine)

    @rule(number=st.integers(0, 2), late=st.booleans())
    def a_buddy_gets_a_shard(self, number: int, late: bool) -> None:
        """`late`: the oldest one, which was long on its way."""
        self._copy(self.machines[number % self.nodes], min if late else max)

    @rule()
    def all_buddies_get_the_newest_shard(self) -> None:
        for machine in self.machines:
            self._copy(machine)

    def _copy(self, machine: Machine, which: Callable[[set[StepId]], StepId] = max) -> None:
        """Then the buddy gives up what the sender does not need."""
        buddy = self.machines[(machine.number + 1) % self.nodes]
        if buddy is not machine and machine.scanned and buddy.scanned and machine.shards:
            buddy.copies.add(which(machine.shards))
            held, needed = {machine.number: buddy.copies}, {machine.number: machine.shards}
            for step_id, _ in superseded_copies(held, needed, committed=machine.node.last_commit()):
                buddy.copies.discard(step_id)

    # --- reports -------------------------------------------------------------------------

    def _report(self, machine: Machine) -> Report:
        held = self._listed(machine.number, machine.shards)
        tiers = {
            Tier.MEMORY: ReportedTier.from_shards(()),
            Tier.LOCAL: held if machine.scanned else ReportedTier(answer=TierAnswer.UNKNOWN),
        }
        ranks: list[ReportedRanks] = []
        if machine.alive or (machine.scanned and machine.shards):
            ranks.append(
                ReportedRanks(
                    ranks=Ranks.of((machine.number,)),
                    world=self.nodes,
                    alive=machine.alive,
                    staged=machine.saved,
                    tiers=tiers,
                )
            )
        if machine.scanned and machine.copies:
            rank = self._before(machine.number)
            ranks.append(report_other_pods_rank(rank, list(self._shards(rank, machine.copies))))
        machine.sequence += 1
        return Report(
            sidecar="test",
            started_at=-float(machine.life),  # no clock counts
            sequence=machine.sequence,
            ready=machine.scanned,
            epochs=tuple(machine.epochs),
            ranks=tuple(ranks),
        )

    def _speak(
        self, machine: Machine, *, answered: bool = True, lies: Sequence[ReportedRanks] = ()
    ) -> None:
        """A report arrives at its leader. `answered`: so does the answer."""
        if machine.to is None:
            return
        report = self._report(machine)
        lied_ranks = {lie.ranks for lie in lies}
        true = (each for each in report.ranks if each.ranks not in lied_ranks)
        report = replace(report, ranks=(*true, *lies))
        news, machine.known = reduce_to_changes(machine.known, report), None
        word = Word(
            machine=machine,
            life=machine.life,
            sequence=report.sequence,
            saved=machine.saved,
            shards=frozenset(machine.shards if machine.scanned else ()),
            copies=frozenset(machine.copies if machine.scanned else ()),
        )
        frame = self._frame(machine, news)
        machine.frames = [*machine.frames[-3:], (machine.to, frame, word)]
        if not self._take(machine, machine.to, frame, word):
            return
        reply = self._reply(machine)
        assert reply is not None, "each report has an answer"
        assert reply.answers == report.sequence
        if not answered:
            machine.to = None
            return
        self._deliver(machine, reply)
        if reply.reply.changes_since == report.sequence:
            machine.known = report

    def _take(self, machine: Machine, host: Host, frame: MemberReport, word: Word) -> bool:
        try:
            host.leader.take(machine.number, frame, at=self.now)
        except UsageError:
            machine.to = None  # its former life, or another machine of its number, is connected
            return False
        before, since = host.words.get(machine.number), frame.report.since
        goes_on = before is not None and (before.life, before.sequence) == (machine.life, since)
        if before is not None and before.life == machine.life and word.sequence < before.sequence:
            return True  # it is old
        if not since or goes_on:
            host.words[machine.number], host.live[machine.number] = word, machine.life
        for number, latest in host.words.items():
            assert host.leader.ledger.list_steps_on_node_volumes(number) == latest.shards, (
                "it takes each at its last word"
            )
        return True

    def _reply(self, machine: Machine) -> LeaderReply | None:
        """What its leader tells it now, if that is news."""
        host = machine.to
        assert host is not None
        host.leader.draw_conclusions(at=self.now)
        reply = host.leader.news(machine.number)
        if reply is None:
            return None
        reply_ = reply.reply
        commits = {*reply_.commits, *filter(None, [reply_.committed.get(str(Tier.LOCAL))])}
        named = {*commits, *filter(None, [reply_.plan])}
        assert named <= self._whole() | self.ever_whole, "named, but never whole"
        self.named |= commits
        if reply_.retire:
            assert len(host.live) == self.nodes, "it names what may go, and does not know all"
            words = {number: host.words[number] for number in host.live}
            assert all(host.live[number] == word.life for number, word in words.items())
            whole = [
                {*word.shards, *words[(number + 1) % self.nodes].copies}
                for number, word in words.items()
            ]
            newest = max(set.intersection(*whole))
            assert all(step_id < newest for step_id in reply_.retire), (
                "no newer step is whole by their words"
            )
        return reply

    @rule(number=st.integers(0, 4), leader=st.integers(0, 3))
    def a_member_connects(self, number: int, leader: int) -> None:
        machine, hosts = self._one(number), self._hosts()
        if machine.to is None:
            self._connect(machine, hosts[leader % len(hosts)])

    def _connect(self, machine: Machine, host: Host) -> None:
        """A second connection of one process ends the first (`Hub.enter`)."""
        if machine.hosts is None and machine.to is not host:
            if host.live.get(machine.number) == machine.life:
                host.left(machine.number)
            machine.to = host

    @precondition(lambda self: self.nodes > 1 and len(self._hosts()) > 1)
    @rule(number=st.integers(1, 2), leader=st.integers(0, 3), back=st.booleans())
    def a_member_goes_to_another_leader(self, number: int, leader: int, back: bool) -> None:
        """`back`: and comes back to the one before, which need not have noticed."""
        machine, hosts = self.machines[number % self.nodes], self._hosts()
        before = machine.to
        self._connect(machine, hosts[leader % len(hosts)])
        for _ in range(2):  # it is asked for a whole report first
            self._speak(machine)
        if back and before is not None:
            self._connect(machine, before)
            self._speak(machine)

    @rule(number=st.integers(0, 4), answered=st.sampled_from([True, True, True, False]))
    def a_member_speaks(self, number: int, answered: bool) -> None:
        self._speak(self._one(number), answered=answered)

    @precondition(_trains)
    @rule(number=st.integers(0, 2), tier=st.sampled_from([Tier.MEMORY, Tier.LOCAL, Tier.PEER]))
    def a_member_claims_that_its_newest_step_is_whole(self, number: int, tier: Tier) -> None:
        """It says that it holds the step of all others, which train and are connected."""
        self._all_speak(act=True)
        machine = self.machines[number % self.nodes]
        others = [each for each in self.machines if each is not machine]
        if all(self._is_known(each, machine.to) for each in others):
            self._save(machine)
            new = {step_id for step_id in machine.shards if step_id == machine.saved}
            claims = [
                ReportedRanks(
                    ranks=Ranks.of((each.number,)),
                    world=self.nodes,
                    alive=False,
                    tiers={tier: self._listed(each.number, new)},
                )
                for each in others
            ]
            self._speak(machine, lies=claims)

    def _is_known(self, machine: Machine, host: Host | None) -> bool:
        """Whether a leader knows that it trains in the newest epoch, and what it holds."""
        here = (
            host is not None
            and machine.to is host
            and host.live.get(machine.number) == machine.life
        )
        return here and machine.saved is not None

    @rule(number=st.integers(0, 4))
    def something_is_news_to_a_member(self, number: int) -> None:
        machine = self._one(number)
        if machine.to is not None and machine.to.live.get(machine.number) == machine.life:
            reply = self._reply(machine)
            if reply is not None:
                self._deliver(machine, reply)

    @rule(number=st.none() | st.integers(0, 4))
    def members_act_on_what_has_arrived(self, number: int | None) -> None:
        """One, or all."""
        for machine in self._all() if number is None else [self._one(number)]:
            self._act(machine)

    def _deliver(self, machine: Machine, reply: LeaderReply) -> None:
        machine.reply = reply
        machine.channel.handle_frame(_encode(reply))

    def _act(self, machine: Machine) -> None:
        reply, machine.reply = machine.channel.take_pushed(), None
        if reply is None or not machine.scanned:
            return
        self._feed(
            machine,
            LastReply(
                commit=reply.committed.get(str(Tier.LOCAL)),
                commits=frozenset(reply.commits),
                plan=reply.plan,
                pinned=frozenset(reply.pinned),
                retire=frozenset(reply.retire),
            ),
        )
        machine.record = machine.node.leader_view.commit

    @rule(act=st.booleans())
    def all_speak(self, act: bool) -> None:
        self._all_speak(act=act)

    def _all_speak(self, *, act: bool) -> None:
        for machine in self._all():
            self._scan(machine)
            if machine.to is None:
                self._connect(machine, self._hosts()[0])
            self._speak(machine)
        for machine in self._all() if act else ():
            self._act(machine)
            self._list(machine)

    @rule(number=st.integers(0, 4), which=st.integers(0, 3))
    def an_earlier_frame_arrives_again(self, number: int, which: int) -> None:
        machine = self._one(number)
        frames = [each for each in machine.frames if each[0] is machine.to]
        if (
            frames
            and machine.to is not None
            and machine.to.live.get(machine.number) == machine.life
        ):
            self._take(machine, *frames[which % len(frames)])

    @rule(number=st.integers(0, 4))
    def the_volumes_are_scanned(self, number: int) -> None:
        self._scan(self._one(number))

    def _scan(self, machine: Machine) -> None:
        machine.scanned = True
        self._list(machine)

    @rule()
    def everything_settles(self) -> None:
        """All machines are connected and say all that they hold: nothing is left to be done."""
        while self.past:
            self._end(self.past.pop())
        host = self._hosts()[0]
        for machine in self.machines:
            self._scan(machine)
            host.left(machine.number)  # also of an earlier life that it takes to be connected
            machine.to, machine.known = host, None
        for _ in range(4):
            for machine in self.machines:
                self._speak(machine)
                self._act(machine)
                self._list(machine)
        assert host.leader.have_all_members_reported or not self._trains()
        whole = self._whole()
        ours = set.intersection(*(machine.shards for machine in self.machines)) & self.alive
        for machine in self.machines:
            self._speak(machine)
            news = host.leader.news(machine.number)
            sent = host.leader._members[machine.number].sent
            assert news is None
            assert sent is not None
            assert ours & machine.shards <= set(sent.reply.commits) <= whole
            assert not self._trains() or sent.reply.plan == max(whole, default=None)
            assert not self._trains() or not sent.reply.retire

    # --- faults --------------------------------------------------------------------------

    @rule(number=st.integers(1, 4), noticed=st.booleans(), long=st.booleans())
    def a_member_is_cut_off(self, number: int, noticed: bool, long: bool) -> None:
        """`noticed`: by the leader, too. `long`: a minute passes; whoever hears nothing then takes
        its leader to be away."""
        self.now += 61.0 if long else 0.0
        machine = self._one(number)
        if machine.hosts is None and machine.to is not None:
            if noticed and machine.to.live.get(machine.number) == machine.life:
                machine.to.left(machine.number)
            machine.to = None

    @rule(number=st.integers(0, 2))
    def leaders_notice_that_a_connection_has_ended(self, number: int) -> None:
        for host in self._hosts():
            there = {
                machine.life
                for machine in self._all()
                if machine.number == number and machine.to is host
            }
            if host.live.get(number) not in there:
                host.left(number)

    @rule(number=st.integers(0, 4), scanned=st.booleans())
    def a_sidecar_is_killed(self, number: int, scanned: bool) -> None:
        machine = self._one(number)
        if machine.to is not None and machine.hosts is None:
            machine.to.left(machine.number)
        self._start(machine)
        if machine.alive:
            self._feed(machine, RanksServed(frozenset({machine.number}), _SLOTS))
        if scanned:
            self._scan(machine)

    @rule(
        number=st.integers(0, 2),
        behind=st.sampled_from([None, 0, 1, 2]),
        late=st.booleans(),
        acted=st.booleans(),
        lives_on=st.booleans(),
        trains_on=st.booleans(),
    )
    def a_machine_is_replaced_by_an_empty_one(
        self,
        number: int,
        behind: int | None,
        late: bool,
        acted: bool,
        lives_on: bool,
        trains_on: bool,
    ) -> None:
        """The training has ended. If the old machine lives on, so does its leader, with its
        members, which may come back to it. Nothing can be asked for where no copy is left.

        `behind`: how many steps the buddies were behind when all had spoken last; None: whatever
        they are. `late`: what they had came only then. `acted`: on what all heard. `trains_on`: the
        trainers start again at once, and only then is acted on what has arrived.
        """
        if behind is not None and self._trains():
            self.the_run_trains_on(1)
            if not late:
                self.all_buddies_get_the_newest_shard()
            self.the_run_trains_on(behind)
            self._all_speak(act=acted)
            for machine in self.machines if late else ():
                self._copy(machine, min)
        old = self.machines[number % self.nodes]
        if not self._on(machine for machine in self.machines if machine is not old):
            return
        for machine in self.machines:
            machine.alive, machine.saved = False, None
        self.machines[old.number] = Machine(old.number)
        self._start(self.machines[old.number])
        if lives_on:
            self.past.append(old)
        else:
            self._end(old)
        if trains_on:
            self.the_trainers_start_again()
            self.members_act_on_what_has_arrived(None)

    @precondition(lambda self: self.past)
    @rule()
    def a_replaced_machine_ends(self) -> None:
        self._end(self.past.pop(0))

    def _end(self, old: Machine) -> None:
        for machine in self._all():
            if old.hosts is not None and machine.to is old.hosts:
                machine.to = None
        self._lose_drives()

    def _lose_drives(self) -> None:
        """What the loss of a drive leaves is all that can be asked for."""
        self.floor = self._promised()

    def _promised(self) -> StepId | None:
        """What no deletion may take: the newest step that all have; of a run in which a machine
        hears nothing of its leader, the newest one that was named a commit. A machine that has
        heard in this epoch that a step may go might have been faster than the loss of a drive."""
        silent = any(machine.node.leader_view.is_leader_silent(self.now) for machine in self._all())
        going = {
            step_id
            for machine in self._all()
            if machine.reply
            and machine.reply.epoch
            and machine.epochs
            and machine.reply.epoch >= machine.epochs[-1].id
            for step_id in machine.reply.reply.retire
        }
        kept = self._whole() - going
        return max(kept & self.named if silent else kept, default=None)

    # --- what always holds ---------------------------------------------------------------

    @invariant()
    def the_newest_commit_is_never_retired(self) -> None:
        newest = max(self._whole(), default=None)
        if self.floor is not None and self.floor in self.alive:
            assert newest is not None, "nothing is whole any more"
            assert newest >= self.floor, "the newest whole step is gone"
        self.floor = self._promised()


TestLedRun = LedRun.TestCase
TestLedRun.settings = settings(
    max_examples=250, stateful_step_count=80, print_blob=True, deadline=None
)
