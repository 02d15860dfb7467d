"""Messages between trainer and sidecar are values, like frozen dataclasses of keywords."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.status import StepStatus
from keepstep.wire.trainer import ChunkReadRequest, ChunksRequest, from_json, to_json


def test_a_map_by_tier_is_read_with_tiers_as_its_keys():
    status = StepStatus(id=StepId(EpochId(3, "1f9c2d7a"), 12), world=2, ranks={Tier.PEER: (0, 1)})
    (tier,) = from_json(StepStatus, msgspec.json.encode(status)).ranks
    assert tier is Tier.PEER


def test_library_and_sidecar_read_the_same_message():
    step = StepId(EpochId(3, "1f9c2d7a"), 12)
    asked = ChunksRequest(lease="a", id=step, chunks=(ChunkReadRequest(rank=0, chunk=1, frame=2),))
    assert msgspec.json.decode(to_json(asked), type=ChunksRequest) == asked
    assert from_json(ChunksRequest, msgspec.json.encode(asked)) == asked
    with pytest.raises(msgspec.ValidationError, match="missing required field `chunk`"):
        msgspec.json.decode(b'{"rank": 0}', type=ChunkReadRequest)
