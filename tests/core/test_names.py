"""A step, an epoch and a shard have exactly one name each: two names would make two directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.shard import MOST_RANKS
from keepstep.steps import EpochId, StepId, shard_name
from keepstep_sidecar.volume.run_tree import (
    ShardName,
    is_shard,
    is_step,
    is_temporary,
    temporary_name,
)

STEP = "0003.1f9c2d7a-000001200"
SHARD = "rank-00000-of-00002.safetensors"

epochs = st.builds(
    EpochId, st.integers(0, 10**9 - 1), st.text("0123456789abcdef", min_size=8, max_size=8)
)
steps = st.builds(StepId, epochs, st.integers(0, 10**18 - 1))


@given(steps)
def test_step_and_epoch_names_survive_formatting_and_parsing(step_id: StepId) -> None:
    assert StepId.parse(str(step_id)) == step_id
    assert EpochId.parse(str(step_id.epoch)) == step_id.epoch
    assert is_step(str(step_id))


@given(st.integers(0, MOST_RANKS - 1), st.integers(1, MOST_RANKS))
def test_shard_names_survive_formatting_and_parsing(rank: int, beyond: int) -> None:
    world = min(rank + beyond, MOST_RANKS)
    name = shard_name(rank, world)
    parsed = ShardName.parse(Path(STEP) / name)
    assert (parsed.rank, parsed.world) == (rank, world)
    assert is_temporary(temporary_name(name, pid=1, number=2))


@pytest.mark.parametrize(
    "name",
    [
        f"{STEP}\n",
        f" {STEP}",
        f"0{STEP}",
        "0003.1f9c2d7a-0000001200",
        "\u0660\u0660\u0660\u0663.1f9c2d7a-000001200",
        "0003.1f9c2d7a-00000120\u0660",
        "0003.1F9C2D7A-000001200",
        "3.1f9c2d7a-000001200",
        "",
    ],
)
def test_any_other_text_is_refused_as_a_step_name(name: str) -> None:
    assert not is_step(name)
    with pytest.raises(ValueError, match="not an epoch"):
        EpochId.parse(name.partition("-")[0] + "\n")


@pytest.mark.parametrize(
    "name",
    [
        f"{SHARD}\n",
        "rank-000000-of-00002.safetensors",
        "rank-00000-of-000002.safetensors",
        "rank-0000\u0660-of-00002.safetensors",
        f"x{SHARD}",
    ],
)
def test_any_other_text_is_refused_as_a_shard_name(name: str) -> None:
    assert is_shard(SHARD)
    assert not is_shard(name)
    with pytest.raises(ValueError, match="not a shard's name"):
        ShardName.parse(Path(STEP) / name)
    assert not is_temporary(f".{SHARD}.tmp-1-\u0661")
