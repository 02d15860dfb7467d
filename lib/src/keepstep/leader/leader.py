"""Leads a run: takes the reports of its members, and says to each what it needs of the rest.

The leader is the sidecar of node rank 0, and a member itself. It has no record of its own: what it
knows comes from its members since it began, so a new leader gives the same answers. It names steps
that may be deleted only while all node ranks are connected and have said everything. A member has
one connection, so of two leaders at most one ever has all of them. What an operator adds is in
`requests`; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.ledger import is_among
from keepstep.core.suspicion import Failure, newest
from keepstep.errors import UsageError
from keepstep.leader.bounds import checked
from keepstep.leader.buddies import Spot, buddies
from keepstep.leader.history import RunHistory
from keepstep.leader.node_rank import Sender
from keepstep.leader.requests import Requests
from keepstep.leader.run_ledger import LARGEST_WORLD, MOST_RANKS, RunLedger
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import (
    LeaderReply,
    MemberReport,
    Peer,
    Pins,
    Report,
    ReportedRank,
    ReportReply,
)
from keepstep.wire.runs import Requested, RunPolicy

DUPLICATE = (
    "DuplicateNodeRank: two sidecars have node rank {}: give each machine a --node-rank of its own,"
    " or end the one that is left over"
)
MOST_NODES = 4096
INTERVAL_S = 10.0
_LEAST_GAP_S = 0.05


@dataclass(kw_only=True)
class _Member:
    """What the leader knows of a member beside its place in the ledger. `order`: grows with each
    sidecar that is a member. `holds`: the version of the list of peers that it has. `restore`: the
    number of the reply since which it is told the same step to go back to."""

    life: str
    order: int
    connected: bool = True
    holds: str = ""
    sequence: int = 0
    heard: int = 0
    number: int = 0
    restore: int = 0
    sent: LeaderReply | None = None


@dataclass(frozen=True)
class _Advice:
    """What all members are told. `reply`: as far as it is the same for all. Steps are oldest
    first."""

    reply: ReportReply
    expendable: tuple[StepId, ...]
    peers: Mapping[int, str]
    ring: Mapping[int, tuple[int, ...]]


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
        pins: Pins | None = None,
    ) -> None:
        """`policy`: what the run goes by until an operator says otherwise. `way_out`: the command
        by which a person has the run begin again. `grid`: see `ArchiveConfig.base`. `pins`: those
        on record here."""
        self.nodes = nodes
        self.closing = False
        self.pins = pins or Pins()
        self.life = life
        self.ledger = RunLedger()
        self.history = RunHistory(self.ledger)
        self.requests = Requests(
            self.ledger, self.history, policy, run=run, way_out=way_out, alone=nodes is not None
        )
        self._grid = grid
        self._members: dict[int, _Member] = {}
        self._owners: dict[int, int] = {}
        self._failures: tuple[Failure, ...] = ()
        self._lives = 0
        self._introduced = False
        self._advice: _Advice | None = None
        self._configure()

    # --- members -------------------------------------------------------------------------

    def take(self, node_rank: int, told: MemberReport, *, at: float) -> None:
        """Take in a member's report. Raises UsageError for one that is no member: nothing has
        changed then."""
        member = self._member(node_rank, told)
        report = checked(told.report)
        if self._members.get(node_rank) is not member:
            self._lives += 1
            member.order = self._lives
            self._members[node_rank] = member
        member.connected = True
        member.holds, member.heard, self._advice = report.peers_version, told.heard, None
        sender = Sender(
            pod=told.pod or member.life,
            node_rank=node_rank,
            node=told.node or str(node_rank),
            created_at=f"{member.order:020}",
            local_stays=self.requests.policy.outlives_pod,
        )
        most_world = min(LARGEST_WORLD, MOST_RANKS * (self.nodes or len(self._members)))
        report = replace(report, ranks=self._believed(node_rank, report))
        member.sequence, progress = report.sequence, self.ledger.progress
        said = self.ledger.take(sender, report, at=at, most_world=most_world)
        if said is not None:
            self._failures = newest((*self._failures, *report.failures))
            self._owners |= {one.rank: node_rank for one in report.ranks if one.alive}
            self.history.took(
                sender,
                report,
                said,
                policy=self.requests.policy,
                grid=self._grid,
                before=progress.step if progress is not None else None,
                at=at,
            )
        if told.pins.version > self.pins.version:
            self.pin(told.pins)

    def meet(self, told: MemberReport) -> None:
        """Another node rank 0 has come. Raises UsageError unless it is this sidecar itself."""
        if told.life != self.life:
            raise UsageError(DUPLICATE.format(0))

    def _member(self, node_rank: int, told: MemberReport) -> _Member:
        if told.nodes != (self.nodes or 0) or not 0 <= node_rank < (self.nodes or MOST_NODES):
            raise UsageError(
                f"node rank {node_rank} of {told.nodes} nodes came to a run of {self.nodes}: give"
                " --nodes the same number on all machines, and --node-rank a lower one on each"
            )
        known = self._members.get(node_rank)
        if known is not None and known.life == told.life:
            return known
        if known is not None and known.connected:
            raise UsageError(DUPLICATE.format(node_rank))
        return _Member(life=told.life, order=0)

    def _believed(self, node_rank: int, report: Report) -> tuple[ReportedRank, ...]:
        """The ranks of a report, without new steps of a rank that trains at another member, unless
        that member has written them: nothing is committed by what others say of its bytes."""
        found = []
        for one in report.ranks:
            owner = self._owner(one.rank)
            written = None if owner in (None, node_rank) else self._written(owner, one.rank)
            tiers = one.tiers if written is None else self._known(one.tiers, written)
            if tiers != one.tiers:
                self.ledger.ask(node_rank)  # its owner may say so yet
            found.append(replace(one, tiers=tiers))
        return tuple(found)

    def _known(
        self, tiers: Mapping[Tier, ReportedTier], written: Collection[StepId]
    ) -> dict[Tier, ReportedTier]:
        current, commit = self.ledger.core.lineage.current, self.ledger.committed()

        def known(id: StepId) -> bool:
            old = id.epoch != current or (commit is not None and id <= commit)
            return old or id in written

        return {
            tier: one
            if tier.shared
            else replace(one, shards=tuple(held for held in one.shards if known(held.step_id)))
            for tier, one in tiers.items()
        }

    def _owner(self, rank: int) -> int | None:
        """The connected member at which this rank trains in the newest epoch."""
        owner, current = self._owners.get(rank), self.ledger.core.lineage.current
        if owner is None or not self._members[owner].connected:
            return None
        staged = self.ledger.places[owner].staged
        trains = any(id.epoch == current and ranks >> rank & 1 for id, ranks in staged)
        return owner if trains else None

    def _written(self, node_rank: int, rank: int) -> set[StepId]:
        on_drives = self.ledger.core.of_node(node_rank, Tier.LOCAL)
        return {id for id, held in on_drives if held.ranks >> rank & 1}

    def left(self, node_rank: int) -> None:
        """The connection of this member has ended. What it holds is still there, as far as is
        known."""
        member = self._members.get(node_rank)
        if member is not None:
            member.connected, member.sent, self._advice = False, None, None

    def pin(self, pins: Pins) -> None:
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
        wanted, pinned = self.requests.wanted, self.pins.steps
        return pinned if wanted is None or wanted in pinned else (*pinned, wanted)

    # --- the operator --------------------------------------------------------------------

    def answered(self, answer: Requested, *, at: float) -> None:
        """The operator has answered a report of the run."""
        self.requests.take(answer, connected=self.connected, at=at)
        if set(answer.pins) != set(self.pins.steps):
            self.pins = Pins(version=self.pins.version + 1, steps=tuple(sorted(answer.pins)))
        self.requests.follow(at=at)
        self._configure()

    def follow(self, *, at: float) -> bool:
        """Called every second or so: what becomes true by waiting. Returns whether members are to
        be told of it."""
        before = self._wishes()
        self.requests.follow(at=at)
        if changed := self._wishes() != before:
            self._configure()
        return changed

    def _wishes(self) -> tuple[object, ...]:
        asked = self.requests
        return asked.wanted, asked.fresh.allowed, asked.gone_for_good, self.history.stand_in

    # --- asking --------------------------------------------------------------------------

    @property
    def connected(self) -> list[int]:
        """The node ranks of the members that are connected, this one among them."""
        return sorted(rank for rank, one in self._members.items() if one.connected)

    @property
    def all_here(self) -> bool:
        """Whether all members are connected and have said everything."""
        return not self.missing() and self.ledger.settled

    def missing(self) -> list[int]:
        """The node ranks that are not connected."""
        expected = range(self.nodes) if self.nodes is not None else self._expected()
        return sorted({*expected}.difference(self.connected))

    def _expected(self) -> set[int]:
        """The node ranks of the pods that there are, by the operator and by what they reported."""
        there = {rank for rank, place in self.ledger.places.items() if not place.gone}
        return there | self.requests.awaited()

    def heard_all(self) -> bool:
        """Whether all connected members have acted on the newest reply."""
        return all(
            one.heard >= one.number
            for one in self._members.values()
            if one.connected and one.life != self.life
        )

    def restore_known(self) -> bool:
        """Whether all members know which step the run is to go back to."""
        wanted = self.requests.wanted
        return not self.missing() and all(
            one.sent is not None
            and one.sent.reply.restore_from == wanted
            and one.heard >= one.restore
            for one in self._members.values()
            if one.connected
        )

    def news(self, node_rank: int) -> LeaderReply | None:
        """What the member is to be told now; None if it knows that already."""
        member = self._members[node_rank]
        reply = self._reply(node_rank, member)
        if member.sent is not None and replace(member.sent, number=0) == reply:
            return None
        member.number += 1
        if member.sent is None or member.sent.reply.restore_from != reply.reply.restore_from:
            member.restore = member.number
        member.sent = replace(reply, number=member.number)
        return member.sent

    def _reply(self, node_rank: int, member: _Member) -> LeaderReply:
        advice, held = self.advice(), sorted(self.ledger.local(node_rank))
        version, peers = self._peers(node_rank, advice)
        left = self.requests.left
        return LeaderReply(
            leader=self.life,
            number=0,
            answers=member.sequence,
            epoch=self.ledger.core.lineage.current,
            closing=self.closing,
            pins=self.pins,
            reply=replace(
                advice.reply,
                commits=tuple(id for id in held if is_among(id, advice.reply.commits)),
                retire=tuple(id for id in held if is_among(id, advice.expendable)),
                peers=() if version == member.holds else peers,
                peers_version=version,
                agents=left.agents_of(node_rank),
                awaits=left.awaited_by(node_rank),
                changes_since=self._follows(node_rank),
            ),
        )

    def _follows(self, node_rank: int) -> int:
        """See `ReportReply.changes_since`."""
        place = self.ledger.places.get(node_rank)
        return self.ledger.follows(node_rank, place.pod) if place is not None else 0

    def advice(self) -> _Advice:
        """What all are told now."""
        if self._advice is None:
            self._advice = self._work_out()
        return self._advice

    def _work_out(self) -> _Advice:
        ledger, asked = self.ledger, self.requests
        here, paused = self.all_here, asked.answer.paused
        served = {
            rank: place.sidecar.peer_address
            for rank, place in sorted(ledger.places.items())
            if place.sidecar.peer_address and not place.gone
        }
        return _Advice(
            reply=ReportReply(
                interval_s=INTERVAL_S,
                least_gap_s=_LEAST_GAP_S,
                committed={str(tier): id for tier, id in ledger.watermarks().items()},
                commits=ledger.commits(),
                plan=None if paused else asked.wanted or ledger.plan(),
                pinned=self._pinned,
                all_peers=here,
                leaving=asked.leaving,
                restore_from=asked.wanted,
                authorities=asked.answer.authorities,
                archive=self.history.stand_in,
                failures=self._failures,
                begin_again=asked.fresh.allowed,
                gone_for_good=asked.gone_for_good,
            ),
            expendable=ledger.expendable() if here and not paused else (),
            peers=served,
            ring=self._ring(len(served)),
        )

    def _ring(self, serving: int) -> dict[int, tuple[int, ...]]:
        """Which node ranks send to which. There is no ring before all are known: one of half the
        run would send gigabytes to buddies that are replaced a second later. The place of a pod
        that is gone stays in it until all are there again, so its restart moves no copies."""
        settled, domains = self.ledger.settled, self.requests.domains()
        known = settled if self.nodes is None else serving == self.nodes
        self._introduced = known or (self._introduced and self.nodes is None)
        if not self._introduced:
            return {}
        places = self.ledger.places.items()
        spots = {
            rank: Spot(place.node, domains.get(rank) or place.node)
            for rank, place in places
            if not (settled and place.gone)
        }
        return buddies(spots, replicas=self.requests.policy.replicas)

    def _peers(self, node_rank: int, advice: _Advice) -> tuple[str, tuple[Peer, ...]]:
        """The other machines, and the version of this list."""
        own = advice.ring.get(node_rank, ())
        peers = tuple(
            Peer(node_rank=rank, address=address, buddy=rank in own)
            for rank, address in advice.peers.items()
            if rank != node_rank
        )
        return blake2b(repr(peers).encode(), digest_size=12).hexdigest(), peers
