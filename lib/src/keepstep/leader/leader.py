"""Leads a run: takes the reports of its members, and says to each what it needs of the rest.

The leader is the sidecar of node rank 0, and a member itself. It has no record of its own: what it
knows comes from its members since it began, so a new leader gives the same answers. It names steps
that may be deleted only while all node ranks are connected and have said everything. A member has
one connection, so of two leaders at most one ever has all of them. What an operator adds is in
`operator_requests`; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter

from keepstep.core.commit_rule import ALL_RANKS
from keepstep.core.ledger import Alarm, is_in_sorted
from keepstep.core.shard import MOST_RANKS, ShardsOfStep
from keepstep.core.suspicion import Failure, newest_failures
from keepstep.errors import UsageError
from keepstep.leader.buddies import PlaceLocation, choose_buddies
from keepstep.leader.latest_operator_answer import LatestOperatorAnswer
from keepstep.leader.node_rank_states import ReportingPod
from keepstep.leader.run_history import RunHistory
from keepstep.leader.run_ledger import RunLedger
from keepstep.steps import StepId, Tier
from keepstep.wire.member_reports import (
    LeaderReply,
    MemberReport,
    Peer,
    PinnedSteps,
    Report,
    ReportedRanks,
    ReportReply,
)
from keepstep.wire.run_reports import LeaderAnswer, RunPolicy

DUPLICATE = (
    "DuplicateNodeRank: two sidecars have node rank {}: give each machine a --node-rank of its own,"
    " or end the sidecar that is left over"
)
INTERVAL_S = 10.0
_LEAST_GAP_S = 0.05
_GAP_ALONE_S = 0.25
"""A machine alone sees its commits by itself: only deletions wait for a report."""
_MOST_REPORTS_S = 1000
"""The most reports that all members together send in a second."""


@dataclass(kw_only=True)
class _Member:
    """What the leader knows of a member beside its place in the ledger. `whole`: the ledger knows
    all that it has said on this connection. `holds`: the version of the list of peers that it has.
    `restore`: the number of the reply since which it is told the same step to go back to. `last`:
    the number of the reply that said that the leader ends."""

    life: str
    pod: str
    connected: bool = True
    leaving: bool = False
    whole: bool = False
    holds: str = ""
    sequence: int = 0
    acknowledged: int = 0
    number: int = 0
    restore: int = 0
    last: int | None = None
    sent: LeaderReply | None = None


@dataclass(frozen=True)
class _Advice:
    """What all members are told. `reply`: as far as it is the same for all. Steps are oldest
    first."""

    reply: ReportReply
    expendable: tuple[StepId, ...]
    peers: PeerMap

    def adds_little_to(self, before: _Advice) -> bool:
        """Whether a member that knows the advice before this one waits for nothing of it."""
        same = before.expendable == self.expendable and before.peers is self.peers
        return same and _can_wait(before.reply, self.reply)


@dataclass(frozen=True)
class PeerMap:
    """All machines by node rank, and who sends copies to whom. Empty until all node ranks have
    reported: a list that grows with each of them would be sent to all each time. `version`: names
    both."""

    all: Mapping[int, Peer]
    ring: Mapping[int, tuple[int, ...]]
    version: str

    def of(self, node_rank: int) -> tuple[Peer, ...]:
        """The other machines, as this one is told."""
        buddies = {rank for rank in self.ring.get(node_rank, ()) if rank in self.all}
        peers = {**self.all, **{rank: replace(self.all[rank], buddy=True) for rank in buddies}}
        peers.pop(node_rank, None)
        return tuple(peers.values())


class Leader:
    """The leader of a run of `nodes` machines; None: an operator says which pods there are. `life`:
    names this process."""

    def __init__(
        self,
        *,
        life: str,
        nodes: int | None,
        policy: RunPolicy,
        run: str = "",
        way_out: str = "",
        grid: int = 1,
    ) -> None:
        """`policy`: what the run goes by until an operator says otherwise. `way_out`: the command
        by which a person has the run begin again. `grid`: see `ArchiveConfig.step_interval`."""
        self.nodes = nodes
        self.closing = False
        self.pins = PinnedSteps()
        self.life = life
        self.ledger = RunLedger()
        self.history = RunHistory(self.ledger)
        self.requests = LatestOperatorAnswer(
            self.ledger, self.history, policy, run=run, way_out=way_out, alone=nodes is not None
        )
        self._grid = grid
        self._members: dict[int, _Member] = {}
        self._owners: dict[int, int] = {}
        self._failures: tuple[Failure, ...] = ()
        self._introduced = False
        self._advice: _Advice | None = None
        self._peers: tuple[object, PeerMap] | None = None
        self._reported: set[int] = set()
        self._patient: set[int] = set()
        """Members that are still to be answered; the patient ones wait for a commit."""
        self._published: tuple[_Advice, tuple[object, ...]] | None = None
        self._configure()

    # --- members -------------------------------------------------------------------------

    def take(self, node_rank: int, member_report: MemberReport, *, at: float) -> None:
        """Take in a member's report; `draw_conclusions` follows after one or many. Raises
        UsageError for one that is no member, or that tells of ranks or images which cannot be:
        nothing has changed then."""
        member, report = self._member(node_rank, member_report), member_report.report
        _check(report)
        self._members[node_rank] = member
        member.connected, member.leaving = True, member_report.leaving
        (self._patient if _is_of_steps(report) else self._reported).add(node_rank)
        member.holds, member.acknowledged, self._advice = (
            report.peers_version,
            member_report.heard,
            None,
        )
        sender = ReportingPod(
            pod=member.pod,
            node_rank=node_rank,
            node=member_report.node or str(node_rank),
            local_stays=self.requests.policy.outlives_pod,
        )
        believed = self._believed(node_rank, report)
        doubted, report = believed is not report, believed
        member.sequence, progress = report.sequence, self.ledger.progress
        place = self.ledger.places.get(node_rank)
        is_new = place is not None and not place.gone and place.pod != sender.pod
        before = self.requests.restart_outlook() if is_new and not sender.local_stays else None
        if self.ledger.take(sender, report, at=at):
            if before is not None:  # the new pod was here before the operator spoke of the old one
                self.requests.on_pod_deleted(node_rank, before, at=at)
            member.whole = True
            self._failures = newest_failures((*self._failures, *report.failures))
            for rank in report.ranks:
                self._owners |= dict.fromkeys(rank.ranks if rank.alive else (), node_rank)
            self.history.take_report(
                sender,
                report,
                policy=self.requests.policy,
                before=progress.step if progress is not None else None,
                at=at,
            )
        if doubted:
            self.ledger.request_full_report(node_rank)  # its owner may say so yet
        if member_report.pins.version > self.pins.version:
            self.set_pins(member_report.pins)

    def draw_conclusions(self, *, at: float) -> tuple[Alarm, ...]:
        """Draw the conclusions from all that was taken in. Returns what a person should look at;
        an operator learns of it from `history`."""
        actions, before = self.ledger.actions(), self.history.stand_in
        self.history.update_commit_and_alarms(
            actions, policy=self.requests.policy, grid=self._grid, at=at
        )
        if self.history.stand_in != before:
            self._advice = None
        return tuple(action for action in actions if isinstance(action, Alarm))

    def reject_duplicate_leader(self, member_report: MemberReport) -> None:
        """Another node rank 0 has come. Raises UsageError unless it is this sidecar itself."""
        if member_report.life != self.life:
            raise UsageError(DUPLICATE.format(0))

    def _member(self, node_rank: int, member_report: MemberReport) -> _Member:
        # pods may have any node ranks: each job of a JobSet begins at a multiple of 10,000
        misplaced = self.nodes is not None and node_rank >= self.nodes
        if misplaced or member_report.nodes != (self.nodes or 0):
            raise UsageError(
                f"node rank {node_rank} of {member_report.nodes} nodes asks to join a run of"
                f" {self.nodes}:"
                " give --nodes the same number on all machines, and --node-rank a lower one on each"
            )
        known = self._members.get(node_rank)
        if known is not None and known.life == member_report.life:
            return known
        if known is not None and known.connected:
            raise UsageError(DUPLICATE.format(node_rank))
        return _Member(life=member_report.life, pod=member_report.pod or member_report.life)

    def _believed(self, node_rank: int, report: Report) -> Report:
        """The report, without new steps of ranks that train at another member, unless that member
        has written them: nothing is committed by what others say of its bytes."""
        believed = tuple(each for rank in report.ranks for each in self._of(node_rank, rank))
        return report if believed == report.ranks else replace(report, ranks=believed)

    def _of(self, node_rank: int, reported: ReportedRanks) -> Iterable[ReportedRanks]:
        """What to believe of this entry; of each rank alone where not everything is believed."""
        owners = {self._owners.get(rank, node_rank) for rank in reported.ranks} - {node_rank}
        training = {owner: self._training(owner) & reported.bits for owner in owners}
        tiers = [tier for tier in reported.tiers if not tier.shared]
        if not any(
            ranks & ~self._known(owner, shard)
            for owner, ranks in training.items()
            for tier in tiers
            for shard in reported.shards(tier)
        ):
            return (reported,)
        return (
            self._believed_of(report, owner)
            if training.get(owner := self._owners.get(rank, node_rank), 0) >> rank & 1
            else report
            for rank, report in reported.each()
        )

    def _believed_of(self, report: ReportedRanks, owner: int) -> ReportedRanks:
        """Without the images of this rank that its owner has not written."""
        tiers = dict(report.tiers)
        for tier, tier_report in report.tiers.items():
            known = (held for held in tier_report.shards if report.bits & self._known(owner, held))
            tiers[tier] = tier_report if tier.shared else replace(tier_report, shards=tuple(known))
        return replace(report, tiers=tiers)

    def _known(self, owner: int, held: ShardsOfStep) -> int:
        """The ranks whose images of the step are old, or on the drives of the member at which they
        train, as a bitmap."""
        commit = self.ledger.find_newest_committed()
        is_old = commit is not None and held.step_id <= commit
        if is_old or held.step_id.epoch != self.ledger.core.lineage.current_epoch:
            return ALL_RANKS
        return self.ledger.core.rank_mask_at(held.step_id, (owner, Tier.LOCAL, held.world))

    def _training(self, owner: int) -> int:
        """The ranks that train at this member in the newest epoch, if it is connected; as bits."""
        if not self._members[owner].connected:
            return 0
        current, found = self.ledger.core.lineage.current_epoch, 0
        for step_id, ranks in self.ledger.places[owner].staged.items():
            found |= ranks if step_id.epoch == current else 0
        return found

    def left(self, node_rank: int) -> None:
        """The connection of this member has ended. What it holds is still there, as far as is
        known."""
        member = self._members.get(node_rank)
        if member is not None:
            member.connected = member.whole = False
            member.sent = self._advice = None

    def set_pins(self, pins: PinnedSteps) -> None:
        """From now on these are pinned."""
        self.pins = pins
        self._configure()

    def _configure(self) -> None:
        policy, self._advice = self.requests.policy, None
        beyond = (Tier.ARCHIVE,) if policy.archive_every is not None else ()
        self.ledger.configure(keep=policy.keep, pins=self._pinned, beyond=beyond)

    @property
    def _pinned(self) -> tuple[StepId, ...]:
        """Steps that stay: the pinned ones, and the one that the run is to go back to."""
        target, pinned = self.requests.restore_target, self.pins.steps
        return pinned if target is None or target in pinned else (*pinned, target)

    # --- the operator --------------------------------------------------------------------

    def handle_operator_answer(self, answer: LeaderAnswer, *, at: float) -> None:
        """The operator has answered a report of the run."""
        self.requests.apply_operator_answer(answer, connected=self.connected, at=at)
        if set(answer.pins) != set(self.pins.steps):
            self.pins = PinnedSteps(version=self.pins.version + 1, steps=tuple(sorted(answer.pins)))
        self.requests.update_requests(at=at)
        self._configure()

    def advance_clock(self, *, at: float) -> bool:
        """Called every second or so: what becomes true by waiting. Returns whether members are to
        be told of it."""
        before = self._requested()
        self.requests.update_requests(at=at)
        if changed := self._requested() != before:
            self._configure()
        return changed

    def _requested(self) -> tuple[object, ...]:
        asked = self.requests
        return (
            asked.restore_target,
            asked.fresh.is_allowed,
            asked.is_missing_data_lost,
            self.history.stand_in,
        )

    # --- asking --------------------------------------------------------------------------

    @property
    def connected(self) -> list[int]:
        """The node ranks of the members that are connected, this one among them."""
        return sorted(rank for rank, member in self._members.items() if member.connected)

    @property
    def have_all_members_reported(self) -> bool:
        """Whether all members are connected and have said everything."""
        return self._advise().reply.all_peers

    def list_unconnected_node_ranks(self) -> list[int]:
        """The node ranks that are not connected."""
        return sorted(self._expected().difference(self.connected))

    def _expected(self) -> set[int]:
        """All node ranks; those of the pods that there are, by the operator and by what they
        reported."""
        if self.nodes is not None:
            return set(range(self.nodes))
        there = {rank for rank, place in self.ledger.places.items() if not place.gone}
        return there | self.requests.list_expected_node_ranks()

    def have_members_acknowledged_end(self) -> bool:
        """Whether all connected members have acted on the reply that the leader ends."""
        return all(
            member.last is not None and member.acknowledged >= member.last
            for member in self._members.values()
            if member.connected and member.life != self.life
        )

    def is_restore_step_known(self) -> bool:
        """Whether all members know which step the run is to go back to."""
        target = self.requests.restore_target
        return not self.list_unconnected_node_ranks() and all(
            member.sent is not None
            and member.sent.reply.restore_from == target
            and member.acknowledged >= member.restore
            for member in self._members.values()
            if member.connected
        )

    def list_members_with_news(self, *, patient: bool = False) -> list[int]:
        """The members for whom there may be news: all if what all are told has changed, else those
        that have reported since. `patient`: without those that can wait for the next commit."""
        advice, rest = self._advise(), (self.requests.left_shards, self.closing, self.pins)
        before, self._published = self._published, (advice, rest)
        changed = before is None or before[1] != rest or not advice.adds_little_to(before[0])
        due = self._reported if patient else self._reported | self._patient
        node_ranks = [node_rank for node_rank in self.connected if changed or node_rank in due]
        self._reported.clear()
        if changed or not patient:
            self._patient.clear()
        return node_ranks

    @property
    def owes_answer(self) -> bool:
        """Whether a member that can wait is still to be answered."""
        return bool(self._patient)

    def news(self, node_rank: int) -> LeaderReply | None:
        """What the member is to be told now; None if it knows that already, or if it can wait for
        the answer to its next report."""
        member = self._members[node_rank]
        reply = self._reply(node_rank, member)
        sent = member.sent
        same = sent is not None and _FRAME(sent) == _FRAME(reply)
        if sent is not None and same and _can_wait(sent.reply, reply.reply):
            return None
        member.number = reply.number
        if self.closing and member.last is None:
            member.last = reply.number
        if member.sent is None or member.sent.reply.restore_from != reply.reply.restore_from:
            member.restore = reply.number
        member.sent = reply
        return reply

    def _reply(self, node_rank: int, member: _Member) -> LeaderReply:
        advice, held = self._advise(), sorted(self.ledger.list_steps_on_node_volumes(node_rank))
        peers, left = advice.peers, self.requests.left_shards
        return LeaderReply(
            number=member.number + 1,
            answers=member.sequence,
            epoch=self.ledger.core.lineage.current_epoch,
            closing=self.closing,
            pins=self.pins,
            reply=replace(
                advice.reply,
                commits=tuple(
                    step_id for step_id in held if is_in_sorted(step_id, advice.reply.commits)
                ),
                retire=tuple(
                    step_id for step_id in held if is_in_sorted(step_id, advice.expendable)
                ),
                peers=() if peers.version == member.holds else peers.of(node_rank),
                peers_version=peers.version,
                agents=left.agents_of(node_rank),
                awaits=left.wait_reason(node_rank),
                changes_since=self.ledger.get_last_sequence(node_rank, member.pod),
            ),
        )

    def _advise(self) -> _Advice:
        if self._advice is None:
            self._advice = self._work_out()
        return self._advice

    def _work_out(self) -> _Advice:
        ledger, asked = self.ledger, self.requests
        known = {rank for rank, member in self._members.items() if member.whole}
        here = ledger.settled and known.issuperset(self._expected())
        paused = asked.answer.paused
        return _Advice(
            reply=ReportReply(
                interval_s=INTERVAL_S,
                least_gap_s=self._gap_s,
                committed={str(tier): step_id for tier, step_id in ledger.watermarks().items()},
                commits=ledger.commits(),
                plan=None if paused else asked.restore_target or ledger.find_restart_step(),
                pinned=self._pinned,
                all_peers=here,
                leaving=asked.has_terminating_pod or any(self._leaving()),
                restore_from=asked.restore_target,
                authorities=asked.answer.authorities,
                archive=self.history.stand_in,
                failures=self._failures,
                begin_again=asked.fresh.is_allowed,
                gone_for_good=asked.is_missing_data_lost,
            ),
            expendable=ledger.expendable() if here and not paused else (),
            peers=self.peers(),
        )

    @property
    def _gap_s(self) -> float:
        if self.nodes == 1:
            return _GAP_ALONE_S
        return max(_LEAST_GAP_S, len(self._members) / _MOST_REPORTS_S)

    def _leaving(self) -> Iterator[bool]:
        return (member.leaving for member in self._members.values() if member.connected)

    def peers(self) -> PeerMap:
        """Where all machines are, and who sends to whom. There is no ring before all are known: one
        of half the run would send gigabytes to buddies that are replaced a second later. The place
        of a pod that is gone stays in it until all are there again, so its restart moves no
        copies."""
        places, settled = self.ledger.places, self.ledger.settled
        known = settled if self.nodes is None else len(places) == self.nodes
        self._introduced = self._introduced or known
        domains, replicas = self.requests.domains(), self.requests.policy.replicas
        of = places.moved, settled, self._introduced, domains, replicas
        if self._peers is None or self._peers[0] != of:
            served = {
                rank: Peer(node_rank=rank, address=place.sidecar.peer_address)
                for rank, place in sorted(places.items())
                if place.sidecar.peer_address and not place.gone and self._introduced
            }
            spots = {
                rank: PlaceLocation(place.node, domains.get(rank) or place.node)
                for rank, place in places.items()
                if self._introduced and not (settled and place.gone)
            }
            ring = choose_buddies(spots, replicas=replicas)
            named = repr((served, ring)).encode()
            self._peers = of, PeerMap(served, ring, blake2b(named, digest_size=12).hexdigest())
        return self._peers[1]


def _check(report: Report) -> None:
    """Raises UsageError for what cannot be: the ledger keeps a bit for each rank, and 64 for the
    size of an image."""
    named = 0
    for rank in report.ranks:
        ranks, runs = rank.ranks, f"{rank.ranks.runs}"[:100]
        if not ranks or not ranks.is_encoded_as_ranges or not ranks.last < rank.world <= MOST_RANKS:
            raise UsageError(f"ranks {runs} of {rank.world} are invalid")
        if named & rank.bits:
            raise UsageError(f"ranks {runs} are reported twice")
        named |= rank.bits
        for image in rank.shards():
            if not image.is_well_formed(ranks):
                raise UsageError(f"ranks {runs} report invalid images: {image}"[:300])


def _is_of_steps(report: Report) -> bool:
    """Whether it adds steps on the drives of a machine that was known before."""
    return bool(report.since) and any(Tier.LOCAL in rank.tiers for rank in report.ranks)


def _can_wait(was: ReportReply, now: ReportReply) -> bool:
    """Whether a member that was told `was` waits for nothing of `now`: it differs in steps that
    are gone, or that memory alone holds."""
    local = str(Tier.LOCAL)
    if was.committed.get(local) != now.committed.get(local):
        return False
    ahead = was.plan is not None and now.plan is not None and was.plan <= now.plan
    return (
        (ahead or was.plan == now.plan)
        and {*now.commits} <= {*was.commits}
        and _REST(was) == _REST(now)
    )


# a reply to each member is compared several times a step, so without copies of it
_FRAME = attrgetter(*({field.name for field in fields(LeaderReply)} - {"number", "reply"}))
_REST = attrgetter(
    *({field.name for field in fields(ReportReply)} - {"committed", "commits", "plan"}),
)
