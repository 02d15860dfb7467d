"""A look at remote tiers is shared by all who ask meanwhile, not by who asks for what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from keepstep.steps import Epoch, EpochId, Tier, TierAnswer
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.api.restoring import VoteScheduler
from keepstep_sidecar.commit.reachable_copies import RemoteInventory
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteTier

MET = Epoch(EpochId(1, "0000000a"))


class Peers(RemoteTier):
    """Answers when it is let, with what it knew when it was asked."""

    tier = Tier.PEER
    address = "10.0.0.1:9465"
    knows_all_peers = True

    def __init__(self) -> None:
        super().__init__()
        self.known: tuple[Epoch, ...] = ()
        self.asked = 0
        self.answers = asyncio.Event()

    async def scan(self) -> Inventory:
        self.asked += 1
        known = self.known
        await self.answers.wait()
        return Inventory(answer=TierAnswer.NONE, epochs=known)

    def peers_are(self, peers: tuple[Peer, ...], **more: Any) -> None:
        self.known = (MET,)


async def _let_begin(work: asyncio.Task[Any]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert not work.done()


async def test_a_scan_that_started_before_a_peer_was_added_does_not_count_for_it() -> None:
    peers = Peers()
    remotes = RemoteInventory(peers=cast("PeerTier", peers))
    before = asyncio.create_task(remotes.scan())
    await _let_begin(before)
    peers.known = (MET,)
    shared, new, newer = (
        asyncio.create_task(remotes.scan(refresh=refresh)) for refresh in (False, True, True)
    )
    await _let_begin(new)
    assert peers.asked == 1
    peers.answers.set()
    await asyncio.gather(before, shared, new, newer)
    assert peers.asked == 2, "one look for both who asked after it was named"
    assert remotes.epochs == (MET,)


async def test_a_vote_waits_until_newly_added_peers_have_been_queried() -> None:
    """Also that of a rank which holds something: it may be old."""
    peers = Peers()
    peers.answers.set()
    remotes = RemoteInventory(peers=cast("PeerTier", peers))

    async def scan_remotes(*, refresh: bool = False) -> None:
        await remotes.scan(refresh=refresh)

    node_host: Any = SimpleNamespace(
        remotes=remotes,
        refresh_remotes=scan_remotes,
        local_shards=SimpleNamespace(scanned_at=0.0),
        leader_answers=True,
    )
    changes = ChangeNotifier()
    beyond = RemoteTiers(node_host, changes, operated=False, leads=True)
    await beyond.scan()
    peers.answers.clear()
    scans: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
        scans.append(asyncio.create_task(work, name=name))

    beyond.set_peers((Peer(node_rank=1, address="10.0.0.2:9465"),), spawn)
    votes = VoteScheduler(
        lambda rank: beyond.get_vote_facts(held=True, replied_at=0.0), beyond.scan, changes
    )
    vote = asyncio.create_task(votes.await_readiness(0, timeout_s=60.0))
    await _let_begin(vote)
    assert "just named" in votes.waits[0], "and it can be told why"
    peers.answers.set()
    await vote
    assert votes.waits == {}
    assert remotes.epochs == (MET,)
    await asyncio.gather(*scans)
