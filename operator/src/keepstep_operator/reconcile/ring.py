"""Which pods keep copies of which other pods' shards: a ring that never stays on one node.

Places stand in the ring so that neighbours are of different domains (values of the policy's
topologyKey, usually nodes) as far as there are any: first one place of each domain, by node rank,
then a second of each, and so on. Whoever is next on another node is a buddy. So every place keeps
as many copies as it sends, wherever the domains are of equal size. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spot:
    """Where a place of the run is. `domain`: the node's value of the topology key."""

    node: str
    domain: str


def buddies(spots: Mapping[int, Spot], *, replicas: int) -> dict[int, tuple[int, ...]]:
    """node rank -> the node ranks that it sends its shards to, best first.

    At most `replicas`, each on another node, none on the sender's own; fewer where the run has
    fewer nodes. Domains that have no copy yet come first.
    """
    ring = _ring(spots)
    domains = len({spot.domain for spot in spots.values()})
    nodes = len({spot.node for spot in spots.values()})
    return {
        sender: tuple(_chosen(ring, at, spots, replicas, domains=domains, nodes=nodes))
        for at, sender in enumerate(ring)
    }


def _ring(spots: Mapping[int, Spot]) -> list[int]:
    members: dict[str, list[int]] = {}
    for rank in sorted(spots):
        members.setdefault(spots[rank].domain, []).append(rank)
    turns = [
        (turn, ranks[0], rank) for ranks in members.values() for turn, rank in enumerate(ranks)
    ]
    return [rank for _, _, rank in sorted(turns)]


def _chosen(
    ring: list[int], at: int, spots: Mapping[int, Spot], replicas: int, *, domains: int, nodes: int
) -> Iterator[int]:
    """`domains`, `nodes`: how many there are, so that nobody looks for one that cannot be."""
    chosen = [spots[ring[at]]]
    for _ in range(replicas):
        found = None
        if len({one.domain for one in chosen}) < domains:
            found = _next(ring, at, spots, chosen, other_domain=True)
        if found is None and len({one.node for one in chosen}) < nodes:
            found = _next(ring, at, spots, chosen, other_domain=False)
        if found is None:
            return
        chosen.append(spots[found])
        yield found


def _next(
    ring: list[int], at: int, spots: Mapping[int, Spot], chosen: list[Spot], *, other_domain: bool
) -> int | None:
    """The first one after `at` that shares no node, or no domain either, with those chosen."""
    nodes, domains = {one.node for one in chosen}, {one.domain for one in chosen}
    for rank in (*ring[at + 1 :], *ring[:at]):
        spot = spots[rank]
        if spot.node not in nodes and not (other_domain and spot.domain in domains):
            return rank
    return None
