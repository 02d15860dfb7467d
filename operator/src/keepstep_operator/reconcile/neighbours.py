"""The pods of a run as each other's peers: who sends to whom, and where each is found.

The ring is made of the pods that are there, and of the places of those that will come back, so that
the restart of a pod moves no copies. It waits until every pod has a node: a ring of half the run
would send gigabytes to buddies that are others a second later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from keepstep.wire.reports import Peer
from keepstep_operator.beyond import HOSTNAME, Peers
from keepstep_operator.reconcile.records import NodeRecord
from keepstep_operator.reconcile.ring import Spot, buddies

if TYPE_CHECKING:
    from keepstep_operator.reconcile.runs import Run


class Neighbours:
    """Remembers the ring until something moves. `nodes`: by name, empty where they are not seen."""

    def __init__(self, run: Run, nodes: Mapping[str, NodeRecord]) -> None:
        self._run = run
        self._nodes = nodes
        self._known: tuple[object, dict[int, tuple[int, ...]]] | None = None

    def of(self, node_rank: int) -> tuple[Peer, ...]:
        """What the sidecar of this place is told: all others that serve, its buddies marked."""
        if self._run.policy is None or self._run.policy.peers is None:
            return ()
        chosen = set(self.ring().get(node_rank, ()))
        return tuple(
            Peer(node_rank=other, address=place.report.peer_address, buddy=other in chosen)
            for other, place in sorted(self._run.host.places.items())
            if other != node_rank and not place.gone and place.report.peer_address
        )

    def ring(self) -> dict[int, tuple[int, ...]]:
        """node rank -> those that it sends its shards to; empty while that is not certain."""
        peers = self._run.policy.peers if self._run.policy else None
        if peers is None:
            return {}
        spots = self._spots(peers)
        key = (peers, tuple(sorted(spots.items())))
        if self._known is None or self._known[0] != key:
            self._known = key, buddies(spots, replicas=peers.replicas)
        return self._known[1]

    def _spots(self, peers: Peers) -> dict[int, Spot]:
        pods = [pod for pod in self._run.pods.values() if pod.injected and not pod.over]
        if not all(pod.node for pod in pods):
            return {}
        complete = self._run.host.settled
        there = {
            rank: place.node
            for rank, place in self._run.host.places.items()
            if not (complete and place.gone)
        }
        there |= {pod.node_rank: pod.node for pod in pods}
        return {rank: self._spot(node, peers) for rank, node in there.items() if node}

    def _spot(self, node: str, peers: Peers) -> Spot:
        """A node without the label, or one that is not seen, is a domain of its own."""
        known = self._nodes.get(node)
        if peers.topology_key == HOSTNAME or known is None:
            return Spot(node, node)
        return Spot(node, known.labels.get(peers.topology_key) or node)
