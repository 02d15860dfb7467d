"""The other pods of the run, and agents of nodes that its pods left, with what each was last heard
to hold.

They are known from the leader of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from keepstep.core.shard import Shard
from keepstep.steps import Epoch, StepId, Tier, TierAnswer, merge_epochs
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.peer.protocol import ListedShard, PodShardListing
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteShard

OWN = ""
"""The address that stands for this pod itself: the copies that it keeps for others."""


@dataclass(kw_only=True)
class KnownPeer:
    """One other pod, or the agent of `node`. `listing` is None while it cannot be reached; `reason`
    then says why."""

    address: str
    node: str = ""
    node_rank: int | None = None
    buddy: bool = False
    listing: PodShardListing | None = None
    reason: str = "not asked yet"

    @property
    def name(self) -> str:
        """A name for people."""
        if self.node:
            return f"the agent of node {self.node}"
        return self.address if self.node_rank is None else f"node rank {self.node_rank}"

    @property
    def expected_identity(self) -> int | str | None:
        """Who must answer at the address: see `client.Expected`."""
        return self.node or self.node_rank


@dataclass(kw_only=True)
class PeerList:
    """The other pods. `complete`: all of them are known. `liars`: (address, step, rank) of copies
    with wrong bytes. `awaits`: what the leader is making reachable, '' for nothing. `agents`: the
    address of each agent that was ever named."""

    complete: bool
    awaits: str = ""
    known: dict[str, KnownPeer] = field(default_factory=dict)
    liars: set[tuple[str, StepId, int]] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)

    def replace_peers(
        self,
        peers: Iterable[Peer],
        *,
        own: str,
        agents: Mapping[str, str] = MappingProxyType({}),
        awaits: str = "",
        complete: bool = True,
    ) -> None:
        """Take over the leader's lists. If they are not `complete`, pods that have not reported
        yet are missing, and these may hold something."""
        self.complete, self.awaits = complete, awaits
        before, self.known = self.known, {}
        for peer in peers:
            if peer.address == own:
                continue
            known = before.get(peer.address) or KnownPeer(address=peer.address)
            known.node_rank, known.buddy, known.node = peer.node_rank, peer.buddy, ""
            self.known[peer.address] = known
        for node, address in agents.items():
            known = before.get(address) or KnownPeer(address=address)
            known.node_rank, known.buddy, known.node = None, False, node
            self.known[address] = known
        self.agents |= {*agents.values()}

    def record_pod_answer(
        self, address: str, listing: PodShardListing | None, reason: str = ""
    ) -> None:
        """Record a pod's answer, or why it did not answer."""
        if (member := self.known.get(address)) is not None:
            member.listing, member.reason = listing, reason

    def is_last_listing_valid(self, address: str) -> bool:
        """Whether what was last seen at this address still counts: an agent's does until it answers
        again. A machine of the run that is there shows what it holds by its own vote."""
        member = self.known.get(address)
        return address in self.agents if member is None else bool(member.node) and _silent(member)

    def combine_inventories(self, kept: Iterable[Shard]) -> Inventory:
        """All that pods answered and this pod keeps. docs/peers.md explains the answer."""
        held: dict[tuple[StepId, int], list[tuple[str, str, ListedShard]]] = {}
        for name, address, shard in self._listed():
            if (address, shard.step_id, shard.rank) not in self.liars:
                held.setdefault((shard.step_id, shard.rank), []).append((name, address, shard))
        own = {(shard.step_id, shard.rank): shard for shard in kept}
        shards = [_remote(key, held.get(key, []), own.get(key)) for key in sorted({*held, *own})]
        away = self.describe_unreachable_peers()
        answer = TierAnswer.STEPS if shards else TierAnswer.UNKNOWN if away else TierAnswer.NONE
        return Inventory(answer=answer, shards=tuple(shards), epochs=self._epochs(), reason=away)

    def describe_unreachable_peers(self) -> str:
        """Which pods did not answer, and why; '' when all did."""
        if not self.complete:
            return "not all machines of the run have reported to the leader yet"
        if self.awaits:
            return self.awaits
        silent = [
            f"{member.name}: {member.reason}" for member in self.known.values() if _silent(member)
        ]
        return "; ".join(silent)

    def _listed(self) -> Iterable[tuple[str, str, ListedShard]]:
        for member in self.known.values():
            for listed in member.listing.shards if member.listing is not None else ():
                yield member.name, member.address, listed

    def _epochs(self) -> tuple[Epoch, ...]:
        listings = [member.listing for member in self.known.values() if member.listing is not None]
        return merge_epochs(epoch for listing in listings for epoch in listing.epochs)


def _silent(member: KnownPeer) -> bool:
    if member.listing is not None and not member.listing.ready:
        member.reason = member.listing.reason
        return True
    return member.listing is None


def _remote(
    key: tuple[StepId, int], held: list[tuple[str, str, ListedShard]], own: Shard | None
) -> RemoteShard:
    """One shard with all its holders. If there are different images, the one that most hold is
    taken; of equally many, one of which there is an original."""
    roots = [shard.root or "" for _, _, shard in held] + (
        [own.root or ""] if own is not None else []
    )
    originals = {shard.root for _, _, shard in held if not shard.copy}
    root = max(roots, key=lambda root: (roots.count(root), root in originals))
    if len(set(roots)) > 1:
        who = ", ".join(f"{name} says {shard.root}" for name, _, shard in held)
        warn("peer.copies_differ", step=str(key[0]), rank=key[1], roots=who, chosen=root)
    holders = [address for _, address, shard in held if shard.root == root]
    shards: list[Shard] = [shard for _, _, shard in held if shard.root == root]
    if own is not None and own.root == root:
        holders.insert(0, OWN)
        shards.insert(0, own)
    return RemoteShard.from_shard(shards[0], tier=Tier.PEER, key=tuple(holders))
