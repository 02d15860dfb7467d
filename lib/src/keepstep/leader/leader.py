"""Leads a run: takes the reports of its members, and says to each what it needs of the rest.

The leader is the sidecar of node rank 0, and a member itself. It has no record of its own: what it
knows comes from its members since it began, so a new leader gives the same answers. It names steps
that may be deleted only while all node ranks are connected and have said everything. A member has
one connection, so of two leaders at most one ever has all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.ledger import is_among
from keepstep.core.retention import Retention
from keepstep.core.suspicion import Failure, newest
from keepstep.errors import UsageError
from keepstep.leader.bounds import checked
from keepstep.leader.buddies import Spot, buddies
from keepstep.leader.node_rank import Sender
from keepstep.leader.run_ledger import MOST_RANKS, RunLedger
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

DUPLICATE = (
    "DuplicateNodeRank: two sidecars have node rank {}: give each machine a --node-rank of its own,"
    " or end the one that is left over"
)
INTERVAL_S = 10.0
_LEAST_GAP_S = 0.05


@dataclass(kw_only=True)
class _Member:
    """What the leader knows of a member beside its place in the ledger. `order`: grows with each
    sidecar that is a member. `whole`: the ledger knows all that it has said on this connection.
    `holds`: the version of the list of peers that it has. `last`: the number of the reply that said
    that the leader ends."""

    life: str
    order: int
    connected: bool = True
    whole: bool = False
    holds: str = ""
    sequence: int = 0
    heard: int = 0
    number: int = 0
    last: int | None = None
    sent: LeaderReply | None = None


@dataclass(frozen=True)
class _Advice:
    """What all members are told. Steps are oldest first. `all_here`: see `Leader`."""

    committed: dict[str, StepId]
    commits: tuple[StepId, ...]
    plan: StepId | None
    expendable: tuple[StepId, ...]
    peers: _Peers
    all_here: bool


@dataclass(frozen=True)
class _Peers:
    """The addresses of all machines by node rank, and who sends copies to whom. Empty until all
    node ranks have reported: a list that grows with each of them would be sent to all each time."""

    addresses: Mapping[int, str]
    ring: Mapping[int, tuple[int, ...]]
    digest: bytes


class Leader:
    """The leader of a run of `nodes` machines. `life`: names this process."""

    def __init__(
        self,
        *,
        life: str,
        nodes: int,
        keep: Retention,
        beyond: Iterable[Tier] = (),
        replicas: int = 0,
        pins: Pins | None = None,
    ) -> None:
        """`beyond`: the tiers beyond the machines that the run has. `replicas`: copies of each
        shard on other machines. `pins`: those on record here."""
        self.nodes = nodes
        self.closing = False
        self.pins = pins or Pins()
        self._life = life
        self._keep, self._beyond, self._replicas = keep, tuple(beyond), replicas
        self._ledger = RunLedger()
        self._members: dict[int, _Member] = {}
        self._owners: dict[int, int] = {}
        self._failures: tuple[Failure, ...] = ()
        self._lives = 0
        self._advice: _Advice | None = None
        self._peers: tuple[int, _Peers] | None = None
        self._reported: set[int] = set()
        self._told: tuple[object, ...] = ()
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
        self._reported.add(node_rank)
        member.holds, member.heard, self._advice = report.peers_version, told.heard, None
        sender = Sender(
            pod=member.life,
            node_rank=node_rank,
            node=str(node_rank),
            created_at=f"{member.order:020}",
            local_stays=False,
        )
        most_world = MOST_RANKS * self.nodes
        ranks = self._believed(node_rank, report)
        doubted, report = ranks != report.ranks, replace(report, ranks=ranks)
        member.sequence = report.sequence
        if self._ledger.take(sender, report, at=at, most_world=most_world) is not None:
            member.whole = True
            self._failures = newest((*self._failures, *report.failures))
            self._owners |= {one.rank: node_rank for one in report.ranks if one.alive}
        if doubted:
            self._ledger.ask(node_rank)  # its owner may say so yet
        if told.pins.version > self.pins.version:
            self.pin(told.pins)

    def meet(self, told: MemberReport) -> None:
        """Another node rank 0 has come. Raises UsageError unless it is this sidecar itself."""
        if told.life != self._life:
            raise UsageError(DUPLICATE.format(0))

    def _member(self, node_rank: int, told: MemberReport) -> _Member:
        if told.nodes != self.nodes or not 0 <= node_rank < self.nodes:
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
            found.append(replace(one, tiers=tiers))
        return tuple(found)

    def _known(
        self, tiers: Mapping[Tier, ReportedTier], written: Collection[StepId]
    ) -> dict[Tier, ReportedTier]:
        current, commit = self._ledger.core.lineage.current, self._ledger.committed()

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
        owner, current = self._owners.get(rank), self._ledger.core.lineage.current
        if owner is None or not self._members[owner].connected:
            return None
        staged = self._ledger.places[owner].staged
        trains = any(id.epoch == current and ranks >> rank & 1 for id, ranks in staged)
        return owner if trains else None

    def _written(self, node_rank: int, rank: int) -> set[StepId]:
        on_drives = self._ledger.core.of_node(node_rank, Tier.LOCAL)
        return {id for id, held in on_drives if held.ranks >> rank & 1}

    def left(self, node_rank: int) -> None:
        """The connection of this member has ended. What it holds is still there, as far as is
        known."""
        member = self._members.get(node_rank)
        if member is not None:
            member.connected = member.whole = False
            member.sent = self._advice = None

    def pin(self, pins: Pins) -> None:
        """From now on these are pinned."""
        self.pins, self._advice = pins, None
        self._configure()

    def _configure(self) -> None:
        self._ledger.configure(keep=self._keep, pins=self.pins.steps, beyond=self._beyond)

    # --- asking --------------------------------------------------------------------------

    @property
    def connected(self) -> list[int]:
        """The node ranks of the members that are connected, this one among them."""
        return sorted(rank for rank, one in self._members.items() if one.connected)

    @property
    def all_here(self) -> bool:
        """Whether all members are connected and have said everything."""
        return self._advise().all_here

    def missing(self) -> list[int]:
        """The node ranks that are not connected."""
        return sorted({*range(self.nodes)}.difference(self.connected))

    def heard_all(self) -> bool:
        """Whether all connected members have acted on the reply that the leader ends."""
        return all(
            one.last is not None and one.heard >= one.last
            for one in self._members.values()
            if one.connected and one.life != self._life
        )

    def waiting(self) -> list[int]:
        """The members for whom there may be news: all if what all are told has changed, else those
        that have reported since."""
        told = (self._advise(), self.closing, self.pins, self._failures)
        changed, self._told = told != self._told, told
        ranks = [one for one in self.connected if changed or one in self._reported]
        self._reported.clear()
        return ranks

    def news(self, node_rank: int) -> LeaderReply | None:
        """What the member is to be told now; None if it knows that already."""
        member = self._members[node_rank]
        reply = self._reply(node_rank, member)
        if member.sent is not None and replace(member.sent, number=0) == reply:
            return None
        member.number += 1
        if self.closing and member.last is None:
            member.last = member.number
        member.sent = replace(reply, number=member.number)
        return member.sent

    def _reply(self, node_rank: int, member: _Member) -> LeaderReply:
        advice, held = self._advise(), sorted(self._ledger.local(node_rank))
        own = advice.peers.ring.get(node_rank, ())
        said = b"%d %b %b" % (node_rank, repr(own).encode(), advice.peers.digest)
        version = blake2b(said, digest_size=12).hexdigest()
        current = self._ledger.core.lineage.current
        return LeaderReply(
            leader=self._life,
            number=0,
            answers=member.sequence,
            epoch=current,
            closing=self.closing,
            pins=self.pins,
            reply=ReportReply(
                interval_s=INTERVAL_S,
                least_gap_s=_LEAST_GAP_S,
                committed=advice.committed,
                commits=tuple(id for id in held if is_among(id, advice.commits)),
                plan=advice.plan,
                retire=tuple(
                    id for id in held if advice.all_here and is_among(id, advice.expendable)
                ),
                pinned=self.pins.steps,
                peers=() if version == member.holds else _listed(advice.peers, node_rank),
                peers_version=version,
                all_peers=advice.all_here,
                changes_since=self._ledger.follows(node_rank, member.life),
                failures=self._failures,
            ),
        )

    def _advise(self) -> _Advice:
        if self._advice is None:
            ledger = self._ledger
            known = sum(one.whole for one in self._members.values())
            self._advice = _Advice(
                committed={str(tier): id for tier, id in ledger.watermarks().items()},
                commits=ledger.commits(),
                plan=ledger.plan(),
                expendable=ledger.expendable(),
                peers=self._introduced(),
                all_here=known == self.nodes and ledger.settled,
            )
        return self._advice

    def _introduced(self) -> _Peers:
        places = self._ledger.places
        if self._peers is None or self._peers[0] != places.moved:
            served = {
                rank: place.sidecar.peer_address
                for rank, place in sorted(places.items())
                if place.sidecar.peer_address and len(places) == self.nodes
            }
            spots = {rank: Spot(str(rank), str(rank)) for rank in served}
            ring = buddies(spots, replicas=self._replicas)
            digest = blake2b(repr(served).encode(), digest_size=12).digest()
            self._peers = places.moved, _Peers(served, ring, digest)
        return self._peers[1]


def _listed(peers: _Peers, node_rank: int) -> tuple[Peer, ...]:
    """The other machines, as this one is told."""
    own = peers.ring.get(node_rank, ())
    return tuple(
        Peer(node_rank=rank, address=address, buddy=rank in own)
        for rank, address in peers.addresses.items()
        if rank != node_rank
    )
