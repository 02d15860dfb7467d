"""Twins are named as runs of ranks, to peers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.core.shard import Ranks, Shard
from keepstep.steps import EpochId, StepId
from keepstep_sidecar.tiers.peer.protocol import ListedShard, PodShardListing

WORLD = 16_384
SHARD = Shard(
    step_id=StepId(EpochId(1, "aaaaaaaa"), 4),
    rank=8,
    world=WORLD,
    root="0" * 32,
    size_bytes=1 << 30,
    alike=Ranks.of(range(0, WORLD, 8)),
)


def listing(shard: Shard = SHARD) -> PodShardListing:
    return PodShardListing(run="gpt", shards=(ListedShard.from_shard(shard, copy=False),))


def received(listed: PodShardListing | dict[str, Any]) -> Shard:
    (shard,) = msgspec.json.decode(msgspec.json.encode(listed), type=PodShardListing).shards
    return Shard(**shard.base_fields)


def test_a_listing_encoded_as_rank_ranges_is_short_for_any_world_size() -> None:
    assert len(msgspec.json.encode(listing())) < 400
    assert received(listing()) == SHARD


@pytest.mark.parametrize(
    "runs",
    [[[0, 10**12, 1]], [[0, WORLD, 8]], [[0, 16, 16]], [[index, index, 1] for index in range(66)]],
)
def test_invalid_rank_ranges_are_refused_when_they_are_parsed(runs: list[list[int]]) -> None:
    listed = msgspec.to_builtins(listing())
    listed["shards"][0]["alike"]["runs"] = runs
    with pytest.raises(msgspec.ValidationError, match=r"twins|ranks"):
        received(listed)
