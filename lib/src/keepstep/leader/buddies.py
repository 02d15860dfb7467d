"""Which node ranks of a run send their shards to which others.

The ring is ordered so that neighbours are in different domains as far as possible. A domain is a
value of the policy's topologyKey, usually a node. The order is: one place of each domain, by node
rank, then a second place of each, and so on. The buddy of a place is the next place on another
node. So every place keeps as many copies as it sends, if the domains are of equal size. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PlaceLocation:
    """Where a place of the run is. `domain`: the value of the node's label topologyKey."""

    node: str
    domain: str


def choose_buddies(
    spots: Mapping[int, PlaceLocation], *, replicas: int
) -> dict[int, tuple[int, ...]]:
    """node rank -> the node ranks that it sends its shards to, best first.

    At most `replicas`, each on another node, none on the sender's own node; fewer if the run has
    fewer nodes. Domains without a copy come first.
    """
    ring = _ring(spots)
    domains = len({spot.domain for spot in spots.values()})
    nodes = len({spot.node for spot in spots.values()})
    return {
        sender: tuple(_chosen(ring, at, spots, replicas, domains=domains, nodes=nodes))
        for at, sender in enumerate(ring)
    }


def _ring(spots: Mapping[int, PlaceLocation]) -> list[int]:
    members: dict[str, list[int]] = {}
    for rank in sorted(spots):
        members.setdefault(spots[rank].domain, []).append(rank)
    turns = [
        (turn, ranks[0], rank) for ranks in members.values() for turn, rank in enumerate(ranks)
    ]
    return [rank for _, _, rank in sorted(turns)]


def _chosen(
    ring: list[int],
    at: int,
    spots: Mapping[int, PlaceLocation],
    replicas: int,
    *,
    domains: int,
    nodes: int,
) -> Iterator[int]:
    """The buddies of the place at index `at`. `domains`, `nodes`: how many exist, so that the
    search stops when all have a copy."""
    chosen = [spots[ring[at]]]
    for _ in range(replicas):
        found = None
        if len({spot.domain for spot in chosen}) < domains:
            found = _next(ring, at, spots, chosen, other_domain=True)
        if found is None and len({spot.node for spot in chosen}) < nodes:
            found = _next(ring, at, spots, chosen, other_domain=False)
        if found is None:
            return
        chosen.append(spots[found])
        yield found


def _next(
    ring: list[int],
    at: int,
    spots: Mapping[int, PlaceLocation],
    chosen: list[PlaceLocation],
    *,
    other_domain: bool,
) -> int | None:
    """The first place after `at` on a node without a chosen place. With `other_domain`, its domain
    has no chosen place either."""
    nodes, domains = {spot.node for spot in chosen}, {spot.domain for spot in chosen}
    for ahead in range(1, len(ring)):
        rank = ring[(at + ahead) % len(ring)]
        spot = spots[rank]
        if spot.node not in nodes and not (other_domain and spot.domain in domains):
            return rank
    return None
