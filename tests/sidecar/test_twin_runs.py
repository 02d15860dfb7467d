"""Twins are named as runs of ranks, to peers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.core.shard import Ranks, Shard
from keepstep.steps import EpochId, StepId
from keepstep_sidecar.tiers.peer.protocol import ListedShard, PodListing

WORLD = 16_384
SHARD = Shard(
    step_id=StepId(EpochId(1, "aaaaaaaa"), 4),
    rank=8,
    world=WORLD,
    root="0" * 32,
    size_bytes=1 << 30,
    alike=Ranks.of(range(0, WORLD, 8)),
)


def listing(shard: Shard = SHARD) -> PodListing:
    return PodListing(run="gpt", shards=(ListedShard.listed(shard, copy=False),))


def received(listed: PodListing | dict[str, Any]) -> Shard:
    (shard,) = msgspec.json.decode(msgspec.json.encode(listed), type=PodListing).shards
    return Shard(**shard.facts)


def test_what_is_told_as_runs_is_short_whatever_the_world() -> None:
    assert len(msgspec.json.encode(listing())) < 400
    assert received(listing()) == SHARD


@pytest.mark.parametrize(
    "runs",
    [[[0, 10**12, 1]], [[0, WORLD, 8]], [[0, 16, 16]], [[index, index, 1] for index in range(66)]],
)
def test_runs_that_cannot_be_are_refused_as_they_are_read(runs: list[list[int]]) -> None:
    listed = msgspec.to_builtins(listing())
    listed["shards"][0]["alike"]["runs"] = runs
    with pytest.raises(msgspec.ValidationError, match=r"twins|ranks"):
        received(listed)
