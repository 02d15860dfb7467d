"""`bench.scale` runs, and its counts do not grow faster than they have to."""

from __future__ import annotations

import msgspec
import pytest

from bench import scale
from keepstep.core import vote
from keepstep.state.sharding import Topology
from keepstep_sidecar.tiers.peer.protocol import Listing

# --- what keeps the figures low ----------------------------------------------------------------


def test_ranks_that_say_the_same_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    ways = vote._ways
    monkeypatch.setattr(vote, "_ways", lambda one, *rest: looked.append(one) or ways(one, *rest))
    scale.vote("ddp", 64)
    assert len(looked) == 1


class Counted(tuple[int, ...]):
    """The nodes of all ranks. Counts how often a node is read."""

    looks = 0

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        Counted.looks += 1
        return super().__getitem__(at)  # type: ignore[index, return-value]


def test_twins_are_found_in_one_look_at_each_rank() -> None:
    world = 1024
    topology = Topology(world=world, nodes=Counted(one // 8 for one in range(world)))
    Counted.looks = 0
    assert topology.twins([tuple(range(world))] * 600) == tuple(range(8, world, 8))
    assert Counted.looks <= 4 * world


def test_what_a_sidecar_hears_of_twins_grows_no_faster_than_the_ranks() -> None:
    """This holds for bytes and for memory. A list of twins with each shard would make both grow
    with the square of the ranks."""
    small, large = (len(scale._listing("ddp", 1, world)) for world in (256, 16_384))
    assert large < 1.1 * small
    shards = [
        one
        for node in range(8)
        for one in msgspec.json.decode(scale._listing("ddp", node, 16_384), type=Listing).shards
    ]
    assert len({id(one.alike) for one in shards}) == scale.NODE
