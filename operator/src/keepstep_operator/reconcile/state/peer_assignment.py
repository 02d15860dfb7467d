"""The pods of a run as each other's peers: which pod sends to which, and the address of each.

The ring consists of the existing pods and of the places whose pods will come back, so the restart
of a pod moves no copies. There is no ring until every pod has a node: a ring of half the run would
send gigabytes to buddies that are replaced a second later. Pure.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from keepstep.leader.buddies import Spot, buddies
from keepstep.leader.node_rank import Place
from keepstep.wire.reports import Peer
from keepstep_operator.api.model import NodeRecord
from keepstep_operator.api.tiers import HOSTNAME, Peers
from keepstep_operator.reconcile.state.reply import NOBODY, may_be_old_s

if TYPE_CHECKING:
    from keepstep_operator.reconcile.state.run import Run


_KEPT: Final = 1 << 14
"""Size of the caches, for all runs together. A pod's entry is then made only once."""


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """All pods that serve, as JSON by node rank. `at`: when the list was made. `of`: what it was
    made from. `digest`: a digest of its content."""

    at: float
    of: tuple[object, ...]
    entries: Mapping[int, bytes]
    digest: bytes


class PeerAssignment:
    """Keeps the ring until something moves. `nodes`: by name; empty if nodes are not watched."""

    def __init__(self, run: Run, nodes: Mapping[str, NodeRecord]) -> None:
        self._run: Run = weakref.proxy(run)  # no cycle: a deleted run is freed at once
        self._nodes = nodes
        self._known: tuple[object, dict[int, tuple[int, ...]]] | None = None
        self._looked: object = None
        self._listed: _Listed | None = None

    def told(self, node_rank: int, *, holds: str = "", at: float) -> tuple[str, msgspec.Raw]:
        """For the sidecar of this place: the version of its list of peers, and the list. The list
        has all other pods that serve, with its buddies marked. It is empty if `holds`, the version
        that the sidecar has, is this version. The version is a digest of the content.

        While pods of a large run have not reported yet, the list may be a little old, except for
        the place's buddies, which hold copies of its shards.
        """
        listed = self._list(at)
        buddies = {rank: self._buddy(rank) for rank in self.ring().get(node_rank, ())}
        named = (b"%d %b" % one for one in buddies.items())
        said = b" ".join((listed.digest, b"%d" % node_rank, *named))
        version = hashlib.blake2b(said, digest_size=12).hexdigest()
        if holds == version:
            return version, NOBODY
        entries = {**listed.entries, **buddies, node_rank: b""}
        return version, msgspec.Raw(b"[%b]" % b",".join(filter(None, entries.values())))

    def _list(self, at: float) -> _Listed:
        run, known = self._run, self._listed
        of = (run.policy is not None and run.policy.peers is not None, run.ledger.places.moved)
        if known is not None:
            waits = known.of[0] == of[0] and not run.ledger.settled
            if known.of == of or (waits and 0 <= at - known.at < may_be_old_s(run.ledger.world)):
                return known
        serving = sorted(run.ledger.places.items()) if of[0] else ()
        entries = {
            rank: _entry(rank, place.sidecar.peer_address, False)
            for rank, place in serving
            if _serves(place)
        }
        digest = hashlib.blake2b(b",".join(entries.values()), digest_size=12).digest()
        self._listed = _Listed(at=at, of=of, entries=entries, digest=digest)
        return self._listed

    def _buddy(self, node_rank: int) -> bytes:
        """The entry of a buddy; empty if it does not serve now."""
        place = self._run.ledger.places.get(node_rank)
        if place is None or not _serves(place):
            return b""
        return _entry(node_rank, place.sidecar.peer_address, True)

    def look_again(self) -> None:
        """Compute the ring anew when next asked, because labels of nodes may have changed."""
        self._looked = None

    def ring(self) -> dict[int, tuple[int, ...]]:
        """node rank -> the node ranks that it sends its shards to; empty while this is
        uncertain."""
        peers = self._run.policy.peers if self._run.policy else None
        if peers is None:
            return {}
        now = (peers, self._run.pods_moved, self._run.ledger.settled)
        if self._known is None or self._looked != now:
            self._looked, spots = now, self._spots(peers)
            key = (peers, tuple(sorted(spots.items())))
            if self._known is None or self._known[0] != key:
                self._known = key, buddies(spots, replicas=peers.replicas)
        return self._known[1]

    def _spots(self, peers: Peers) -> dict[int, Spot]:
        pods = [pod for pod in self._run.pods.values() if pod.stays]
        if not all(pod.node for pod in pods):
            return {}
        complete = self._run.ledger.settled
        there = {
            rank: place.node
            for rank, place in self._run.ledger.places.items()
            if not (complete and place.gone)
        }
        there |= {pod.node_rank: pod.node for pod in pods}
        return {rank: self._spot(node, peers) for rank, node in there.items() if node}

    def _spot(self, node: str, peers: Peers) -> Spot:
        """The place's node and domain. A node that is unknown or lacks the label is its own
        domain."""
        known = self._nodes.get(node)
        if peers.topology_key == HOSTNAME or known is None:
            return _spot_of(node, node)
        return _spot_of(node, known.labels.get(peers.topology_key) or node)


@functools.lru_cache(maxsize=_KEPT)
def _spot_of(node: str, domain: str) -> Spot:
    return Spot(node, domain)


@functools.lru_cache(maxsize=_KEPT)
def _entry(node_rank: int, address: str, buddy: bool) -> bytes:
    return msgspec.json.encode(Peer(node_rank=node_rank, address=address, buddy=buddy))


def _serves(place: Place) -> bool:
    return not place.gone and bool(place.sidecar.peer_address)
